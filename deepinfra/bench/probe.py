"""What this machine reaches: bytes per second from memory, and operations per second of products."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from deepinfra.interfaces.given import Clock

__all__ = ("Reached", "probe")

_NBYTES = 256 * 2**20
_SIZE = (512, 2048, 2048)
_TIMES = 20
"""The best of so many: on a shared machine most are disturbed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reached:
    """The best of some tries, with so many threads.

    Attributes:
        bytes_per_s: Read from memory, by libc's memchr over 256 MiB for each thread.
        float32: Operations per second of a product of 512 × 2048 × 2048, by torch; a multiply-add counts as two.
        bfloat16: The same.
        int8: The same, summed in int32.
    """

    bytes_per_s: float
    float32: float
    bfloat16: float
    int8: float


def probe(threads: int, clock: Clock) -> Reached:
    """Measure; blocks for about a second."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        rows, inputs, out = _SIZE
        x, w = torch.randn(rows, inputs), torch.randn(inputs, out)
        narrow = [torch.randint(-127, 127, shape, dtype=torch.int8) for shape in ((rows, inputs), (inputs, out))]
        half = [x.bfloat16(), w.bfloat16()]
        operations = 2.0 * rows * inputs * out
        return Reached(
            bytes_per_s=_read(threads, clock),
            float32=operations / _best(lambda: torch.mm(x, w), clock),
            bfloat16=operations / _best(lambda: torch.mm(*half), clock),
            int8=operations / _best(lambda: torch._int_mm(*narrow), clock),
        )
    finally:
        torch.set_num_threads(before)


def _best(call: Callable[[], object], clock: Clock) -> float:
    taken = []
    for _ in range(_TIMES):
        began = clock.now()
        call()
        taken.append(clock.now() - began)
    return min(taken)


def _read(threads: int, clock: Clock) -> float:
    """Memchr reads with the widest instructions there are, and ctypes lets go of the interpreter's lock."""
    find = ctypes.CDLL(None).memchr
    find.argtypes, find.restype = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t], ctypes.c_void_p
    regions = [np.ones(_NBYTES, np.uint8) for _ in range(threads)]

    def all_at_once() -> None:
        readers = [threading.Thread(target=find, args=(region.ctypes.data, 7, _NBYTES)) for region in regions]
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join()

    return threads * _NBYTES / _best(all_at_once, clock)
