"""What stores are measured beside: the same system calls without a store, and the page cache in a known state."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from deepinfra.kvstores.ssd.disk import Disk

__all__ = ("NotedDisk", "Write", "append_plainly", "drop_folder", "drop_pages", "read_plainly", "sync_files")


class Write(NamedTuple):
    """One `pwritev` of a store, or with no sizes one `fdatasync`: in which of its files, and the bytes per buffer."""

    file: int
    sizes: tuple[int, ...]


class NotedDisk(Disk):
    """A disk that notes which records and footers are written to it.

    Attributes:
        writes: Calls in order, of segment files only; these are numbered as they are created.
    """

    def __init__(self) -> None:
        self.writes: list[Write] = []
        self._numbers: dict[int, int] = {}
        self._created = 0

    def open(self, path: Path, *, create: bool = False, write: bool = False) -> int:
        """See `Disk.open`."""
        fd = super().open(path, create=create, write=write)
        self._numbers.pop(fd, None)
        if path.suffix == ".kvseg":
            self._numbers[fd] = self._created
            self._created += create
        return fd

    def pwritev(self, fd: int, buffers: Sequence[bytes | memoryview], offset: int) -> int:
        """See `Disk.pwritev`."""
        if fd in self._numbers:
            self.writes.append(Write(self._numbers[fd], tuple(map(len, buffers))))
        return super().pwritev(fd, buffers, offset)

    def sync(self, fd: int) -> None:
        """See `Disk.sync`."""
        if fd in self._numbers:
            self.writes.append(Write(self._numbers[fd], ()))
        super().sync(fd)


def append_plainly(folder: Path, writes: Sequence[Write], data: memoryview) -> None:
    """Do noted calls again, one behind the other, with bytes of `data`; `folder` is there and empty."""
    files: dict[int, int] = {}
    for number, sizes in writes:
        if number not in files:
            files[number] = os.open(folder / str(number), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        if sizes:
            os.writev(files[number], [data[:size] for size in sizes])
        else:
            os.fdatasync(files[number])
    for fd in files.values():
        os.close(fd)


def read_plainly(path: Path, buffers: Sequence[memoryview]) -> int:
    """Read a file from end to end, as many bytes per call as `buffers` hold; returns its bytes."""
    fd = os.open(path, os.O_RDONLY)
    try:
        done = 0
        while got := os.preadv(fd, buffers, done):
            done += got
        return done
    finally:
        os.close(fd)


def sync_files(files: Sequence[Path]) -> None:
    """Wait until files are on the disk, so that nobody writes them while something else is measured."""
    for path in files:
        with open(path, "rb") as file:
            os.fsync(file.fileno())


def drop_pages(files: Sequence[Path]) -> None:
    """Drop files from the page cache, and ask mincore(2) whether they are gone."""
    sync_files(files)
    for path in files:
        with open(path, "r+b") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            if sum(_cached(file.fileno())) > 0.01 * os.fstat(file.fileno()).st_size / mmap.PAGESIZE:
                raise RuntimeError(f"the page cache does not let go of {path}")


def drop_folder(folder: Path) -> None:
    """Drop the files of a store from the page cache; see `drop_pages`."""
    drop_pages(sorted(folder.glob("*.kvseg")))


def _cached(fd: int) -> Iterator[int]:
    with mmap.mmap(fd, 0) as mapped:
        first = ctypes.c_char.from_buffer(mapped)
        pages = (ctypes.c_ubyte * -(-len(mapped) // mmap.PAGESIZE))()
        ctypes.CDLL(None).mincore(ctypes.c_void_p(ctypes.addressof(first)), ctypes.c_size_t(len(mapped)), pages)
        del first
    return (page & 1 for page in pages)
