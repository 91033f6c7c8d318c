"""A folder that several processes share: who may write how much, and what all must know. Blocking calls.

Everything runs in offloaded functions, one at a time per store except `look`s. Changes of what is claimed, footers and
overwriting happen under the lock of the file `lock`; appends under a lock that they share on `forgotten`. Nobody waits
for a lock: a call that cannot have it at once raises BlockingIOError, with nothing done. The kernel frees the locks of
a process that ends, however it ends.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from deepinfra.kvstores.ssd.appending import Life, append
from deepinfra.kvstores.ssd.claims import (
    FORGOTTEN,
    LOCK,
    TOMBSTONE_NBYTES,
    Others,
    Tombstone,
    interrupted,
    pack_tombstone,
    process_name,
    read_others,
    read_tombstones,
    tells,
    write_claims,
)
from deepinfra.kvstores.ssd.disk import Disk, write_all
from deepinfra.kvstores.ssd.format import Erased, Owner, pack_footer, parse_name
from deepinfra.kvstores.ssd.room import File, victims
from deepinfra.kvstores.ssd.segment import taken

__all__ = ("Folder", "Gone", "Unheard", "Wish")


class Unheard(Exception):
    """Something was forgotten meanwhile: that must be heeded before anything is written."""


class Gone(FileNotFoundError):
    """Somebody removed the folder, or our files in it: what we claim is not known to others any more."""

    def __init__(self) -> None:
        super().__init__(errno.ENOENT, "the folder, or this process's files in it, were removed")


class Wish(NamedTuple):
    """That a file may grow.

    Attributes:
        name: Of the file; empty if the folder is only to be brought within its limits.
        least, most: Bytes on disk that it must be allowed to take, and would better be, if nothing has to go for that.
        tag: Of the tenant whose records alone are in it, and `quota`, what that one may have on disk; 0: no limit.
    """

    name: str = ""
    least: int = 0
    most: int = 0
    tag: str = ""
    quota: int = 0


_NO_ROOM = "no room under its cap of {} bytes, and too little that may go for it"
_NO_SPACE = "no room above the floor of free space on its disk (`min_free_nbytes`)"


class Folder:
    """One process's part in a folder.

    Attributes:
        writer: This process's number; part of the names of its files.
        claims: Bytes on disk that files we append to may take, by name.
        interrupted: What dead processes had begun to forget when we entered, and nobody else can be about to.
        lack: Why the last `reserve` claimed nothing; empty if it did, or if only a tenant's quota was in its way.
    """

    def __init__(
        self, disk: Disk, path: Path, capacity_nbytes: int, min_free_nbytes: int, quota_of: Callable[[str], int]
    ) -> None:
        self.disk, self.path = disk, path
        self._quota_of = quota_of
        self._capacity_nbytes, self._min_free_nbytes = capacity_nbytes, min_free_nbytes
        self.writer = ""
        self.claims: dict[str, int] = {}
        self.interrupted: list[Erased] = []
        self.lack: OSError | str = ""
        self._process = self._forgotten = -1
        self._turn = 0

    def enter(self) -> int:
        """Make the folder if it is not there, become one of its processes, and clear away what dead ones left.

        Whoever was one of its processes is so no longer, and is a new one, with nothing claimed.

        Returns:
            Bytes of the file `forgotten` that are known, since nothing was read before.

        Raises:
            OSError: It cannot be used.
        """
        self.leave()
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.writer, self._turn = os.urandom(6).hex(), 0
        self.claims.clear()
        self.interrupted = []
        with self._locked():
            others, dead = read_others(self.disk, self.path, self.disk.names(self.path), self.writer)
            for name in dead:
                self._unlink(name)
            self._process = self.disk.lock(self.path / process_name(self.writer))
            try:
                self._forgotten = self.disk.open(self.path / FORGOTTEN, create=True, write=True)
                if not others.processes:
                    self.interrupted = interrupted(read_tombstones(self.disk, self._forgotten, 0)[0])
                    if not self.interrupted:
                        self.disk.truncate(self._forgotten, 0)
                return self.disk.size(self._forgotten) // TOMBSTONE_NBYTES * TOMBSTONE_NBYTES
            except OSError:
                self.leave()
                raise

    def leave(self) -> None:
        """Be none of its processes any more."""
        if self._process >= 0:
            self._unlink(process_name(self.writer))
        for fd in (self._process, self._forgotten):
            if fd >= 0:
                self.disk.close(fd)
        self._process = self._forgotten = -1

    def check(self) -> None:
        """See that we are one of its processes.

        Raises:
            Gone: Not any more: our file, or the one that all hear of forgetting by, was removed.
            OSError: It cannot be told.
        """
        ours = ((self._process, process_name(self.writer)), (self._forgotten, FORGOTTEN))
        if not all(fd >= 0 and self.disk.is_at(fd, self.path / name) for fd, name in ours):
            raise Gone

    def others(self) -> Others:
        """What other processes claim."""
        return read_others(self.disk, self.path, self.disk.names(self.path), self.writer)[0]

    # -- room ---------------------------------------------------------------------------------------

    def reserve(self, wish: Wish, used: Mapping[str, int], fds: Mapping[str, int]) -> list[str]:
        """Claim room for a file, and remove least recently used ones for it; if that is not enough, do neither.

        Args:
            wish: What is to be claimed.
            used: Times of use that other processes were not told, by name.
            fds: Files open for appending by name; one that goes is closed.

        Returns:
            Names of files that went; `claims` says whether there is room now.

        Raises:
            BlockingIOError: Another process has the lock.
            OSError: The folder cannot be read.
        """
        self.lack = ""
        with self.locked():
            files, taken, unfilled = self._survey(wish, used)
            before = self.claims.get(wish.name, 0)
            free = self.disk.free_nbytes(self.path) - self._min_free_nbytes if self._min_free_nbytes else None

            def lacking(nbytes: int) -> tuple[int, int]:
                more = nbytes - before
                over = sum(file.nbytes for file in files if file.tag == wish.tag) + more - wish.quota
                short = taken + more - self._capacity_nbytes
                return over if wish.quota else 0, max(short, unfilled + more - free) if free is not None else short

            granted = wish.most if max(lacking(wish.most)) <= 0 else wish.least
            over, short = lacking(granted)
            going = victims(files, wish.tag, over, short)
            if going is None:
                if victims(files, wish.tag, 0, short) is None:
                    capped = taken + granted - before > self._capacity_nbytes
                    self.lack = _NO_ROOM.format(self._capacity_nbytes) if capped else _NO_SPACE
                return []
            gone = [file.name for file in going if self._unlink(file.name)]
            for name in gone:
                self.claims.pop(name, None)
                if name in fds:
                    self.disk.close(fds[name])
            kept = {name: nbytes for name, nbytes in self.claims.items() if name in fds}
            if wish.name and len(gone) == len(going):
                kept[wish.name] = granted
            try:
                self._claim(kept)
            except OSError as error:
                self.lack = error
            return gone

    def fits(self, name: str, nbytes: int, tenant: str) -> bool:
        """Whether a file may grow to `nbytes` on disk without anything going for it; ask under the lock.

        Args:
            name: Of the file.
            nbytes: Bytes on disk.
            tenant: Whose it is, if it has one of its own.
        """
        files, total, _ = self._survey(Wish(name), {})
        more = nbytes - sum(file.nbytes for file in files if file.name == name)
        tag = parsed.tag if (parsed := parse_name(name)) is not None else ""
        quota = self._quota_of(tenant) if tag else 0
        if quota and sum(file.nbytes for file in files if file.tag == tag) + more > quota:
            return False
        return total + more <= self._capacity_nbytes

    def _survey(self, wish: Wish, used: Mapping[str, int]) -> tuple[list[File], int, int]:
        """Files of records, bytes that all files take or may take, and how many of these are still to be written."""
        others = self.others().claims
        listed = self.disk.files(self.path)
        claims = others | self.claims
        files: list[File] = []
        total = sum(nbytes for name, nbytes in claims.items() if name not in listed)
        unfilled = total
        for name, status in listed.items():
            parsed, held = parse_name(name), taken(status)
            if parsed is not None:
                nbytes = max(held, claims.get(name, 0))
                unfilled += nbytes - held
                total += nbytes
                free = name not in others and name != wish.name
                files.append(File(name, parsed.tag, nbytes, used.get(name, status.changed_ns), parsed.serial, free))
            elif tells(name):
                total += held
        return files, total, unfilled

    # -- writing ------------------------------------------------------------------------------------

    def append(
        self, name: str, fd: int | None, offset: int, lives: Sequence[Life], sync: bool, heard: int
    ) -> tuple[int, OSError | None]:
        """Append records, as `appending.append` does, unless something was forgotten that we have not heeded.

        Raises:
            Unheard: That is so.
            BlockingIOError: Somebody is overwriting what was forgotten.
            OSError: As `appending.append`: the file is closed.
        """
        try:
            self._share(heard)
        except BlockingIOError:
            raise
        except OSError:
            if fd is not None:
                self.disk.close(fd)
            raise
        try:
            return append(self.disk, self.path / name, fd, offset, lives, sync)
        finally:
            self.disk.release(self._forgotten)

    def seal(self, name: str, fd: int, size: int, rows: bytes, owners: Sequence[Owner], used: int, heard: int) -> bool:
        """Write a footer and give the claim back; false if it could not be written, and a scan must do.

        Raises:
            Unheard: Something was forgotten that we have not heeded.
            BlockingIOError: Another process has the lock.
            OSError: The lock cannot be had.
        """
        with self.locked():
            self._check_heard(heard)
            kept = {other: nbytes for other, nbytes in self.claims.items() if other != name}
            try:
                write_all(self.disk, fd, [pack_footer(size, rows, owners)], size)
                self.disk.stamp(fd, used)
                self._claim(kept)
            except OSError:
                return False
            return True

    def _claim(self, claims: dict[str, int]) -> None:
        self._turn += 1
        write_claims(self.disk, self._process, self._turn, claims)
        self.claims = claims

    # -- forgetting -----------------------------------------------------------------------------------

    def announce(self, which: Erased, heard: int, done: bool) -> tuple[list[Tombstone], int]:
        """Tell all other processes that records are to be forgotten, or that their bytes are gone.

        Returns:
            What they announced behind `heard`; and how far that is, this included.

        Raises:
            BlockingIOError: Another process has the lock.
            OSError: The others cannot be told.
        """
        with self.locked():
            news, end = read_tombstones(self.disk, self._forgotten, heard)
            return news, write_all(self.disk, self._forgotten, [pack_tombstone(which, done=done)], end)

    def news(self, heard: int) -> tuple[list[Tombstone], int]:
        """What was announced behind `heard`, and how far that is."""
        return read_tombstones(self.disk, self._forgotten, heard)

    def settle(self) -> None:
        """Return when no append is under way that began before the last announcement; else BlockingIOError."""
        with self._still():
            pass

    @contextmanager
    def still(self) -> Iterator[None]:
        """Have the lock, while nobody appends."""
        with self.locked(), self._still():
            yield

    def _share(self, heard: int) -> None:
        self.check()
        self.disk.hold(self._forgotten, alone=False)
        try:
            self._check_heard(heard)
        except BaseException:
            self.disk.release(self._forgotten)
            raise

    def _check_heard(self, heard: int) -> None:
        if self.disk.size(self._forgotten) - heard >= TOMBSTONE_NBYTES:
            raise Unheard

    @contextmanager
    def _still(self) -> Iterator[None]:
        self.disk.hold(self._forgotten, alone=True)
        try:
            yield
        finally:
            self.disk.release(self._forgotten)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the folder's lock as one of its processes; blocking calls.

        Raises:
            BlockingIOError: Somebody else holds it.
            Gone: We are none of its processes any more.
        """
        try:
            with self._locked():
                self.check()
                yield
        except (FileNotFoundError, NotADirectoryError):
            self.check()
            raise

    @contextmanager
    def _locked(self) -> Iterator[None]:
        fd = self.disk.lock(self.path / LOCK)
        try:
            yield
        finally:
            self.disk.close(fd)

    def _unlink(self, name: str) -> bool:
        with suppress(OSError):
            self.disk.unlink(self.path / name)
            return True
        return False
