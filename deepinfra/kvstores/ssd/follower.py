"""Keeping up with the other processes on a folder, on the loop's side."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, TypeVarTuple

import anyio
from anyio import CancelScope
from anyio.lowlevel import checkpoint

from deepinfra.interfaces.given import Clock, Offload
from deepinfra.kvstores.ssd.claims import Tombstone
from deepinfra.kvstores.ssd.folder import Folder, Gone
from deepinfra.kvstores.ssd.following import Growth, Look, look
from deepinfra.kvstores.ssd.format import NOBODY, Erased, Owner
from deepinfra.kvstores.ssd.index import Index
from deepinfra.kvstores.ssd.recovery import entry_of
from deepinfra.kvstores.ssd.segment import Segment

__all__ = ("Follower", "patiently")

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

FOLLOW_S = 1.0
"""Seconds between looks at the folder, by whoever wants something of it then; others' records are seen that late."""

STALLED_S = 3.0
"""Seconds after which a look that nobody waits for any more is given up for lost."""

ROWS_PER_TURN = 256
"""Rows made findable before the loop gets a turn: about 0.7 ms."""

MOST_TOMBSTONES = 1024
"""Announcements remembered for saves that wait; a save that waits through more of them keeps what the oldest meant."""


async def patiently(offload: Offload, most_s: float, function: Callable[[*Ts], T], *args: *Ts) -> T:
    """Run a function in a thread, again while it finds something locked, for so many seconds.

    Raises:
        BlockingIOError: It was locked all the time.
    """
    pause_s, waited_s = 0.001, 0.0
    while True:
        try:
            return await offload(function, *args)
        except BlockingIOError:
            if waited_s >= most_s:
                raise
        await anyio.sleep(pause_s)
        waited_s += pause_s
        pause_s = min(0.02, 2 * pause_s)


