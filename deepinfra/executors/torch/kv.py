"""Paged keys and values as tensors: of layers that see everything, and of those that keep windows."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deepinfra.core.ids import BlockId
from deepinfra.core.kv import FRAME_NBYTES
from deepinfra.core.step import Fill
from deepinfra.executors.torch.blocks import KVBlocks, mapped
from deepinfra.executors.torch.decoder import DecoderConfig

__all__ = ("PagedKV",)


class PagedKV(KVBlocks):
    """Blocks that torch reads and writes, `[layers, k|v, kv_heads, blocks, block_size, head_dim]`.

    Heads lie outside blocks, so that reading a batch's blocks by number gives `[k|v, kv_heads, seqs, positions,
    head_dim]`, which is a batch of matrices without a copy. So a block touches the plane of each layer and head: with
    huge pages the first one of SmolLM2 would take 358 MB.

    Args:
        config: The model.
        dtype: Of elements.
        num_blocks: Blocks.
        block_size: Positions per block.
        layers: How many of the model's layers; default: all that are kept in blocks.
    """

    def __init__(
        self, config: DecoderConfig, dtype: torch.dtype, num_blocks: int, block_size: int, layers: int | None = None
    ) -> None:
        super().__init__(config, dtype.itemsize, num_blocks, block_size, layers)
        shape = (self.num_layers, 2, config.num_kv_heads, num_blocks, block_size, config.head_dim)
        self.words = mapped(shape, self.word, huge=False)
        data = torch.from_numpy(self.words).view(dtype)
        self._dtype = dtype
        self._positions = data.view(self.num_layers, 2, config.num_kv_heads, -1, config.head_dim)
        self.pages = [
            (layer[0], layer[1], whole.view(-1, block_size * config.head_dim))
            for layer, whole in zip(self._positions.unbind(0), data.unbind(0), strict=True)
        ]
        self._heads = torch.arange(2 * config.num_kv_heads).unsqueeze(1) * num_blocks

    def clear(self, blocks: Iterable[int]) -> None:
        """See `KVBlocks.clear`."""
        for block in blocks:
            self.words[:, :, :, block] = 0

    def fill(self, fill: Fill, slot: memoryview) -> None:
        """See `KVBlocks.fill`."""
        self._block(fill.block)[...] = self._payload(slot)

    def drain(self, block: BlockId, slot: memoryview) -> None:
        """See `KVBlocks.drain`."""
        self._payload(slot)[...] = self._block(block)

    def _block(self, block: int) -> NDArray[np.number]:
        return self.words[:, :, :, self._checked(block)].swapaxes(2, 3)

    def rows(self, blocks: Tensor) -> Tensor:
        """Row numbers in a layer's pages that hold `blocks` (any order, flat), for keys and values of all heads."""
        return (self._heads + blocks).flatten()

    def write(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Write `[rows, kv_heads, head_dim]` at `slots` (block * block_size + offset)."""
        key_page, value_page, _ = self.pages[layer]
        key_page.index_copy_(1, slots, keys.transpose(0, 1))
        value_page.index_copy_(1, slots, values.transpose(0, 1))

    def read(self, layer: int, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of the blocks that `rows` names, each `[kv_heads * seqs, positions, head_dim]`-viewable."""
        keys, values = self.pages[layer][2].index_select(0, rows).chunk(2)
        return keys, values

    def take(self, slots: Tensor, payload: Tensor) -> None:
        """Copy positions at `slots` into `payload` `[layers, k|v, positions, kv_heads, head_dim]`."""
        payload.copy_(self._positions.index_select(3, slots).transpose(2, 3))

    def put(self, slots: Tensor, payload: Tensor) -> None:
        """Copy `payload` to the positions at `slots`."""
        self._positions.index_copy_(3, slots, payload.transpose(2, 3))

    def payload(self, slot: memoryview, positions: int) -> Tensor:
        """A staging slot's bytes behind its frame, as `positions` positions of these layers."""
        shape = (self.num_layers, 2, positions, self.num_kv_heads, self.head_dim)
        count = 2 * self.num_layers * positions * self.num_kv_heads * self.head_dim
        return torch.frombuffer(slot, dtype=self._dtype, offset=FRAME_NBYTES, count=count).view(shape)
