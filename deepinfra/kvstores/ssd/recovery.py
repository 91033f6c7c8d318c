"""Reading a segment back from its file: by its footer, or by a scan. Runs in offloaded functions."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from deepinfra.kvstores.ssd.disk import Disk, read_upto
from deepinfra.kvstores.ssd.format import (
    FIXED_NBYTES,
    KINDS,
    PREFIX_NBYTES,
    ROW_DTYPE,
    TRAILER_NBYTES,
    Entry,
    Header,
    Owner,
    read_trailer,
    unpack_fixed,
    unpack_footer,
    unpack_header,
)
from deepinfra.kvstores.ssd.segment import Segment

__all__ = ("entry_of", "fill", "read_footer", "scan")

SMALL_NBYTES = 16 << 10
"""Records below this are scanned through a large window, those above header by header."""

WINDOW_NBYTES = 256 << 10


def fill(disk: Disk, fd: int, segment: Segment, now: float) -> None:
    """Fill an empty segment from its file: by its footer, or up to the first bad record. Payloads are not read.

    A load checks them. `Segment.sealed` says whether there was a footer.
    """
    file_nbytes = disk.size(fd)
    footer = read_footer(disk, fd, file_nbytes)
    if footer is None:
        for offset, header_nbytes, header in scan(disk, fd, file_nbytes):
            segment.size = offset + header_nbytes + header.nbytes
            if header.kind:
                number = segment.owner(header.owner)
                if header.expires > now:
                    segment.add(entry_of(offset, header_nbytes, header, number))
        return
    rows, owners, segment.size = footer
    segment.sealed = True
    for owner in owners:
        segment.take_over(owner)
    table = np.frombuffer(rows, ROW_DTYPE)
    alive = table["expires"] > now
    segment.fill(rows if alive.all() else bytearray(table[alive].tobytes()))


def entry_of(offset: int, header_nbytes: int, header: Header, owner: int) -> Entry:
    """The row of a record that a scan found."""
    times = header.created, header.expires, header.life_s
    tag = owner << 2 | KINDS.index(header.kind)
    return Entry(header.id[:PREFIX_NBYTES], offset, *times, header.nbytes, header_nbytes, tag)


def read_footer(disk: Disk, fd: int, file_nbytes: int) -> tuple[bytearray, list[Owner], int] | None:
    """Rows, owners and offset of a file's footer; `None` if it has none, or a damaged one."""
    tail_nbytes = min(file_nbytes, TRAILER_NBYTES)
    offset = read_trailer(read_upto(disk, fd, tail_nbytes, file_nbytes - tail_nbytes), file_nbytes)
    if offset is None:
        return None
    footer = unpack_footer(read_upto(disk, fd, file_nbytes - offset, offset))
    return None if footer is None else (*footer, offset)


def scan(disk: Disk, fd: int, file_nbytes: int, offset: int = 0) -> Iterator[tuple[int, int, Header]]:
    """Records of a file from `offset` on: offset, bytes of the header, header; ends at the first bad record."""
    window, base, last_nbytes = bytearray(), offset, 0
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
