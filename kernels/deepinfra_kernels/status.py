"""How calls of C++ end: what it could not do is an error here."""

from __future__ import annotations

import ctypes
from typing import Any, Final

__all__ = ("MOST_THREADS", "check_threads", "declare", "raising")

MOST_THREADS: Final = 256
"""Threads that one caller may have; more is taken for a mistake."""

_ERRORS: Final = (ValueError, MemoryError, RuntimeError)  # of `Status` in status.h, from 1 on


def declare(functions: ctypes.CDLL) -> None:
    """Gives the function of `status.h` its signature."""
    functions.di_reason.argtypes, functions.di_reason.restype = [], ctypes.c_char_p


def raising(functions: ctypes.CDLL, name: str, arguments: list[Any]) -> None:
    """Gives a function its signature; from then on a call that C++ does not complete raises.

    What is raised, with the reason: `ValueError` for what it refuses, `MemoryError` if there is no more memory,
    `RuntimeError` if there are no more threads.
    """

    def ended(status: int, function: Any, given: tuple[Any, ...]) -> int:
        if status:
            raise _ERRORS[status - 1](functions.di_reason().decode())
        return status

    function = getattr(functions, name)
    function.argtypes, function.restype, function.errcheck = arguments, ctypes.c_int, ended


def check_threads(threads: int) -> None:
    """Refuses a number of threads that nobody means.

    Raises:
        ValueError: Below one, or above `MOST_THREADS`.
    """
    if not 1 <= threads <= MOST_THREADS:
        raise ValueError(f"threads {threads} is not 1 to {MOST_THREADS}")
