"""The system calls that the store makes, in one place, so that a test can make each of them fail."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

__all__ = ("BUFFERS_PER_CALL", "Disk", "Status", "read_upto", "write_all")

BUFFERS_PER_CALL = 1024
"""IOV_MAX of Linux."""


class Status(NamedTuple):
    """Length of a file, bytes that it takes on disk, those that the file system needs to find it too, and its time."""

    size: int
    disk_nbytes: int
    changed_ns: int


class Disk:
    """Plain calls; blocking, so they run in offloaded functions only; all but `close` raise OSError."""

    def open(self, path: Path, *, create: bool = False, write: bool = False) -> int:
        """A file descriptor; files are created for their owner only, since token ids are in them.

        Links are not followed, since files are cut and written, and nothing is waited for that is no plain file.
        """
        flags = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        flags |= (os.O_RDWR if write else os.O_RDONLY) | (os.O_CREAT if create else 0)
        return os.open(path, flags, 0o600)

    def close(self, fd: int) -> None:
        """Close a descriptor; never raises: it is closed whatever the kernel says, and bytes are checked when read."""
        with suppress(OSError):
            os.close(fd)

    def pwritev(self, fd: int, buffers: Sequence[bytes | memoryview], offset: int) -> int:
        """Write some of `buffers`; returns how many bytes."""
        return os.pwritev(fd, buffers, offset)

    def preadv(self, fd: int, buffers: Sequence[bytearray | memoryview], offset: int) -> int:
        """Read into `buffers`; returns how many bytes."""
        return os.preadv(fd, buffers, offset)

    def size(self, fd: int) -> int:
        """Bytes of an open file."""
        return os.fstat(fd).st_size

    def status(self, fd: int) -> Status:
        """Of an open file."""
        status = os.fstat(fd)
        return Status(status.st_size, status.st_blocks * 512, status.st_mtime_ns)

    def truncate(self, fd: int, nbytes: int) -> None:
        """Cut a file."""
        os.ftruncate(fd, nbytes)

    def sync(self, fd: int) -> None:
        """Make a file's bytes survive a power cut."""
        os.fdatasync(fd)

    def unlink(self, path: Path) -> None:
        """Remove a file; one that is not there is removed already."""
        path.unlink(missing_ok=True)

    def free_nbytes(self, path: Path) -> int:
        """Bytes that an ordinary user may still write to the file system of `path`."""
        status = os.statvfs(path)
        return status.f_bavail * status.f_frsize

    def names(self, path: Path) -> list[str]:
        """Names of the plain files in a folder."""
        with os.scandir(path) as files:
            return [file.name for file in files if file.is_file(follow_symlinks=False)]

    def files(self, path: Path) -> dict[str, Status]:
        """The plain files in a folder by name."""
        found: dict[str, Status] = {}
        with os.scandir(path) as files:
            for file in files:
                with suppress(FileNotFoundError):  # another process removed it
                    if file.is_file(follow_symlinks=False):
                        status = file.stat()
                        found[file.name] = Status(status.st_size, status.st_blocks * 512, status.st_mtime_ns)
        return found

    def stamp(self, path: Path | int, time_ns: int) -> None:
        """Set the time of change of a file."""
        os.utime(path, ns=(time_ns, time_ns))

    def lock(self, path: Path) -> int:
        """Lock a file for this descriptor alone, or raise BlockingIOError; a dead process holds no lock."""
        fd = self.open(path, create=True, write=True)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(fd)
            raise
        return fd

    def locked(self, path: Path) -> bool:
        """Whether somebody has locked a file."""
        try:
            fd = self.open(path)
        except FileNotFoundError:
            return False
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            self.close(fd)
        return False

    def is_at(self, fd: int, path: Path) -> bool:
        """Whether an open file is what lies at a path."""
        try:
            there = os.stat(path, follow_symlinks=False)
        except (FileNotFoundError, NotADirectoryError):
            return False
        return os.path.samestat(there, os.fstat(fd))

    def hold(self, fd: int, *, alone: bool) -> None:
        """Lock an open file, together with others or alone, or raise BlockingIOError."""
        fcntl.flock(fd, (fcntl.LOCK_EX if alone else fcntl.LOCK_SH) | fcntl.LOCK_NB)

    def release(self, fd: int) -> None:
        """Unlock what was held; never raises."""
        with suppress(OSError):
            fcntl.flock(fd, fcntl.LOCK_UN)


def write_all(disk: Disk, fd: int, buffers: Sequence[bytes | memoryview], offset: int) -> int:
    """Write all of `buffers` at `offset`, however the kernel cuts it; returns the offset behind them."""
    rest = [memoryview(buffer).cast("B") for buffer in buffers if len(buffer)]
    while rest:
        written = disk.pwritev(fd, rest[:BUFFERS_PER_CALL], offset)
        offset += written
        done = 0
        while done < len(rest) and written >= rest[done].nbytes:
            written -= rest[done].nbytes
            done += 1
        del rest[:done]
        if written:
            rest[0] = rest[0][written:]
    return offset


def read_upto(disk: Disk, fd: int, nbytes: int, offset: int) -> bytearray:
    """Bytes at `offset`: `nbytes` of them, fewer where the file ends."""
    data = bytearray(nbytes)
    done = 0
    while done < nbytes:
        got = disk.preadv(fd, [memoryview(data)[done:]], offset + done)
        if got == 0:
            break
        done += got
    del data[done:]
    return data
