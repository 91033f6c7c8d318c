"""Reads the header of a GGUF file: metadata and the table of tensors, every size checked before it is believed.

Source: the GGUF specification (ggml/docs/gguf.md). The gguf package reads the same format, but builds one numpy object
for each string (2 s for a vocabulary of 49k) and trusts the counts in the file.
"""

from __future__ import annotations

import mmap
import os
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from deepinfra.errors import ModelError
from deepinfra.models.ggml_types import GGML_TYPES, GgmlType

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ("GgufFile", "GgufTensor", "MetaValue", "drop_pages", "map_file", "open_gguf")

MetaValue: TypeAlias = "str | int | float | bool | list[MetaValue]"

# Far above any real file (a few hundred keys, 1 000 tensors of a large dense model, vocabularies of 260k), far below
# what would hurt: a header that claims more is damaged or hostile.
MAX_KEYS = 10_000
MAX_TENSORS = 200_000
MAX_KEY_BYTES = 1_024
MAX_STRING_BYTES = 16 * 2**20
MAX_ARRAY = 2**22
MAX_DEPTH = 3
MAX_DIMS = 4
MAX_HEADER_BYTES = 256 * 2**20

_SCALARS: dict[int, str] = {
    0: "<u1",
    1: "<i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    7: "?",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}
_STRING, _ARRAY = 8, 9
_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """A row of the tensor table: `shape` is row-major, `start` counts from the start of the file."""

    name: str
    type: GgmlType
    shape: tuple[int, ...]
    start: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class GgufFile:
    """A mapped GGUF file with its header read.

    Attributes:
        path: Where it was opened.
        metadata: Every key in file order; numbers as Python numbers, arrays as lists.
        tensors: The tensor table by the file's own names.
        data: The whole file, mapped copy-on-write.
    """

    path: Path
    metadata: dict[str, MetaValue]
    tensors: dict[str, GgufTensor]
    data: memoryview


def map_file(path: Path) -> memoryview:
    """Maps a file privately: readable and writable, writes stay in this process.

    A writable view lets torch wrap the bytes without a copy and without its warning about read-only memory; NORESERVE
    keeps the kernel from counting a file larger than memory against it.

    Raises:
        ModelError: The file cannot be opened or is empty.
    """
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size == 0:
                raise ModelError(f"{path} is empty; download it again")
            flags = mmap.MAP_PRIVATE | getattr(mmap, "MAP_NORESERVE", 0)
            return memoryview(mmap.mmap(file.fileno(), size, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE))
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror or error}") from error


def drop_pages(data: memoryview) -> None:
    """Gives the memory of a mapped file's pages back to the kernel; they are read again when they are looked at."""
    if isinstance(data.obj, mmap.mmap) and hasattr(mmap, "MADV_DONTNEED"):
        data.obj.madvise(mmap.MADV_DONTNEED)


def open_gguf(path: Path) -> GgufFile:
    """Maps a GGUF file (version 2 or 3, little-endian) and reads its header.

    Raises:
        ModelError: The file is no GGUF file, is cut short, or its header contradicts itself or the file's size.
    """
    data = map_file(path)
    reader = _Reader(path, data)
    if bytes(data[:4]) != b"GGUF":
        raise ModelError(f"{path} is not a GGUF file: it does not begin with the letters GGUF")
    reader.at = 4
    version = reader.u32()
    if version not in (2, 3):
        raise ModelError(f"{path} is GGUF version {version}, versions 2 and 3 (little-endian) can be read")
    tensor_count, key_count = reader.u64(), reader.u64()
    if tensor_count > MAX_TENSORS or key_count > MAX_KEYS:
        raise reader.damaged(f"it claims {tensor_count} tensors and {key_count} metadata keys")

    metadata: dict[str, MetaValue] = {}
    for _ in range(key_count):
        key = reader.string(MAX_KEY_BYTES)
        if key in metadata:
            raise reader.damaged(f"metadata key {key!r} appears twice")
        metadata[key] = reader.value(reader.u32(), 0)

    rows = [_read_row(reader) for _ in range(tensor_count)]
    tensors = _place_rows(reader, rows, metadata.get("general.alignment", 32))
    return GgufFile(path, metadata, tensors, data)


def _read_row(reader: _Reader) -> tuple[str, tuple[int, ...], int, int]:
    name = reader.string(MAX_KEY_BYTES)
    dims = reader.u32()
    if not 1 <= dims <= MAX_DIMS:
        raise reader.damaged(f"tensor {name!r} has {dims} dimensions")
    # ggml counts from the fastest dimension, everybody else from the slowest.
    shape = tuple(reversed([reader.u64() for _ in range(dims)]))
    return name, shape, reader.u32(), reader.u64()


