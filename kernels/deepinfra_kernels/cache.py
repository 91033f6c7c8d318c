"""Keys and values as kernels keep them, from and to the order of the model."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

from deepinfra_kernels.arrays import address
from deepinfra_kernels.records import cache_record

if TYPE_CHECKING:
    from deepinfra_kernels.library import Library

__all__ = ("Cache", "shape_of")


def shape_of(
    *, blocks: int, layers: int, kv_heads: int, block_size: int, head_dim: int
) -> tuple[int, int, int, int, int, int]:
    """Of an array of keys and values: `[blocks, layers, kv_heads, 2, block_size, head_dim]`.

    A block is one piece of memory. In it the numbers of keys and of values, the last two axes together, have an order
    of the kernels' own, which csrc/cache.h describes.
    """
    return (blocks, layers, kv_heads, 2, block_size, head_dim)


class Cache:
    """Reads and writes blocks in the order of the model.

    Args:
        library: Of any path; they keep the same order.
        kv: In the shape of `shape_of`, bfloat16 or float32; kept.

    Raises:
        ValueError: It has another type or shape, or gaps.
    """

    def __init__(self, library: Library, kv: Any) -> None:
        self._functions, self._kv, self._record = library.functions, kv, cache_record(kv)
        record = self._record
        self._shape = (record.layers, 2, record.block_size, record.heads, record.dim)
        self._dtype = "bfloat16" if record.bf16 else "float32"

    def put(self, block: int, payload: Any) -> None:
        """Copies `payload` `[layers, k|v, positions, kv_heads, head_dim]` into a block.

        Raises:
            IndexError: There is no such block.
            ValueError: The payload has another type or shape, or gaps.
        """
        self._check(block)
        begin = address("payload", payload, self._dtype, self._shape)
        self._functions.di_cache_put(ctypes.byref(self._record), block, begin)

    def get(self, block: int, payload: Any) -> None:
        """Copies a block into `payload`; as `put`."""
        self._check(block)
        begin = address("payload", payload, self._dtype, self._shape, writes=True)
        self._functions.di_cache_get(ctypes.byref(self._record), block, begin)

    def _check(self, block: int) -> None:
        if not 0 <= block < self._record.blocks:
            raise IndexError(f"block {block} is not one of {self._record.blocks}: out of range")
