"""Opening a folder: which records are in it. Runs in an offloaded function."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from deepinfra.kvstores.ssd.disk import Disk, read_upto, write_all
from deepinfra.kvstores.ssd.format import (
    FIXED_NBYTES,
    KINDS,
    PREFIX_NBYTES,
    ROW_DTYPE,
    TRAILER_NBYTES,
    Entry,
    Header,
    pack_footer,
    parse_name,
    read_trailer,
    unpack_fixed,
    unpack_footer,
    unpack_header,
)
from deepinfra.kvstores.ssd.segment import Segment, allocated

__all__ = ("recover", "scan")

SMALL_NBYTES = 16 << 10
"""Records below this are scanned through a large window, those above header by header."""

WINDOW_NBYTES = 256 << 10


def recover(disk: Disk, folder: Path, now: float) -> list[Segment]:
    """Segments of a folder by ascending serial; one without live records is for the caller to remove.

    A sealed segment is read by its footer. One without (the process was killed) or with a damaged one is scanned
    header by header, cut at the first bad record and sealed. Payloads are not read: a load checks them.
    """
    segments = []
    for name, nbytes in disk.sizes(folder).items():
        parsed = parse_name(name)
        if parsed is not None:
            segment = Segment(*parsed)
            segment.disk_nbytes = allocated(nbytes)
            if not segment.over(now):
                _read(disk, folder / name, segment, now)
            segments.append(segment)
    return sorted(segments, key=lambda segment: segment.serial)


def _read(disk: Disk, path: Path, segment: Segment, now: float) -> None:
    """Fill a segment from its file, as far as that can be read."""
    try:
        fd = disk.open(path, write=True)
        try:
            file_nbytes = disk.size(fd)
            if not _read_footer(disk, fd, segment, file_nbytes, now):
                _rescan(disk, fd, segment, file_nbytes, now)
                segment.disk_nbytes = _reseal(disk, fd, segment)
        finally:
            disk.close(fd)
    except OSError:
        pass  # what was not read is not held


def _read_footer(disk: Disk, fd: int, segment: Segment, file_nbytes: int, now: float) -> bool:
    tail_nbytes = min(file_nbytes, TRAILER_NBYTES)
    offset = read_trailer(read_upto(disk, fd, tail_nbytes, file_nbytes - tail_nbytes), file_nbytes)
    if offset is None:
        return False
    footer = unpack_footer(read_upto(disk, fd, file_nbytes - offset, offset))
    if footer is None:
        return False
    rows, owners = footer
    segment.size = offset
    for owner in owners:
        segment.owner(owner)
    table = np.frombuffer(rows, ROW_DTYPE)
    alive = table["expires"] > now
    segment.fill(rows if alive.all() else bytearray(table[alive].tobytes()))
    return True


def scan(disk: Disk, fd: int, file_nbytes: int) -> Iterator[tuple[int, int, Header]]:
    """Records of a file by their headers: offset, bytes of the header, header; ends at the first bad record."""
    window, base, offset, last_nbytes = bytearray(), 0, 0, 0
    while offset < file_nbytes:
        at = offset - base
        lengths = unpack_fixed(memoryview(window)[at : at + FIXED_NBYTES]) if at < len(window) else None
        if lengths is None or at + lengths[0] > len(window):
            want = WINDOW_NBYTES if last_nbytes <= SMALL_NBYTES else FIXED_NBYTES
            window, base, at = read_upto(disk, fd, min(want, file_nbytes - offset), offset), offset, 0
            lengths = unpack_fixed(memoryview(window)[:FIXED_NBYTES])
            if lengths is None or offset + sum(lengths) > file_nbytes:
                return
            if lengths[0] > len(window):
                window = read_upto(disk, fd, lengths[0], offset)
        header = unpack_header(bytes(memoryview(window)[at : at + lengths[0]]))
        if header is None or offset + sum(lengths) > file_nbytes:
            return
        yield offset, lengths[0], header
        offset += sum(lengths)
        last_nbytes = lengths[1]


def _rescan(disk: Disk, fd: int, segment: Segment, file_nbytes: int, now: float) -> None:
    for offset, header_nbytes, header in scan(disk, fd, file_nbytes):
        segment.size = offset + header_nbytes + header.nbytes
        if header.kind:
            owner = segment.owner(header.owner)
            if header.expires > now:
                times = header.created, header.expires, header.life_s
                tag = owner << 2 | KINDS.index(header.kind)
                segment.add(Entry(header.id[:PREFIX_NBYTES], offset, *times, header.nbytes, header_nbytes, tag))


def _reseal(disk: Disk, fd: int, segment: Segment) -> int:
    """Cut what the scan did not accept and write a footer; returns the bytes on disk."""
    disk.truncate(fd, segment.size)
    footer = pack_footer(segment.size, segment.rows, segment.owners)
    try:
        write_all(disk, fd, [footer], segment.size)
    except OSError:
        pass  # a full disk: the next start scans again
    return allocated(segment.size + len(footer))
