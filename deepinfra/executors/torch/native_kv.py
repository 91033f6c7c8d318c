"""Blocks of keys and values as deepinfra-kernels read them; without torch."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from deepinfra_kernels.cache import Cache, shape_of
from deepinfra_kernels.library import Library

from deepinfra.core.ids import BlockId
from deepinfra.core.step import Fill
from deepinfra.executors.torch.blocks import KVBlocks, mapped
from deepinfra.executors.torch.decoder import DecoderConfig

__all__ = ("NativeKV",)


class NativeKV(KVBlocks):
    """Blocks as deepinfra-kernels read them: each is one piece of memory, so that huge pages hold a few blocks each.

    Args:
        library: Of the path that computes.
        config: The model.
        itemsize: Bytes of an element.
        num_blocks: Blocks.
        block_size: Positions per block.
    """

    def __init__(
        self, library: Library, config: DecoderConfig, itemsize: int, num_blocks: int, block_size: int
    ) -> None:
        super().__init__(config, itemsize, num_blocks, block_size)
        shape = shape_of(
            blocks=num_blocks,
            layers=self.num_layers,
            kv_heads=self.num_kv_heads,
            block_size=block_size,
            head_dim=self.head_dim,
        )
        self.words = mapped(shape, np.dtype(np.float32) if itemsize == 4 else self.word, huge=True)
        self._cache = Cache(library, self.words)

    def clear(self, blocks: Iterable[int]) -> None:
        """See `KVBlocks.clear`."""
        for block in blocks:
            self.words[self._checked(block)] = 0

    def fill(self, fill: Fill, slot: memoryview) -> None:
        """See `KVBlocks.fill`."""
        self._cache.put(fill.block, self._payload(slot).view(self.words.dtype))

    def drain(self, block: BlockId, slot: memoryview) -> None:
        """See `KVBlocks.drain`."""
        self._cache.get(block, self._payload(slot).view(self.words.dtype))
