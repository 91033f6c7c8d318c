"""The engine's own frame around a record, checked after every load, whoever's store it was.

128 bytes: magic, format version, kind, payload length, key, xxh3-128 of the payload, xxh3-64 of the fields before it.
The checksum is against damage; the key in the frame is against a store that mixes records up.
"""

from __future__ import annotations

import struct
from typing import Literal

import xxhash

from deepinfra.core.ids import BlockKey
from deepinfra.core.kv import FORMAT_VERSION, FRAME_NBYTES

__all__ = ("frame_is_good", "write_frame")

_MAGIC = b"DIKV"
_FIELDS = struct.Struct("<4sHHQ32s16s")
_KINDS = {"block": 1, "snapshot": 2, "tail": 3}

Kind = Literal["block", "snapshot", "tail"]


def write_frame(record: memoryview, key: BlockKey, kind: Kind = "block") -> None:
    """Write the frame into the first `FRAME_NBYTES` of `record`, whose payload is already behind it."""
    payload = record[FRAME_NBYTES:]
    fields = _FIELDS.pack(_MAGIC, FORMAT_VERSION, _KINDS[kind], len(payload), key, xxhash.xxh3_128_digest(payload))
    head = fields + xxhash.xxh3_64_digest(fields)
    record[: len(head)] = head
    record[len(head) : FRAME_NBYTES] = bytes(FRAME_NBYTES - len(head))


def frame_is_good(record: memoryview, key: BlockKey, kind: Kind = "block") -> bool:
    """Whether `record` is exactly what was framed under `key`."""
    payload = record[FRAME_NBYTES:]
    fields = bytes(record[: _FIELDS.size])
    if bytes(record[_FIELDS.size : _FIELDS.size + 8]) != xxhash.xxh3_64_digest(fields):
        return False
    magic, version, code, nbytes, framed_key, checksum = _FIELDS.unpack(fields)
    if (magic, version, code, nbytes, framed_key) != (_MAGIC, FORMAT_VERSION, _KINDS[kind], len(payload), key):
        return False
    return bool(checksum == xxhash.xxh3_128_digest(payload))
