"""Reads safetensors files, one or many: headers are checked, bytes are mapped.

Source: the format's own description (safetensors/README.md). The safetensors package has no numpy type for BF16 and
copies what it returns; here a tensor is a view of the file.
"""

from __future__ import annotations

import json
import math
import struct
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from deepinfra.errors import ModelError, UnsupportedModelError
from deepinfra.models.gguf_file import drop_pages, map_file
from deepinfra.models.records import TensorInfo

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

__all__ = ("INDEX", "SafeTensors", "find_shards", "indexed_shards")

# The package's own limit on a header; and one on an index (DeepSeek-V3's, with 91 000 tensors, has 9 MB).
MAX_HEADER_BYTES: Final = 100_000_000
MAX_INDEX_BYTES: Final = 100_000_000
_MAX_DIMS = 8
_MAX_SHARDS = 4096

_BITS: Final[Mapping[str, int]] = {
    "F64": 64,
    "F32": 32,
    "F16": 16,
    "BF16": 16,
    "F8_E4M3": 8,
    "F8_E5M2": 8,
    "F8_E8M0": 8,
    "I64": 64,
    "I32": 32,
    "I16": 16,
    "I8": 8,
    "U64": 64,
    "U32": 32,
    "U16": 16,
    "U8": 8,
    "BOOL": 8,
    "F4": 4,
}
_NUMPY: Final[Mapping[str, str]] = {
    "F64": "<f8",
    "F32": "<f4",
    "F16": "<f2",
    "I64": "<i8",
    "I32": "<i4",
    "I16": "<i2",
    "I8": "<i1",
    "U64": "<u8",
    "U32": "<u4",
    "U16": "<u2",
    "U8": "<u1",
    "BOOL": "?",
}
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.pkl", "*.ckpt")
INDEX = "model.safetensors.index.json"


class _Entry(NamedTuple):
    info: TensorInfo
    data: memoryview


def find_shards(folder: Path) -> list[Path]:
    """Lists the safetensors files of a model folder.

    Raises:
        UnsupportedModelError: The weights are there as pickle files only.
        ModelError: There are none, the index is damaged, or a file that it names is missing.
    """
    if (folder / INDEX).exists():
        shards = [folder / shard for shard in indexed_shards(folder / INDEX)]
        for shard in shards:
            if not shard.exists():
                raise ModelError(f"{folder} is incomplete: {shard.name} is missing; download it again")
        return shards
    if (folder / "model.safetensors").exists():
        return [folder / "model.safetensors"]
    found = sorted(folder.glob("*.safetensors"))
    if len(found) == 1:
        return found
    if found:
        raise ModelError(f"{folder} is incomplete: it holds {len(found)} safetensors files but no {INDEX}")
    for pattern in _PICKLES:
        for path in sorted(folder.glob(pattern)):
            raise UnsupportedModelError(
                "weights", path.name, "is a pickle file, which can run code when read; use a safetensors version"
            )
    raise ModelError(f"{folder} holds no weights: there is no model.safetensors and no {INDEX}")


def indexed_shards(index: Path) -> list[str]:
    """Lists the file names in a `model.safetensors.index.json`, sorted.

    Raises:
        ModelError: The index is damaged, or names something that is no safetensors file beside it.
    """
    shards = set()
    for tensor, shard in _weight_map(index).items():
        if not isinstance(shard, str) or "/" in shard or "\\" in shard or not shard.endswith(".safetensors"):
            raise ModelError(f"{index} is damaged: it puts {tensor} into {shard!r}")
        shards.add(shard)
    if len(shards) > _MAX_SHARDS:
        raise ModelError(f"{index} is damaged: it names {len(shards)} files")
    return sorted(shards)


def _weight_map(index: Path) -> dict[str, object]:
    weight_map = _json_object(index, _read(index, MAX_INDEX_BYTES)).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"{index} is damaged: it has no weight_map")
    return weight_map


