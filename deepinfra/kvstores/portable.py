"""Records in one file, to be taken to another machine: a format of its own, which no store's own format can break.

    file     magic | version | records | end
    record   tag, bytes of about and payload | about | payload | xxh3_128 of all before
    about    kind, class, lengths of names and tokens, key, parent, namespace, times | tenant | model | token ids

All integers are little-endian. The end says how many records there are, so that a cut file is noticed. Nothing in a
file is believed before its checksum holds, and nothing is larger than the limits here. Checksums are against damage: a
file says what a model remembers of prompts, so import only what you would let answer for you. Blocking.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from typing import BinaryIO, Literal, NamedTuple, TypeAlias, cast

import xxhash

from deepinfra.core.ids import BlockKey
from deepinfra.core.kv import KVRecord, RecordRef, Retention
from deepinfra.errors import ConfigError

__all__ = ("MOST_PAYLOAD_NBYTES", "Portable", "PortableWriter", "read_portable")

Kind: TypeAlias = Literal["block", "snapshot", "tail"]
Class: TypeAlias = Literal["default", "agent", "chat"]

MAGIC = b"deepinfra KV\r\n\x1a\n"
VERSION = 1
KINDS: tuple[Kind, ...] = ("block", "snapshot", "tail")
CLASSES: tuple[Class, ...] = ("default", "agent", "chat")

MOST_PAYLOAD_NBYTES = 256 << 20
"""Bytes of a record at most; a block of the largest models has a tenth of it."""

MOST_ABOUT_NBYTES = 4 << 20
MOST_LIFE_S = 366 * 86400.0

_HEAD = struct.Struct("<16sI")
_FRAME = struct.Struct("<4sIQ")
_ABOUT = struct.Struct("<BBHHI32s32s32sdd")
_RECORD, _END = b"rec\n", b"end\n"
_SUM_NBYTES = 16


class Portable(NamedTuple):
    """A record, when it was saved and when it expires, in Unix seconds."""

    record: KVRecord
    created: float
    expires: float


class PortableWriter:
    """Writes a file: records one by one, then `end`, without which it is not whole."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.records = 0
        file.write(_HEAD.pack(MAGIC, VERSION))

    def add(self, portable: Portable) -> bool:
        """Write a record; `False` if it is too large for a file of this kind."""
        record = portable.record
        tenant, model = record.tenant.encode(), record.model.encode()
        tokens = struct.pack(f"<{len(record.tokens)}I", *record.tokens)
        about_nbytes = _ABOUT.size + len(tenant) + len(model) + len(tokens)
        if record.data.nbytes > MOST_PAYLOAD_NBYTES or about_nbytes > MOST_ABOUT_NBYTES:
            return False
        about = _ABOUT.pack(
            KINDS.index(record.ref.kind),
            CLASSES.index(cast("Class", record.retention.traffic)),
            len(tenant),
            len(model),
            len(record.tokens),
            record.ref.key,
            record.parent,
            record.namespace,
            portable.created,
            portable.expires,
        )
        self._write(_RECORD, about + tenant + model + tokens, record.data)
        self.records += 1
        return True

    def end(self) -> None:
        """Say that this is all."""
        self._write(_END, struct.pack("<Q", self.records), memoryview(b""))

    def _write(self, tag: bytes, about: bytes, payload: memoryview) -> None:
        head = _FRAME.pack(tag, len(about), payload.nbytes) + about
        checksum = xxhash.xxh3_128(head)
        checksum.update(payload)
        for piece in (head, payload, checksum.digest()):
            self._file.write(piece)


def read_portable(file: BinaryIO) -> Iterator[Portable]:
    """The records of a file, one in memory at a time.

    Raises:
        ConfigError: It is not of this kind or version, damaged, or cut; records before that were good.
    """
    magic, version = _HEAD.unpack(_exactly(file, _HEAD.size, 0, "the file is too short to hold records"))
    if magic != MAGIC:
        raise ConfigError("the file was not written by `deepinfra cache export`")
    if version != VERSION:
        raise ConfigError(f"the file has version {version} of the format; this deepinfra reads {VERSION}")
    at, count = _HEAD.size, 0
    while True:
        cut = f"the file is cut at byte {at}, behind {count} whole records"
        head = _exactly(file, _FRAME.size, at, cut)
        tag, about_nbytes, nbytes = _FRAME.unpack(head)
        if tag not in (_RECORD, _END) or about_nbytes > MOST_ABOUT_NBYTES or nbytes > MOST_PAYLOAD_NBYTES:
            raise ConfigError(f"the file is damaged at byte {at}, behind {count} whole records")
        about = _exactly(file, about_nbytes, at, cut)
        payload = _exactly(file, nbytes, at, cut)
        checksum = xxhash.xxh3_128(head + about)
        checksum.update(payload)
        if _exactly(file, _SUM_NBYTES, at, cut) != checksum.digest():
            raise ConfigError(f"the file is damaged at byte {at}, behind {count} whole records")
        if tag == _END:
            if about != struct.pack("<Q", count):
                raise ConfigError(f"the file has {count} records and says it has others")
            return
        yield _unpacked(about, payload, at)
        at += _FRAME.size + about_nbytes + nbytes + _SUM_NBYTES
        count += 1


def _exactly(file: BinaryIO, nbytes: int, at: int, cut: str) -> bytes:
    data = file.read(nbytes) if nbytes else b""
    if len(data) < nbytes:
        raise ConfigError(cut)
    return data


def _unpacked(about: bytes, payload: bytes, at: int) -> Portable:
    wrong = ConfigError(f"the record at byte {at} makes no sense")
    if len(about) < _ABOUT.size:
        raise wrong
    kind, traffic, tenant, model, tokens, key, parent, namespace, created, expires = _ABOUT.unpack_from(about)
    names = about[_ABOUT.size :]
    if kind >= len(KINDS) or traffic >= len(CLASSES) or len(names) != tenant + model + 4 * tokens or not payload:
        raise wrong
    if not (math.isfinite(created) and math.isfinite(expires) and 0 <= created <= expires <= created + MOST_LIFE_S):
        raise wrong
    try:
        texts = names[:tenant].decode(), names[tenant : tenant + model].decode()
    except UnicodeDecodeError:
        raise wrong from None
    record = KVRecord(
        ref=RecordRef(BlockKey(key), KINDS[kind], len(payload)),
        parent=BlockKey(parent),
        namespace=namespace,
        tenant=texts[0],
        model=texts[1],
        tokens=struct.unpack(f"<{tokens}I", names[tenant + model :]),
        retention=Retention(traffic=CLASSES[traffic]),
        data=memoryview(payload),
    )
    return Portable(record, created, expires)
