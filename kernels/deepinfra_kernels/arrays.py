"""Addresses of arrays, checked before C++ sees them; torch's are taken without importing torch."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

__all__ = ("address",)

_WORDS: Final = {"bfloat16": "uint16"}  # numpy has no bfloat16: its bits are kept as integers


def address(name: str, array: Any, dtype: str, shape: Sequence[int], *, writes: bool = False) -> int:
    """The address of an array's first element; the caller keeps the array alive while it is used.

    Args:
        name: What an error calls it.
        array: A numpy array, a torch tensor on the CPU, or anything with a buffer (bytes of a file), contiguous.
        dtype: numpy's name of the elements, or `bfloat16`: a tensor of that type, or integers of 16 bits. `uint8`
            takes a buffer of any type, measured in bytes.
        shape: What it must have; a buffer that is neither array nor tensor needs the right number of bytes only.
        writes: It will be written to.

    Raises:
        ValueError: It has another type or shape, has gaps, lies elsewhere or askew, or cannot be written to.
    """
    wanted = tuple(shape)
    if hasattr(array, "data_ptr"):
        found = str(array.dtype).removeprefix("torch.")
        _check(name, found, tuple(array.shape), dtype, wanted, contiguous=array.is_contiguous())
        if array.device.type != "cpu":
            raise ValueError(f"{name} is on {array.device}, not in the CPU's memory")
        return int(array.data_ptr())
    if not isinstance(array, np.ndarray):
        array = np.frombuffer(array, _WORDS.get(dtype, dtype))
        if array.size == np.prod(wanted, dtype=np.int64):
            array = array.reshape(wanted)
    found = _name(array.dtype)
    if found in ("int16", "uint16") and dtype == "bfloat16":
        found = dtype
    flags = array.flags
    _check(name, found, array.shape, dtype, wanted, contiguous=flags.c_contiguous)
    if not flags.aligned or (writes and not flags.writeable):
        raise ValueError(f"{name} cannot be written to, or does not begin where an element may")
    return int(array.ctypes.data)


@functools.cache
def _name(dtype: np.dtype[Any]) -> str:
    return str(dtype)  # 2 us, where a step asks for seven


def _check(
    name: str, found: str, shape: tuple[int, ...], dtype: str, wanted: tuple[int, ...], *, contiguous: bool
) -> None:
    if found != dtype or shape != wanted:
        raise ValueError(f"{name} is {found} {list(shape)}, where {dtype} {list(wanted)} is needed")
    if not contiguous:
        raise ValueError(f"{name} has gaps between its elements")
