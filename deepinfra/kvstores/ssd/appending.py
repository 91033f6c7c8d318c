"""Appending and removing. Runs in offloaded functions, one at a time per store."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from deepinfra.core.kv import KVRecord
from deepinfra.kvstores.ssd.disk import Disk, write_all
from deepinfra.kvstores.ssd.format import pack_header

__all__ = ("Life", "append", "unlink_all")


class Life(NamedTuple):
    """A record to be written, when it was born and dies in Unix seconds, and how long a use lets it live.

    `again`: it is held, and is written to live longer.
    """

    record: KVRecord
    created: float
    expires: float
    life_s: float
    again: bool = False


def append(
    disk: Disk, path: Path, fd: int | None, offset: int, lives: Sequence[Life], sync: bool
) -> tuple[int, OSError | None]:
    """Append records; all of them or none.

    Returns:
        The open file, and why the records are not in it, if they are not. Otherwise their bytes are the kernel's then:
        killing this process loses none of them.

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
    except OSError as error:
        try:
            disk.truncate(fd, offset)
        except OSError:
            disk.close(fd)
            raise
        return fd, error
    return fd, None


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
