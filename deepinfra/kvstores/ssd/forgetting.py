"""Overwriting what is to be forgotten. Runs in offloaded functions."""

from __future__ import annotations

import numpy as np

from deepinfra.kvstores.ssd.disk import Disk, read_upto, write_all
from deepinfra.kvstores.ssd.folder import Folder
from deepinfra.kvstores.ssd.format import NOBODY, ROW_DTYPE, Erased, Owner, dead_header, pack_footer
from deepinfra.kvstores.ssd.recovery import read_footer, scan
from deepinfra.kvstores.ssd.segment import taken

__all__ = ("scrub",)

ZEROS_NBYTES = 1 << 20


def scrub(folder: Folder, name: str, least: int, which: Erased) -> int | None:
    """Overwrite every record of certain owners in a file, and take them out of its footer if it has one.

    Goes by what is in the file, so records that no index lists any more are overwritten too. The old footer goes
    first: killed at any point, a scan finds what is really there. A file that another process appends to keeps its
    end, and that process writes no footer before it knows what was forgotten.

    Args:
        folder: Ours.
        name: Of the file.
        least: Bytes of records that are known to be in it.
        which: Whose.

    Returns:
        Bytes that the file takes on disk now that nothing of them is left; `None`: it must go as a whole.

    Raises:
        BlockingIOError: Somebody has the lock or appends just now.
    """
    disk = folder.disk
    with folder.still():
        try:
            fd = disk.open(folder.path / name, write=True)
        except FileNotFoundError:
            return 0
        except OSError:
            return None
        try:
            changed = disk.status(fd).changed_ns
            footer = read_footer(disk, fd, disk.size(fd))
            if footer is None:
                size = disk.size(fd)
                end = _overwrite(disk, fd, size, which)
                if end < least:
                    return None
                if end < size:  # part of a record, whosever it is: of a killed process, or of an append that failed
                    disk.truncate(fd, end)
            else:
                rows, owners, size = footer
                disk.truncate(fd, size)
                if _overwrite(disk, fd, size, which) != size:
                    return None
                write_all(disk, fd, [_footer(rows, owners, size, which)], size)
            disk.sync(fd)
            disk.stamp(fd, changed)
            return taken(disk.status(fd))
        except OSError:
            return None
        finally:
            disk.close(fd)


def _overwrite(disk: Disk, fd: int, size: int, which: Erased) -> int:
    """Make records dead; returns where the last one ends."""
    end = 0
    for offset, header_nbytes, header in scan(disk, fd, size):
        end = offset + header_nbytes + header.nbytes
        if header.kind and which.means(header.owner):
            at = offset + header_nbytes
            while at < end:  # before the header, by which who comes after a crash finds them
                at = write_all(disk, fd, [bytes(min(ZEROS_NBYTES, end - at))], at)
            write_all(disk, fd, [dead_header(read_upto(disk, fd, header_nbytes, offset))], offset)
    return end


def _footer(rows: bytearray, owners: list[Owner], size: int, which: Erased) -> bytes:
    gone = [number for number, owner in enumerate(owners) if which.means(owner)]
    table = np.frombuffer(rows, ROW_DTYPE)
    kept = table.compress(~np.isin(table["tag"] >> 2, gone))
    return pack_footer(size, kept.tobytes(), [NOBODY if n in gone else owner for n, owner in enumerate(owners)])
