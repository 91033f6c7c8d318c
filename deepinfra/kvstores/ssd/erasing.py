"""Forgetting on the loop's side: other processes are told, then what is theirs or ours is overwritten or removed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar, TypeVarTuple

from deepinfra.core.kv import Forgotten
from deepinfra.interfaces.given import Offload
from deepinfra.kvstores.ssd.appending import unlink_all
from deepinfra.kvstores.ssd.folder import Folder
from deepinfra.kvstores.ssd.follower import Follower, patiently
from deepinfra.kvstores.ssd.forgetting import scrub
from deepinfra.kvstores.ssd.format import Erased
from deepinfra.kvstores.ssd.index import Index
from deepinfra.kvstores.ssd.segment import Segment

__all__ = ("Eraser", "Files")

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

FORGET_PATIENCE_S = 10.0
"""Seconds to wait for another process's lock before files are not overwritten but removed, the rest without waiting."""


class Files(Protocol):
    """What forgetting needs of who writes the folder's files."""

    async def follow(self) -> bool:
        """Take over what changed in the folder; false if it cannot be read."""
        ...

    async def seal_all(self) -> None:
        """Close every file of ours."""

    async def remove(self, segments: Sequence[Segment], why: str) -> None:
        """Remove files, and from the index those that are gone."""

    async def let_go(self, segment: Segment, why: str) -> None:
        """Take a file out of the index."""

    async def patiently(self, function: Callable[[*Ts], T], *args: *Ts) -> T:
        """Run a function that may find something locked."""
        ...


class Eraser:
    """Forgets; call it under the writer's lock.

    Attributes:
        doomed: Files to be forgotten that could be neither overwritten nor removed.

    What is begun is in the folder's log before anything is overwritten, and that it is done when nothing is left: who
    enters the folder after a crash finishes it.
    """

    def __init__(self, files: Files, index: Index, folder: Folder, follower: Follower, offload: Offload) -> None:
        self._files, self._index, self._folder = files, index, folder
        self._follower, self._offload = follower, offload
        self.doomed: list[Segment] = []
        self._overwritten: list[Erased] = []  # which the log does not tell of yet

    async def forget(self, erased: Erased) -> Forgotten:
        """Remove the records of certain owners; what cannot be done now is done by `again`.

        What this process saves from now on is in files that it begins from now on if something is left to be done, so
        that `again` does not take it. What others save until they can be told it does take: nobody can tell it from
        what was given to them before.
        """
        await self._files.follow()
        gone = list(self._follower.forget(erased).values())
        finished, later = await self._erase(erased, None)
        if finished:
            self._follower.unfinished.pop(erased, None)
        else:
            await self._files.seal_all()
            self._follower.unfinished[erased] = self._index.serial
        await self._tell()
        gone += later
        return Forgotten(records=sum(records for records, _ in gone), nbytes=sum(nbytes for _, nbytes in gone))

    async def again(self) -> None:
        """Try once more what could not be done."""
        for erased, serial in list(self._follower.unfinished.items()):
            if (await self._erase(erased, serial))[0]:
                del self._follower.unfinished[erased]
        doomed, self.doomed = self.doomed, []
        for segment in doomed:
            (gone,) = await self._offload(unlink_all, self._folder.disk, [self._folder.path / segment.name])
            self.doomed += [] if gone else [segment]
        await self._tell()

    async def _erase(self, erased: Erased, serial: int | None) -> tuple[bool, list[tuple[int, int]]]:
        """Tell the others, then overwrite: in all files but those that this process began behind a serial number.

        Returns:
            Whether nothing is left but files that are doomed, and how much was found, with its bytes.
        """
        self._overwritten = [other for other in self._overwritten if other != erased]
        finished = await self._announce(erased, done=False)
        try:
            await self._files.patiently(self._folder.settle)
        except OSError:
            finished = False
        finished = await self._files.follow() and finished
        found = self._follower.erase(erased, serial)
        patience_s = FORGET_PATIENCE_S
        for name in found:
            if (segment := self._index.names.get(name)) is not None and not await self._scrub(
                segment, erased, patience_s
            ):
                patience_s = 0.0
        if finished:
            self._overwritten.append(erased)
        return finished, list(found.values())

    async def _tell(self) -> None:
        """Tell all others, and who comes after a crash, what is done: not while a file is left that should go."""
        while self._overwritten and not self.doomed and await self._announce(self._overwritten[0], done=True):
            self._follower.settle(self._overwritten.pop(0))

    async def _announce(self, erased: Erased, *, done: bool) -> bool:
        """Tell all others what is forgotten; false if that cannot be."""
        args = erased, self._follower.heard, done
        try:
            self._follower.heed(*await self._files.patiently(self._folder.announce, *args))
        except OSError:
            return False
        return True

    async def _scrub(self, segment: Segment, erased: Erased, patience_s: float) -> bool:
        """Overwrite what was forgotten in a file, or remove it; false if it was locked all the time."""
        nbytes: int | None = None
        locked = False
        if segment.live or segment.living or segment.unread:
            args = self._folder, segment.name, segment.size, erased
            try:
                nbytes = await patiently(self._offload, patience_s, scrub, *args)
            except OSError as error:
                locked = isinstance(error, BlockingIOError)
        if nbytes is not None:
            segment.settle(erased)
            if segment.fd is None and not segment.living:  # its footer is shorter; what is appended to takes its claim
                segment.disk_nbytes = nbytes
        else:
            await self._files.remove([segment], "evicted")
            if self._index.names.get(segment.name) is segment:
                await self._files.let_go(segment, "evicted")
                self._follower.mine.add(segment.name)  # no look may find it again
                self.doomed.append(segment)
        return not locked