def _place_rows(
    reader: _Reader, rows: list[tuple[str, tuple[int, ...], int, int]], alignment: MetaValue
) -> dict[str, GgufTensor]:
    if not isinstance(alignment, int) or isinstance(alignment, bool) or alignment not in (2**n for n in range(3, 17)):
        raise reader.damaged(f"general.alignment is {alignment!r}")
    size = len(reader.data)
    begin = -(-reader.at // alignment) * alignment
    tensors: dict[str, GgufTensor] = {}
    end = begin
    for name, shape, type_id, offset in rows:
        kind = GGML_TYPES.get(type_id)
        if kind is None:
            raise reader.damaged(f"tensor {name!r} has the unknown type {type_id}")
        if name in tensors:
            raise reader.damaged(f"tensor {name!r} appears twice")
        count = 1
        for dim in shape:
            count *= dim
        if shape[-1] % kind.block or not count:
            raise reader.damaged(f"tensor {name!r} of shape {list(shape)} does not fit blocks of {kind.name}")
        nbytes = count // kind.block * kind.nbytes
        start = begin + offset
        if offset % alignment or start + nbytes > size:
            raise ModelError(
                f"{reader.path} is cut short or damaged: tensor {name!r} ends at byte {start + nbytes}, "
                f"the file has {size}; download it again"
            )
        tensors[name] = GgufTensor(name, kind, shape, start, nbytes)
    for tensor in sorted(tensors.values(), key=lambda tensor: tensor.start):
        if tensor.start < end:
            raise reader.damaged(f"tensor {tensor.name!r} overlaps the one before it")
        end = tensor.start + tensor.nbytes
    return tensors


class _Reader:
    """A position in the header; every read is checked against the end of the file."""

    def __init__(self, path: Path, data: memoryview) -> None:
        self.path, self.data, self.at = path, data, 0

    def damaged(self, why: str) -> ModelError:
        return ModelError(f"{self.path} is damaged near byte {self.at}: {why}; download it again")

    def take(self, nbytes: int) -> memoryview:
        end = self.at + nbytes
        if end > len(self.data):
            raise self.damaged("its header goes on past the end of the file")
        if end > MAX_HEADER_BYTES:
            raise self.damaged(f"its header is larger than {MAX_HEADER_BYTES} bytes")
        chunk = self.data[self.at : end]
        self.at = end
        return chunk

    def u32(self) -> int:
        return int(_U32.unpack(self.take(4))[0])

    def u64(self) -> int:
        return int(_U64.unpack(self.take(8))[0])

    def string(self, limit: int) -> str:
        length = self.u64()
        if length > limit:
            raise self.damaged(f"a string claims {length} bytes")
        try:
            return str(self.take(length), "utf-8")
        except UnicodeDecodeError:
            raise self.damaged("a string is not UTF-8") from None

    def value(self, kind: int, depth: int) -> MetaValue:
        if kind in _SCALARS:
            return self.numbers(kind, 1)[0]
        if kind == _STRING:
            return self.string(MAX_STRING_BYTES)
        if kind != _ARRAY:
            raise self.damaged(f"metadata type {kind} is unknown")
        if depth == MAX_DEPTH:
            raise self.damaged("arrays are nested too deeply")
        inner, count = self.u32(), self.u64()
        if count > MAX_ARRAY or count > len(self.data) - self.at:
            raise self.damaged(f"an array claims {count} values")
        if inner in _SCALARS:
            return self.numbers(inner, count)
        if inner == _STRING:
            return self.strings(count)
        return [self.value(inner, depth + 1) for _ in range(count)]

    def strings(self, count: int) -> list[MetaValue]:
        """As many calls of `string` give, in a sixth of the time: a vocabulary with its merges has 100,000."""
        data, at, end = self.data.obj, self.at, min(len(self.data), MAX_HEADER_BYTES)
        assert isinstance(data, mmap.mmap)  # whose slices are bytes: half as much as views of it take
        length_at, found = _U64.unpack_from, list[MetaValue]()
        for _ in range(count):
            start = at + 8
            if start > end or start + (length := length_at(data, at)[0]) > end or length > MAX_STRING_BYTES:
                self.at = at
                return [*found, self.string(MAX_STRING_BYTES)]  # which says what is wrong
            at = start + length
            try:
                found.append(data[start:at].decode())
            except UnicodeDecodeError:
                self.at = start
                raise self.damaged("a string is not UTF-8") from None
        self.at = at
        return found

    def numbers(self, kind: int, count: int) -> list[MetaValue]:
        dtype = np.dtype(_SCALARS[kind])
        values: list[MetaValue] = np.frombuffer(self.take(count * dtype.itemsize), dtype).tolist()
        return values
