"""Paged keys and values: of layers that see everything, and of those that keep windows."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

from deepinfra.core.ids import BlockId
from deepinfra.core.kv import FRAME_NBYTES
from deepinfra.core.step import Fill
from deepinfra.executors.torch.decoder import DecoderConfig

__all__ = ("PagedKV",)


class PagedKV:
    """Blocks of some layers of a model, `[layers, k|v, kv_heads, blocks, block_size, head_dim]`.

    Heads lie outside blocks, so that reading a batch's blocks by number gives `[k|v, kv_heads, seqs, positions,
    head_dim]`, which is a batch of matrices without a copy. A record's payload has the order of the model, `[layers,
    k|v, positions, kv_heads, head_dim]`, whatever the device prefers.

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
        self.num_blocks, self.block_size = num_blocks, block_size
        self.num_kv_heads, self.head_dim = config.num_kv_heads, config.head_dim
        self.num_layers = len(config.paged) if layers is None else layers
        # numpy's zeros are mapped on demand; torch's are written at once (4 s and 4 GiB resident for a 4 GiB pool).
        shape = (self.num_layers, 2, config.num_kv_heads, num_blocks, block_size, config.head_dim)
        words = np.zeros(shape, np.dtype(f"i{dtype.itemsize}"))
        self._data = torch.from_numpy(words).view(dtype)
        self._positions = self._data.view(self.num_layers, 2, config.num_kv_heads, -1, config.head_dim)
        self.pages = [
            (layer[0], layer[1], whole.view(-1, block_size * config.head_dim))
            for layer, whole in zip(self._positions.unbind(0), self._data.unbind(0), strict=True)
        ]
        self._heads = torch.arange(2 * config.num_kv_heads).unsqueeze(1) * num_blocks

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

    def clear(self, blocks: Iterable[int]) -> None:
        """Zero blocks."""
        for block in blocks:
            self._data[:, :, :, block].zero_()

    def fill(self, fill: Fill, slot: memoryview) -> None:
        """Copy a slot's payload into a block."""
        self._block(fill.block).copy_(self._payload(slot))

    def drain(self, block: BlockId, slot: memoryview) -> None:
        """Copy a block into a slot's payload."""
        self._payload(slot).copy_(self._block(block))

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
        return torch.frombuffer(slot, dtype=self._data.dtype, offset=FRAME_NBYTES, count=count).view(shape)

    def _block(self, block: int) -> Tensor:
        if not 0 <= block < self.num_blocks:
            raise IndexError(f"block {block} is not one of {self.num_blocks}")
        return self._data[:, :, :, block].transpose(2, 3)

    def _payload(self, slot: memoryview) -> Tensor:
        return self.payload(slot, self.block_size)
