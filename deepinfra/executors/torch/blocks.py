"""Blocks of keys and values in memory of the host, as bits; without torch."""

from __future__ import annotations

import mmap
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from deepinfra.core.ids import BlockId
from deepinfra.core.kv import FRAME_NBYTES
from deepinfra.core.step import Fill
from deepinfra.executors.torch.decoder import DecoderConfig

__all__ = ("KVBlocks",)


class KVBlocks:
    """Blocks of some layers of a model, `[layers, k|v, kv_heads, blocks, block_size, head_dim]`.

    Heads lie outside blocks, so that reading a batch's blocks by number gives `[k|v, kv_heads, seqs, positions,
    head_dim]`, which is a batch of matrices without a copy. A record's payload has the order of the model, `[layers,
    k|v, positions, kv_heads, head_dim]`, whatever the device prefers.

    Args:
        config: The model.
        itemsize: Bytes of an element.
        num_blocks: Blocks.
        block_size: Positions per block.
        layers: How many of the model's layers; default: all that are kept in blocks.
    """

    def __init__(
        self, config: DecoderConfig, itemsize: int, num_blocks: int, block_size: int, layers: int | None = None
    ) -> None:
        self.num_blocks, self.block_size = num_blocks, block_size
        self.num_kv_heads, self.head_dim = config.num_kv_heads, config.head_dim
        self.num_layers = len(config.paged) if layers is None else layers
        shape = (self.num_layers, 2, config.num_kv_heads, num_blocks, block_size, config.head_dim)
        count = int(np.prod(shape, dtype=np.int64))
        # Mapped on demand, page by page. numpy's own zeros ask for huge pages: a block, which touches every plane of
        # layers and heads, then took 2 MiB of each, 380 MB for SmolLM2's first token.
        memory = mmap.mmap(-1, max(1, count * itemsize), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        memory.madvise(mmap.MADV_NOHUGEPAGE)
        words = np.frombuffer(memory, np.dtype(f"i{itemsize}"), count=count)
        self.words: NDArray[np.signedinteger] = words.reshape(shape)

    def clear(self, blocks: Iterable[int]) -> None:
        """Zero blocks."""
        for block in blocks:
            self.words[:, :, :, block] = 0

    def fill(self, fill: Fill, slot: memoryview) -> None:
        """Copy a slot's payload into a block."""
        self._block(fill.block)[...] = self._payload(slot)

    def drain(self, block: BlockId, slot: memoryview) -> None:
        """Copy a block into a slot's payload."""
        self._payload(slot)[...] = self._block(block)

    def _block(self, block: int) -> NDArray[np.signedinteger]:
        if not 0 <= block < self.num_blocks:
            raise IndexError(f"block {block} is not one of {self.num_blocks}: out of range")
        return self.words[:, :, :, block].swapaxes(2, 3)

    def _payload(self, slot: memoryview) -> NDArray[np.signedinteger]:
        shape = (self.num_layers, 2, self.block_size, self.num_kv_heads, self.head_dim)
        count = int(np.prod(shape))
        return np.frombuffer(slot, self.words.dtype, offset=FRAME_NBYTES, count=count).reshape(shape)
