"""Blocks of keys and values in memory of the host, as bits; without torch."""

from __future__ import annotations

import mmap
from abc import ABC, abstractmethod
from collections.abc import Iterable
from contextlib import suppress

import numpy as np
from numpy.typing import NDArray

from deepinfra.core.ids import BlockId
from deepinfra.core.kv import FRAME_NBYTES
from deepinfra.core.step import Fill
from deepinfra.executors.torch.decoder import DecoderConfig

__all__ = ("KVBlocks", "mapped")


class KVBlocks(ABC):
    """Blocks of some layers of a model, in an order that who computes prefers.

    A record's payload has the order of the model, `[layers, k|v, positions, kv_heads, head_dim]`, whatever that is.

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
        self.word = np.dtype(f"i{itemsize}")

    @abstractmethod
    def clear(self, blocks: Iterable[int]) -> None:
        """Zero blocks."""

    @abstractmethod
    def fill(self, fill: Fill, slot: memoryview) -> None:
        """Copy a slot's payload into a block."""

    @abstractmethod
    def drain(self, block: BlockId, slot: memoryview) -> None:
        """Copy a block into a slot's payload."""

    def _checked(self, block: int) -> int:
        if not 0 <= block < self.num_blocks:
            raise IndexError(f"block {block} is not one of {self.num_blocks}: out of range")
        return block

    def _payload(self, slot: memoryview) -> NDArray[np.signedinteger]:
        shape = (self.num_layers, 2, self.block_size, self.num_kv_heads, self.head_dim)
        count = int(np.prod(shape))
        return np.frombuffer(slot, self.word, offset=FRAME_NBYTES, count=count).reshape(shape)


def mapped(shape: tuple[int, ...], dtype: np.dtype[np.number], *, huge: bool) -> NDArray[np.number]:
    """Zeros that take memory when they are written, page by page; numpy's own ask for huge pages."""
    count = int(np.prod(shape, dtype=np.int64))
    memory = mmap.mmap(-1, max(1, count * dtype.itemsize), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without huge pages knows neither
        memory.madvise(mmap.MADV_HUGEPAGE if huge else mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(memory, dtype, count=count).reshape(shape)
