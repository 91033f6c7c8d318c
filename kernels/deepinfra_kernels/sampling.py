"""From logits to tokens: the likeliest, the winner of a race, and what stands beside them."""

from __future__ import annotations

import ctypes
import weakref
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from deepinfra_kernels.status import check_threads, raising

if TYPE_CHECKING:
    from deepinfra_kernels.library import Library

__all__ = ("DRAW", "Sampled", "Sampler", "blank_draws", "declare")

DRAW: Final = np.dtype(
    [
        ("key", np.uint64),
        ("heat", np.float64),
        ("top_p", np.float64),
        ("least", np.float64),
        ("top_k", np.int64),
        ("likeliest", np.int64),
        ("token", np.int64),
        ("total", np.float64),
        ("best", np.float32),
        ("padding", np.int32),
    ]
)
"""How a row is drawn, and what came of it; see `blank_draws` and `Sampled`."""

_MOST_TOKENS: Final = 2**30
_MOST_ROWS: Final = 2**24 - 1  # tasks of a pool


class Sampled(NamedTuple):
    """What a `Sampler` found.

    Attributes:
        draws: Those given, with these fields filled in. `token`: the one drawn, or -1 where rounding decides and only
            the definition itself can tell, which is about one row in a million. `best`: the largest logit; if it is not
            finite the row's other results mean nothing. `total`: logarithm of the sum of `e**logit` in float64, summed
            in an order that does not depend on anything but the number of tokens.
        ids: The likeliest tokens of rows that asked for them, likelier first and equals by id, `[rows, most]`.
        values: Their logits.
    """

    draws: NDArray[np.void]
    ids: NDArray[np.int64]
    values: NDArray[np.float32]


def declare(functions: ctypes.CDLL) -> None:
    """Gives the functions of `sample_abi.h` their signatures."""
    number, pointer = ctypes.c_int64, ctypes.c_void_p
    raising(functions, "di_sampler_new", [ctypes.c_int, pointer])
    functions.di_sampler_free.argtypes, functions.di_sampler_free.restype = [pointer], None
    raising(functions, "di_sample", [pointer, pointer, number, number, number, pointer, number, pointer, pointer])


def blank_draws(rows: int) -> NDArray[np.void]:
    """Greedy draws without filters and without likeliest tokens, for the caller to change.

    Fields of `DRAW` to set: `key`; `heat`, the temperature; `top_k`, 0 for all; `top_p`; `least`, the logarithm of
    min_p; `likeliest`, how many tokens to list beside `total`, or -1 for neither.
    """
    draws = np.zeros(rows, DRAW)
    draws["top_p"], draws["least"], draws["likeliest"] = 1.0, -np.inf, -1
    return draws


class Sampler:
    """Draws tokens, on threads of its own; for one thread of Python at a time.

    A token's score is `logit / heat - log(-log(u))`, with the `u` of `deepinfra.core.sampling.token_uniform`; the
    largest score among the tokens that the filters leave is drawn. What a row gives depends on that row alone, bit by
    bit, on every path.

    Args:
        library: Of any path.
        threads: How many, with the calling one.

    Raises:
        ValueError: Not 1 to 256 threads.
        MemoryError: There is no more memory.
        RuntimeError: There are no more threads.
    """

    def __init__(self, library: Library, threads: int = 1) -> None:
        self._functions = library.functions
        check_threads(threads)
        made = ctypes.c_void_p()
        library.functions.di_sampler_new(threads, ctypes.byref(made))
        self._sampler = made.value
        weakref.finalize(self, library.functions.di_sampler_free, self._sampler)

    def sample(self, logits: NDArray[np.float32], draws: NDArray[np.void]) -> Sampled:
        """Draws a token for each row.

        Args:
            logits: `[rows, vocab]`, the last dimension contiguous.
            draws: `DRAW`, one per row; its results are written.

        Raises:
            ValueError: Shapes or types do not fit.
            MemoryError: There is no more memory.
        """
        if logits.dtype != np.float32 or logits.ndim != 2 or not 0 < logits.shape[1] <= _MOST_TOKENS:
            raise ValueError(f"logits is {logits.dtype} {list(logits.shape)}, where float32 [rows, vocab] is needed")
        rows, vocab = logits.shape
        if rows > _MOST_ROWS:
            raise ValueError(f"logits has {rows} rows, and {_MOST_ROWS} are the most")
        if rows and (logits.strides[1] != 4 or logits.strides[0] % 4 or logits.strides[0] < 0):
            raise ValueError(f"logits has rows with gaps: strides {list(logits.strides)}")
        if draws.dtype != DRAW or draws.shape != (rows,) or not draws.flags.carray:
            raise ValueError(f"draws is {draws.dtype} {list(draws.shape)}, where {rows} records of DRAW are needed")
        most = min(vocab, max(0, int(draws["likeliest"].max(initial=0))))
        ids, values = np.empty((rows, most), np.int64), np.empty((rows, most), np.float32)
        self._functions.di_sample(
            self._sampler,
            logits.ctypes.data,
            rows,
            logits.strides[0] // 4,
            vocab,
            draws.ctypes.data,
            most,
            ids.ctypes.data,
            values.ctypes.data,
        )
        return Sampled(draws, ids, values)
