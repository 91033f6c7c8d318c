"""What a record is on the server: a header, the block's token ids, and the framed bytes, in one string."""

from __future__ import annotations

import hashlib
import struct
from array import array
from typing import NamedTuple

from deepinfra.core.kv import KVRecord, RecordRef

__all__ = ("HEADER_NBYTES", "Header", "member_of", "pack", "record_id", "scope_of", "unpack")

_HEADER = struct.Struct("<4sIddd16s")
HEADER_NBYTES = _HEADER.size
_MAGIC = b"dkv1"


class Header(NamedTuple):
    """The part of a record that is read without its bytes; times are Unix seconds by the clients' clocks."""

    tokens: int
    created: float
    life_s: float
    expires: float
    scope: bytes

    @property
    def data_at(self) -> int:
        """Where the framed bytes begin."""
        return HEADER_NBYTES + 4 * self.tokens


def pack(record: KVRecord, now: float, life_s: float) -> bytes:
    """The string to be stored."""
    header = _HEADER.pack(_MAGIC, len(record.tokens), now, life_s, now + life_s, scope_of(record))
    return b"".join((header, array("I", record.tokens).tobytes(), record.data))


def unpack(value: bytes) -> Header | None:
    """The header at the beginning of a string; `None` if it is none of ours."""
    if len(value) < HEADER_NBYTES:
        return None
    magic, *fields = _HEADER.unpack_from(value)
    return Header(*fields) if magic == _MAGIC else None


def record_id(ref: RecordRef) -> bytes:
    """Name of a record below the prefix: the key says whose it is and what it means, the kind what is in it."""
    return ref.key if ref.kind == "block" else ref.key + ref.kind.encode()


def scope_of(record: KVRecord) -> bytes:
    """16 bytes that name a tenant's records of a model in a namespace."""
    tenant, model = record.tenant.encode(), record.model.encode()
    return hashlib.sha256(b"%s/%d/%s/%s" % (record.namespace, len(tenant), tenant, model)).digest()[:16]


def member_of(record: KVRecord, nbytes: int) -> bytes:
    """How a record is called in its scope's index: with its size, which is not known once it has expired."""
    return record_id(record.ref) + b":%d" % nbytes
