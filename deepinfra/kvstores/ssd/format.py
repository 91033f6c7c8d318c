"""Bytes of a segment file: records one after another, then a footer that lists them once the segment is sealed.

    record   fixed header | tenant | model | token ids (u32 each) | xxh3_64 of all before | payload
    footer   rows (one per live record) | owners | trailer with counts, offset and xxh3_128 of the footer

All integers are little-endian. A *dead* record (kind 0) is one that was forgotten: lengths are kept, so that a scan
finds what follows, everything else is zeros. Rows are what the index keeps in memory, byte for byte: a footer is read
without a loop. They name a record by the first half of its key; its header, which is checked at every load, by all.
"""

from __future__ import annotations

import hashlib
import math
import re
import struct
from collections.abc import Sequence
from functools import lru_cache
from typing import Literal, NamedTuple, TypeAlias, cast

import numpy as np
import xxhash

from deepinfra.core.kv import KVRecord, NamespaceFilter, RecordRef

__all__ = (
    "FIXED_NBYTES",
    "KEY_NBYTES",
    "KINDS",
    "MOST_NBYTES",
    "NOBODY",
    "PREFIX_NBYTES",
    "ROW",
    "ROW_DTYPE",
    "TRAILER_NBYTES",
    "Entry",
    "Erased",
    "Header",
    "Owner",
    "Rows",
    "SegmentName",
    "Traffic",
    "dead_header",
    "footer_nbytes",
    "header_nbytes",
    "index_key",
    "kind_of",
    "pack_footer",
    "pack_header",
    "parse_name",
    "payload_sum",
    "read_trailer",
    "record_id",
    "snapshot_id",
    "tag_of",
    "unpack_fixed",
    "unpack_footer",
    "unpack_header",
    "writable",
)

Kind: TypeAlias = Literal["", "block", "snapshot", "tail"]
Traffic: TypeAlias = Literal["default", "agent", "chat", "none"]

VERSION = 2
KEY_NBYTES, PREFIX_NBYTES = 32, 16
TRAFFICS: tuple[Traffic, ...] = ("default", "agent", "chat")
KINDS: tuple[Kind, ...] = ("", "block", "snapshot", "tail")

_RECORD = struct.Struct("<4sBBBxHHIQ32s32s32sddd16s")
_CHECKED = struct.Struct("<4sBB10xQ32s88x16s")  # of the same bytes, what every load checks
_RECORD_MAGIC = b"DIkv"
_SUM = struct.Struct("<Q")
_OWNER = struct.Struct("<32sHH")
_TRAILER = struct.Struct("<8sIIQQ16s")
_TRAILER_MAGIC = b"DIkvFOOT"
_NAME = re.compile(r"(default|agent|chat)-(\d{1,12})-(\d{8,18})(?:-([0-9a-f]{12})(?:-([0-9a-f]{16}))?)?\.kvseg")

ROW = struct.Struct("<16sQddfIII")
"""A row as `Entry`: what a footer holds, and the index in memory."""

ROW_DTYPE = np.dtype(
    [
        ("prefix", "<u8", 2),
        ("offset", "<u8"),
        ("created", "<f8"),
        ("expires", "<f8"),
        ("life_s", "<f4"),
        ("nbytes", "<u4"),
        ("header_nbytes", "<u4"),
        ("tag", "<u4"),
    ]
)
"""The same for numpy."""

Rows: TypeAlias = np.ndarray[tuple[int], np.dtype[np.void]]

MOST_NBYTES = (1 << 32) - 1
"""Bytes of a payload, and of a header, at most."""

MOST_TOKENS = 1 << 20
"""Token ids of a record at most: what a header claims is read into memory."""

MOST_FOOTER_NBYTES = 256 << 20
"""Of a footer at most, for the same reason; it lists four million records."""

MOST_S = 1e12
"""Times and lives are less, so that they can be stamped on files: 30,000 years."""

FIXED_NBYTES = _RECORD.size
SUM_NBYTES = _SUM.size
TRAILER_NBYTES = _TRAILER.size


class Owner(NamedTuple):
    """Whose records: what `forget` and accounting ask for."""

    namespace: bytes
    tenant: str
    model: str

    @property
    def nbytes(self) -> int:
        """Bytes in a footer."""
        return _OWNER.size + len(self.tenant.encode()) + len(self.model.encode())