class Follower:
    """Brings into an index what other processes did, and takes out what is forgotten.

    Attributes:
        mine: Names of files that this process appends to, from before they are made until their footer is written.
        heard: How far announcements are heeded, and `erasures`, how many there were.
        gone: The folder was removed under us: nothing is held, until `restart`.
        writers: Processes that live on the folder, this one included.
        unfinished: What is to be forgotten, but the folder could not be read or others not be told: in all files but
            those that this process began since, which have larger serial numbers than this.
    """

    def __init__(self, index: Index, folder: Folder, clock: Clock, offload: Offload) -> None:
        self._index, self._folder = index, folder
        self._clock, self._offload = clock, offload
        self.mine: set[str] = set()
        self.heard = self.erasures = 0
        self.gone = False
        self.writers = 1
        self.unfinished: dict[Erased, int] = {}
        self._erased: list[tuple[int, Erased]] = []  # the last ones, with what `erasures` was then
        self._starts = 0
        self._again: set[str] = set()
        self._next = 0.0
        self._since: float | None = None  # a look is under way

    async def begin(self, heard: int) -> None:
        """Fill the index from the folder for the first time.

        Raises:
            OSError: The folder cannot be read.
        """
        self.heard = heard
        found = await self._look()
        await self._offload(self._index.adopt, found.fresh)
        self._inherit()
        self.heed(found.tombstones, found.heard)

    @property
    def due(self) -> bool:
        """Whether the last look is too old to go by."""
        now = self._clock.now()
        return now >= self._next and (self._since is None or now - self._since > STALLED_S)

    def hurry(self) -> None:
        """Make a look due at once."""
        self._next = 0.0

    async def follow(self) -> bool:
        """Look, and take over what changed; false if the folder cannot be read.

        If it is gone, so is all that was held. A call that is cancelled leaves everything to the next one.
        """
        self._since = self._clock.now()
        starts = self._starts
        try:
            found = await self._look()
        except OSError as error:
            found = None
            self.gone = self.gone or (isinstance(error, Gone) and starts == self._starts)
        self._since = None
        with CancelScope(shield=True):
            if self.gone:
                await self._clear()
            elif found is not None and starts == self._starts:
                await self._take_over(found)
        return found is not None

    def restart(self, heard: int) -> None:
        """The folder was entered anew, with so many bytes of announcements: what looks find of before means nothing."""
        self._starts += 1
        self.heard, self.gone = heard, False
        self._inherit()
        self.hurry()

    def _inherit(self) -> None:
        """Finish what dead processes had begun to forget, in all files that there are."""
        for which in self._folder.interrupted:
            self.unfinished.setdefault(which, self._index.serial)

    async def _clear(self) -> None:
        for segment in list(self._index.segments.values()):
            if self._index.names.get(segment.name) is segment:
                self._index.remove(segment, "evicted")
                await checkpoint()

    async def _look(self) -> Look:
        self._next = self._clock.now() + FOLLOW_S
        again, touched = frozenset(self._again), dict(self._index.touched)
        args = self._index.names, self.mine, again, touched, self.heard, self._clock.wall()
        found = await self._offload(look, self._folder, *args)
        self._again -= again
        for name, used in touched.items():
            if self._index.touched.get(name) == used:
                del self._index.touched[name]
        self.writers = found.writers + 1
        return found

    async def _take_over(self, found: Look) -> None:
        now, index, starts = self._clock.wall(), self._index, self._starts
        for name in found.gone:
            if name not in self.mine and (segment := index.names.get(name)) is not None:
                await self.drop(segment, "expired" if segment.over(now) else "evicted")
        for segment in found.fresh:
            if segment.name in self.mine:
                continue
            if (old := index.names.get(segment.name)) is not None:
                await self.drop(old)
            index.begin(segment)
            await self._place(segment, 0)
        for growth in found.grown:
            if index.names.get(growth.segment.name) is growth.segment and growth.segment.name not in self.mine:
                await self._grow(growth, now)
        if starts == self._starts:
            self.heed(found.tombstones, found.heard)
        for which, serial in self.unfinished.items():
            self.erase(which, serial)

    async def _place(self, segment: Segment, start: int) -> None:
        for at in range(start, len(segment), ROWS_PER_TURN):
            if self._index.names.get(segment.name) is not segment:
                return
            self._index.place(segment, at, min(len(segment), at + ROWS_PER_TURN))
            await checkpoint()

    async def _grow(self, growth: Growth, now: float) -> None:
        segment, start = growth.segment, len(growth.segment)
        for offset, header_nbytes, header in growth.records:
            if offset < segment.size:
                continue  # known from another look
            segment.size += header_nbytes + header.nbytes
            if header.kind:
                owner = segment.owner(header.owner)
                if header.expires > now and offset not in growth.unlisted:
                    segment.add(entry_of(offset, header_nbytes, header, owner))
        if growth.unlisted:
            segment.kill_at(growth.unlisted)
        segment.sealed = growth.sealed
        segment.living = segment.living and not growth.sealed
        await self._place(segment, start)

    async def drop(self, segment: Segment, why: str = "") -> None:
        """Take a segment out of the index that is no longer in the folder, or will be read again."""
        self._index.remove(segment, why)
        while self._index.purge():
            await checkpoint()

    # -- forgetting ---------------------------------------------------------------------------------

    def heed(self, tombstones: list[Tombstone], heard: int) -> None:
        """Take out of the index what others announced to be forgotten."""
        for tombstone in tombstones:
            if tombstone.end <= self.heard:
                continue
            if tombstone.done:
                self.settle(tombstone.which)
            else:
                self.forget(tombstone.which)
        self.heard = max(self.heard, heard)

    def forget(self, which: Erased) -> dict[str, tuple[int, int]]:
        """Take certain owners' records out of the index, and remember it for what waits to be saved; see `erase`."""
        self.erasures += 1
        self._erased.append((self.erasures, which))
        del self._erased[:-MOST_TOMBSTONES]
        return self.erase(which)

    def erase(self, which: Erased, serial: int | None = None) -> dict[str, tuple[int, int]]:
        """Take certain owners' records out of the index, but for what this process began behind a serial number.

        Returns:
            How many, and their bytes, by name of every file in which something of these owners may be: also where that
            was taken out before, but is not known to be overwritten, and where it is not known what is in the file.
        """
        return {
            segment.name: segment.forget(which)
            for segment in self._index.segments.values()
            if (segment.unread or any(which.means(owner) for owner in segment.owners))
            and (serial is None or segment.serial <= serial or segment.writer != self._folder.writer)
        }

    def settle(self, which: Erased) -> None:
        """Certain owners' bytes are overwritten in all files: what was read meanwhile is read again."""
        for segment in self._index.segments.values():
            if segment.name in self.mine:
                segment.settle(which)
            elif any(owner == NOBODY or which.means(owner) for owner in segment.owners):
                self._again.add(segment.name)
        self.hurry()

    def forgotten_since(self, asked: int, owner: Owner) -> bool:
        """Whether an owner's records were forgotten after so many `erasures`."""
        return any(number > asked and which.means(owner) for number, which in self._erased)