class SafeTensors:
    """A `TensorSource` over the safetensors files of one model.

    Args:
        folder: The model's folder, for errors.
        shards: Its files.

    Raises:
        ModelError: A file is damaged or cut short, a tensor is in two files or, by the index, in another.
    """

    def __init__(self, folder: Path, shards: Sequence[Path]) -> None:
        self._folder = folder
        self._entries: dict[str, _Entry] = {}
        for shard in shards:
            for name, entry in _read_header(shard).items():
                if name in self._entries:
                    raise ModelError(f"{folder} contradicts itself: {name} is in two of its files")
                self._entries[name] = entry
        if (folder / INDEX).exists():
            listed = _weight_map(folder / INDEX)
            for name, holder in listed.items():
                if name not in self._entries:
                    raise ModelError(f"{folder} is incomplete: {holder} does not hold {name}; download it again")

    def names(self) -> Sequence[str]:
        """Returns every tensor's name, file by file in header order."""
        return tuple(self._entries)

    def info(self, name: str) -> TensorInfo:
        """Returns the header's description of a tensor."""
        return self._entry(name).info

    def raw(self, name: str) -> memoryview:
        """Returns the stored bytes, mapped."""
        return self._entry(name).data

    def read(self, name: str) -> NDArray[np.float32]:
        """Returns a tensor as float32; 8-bit and 4-bit floats have to be decoded by who knows their scales."""
        info, data = self._entry(name)
        if info.dtype == "BF16":
            widened = np.frombuffer(data, "<u2").astype(np.uint32) << 16
            return widened.view(np.float32).reshape(info.shape)
        if info.dtype not in _NUMPY:
            raise UnsupportedModelError(f"dtype of tensor {name}", info.dtype, "cannot be decoded")
        return np.frombuffer(data, _NUMPY[info.dtype]).astype(np.float32).reshape(info.shape)

    def release(self) -> None:
        """Gives back the memory of what was read."""
        for data in {id(entry.data.obj): entry.data for entry in self._entries.values()}.values():
            drop_pages(data)

    def _entry(self, name: str) -> _Entry:
        try:
            return self._entries[name]
        except KeyError:
            raise ModelError(f"{self._folder} has no tensor {name}") from None


def _read_header(path: Path) -> dict[str, _Entry]:
    data = map_file(path)
    if len(data) < 8:
        raise ModelError(f"{path} is cut short: it has {len(data)} bytes; download it again")
    (length,) = struct.unpack("<Q", data[:8])
    if length > min(len(data) - 8, MAX_HEADER_BYTES):
        raise ModelError(f"{path} is cut short or damaged: it claims a header of {length} bytes; download it again")
    header = _json_object(path, bytes(data[8 : 8 + length]))
    header.pop("__metadata__", None)
    body = data[8 + length :]
    entries: dict[str, _Entry] = {}
    spans: list[tuple[int, int, str]] = []
    for name, fields in header.items():
        info, begin, end = _checked(path, name, fields)
        if end > len(body):
            raise ModelError(
                f"{path} is cut short: {name} ends at byte {end} of the data, there are {len(body)}; download it again"
            )
        entries[name] = _Entry(info, body[begin:end])
        spans.append((begin, end, name))
    last = 0
    for begin, end, name in sorted(spans):
        if begin < last:
            raise ModelError(f"{path} is damaged: {name} overlaps another tensor; download it again")
        last = end
    return entries


def _checked(path: Path, name: str, fields: object) -> tuple[TensorInfo, int, int]:
    damaged = ModelError(f"{path} is damaged: its header describes {name} as {str(fields)[:200]}; download it again")
    if not isinstance(fields, dict):
        raise damaged
    dtype, shape, offsets = fields.get("dtype"), fields.get("shape"), fields.get("data_offsets")
    if not isinstance(dtype, str) or not isinstance(shape, list) or not isinstance(offsets, list):
        raise damaged
    if dtype not in _BITS:
        raise UnsupportedModelError(f"dtype of tensor {name}", dtype)
    if len(shape) > _MAX_DIMS or len(offsets) != 2:
        raise damaged
    if not all(isinstance(number, int) and not isinstance(number, bool) and number >= 0 for number in shape + offsets):
        raise damaged
    begin, end = offsets
    bits = math.prod(shape) * _BITS[dtype]
    if bits % 8 or begin + bits // 8 != end:
        raise damaged
    return TensorInfo(dtype, tuple(shape), end - begin), begin, end


def _read(path: Path, limit: int) -> bytes:
    try:
        with path.open("rb") as file:
            data = file.read(limit + 1)
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror or error}") from error
    if len(data) > limit:
        raise ModelError(f"{path} is larger than {limit} bytes, which no such file needs")
    return data


def _json_object(path: Path, data: bytes) -> dict[str, object]:
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        raise ModelError(f"{path} is damaged: its header is no JSON; download it again") from None
    if not isinstance(value, dict):
        raise ModelError(f"{path} is damaged: its header is no JSON object; download it again")
    return value
