"""Forgetting on the loop's side: other processes are told, then what is theirs or ours is overwritten or removed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
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

    async def seal(self, segment: Segment) -> None:
        """Close a file of ours."""

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
    """

    def __init__(self, files: Files, index: Index, folder: Folder, follower: Follower, offload: Offload) -> None:
        self._files, self._index, self._folder = files, index, folder
        self._follower, self._offload = follower, offload
        self.doomed: list[Segment] = []

    async def forget(self, erased: Erased) -> Forgotten:
        """Remove the records of certain owners; what cannot be done now is done by `again`."""
        await self._files.follow()
        found = self._follower.erase(erased)
        finished = await self._announce(erased, done=False)
        with suppress(OSError):
            await self._files.patiently(self._folder.settle)
        finished = await self._files.follow() and finished
        later = self._follower.erase(erased)  # what others had saved since the last look
        patience_s = FORGET_PATIENCE_S
        for name in dict.fromkeys((*found, *later)):
            if (segment := self._index.names.get(name)) is not None and not await self._scrub(
                segment, erased, patience_s
            ):
                patience_s = 0.0
        finished = await self._announce(erased, done=True) and finished
        if not finished and erased not in self._follower.unfinished:
            self._follower.unfinished.append(erased)
        gone = [*found.values(), *later.values()]
        return Forgotten(records=sum(records for records, _ in gone), nbytes=sum(nbytes for _, nbytes in gone))

    async def again(self) -> None:
        """Try once more what could not be done."""
        unfinished, self._follower.unfinished = self._follower.unfinished, []
        for erased in unfinished:
            await self.forget(erased)
        doomed, self.doomed = self.doomed, []
        for segment in doomed:
            (gone,) = await self._offload(unlink_all, self._folder.disk, [self._folder.path / segment.name])
            self.doomed += [] if gone else [segment]

    async def _announce(self, erased: Erased, *, done: bool) -> bool:
        """Tell all processes what is forgotten; false if that cannot be."""
        args = erased, self._follower.heard, done
        try:
            self._follower.heed(*await self._files.patiently(self._folder.announce, *args))
        except OSError:
            return False
        return True

    async def _scrub(self, segment: Segment, erased: Erased, patience_s: float) -> bool:
        """Overwrite what was forgotten in a file, or remove it; false if it was locked all the time."""
        if segment.name in self._follower.mine:
            await self._files.seal(segment)
        clean, locked = False, False
        if segment.live or segment.living:
            args = self._folder, segment.name, segment.size, erased
            try:
                clean = await patiently(self._offload, patience_s, scrub, *args)
            except OSError as error:
                locked = isinstance(error, BlockingIOError)
        if not clean:
            await self._files.remove([segment], "evicted")
            if self._index.names.get(segment.name) is segment:
                await self._files.let_go(segment, "evicted")
                self._follower.mine.add(segment.name)  # no look may find it again
                self.doomed.append(segment)
        return not locked