class Erased(NamedTuple):
    """Whose records are to be forgotten, by digests of the names, so that a folder does not keep the names themselves.

    Attributes:
        whose: `_digest` of the tenant; zeros for all. If `narrow`, a namespace; with a tenant, `_joined` to it.
        model: `_digest` of the model; zeros for all.
        narrow: Whether only one namespace's are.
    """

    whose: bytes
    model: bytes
    narrow: bool = False

    @classmethod
    def of(cls, which: NamespaceFilter) -> Erased:
        """What a filter means."""
        tenant, model = (_digest(name) if name else bytes(32) for name in (which.tenant, which.model))
        if not which.namespace:
            return cls(tenant, model)
        whose = _joined(which.namespace, which.tenant) if which.tenant else which.namespace
        return cls(whose, model, narrow=True)

    def means(self, owner: Owner) -> bool:
        """Whether an owner's records are meant; nobody's never are."""
        if owner == NOBODY or self.model not in (bytes(32), _digest(owner.model)):
            return False
        if self.narrow:
            return self.whose in (owner.namespace, _joined(owner.namespace, owner.tenant))
        return self.whose in (bytes(32), _digest(owner.tenant))


NOBODY = Owner(bytes(KEY_NBYTES), "", "")
"""Stands where an owner was that is forgotten."""


@lru_cache(maxsize=4096)
def _digest(name: str) -> bytes:
    return hashlib.sha256(b"deepinfra/kv\0" + name.encode()).digest()


def _joined(namespace: bytes, tenant: str) -> bytes:
    return hashlib.sha256(b"deepinfra/kv/namespace\0" + namespace + tenant.encode()).digest()


def tag_of(tenant: str) -> str:
    """What the names of a tenant's own segments end with."""
    return _digest(tenant)[:8].hex()


class Entry(NamedTuple):
    """Where a record is in its segment, and what must be known without reading it; the fields of a row.

    Attributes:
        prefix: First half of the key.
        life_s: Seconds that a use lets it live.
        tag: Number of its owner in the segment, and its kind; see `owner` and `kind`.
    """

    prefix: bytes
    offset: int
    created: float
    expires: float
    life_s: float
    nbytes: int
    header_nbytes: int
    tag: int

    @property
    def owner(self) -> int:
        """Number of its owner in the segment."""
        return self.tag >> 2

    @property
    def kind(self) -> int:
        """Which of `KINDS`; 0 for a dead row."""
        return self.tag & 3


class Header(NamedTuple):
    """A record's header as read back; `kind` is empty for a dead record."""

    kind: Kind
    id: bytes
    parent: bytes
    owner: Owner
    tokens: tuple[int, ...]
    nbytes: int
    created: float
    expires: float
    life_s: float
    payload_sum: bytes


def record_id(ref: RecordRef) -> bytes:
    """What the index calls a record: the key, with a letter behind it where it is not a block."""
    return ref.key if ref.kind == "block" else ref.key + ref.kind[:1].encode()


def snapshot_id(key: bytes) -> bytes:
    """What the index calls the snapshot at the end of a block."""
    return key + b"s"


def kind_of(id_: bytes) -> int:
    """Which of `KINDS` an id names."""
    return 1 if len(id_) <= KEY_NBYTES else 2 if id_[KEY_NBYTES:] == b"s" else 3


def index_key(prefix: bytes, kind: int) -> int:
    """The number by which the index finds a record: 62 bits of its key, then its kind."""
    return int.from_bytes(prefix[:8], "little") & ~3 | kind


def _id_of(key: bytes, kind: int) -> bytes:
    return key if kind == 1 else key + KINDS[kind][:1].encode()


# -- names ----------------------------------------------------------------------------------------


class SegmentName(NamedTuple):
    """What the name of a file of records says.

    Attributes:
        traffic: Class of its records.
        hour: Hour since the epoch in which they expire.
        serial: A number that grows.
        writer: The process that appends to it, a number of its own; empty in folders of older versions.
        tag: Of the tenant whose records alone are in it (`tag_of`); empty if anybody's may be.
    """

    traffic: Traffic
    hour: int
    serial: int
    writer: str = ""
    tag: str = ""

    def __str__(self) -> str:
        return "-".join((self.traffic, str(self.hour), f"{self.serial:08d}", *filter(None, self[3:]))) + ".kvseg"


