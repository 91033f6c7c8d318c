"""What is in a folder of the ssd store, for tools that do not enter it. Blocking: run in offloaded functions.

Nothing is locked or written, so servers may use the folder meanwhile; what goes while it is being listed is left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from deepinfra.core.ids import BlockKey
from deepinfra.core.kv import KVRecord, RecordRef, Retention
from deepinfra.kvstores.ssd.disk import Disk, read_upto
from deepinfra.kvstores.ssd.format import (
    KEY_NBYTES,
    KINDS,
    PREFIX_NBYTES,
    ROW,
    Entry,
    Header,
    Owner,
    Traffic,
    parse_name,
    record_id,
    unpack_header,
)
from deepinfra.kvstores.ssd.reading import read_records
from deepinfra.kvstores.ssd.recovery import read_footer, scan

__all__ = ("ListedRecord", "ListedSegment", "list_records", "list_segments", "read_listed", "read_successors")


class ListedSegment(NamedTuple):
    """A file of records.

    Attributes:
        hour: Hour since the epoch in which its records expire.
        nbytes: Length of the file.
        sealed: Whether it ends with a whole footer; if not, a server appends to it, or was killed.
    """

    name: str
    traffic: Traffic
    hour: int
    nbytes: int
    sealed: bool


class ListedRecord(NamedTuple):
    """A record as its header tells of it; one that was written again to live longer is listed for each copy.

    Attributes:
        segment: Name of the file.
        owner: Namespace, tenant and model.
        created, expires: Unix seconds.
        life_s: Seconds that a use lets it live.
        offset: Where the header begins.
        header_nbytes: Bytes before the payload of `ref.nbytes`.
    """

    segment: str
    traffic: Traffic
    ref: RecordRef
    parent: BlockKey
    owner: Owner
    tokens: tuple[int, ...]
    created: float
    expires: float
    life_s: float
    offset: int
    header_nbytes: int


def list_segments(folder: Path, disk: Disk | None = None) -> list[ListedSegment]:
    """Files of records in a folder, by class and age; none if there is no such folder."""
    disk = disk or Disk()
    try:
        names = disk.files(folder)
    except OSError:
        return []
    found = []
    for name in names:
        if (parsed := parse_name(name)) is None:
            continue
        try:
            fd = disk.open(folder / name)
            try:
                nbytes = disk.size(fd)
                found.append(
                    ListedSegment(name, parsed[0], parsed[1], nbytes, read_footer(disk, fd, nbytes) is not None)
                )
            finally:
                disk.close(fd)
        except OSError:
            continue
    return sorted(found)


def list_records(
    folder: Path, segments: Sequence[ListedSegment] | None = None, disk: Disk | None = None
) -> Iterator[ListedRecord]:
    """Every record whose header is whole, expired ones too; payloads are not read.

    Args:
        folder: The store's.
        segments: Only of these; default: of all.
        disk: Whose system calls.
    """
    disk = disk or Disk()
    for segment in list_segments(folder, disk) if segments is None else segments:
        try:
            fd = disk.open(folder / segment.name)
        except OSError:
            continue
        try:
            for offset, header_nbytes, header in _headers(disk, fd):
                if header.kind:
                    yield _listed(segment, offset, header_nbytes, header)
        except OSError:
            continue
        finally:
            disk.close(fd)


def read_listed(folder: Path, listed: ListedRecord, disk: Disk | None = None) -> KVRecord | None:
    """A record as it can be saved again, header and payload checked; `None` if it is damaged or gone."""
    id_ = record_id(listed.ref)
    tag = KINDS.index(listed.ref.kind)
    times = listed.created, listed.expires, listed.life_s
    entry = Entry(id_[:PREFIX_NBYTES], listed.offset, *times, listed.ref.nbytes, listed.header_nbytes, tag)
    (record,) = read_records(disk or Disk(), [(folder / listed.segment, id_, entry)])
    if record is None:
        return None
    return replace(record, retention=Retention(traffic=listed.traffic, ttl_s=listed.life_s))


def read_successors(disk: Disk, path: Path, parent: BlockKey, now: float, most: int) -> list[tuple[int, ...]]:
    """Token ids of the blocks in a file that continue `parent`, of its first `most` records; none if it is gone."""
    try:
        fd = disk.open(path)
    except OSError:
        return []
    try:
        headers = islice(_headers(disk, fd), most)
        return [h.tokens for _, _, h in headers if h.kind == "block" and h.parent == parent and h.expires > now]
    except OSError:
        return []
    finally:
        disk.close(fd)


def _headers(disk: Disk, fd: int) -> Iterator[tuple[int, int, Header]]:
    """Headers one after another; behind a damaged one, those that the footer knows of."""
    nbytes, end = disk.size(fd), 0
    for offset, header_nbytes, header in scan(disk, fd, nbytes):
        end = offset + header_nbytes + header.nbytes
        yield offset, header_nbytes, header
    if (footer := read_footer(disk, fd, nbytes)) is None or footer[2] == end:
        return
    for entry in sorted(map(Entry._make, ROW.iter_unpack(footer[0])), key=lambda entry: entry.offset):
        if entry.offset > end:
            lost = unpack_header(read_upto(disk, fd, entry.header_nbytes, entry.offset))
            if lost is not None:
                yield entry.offset, entry.header_nbytes, lost


def _listed(segment: ListedSegment, offset: int, header_nbytes: int, header: Header) -> ListedRecord:
    assert header.kind
    ref = RecordRef(BlockKey(header.id[:KEY_NBYTES]), header.kind, header.nbytes)
    return ListedRecord(
        segment.name,
        segment.traffic,
        ref,
        BlockKey(header.parent),
        header.owner,
        header.tokens,
        header.created,
        header.expires,
        header.life_s,
        offset,
        header_nbytes,
    )
