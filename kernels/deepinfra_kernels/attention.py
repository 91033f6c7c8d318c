"""Attention and rotation alone, as a decoder's step does them; for tests and measurements."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from deepinfra_kernels.arrays import address
from deepinfra_kernels.decoder import Step
from deepinfra_kernels.records import cache_record
from deepinfra_kernels.status import check_threads

if TYPE_CHECKING:
    from deepinfra_kernels.library import Library

__all__ = ("attend", "rotate")

_MOST: Final = 2**31 - 1


def attend(
    library: Library,
    kv: Any,
    layer: int,
    queries: NDArray[np.float32],
    step: Step,
    *,
    window: int = 0,
    threads: int = 1,
) -> NDArray[np.float32]:
    """Attends a step's rows to the keys and values that their sequences have; the scale is `head_dim ** -0.5`.

    Args:
        library: Of the path that computes.
        kv: In the shape of `cache.shape_of`, bfloat16 or float32.
        layer: Which of its layers.
        queries: `[rows, heads, head_dim]`.
        step: Whose rows these are; tokens mean nothing.
        window: How many positions a row sees, its own included; 0 = all.
        threads: That compute; started anew.

    Raises:
        ValueError: A size, a shape or a type is wrong.
    """
    cache = cache_record(kv)
    heads = queries.shape[1] if queries.ndim == 3 else 0
    if not 0 <= layer < cache.layers or not heads or heads % cache.heads or not 0 <= window <= _MOST:
        raise ValueError(f"layer {layer}, {heads} heads or window {window} are out of range")
    check_threads(threads)
    begin = address("queries", queries, "float32", (len(step.tokens), heads, cache.dim))
    y = np.empty_like(queries)
    record = step.record()
    library.functions.di_attend(
        ctypes.byref(cache),
        layer,
        heads // cache.heads,
        window,
        cache.dim**-0.5,
        ctypes.byref(record),
        begin,
        y.ctypes.data,
        threads,
    )
    return y


def rotate(
    library: Library,
    x: NDArray[np.float32],
    positions: NDArray[np.int64],
    inv_freq: NDArray[np.float32],
    *,
    factor: float = 1.0,
    scale: float = 1.0,
) -> NDArray[np.float32]:
    """Rotates halves `(i, i + head_dim / 2)` of `[rows, heads, head_dim]` at `positions` `[rows]`.

    Raises:
        ValueError: A shape or type is wrong.
    """
    rows, heads, dim = x.shape
    if dim % 2:
        raise ValueError(f"x has heads of {dim}, which have no halves")
    y = np.empty_like(x)
    library.functions.di_rope(
        address("x", x, "float32", (rows, heads, dim)),
        address("positions", positions, "int64", (rows,)),
        rows,
        heads,
        dim,
        address("inv_freq", inv_freq, "float32", (dim // 2,)),
        factor,
        scale,
        y.ctypes.data,
    )
    return y