def parse_name(name: str) -> SegmentName | None:
    """What a name says, or `None` for a file that is not ours."""
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    parsed = SegmentName(cast("Traffic", match[1]), int(match[2]), int(match[3]), match[4] or "", match[5] or "")
    return parsed if str(parsed) == name else None


# -- records --------------------------------------------------------------------------------------


def writable(record: KVRecord) -> bool:
    """Whether a record can be written down without loss (keys of 32 bytes, names under 64 KiB, true length < 4 GiB)."""
    return (
        len(record.ref.key) == len(record.parent) == len(record.namespace) == KEY_NBYTES
        and len(record.tenant.encode()) < 1 << 16
        and len(record.model.encode()) < 1 << 16
        and record.data.nbytes == record.ref.nbytes <= MOST_NBYTES
        and len(record.tokens) <= MOST_TOKENS
    )


def header_nbytes(record: KVRecord) -> int:
    """Bytes before the payload."""
    names = len(record.tenant.encode()) + len(record.model.encode())
    return FIXED_NBYTES + names + 4 * len(record.tokens) + SUM_NBYTES


def pack_header(record: KVRecord, created: float, expires: float, life_s: float) -> bytes:
    """Header of a record, the checksum of its payload included."""
    tenant, model = record.tenant.encode(), record.model.encode()
    fixed = _RECORD.pack(
        _RECORD_MAGIC,
        VERSION,
        KINDS.index(record.ref.kind),
        TRAFFICS.index(record.retention.traffic),
        len(tenant),
        len(model),
        len(record.tokens),
        record.ref.nbytes,
        record.ref.key,
        record.parent,
        record.namespace,
        created,
        expires,
        life_s,
        xxhash.xxh3_128_digest(record.data),
    )
    body = fixed + tenant + model + struct.pack(f"<{len(record.tokens)}I", *record.tokens)
    return body + _SUM.pack(xxhash.xxh3_64_intdigest(body))


def dead_header(header: bytes | bytearray | memoryview) -> bytes:
    """The header that takes the place of a forgotten record's: equal lengths, nothing else."""
    fixed = list(_RECORD.unpack_from(header))
    fixed[2] = 0
    fixed[8:] = [bytes(KEY_NBYTES)] * 3 + [0.0, 0.0, 0.0, bytes(16)]
    body = _RECORD.pack(*fixed) + bytes(len(header) - FIXED_NBYTES - SUM_NBYTES)
    return body + _SUM.pack(xxhash.xxh3_64_intdigest(body))


def unpack_fixed(data: bytes | bytearray | memoryview) -> tuple[int, int] | None:
    """Lengths of header and payload that a fixed header claims (unchecked), or `None` if it is none."""
    if len(data) < FIXED_NBYTES:
        return None
    magic, version, kind, traffic, tenant, model, tokens, nbytes = _RECORD.unpack_from(data)[:8]
    if magic != _RECORD_MAGIC or version != VERSION or kind >= len(KINDS) or traffic >= len(TRAFFICS):
        return None
    if nbytes > MOST_NBYTES or tokens > MOST_TOKENS:
        return None
    return FIXED_NBYTES + tenant + model + 4 * tokens + SUM_NBYTES, nbytes


def unpack_header(data: bytes | bytearray | memoryview) -> Header | None:
    """A whole header, or `None` if anything about it is wrong."""
    lengths = unpack_fixed(data)
    if lengths is None or lengths[0] != len(data):
        return None
    if _SUM.unpack_from(data, len(data) - SUM_NBYTES)[0] != xxhash.xxh3_64_intdigest(data[:-SUM_NBYTES]):
        return None
    fields = _RECORD.unpack_from(data)
    _, _, kind, _, tenant, model, num_tokens, nbytes, key, parent, namespace = fields[:11]
    body = bytes(data[FIXED_NBYTES:-SUM_NBYTES])
    if kind == 0:
        return Header("", b"", parent, Owner(namespace, "", ""), (), nbytes, *fields[11:])
    tokens = struct.unpack(f"<{num_tokens}I", body[tenant + model :])
    owner = _owner(namespace, body[: tenant + model], tenant)
    if owner is None or not all(math.isfinite(time) and abs(time) < MOST_S for time in fields[11:14]):
        return None
    return Header(KINDS[kind], _id_of(key, kind), parent, owner, tokens, nbytes, *fields[11:])


