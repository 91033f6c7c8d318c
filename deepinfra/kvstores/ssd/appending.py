"""Appending, sealing and forgetting. Runs in offloaded functions, one at a time per store."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from deepinfra.core.kv import KVRecord, NamespaceFilter
from deepinfra.kvstores.ssd.disk import Disk, read_upto, write_all
from deepinfra.kvstores.ssd.format import Owner, Traffic, dead_header, pack_footer, pack_header
from deepinfra.kvstores.ssd.recovery import scan
from deepinfra.kvstores.ssd.segment import HOUR_S

__all__ = ("Life", "append", "forget_records", "seal", "unlink_all")

ZEROS_NBYTES = 1 << 20


class Life(NamedTuple):
    """A record to be written, when it was born and dies in Unix seconds, and how long a use lets it live.

    `again`: it is held, and is written to live longer.
    """

    record: KVRecord
    created: float
    expires: float
    life_s: float
    again: bool = False

    @property
    def group(self) -> tuple[Traffic, int]:
        """Class and expiry hour: what shares a segment."""
        return self.record.retention.traffic, int(self.expires // HOUR_S)


def append(disk: Disk, path: Path, fd: int | None, offset: int, lives: Sequence[Life], sync: bool) -> tuple[int, bool]:
    """Append records; all of them or none.

    Returns:
        The open file, and whether the records are in it. Their bytes are the kernel's then: killing this process
        loses none of them.

    Raises:
        OSError: The file cannot be created, or not be cut back after a failed write: it is closed, and nothing may
            be appended to it again.
    """
    if fd is None:
        fd = disk.open(path, create=True, write=True)
    try:
        buffers: list[bytes | memoryview] = []
        for record, created, expires, life_s, _ in lives:
            buffers += (pack_header(record, created, expires, life_s), record.data)
        write_all(disk, fd, buffers, offset)
        if sync:
            disk.sync(fd)
    except OSError:
        try:
            disk.truncate(fd, offset)
        except OSError:
            disk.close(fd)
            raise
        return fd, False
    return fd, True


def seal(disk: Disk, fd: int, offset: int, rows: bytes, owners: Sequence[Owner], sync: bool) -> None:
    """Write the footer and close the file; where that fails the next start scans the records instead."""
    try:
        write_all(disk, fd, [pack_footer(offset, rows, owners)], offset)
        if sync:
            disk.sync(fd)
    except OSError:
        pass
    finally:
        disk.close(fd)


def forget_records(
    disk: Disk, path: Path, size: int, which: NamespaceFilter, rows: bytes, owners: Sequence[Owner]
) -> int | None:
    """Overwrite every record of certain owners in a sealed segment and give it a footer of the rest.

    Goes by what is in the file, so records that no index lists any more are overwritten too. The old footer goes
    first: killed at any point, a scan finds what is really there.

    Returns:
        Bytes of the file, or `None` if it cannot be done: then the file must go as a whole.
    """
    try:
        fd = disk.open(path, write=True)
        try:
            disk.truncate(fd, size)
            end = 0
            for offset, header_nbytes, header in scan(disk, fd, size):
                end = offset + header_nbytes + header.nbytes
                if header.kind and header.owner.matches(which):
                    dead = dead_header(read_upto(disk, fd, header_nbytes, offset))
                    at = write_all(disk, fd, [dead], offset)
                    while at < end:
                        at = write_all(disk, fd, [bytes(min(ZEROS_NBYTES, end - at))], at)
            if end != size:
                return None
            end = write_all(disk, fd, [pack_footer(size, rows, owners)], size)
            disk.sync(fd)
        finally:
            disk.close(fd)
    except OSError:
        return None
    return end


def unlink_all(disk: Disk, paths: Sequence[Path]) -> list[bool]:
    """Remove files; returns which of them are gone."""
    gone = []
    for path in paths:
        try:
            disk.unlink(path)
            gone.append(True)
        except OSError:
            gone.append(False)
    return gone
