"""What changed in a folder since the last look: files and records of other processes. Runs in offloaded functions."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

import numpy as np

from deepinfra.kvstores.ssd.claims import Tombstone
from deepinfra.kvstores.ssd.disk import Disk, write_all
from deepinfra.kvstores.ssd.folder import Folder
from deepinfra.kvstores.ssd.format import ROW_DTYPE, Header, pack_footer, parse_name
from deepinfra.kvstores.ssd.recovery import fill, read_footer, scan
from deepinfra.kvstores.ssd.segment import Segment, allocated, taken

__all__ = ("Growth", "Look", "look")


class Growth(NamedTuple):
    """What came behind the known end of a file.

    Attributes:
        records: Offset, bytes of the header, header of each.
        sealed: Whether it has a footer now.
        unlisted: Offsets of records, these or known ones, that the footer does not list: they count for dead, as they
            do for whoever reads the file by its footer.
    """

    segment: Segment
    records: Sequence[tuple[int, int, Header]]
    sealed: bool
    unlisted: Collection[int]


class Look(NamedTuple):
    """What a look found.

    Attributes:
        fresh: Files that were not known, with all their records; one that was known by that name is to go for it.
        grown: Files of others that were appended to, or sealed.
        gone: Names that are no longer there.
        writers: Other processes that live.
        tombstones: What was announced, and `heard` how far that is.
    """

    fresh: list[Segment]
    grown: list[Growth]
    gone: list[str]
    writers: int
    tombstones: list[Tombstone]
    heard: int


def look(
    folder: Folder,
    known: Mapping[str, Segment],
    mine: Collection[str],
    again: Collection[str],
    touched: Mapping[str, int],
    heard: int,
    now: float,
) -> Look:
    """Find out what changed, and seal what dead processes left open, as far as the lock can be had.

    Args:
        folder: Ours.
        known: Files that are known, by name; only read.
        mine: Names of those we append to.
        again: Names of those that are to be read as if they were not known.
        touched: When files were used: the folder's other processes are told.
        heard: How far announcements are known.
        now: Unix seconds.

    Raises:
        Gone: The folder is another one, or we are none of its processes any more.
        OSError: The folder cannot be read.
    """
    disk = folder.disk
    folder.check()
    for name, used in touched.items():
        if name not in mine:
            with suppress(OSError):
                disk.stamp(folder.path / name, used)
    before = list(known)
    # In this order: what is claimed behind a listing cannot be in it, and what is not claimed any more has its footer.
    tombstones, heard = folder.news(heard)
    others = folder.others()
    listed = disk.files(folder.path)
    found = Look(
        [],
        [],
        [name for name in before if name not in listed and name not in mine],
        others.processes,
        tombstones,
        heard,
    )
    for name, status in listed.items():
        parsed = parse_name(name)
        if parsed is None or name in mine:
            continue
        segment = known.get(name)
        if segment is not None and name not in again:
            if segment.sealed:
                segment.used, segment.disk_nbytes = max(segment.used, status.changed_ns), taken(status)
                continue
        else:
            segment = None
        living = name in others.claims
        nbytes = max(taken(status), others.claims.get(name, 0))
        with suppress(OSError):  # what is not read is not held
            if segment is not None:
                segment.living, segment.disk_nbytes = living, nbytes
                _follow(disk, folder, segment, found, now)
            else:
                segment = Segment(*parsed)
                segment.living, segment.disk_nbytes, segment.used = living, nbytes, status.changed_ns
                segment.unread = True
                found.fresh.append(segment)
                if not segment.over(now):
                    found.fresh[-1] = _read(disk, folder, segment, now)
    return found


def _read(disk: Disk, folder: Folder, segment: Segment, now: float) -> Segment:
    fd = disk.open(folder.path / segment.name, write=not segment.living)
    try:
        fill(disk, fd, segment, now)
        if not segment.sealed and not segment.living and not _mend(disk, folder, fd, segment):
            segment = segment.anew()
            fill(disk, fd, segment, now)
        segment.unread = not segment.sealed and disk.size(fd) > segment.size
        return segment
    finally:
        disk.close(fd)


def _follow(disk: Disk, folder: Folder, segment: Segment, found: Look, now: float) -> None:
    """See what came behind the known end of a file; read it anew if that is not where records end."""
    segment.unread = True
    fd = disk.open(folder.path / segment.name, write=not segment.living)
    try:
        file_nbytes = disk.size(fd)
        records = list(scan(disk, fd, file_nbytes, segment.size))
        end = segment.size
        for offset, header_nbytes, header in records:
            end = offset + header_nbytes + header.nbytes
        footer = read_footer(disk, fd, file_nbytes)
        if file_nbytes < segment.size or (footer is not None and footer[2] != end):
            anew = segment.anew()
            fill(disk, fd, anew, now)
            anew.unread = not anew.sealed and disk.size(fd) > anew.size
            found.fresh.append(anew)
        elif records or footer is not None:
            unlisted = _unlisted(segment, records, footer[0]) if footer is not None else ()
            found.grown.append(Growth(segment, records, footer is not None, unlisted))
            segment.unread = footer is None and file_nbytes > end
        else:
            if not segment.living and not segment.owed:
                _mend(disk, folder, fd, segment)
            segment.unread = not segment.sealed and disk.size(fd) > segment.size
    finally:
        disk.close(fd)


def _unlisted(segment: Segment, records: Sequence[tuple[int, int, Header]], footer: bytearray) -> set[int]:
    known = np.frombuffer(bytes(segment.rows), ROW_DTYPE)  # a copy, since the loop may add to them
    offsets = {*known["offset"].tolist(), *(offset for offset, _, header in records if header.kind)}
    return offsets.difference(np.frombuffer(footer, ROW_DTYPE)["offset"].tolist())


def _mend(disk: Disk, folder: Folder, fd: int, segment: Segment) -> bool:
    """Cut a file that a dead process left behind its last whole record, and write its footer.

    Returns:
        False if there is a footer after all: it was written meanwhile, or could not be read before.
    """
    try:
        with folder.locked():
            if segment.name in folder.others().claims | folder.claims:
                return True
            if read_footer(disk, fd, disk.size(fd)) is not None:
                return False
            disk.truncate(fd, segment.size)
            footer = pack_footer(segment.size, segment.live_rows().tobytes(), segment.owners)
            tenant = segment.owners[0].tenant if segment.owners else ""
            if not folder.fits(segment.name, allocated(segment.size + len(footer)), tenant):
                return True
            write_all(disk, fd, [footer], segment.size)
            times = segment.table()["created"]
            segment.used = int(times.max() * 1e9) if len(times) else 0
            disk.stamp(fd, segment.used)
            segment.disk_nbytes = taken(disk.status(fd))
    except OSError:
        return True  # busy or full: the next look tries again
    segment.sealed = True
    return True