def _owner(namespace: bytes, names: bytes, tenant: int) -> Owner | None:
    try:
        return Owner(namespace, names[:tenant].decode(), names[tenant:].decode())
    except UnicodeDecodeError:
        return None


def payload_sum(header: memoryview, id_: bytes, nbytes: int) -> bytes | None:
    """Checksum of a payload, if this is the whole header of such a record; `None` if anything about it is wrong.

    What `unpack_header` finds out, without taking the header apart.
    """
    magic, version, kind, length, key, checksum = _CHECKED.unpack_from(header)
    if magic != _RECORD_MAGIC or version != VERSION or length != nbytes or key != id_[:KEY_NBYTES]:
        return None
    if _SUM.unpack_from(header, len(header) - SUM_NBYTES)[0] != xxhash.xxh3_64_intdigest(header[:-SUM_NBYTES]):
        return None
    return bytes(checksum) if kind == kind_of(id_) else None


# -- footers --------------------------------------------------------------------------------------


def footer_nbytes(rows: int, owners: Sequence[Owner]) -> int:
    """Bytes of a footer."""
    return rows * ROW.size + sum(owner.nbytes for owner in owners) + TRAILER_NBYTES


def pack_footer(offset: int, rows: bytes | bytearray, owners: Sequence[Owner]) -> bytes:
    """The footer of a segment whose records end at `offset`; `rows` are those of its live records."""
    parts = [rows]
    for owner in owners:
        tenant, model = owner.tenant.encode(), owner.model.encode()
        parts.append(_OWNER.pack(owner.namespace, len(tenant), len(model)) + tenant + model)
    parts.append(_TRAILER.pack(_TRAILER_MAGIC, VERSION, len(owners), len(rows) // ROW.size, offset, bytes(16))[:-16])
    body = b"".join(parts)
    return body + xxhash.xxh3_128_digest(body)


def read_trailer(tail: bytes | bytearray, file_nbytes: int) -> int | None:
    """Offset of the footer, from the last bytes of a file; `None` if it has none."""
    if len(tail) < TRAILER_NBYTES:
        return None
    magic, version, owners, rows, offset, _ = _TRAILER.unpack(tail[-TRAILER_NBYTES:])
    least = rows * ROW.size + owners * _OWNER.size + TRAILER_NBYTES
    most = min(least + owners * 2 * 0xFFFF, MOST_FOOTER_NBYTES)
    if magic != _TRAILER_MAGIC or version != VERSION or not least <= file_nbytes - offset <= most:
        return None
    return int(offset)


def unpack_footer(data: bytearray) -> tuple[bytearray, list[Owner]] | None:
    """Rows and owners of a footer read from its offset to the end of the file; `None` if it is damaged.

    The rows are `data` itself, cut. A checksum is against damage only: whoever can write it may have written anything.
    """
    view = memoryview(data)
    good = xxhash.xxh3_128_digest(view[:-16]) == view[-16:]
    view.release()
    if not good:
        return None
    _, _, num_owners, num_rows, size, _ = _TRAILER.unpack(data[-TRAILER_NBYTES:])
    owners, at, end = list[Owner](), num_rows * ROW.size, len(data) - TRAILER_NBYTES
    while len(owners) < num_owners and at + _OWNER.size <= end:
        namespace, tenant, model = _OWNER.unpack_from(data, at)
        at += _OWNER.size
        owner = _owner(namespace, bytes(data[at : at + tenant + model]), tenant)
        if owner is None:
            return None
        owners.append(owner)
        at += tenant + model
    if len(owners) < num_owners or at != end:
        return None
    del data[num_rows * ROW.size :]
    return (data, owners) if _sensible(np.frombuffer(data, ROW_DTYPE), num_owners, size) else None


def _sensible(rows: Rows, num_owners: int, size: int) -> bool:
    """Whether all rows can be of records in the first `size` bytes of a file."""
    header_nbytes, nbytes = rows["header_nbytes"].astype(np.uint64), rows["nbytes"].astype(np.uint64)
    good = (rows["tag"] & 3 != 0) & (rows["tag"] >> 2 < num_owners) & (header_nbytes >= FIXED_NBYTES + SUM_NBYTES)
    good &= (rows["offset"] <= size) & (rows["offset"] + header_nbytes + nbytes <= size)
    for name in ("created", "expires", "life_s"):
        good &= np.abs(rows[name]) < MOST_S
    return bool(good.all())
