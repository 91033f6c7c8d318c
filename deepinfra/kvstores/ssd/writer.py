"""Saves on the loop's side: which segment, what must go to make room, when to sync; one at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias, TypeVar, TypeVarTuple

from anyio import CancelScope, Lock
from anyio.lowlevel import checkpoint

from deepinfra.core.kv import Forgotten, NamespaceFilter, Retention
from deepinfra.interfaces.given import Clock, Offload
from deepinfra.kvstores.quotas import Quotas
from deepinfra.kvstores.ssd.appending import Life, unlink_all
from deepinfra.kvstores.ssd.claims import MOST_CLAIMS
from deepinfra.kvstores.ssd.disk import Disk
from deepinfra.kvstores.ssd.erasing import Eraser
from deepinfra.kvstores.ssd.folder import Folder, Gone, Unheard, Wish
from deepinfra.kvstores.ssd.follower import Follower, patiently
from deepinfra.kvstores.ssd.format import (
    KINDS,
    PREFIX_NBYTES,
    ROW,
    Entry,
    Erased,
    Owner,
    footer_nbytes,
    header_nbytes,
    record_id,
    tag_of,
    writable,
)
from deepinfra.kvstores.ssd.index import Index, Slide
from deepinfra.kvstores.ssd.reading import read_records
from deepinfra.kvstores.ssd.segment import HOUR_S, Group, Segment, allocated
from deepinfra.kvstores.ssd.trouble import Trouble

__all__ = ("FsyncPolicy", "Limits", "Writer")

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

FsyncPolicy: TypeAlias = Literal["none", "interval", "always"]

BATCH_NBYTES = 8 << 20
"""Bytes per offloaded append: a few milliseconds, after which a cancelled caller is let go."""

BATCH_RECORDS = 256
"""Records per offloaded append, so that the loop's own share of it stays short."""

CLAIM_SHARE = 1024
"""A file claims this part of the capacity ahead, so that the folder is not surveyed for every batch."""

SYNC_NBYTES, SYNC_S = 16 << 20, 5.0
"""Policy `interval`: the append that finds this much, or this long, unsynced in its segment syncs it."""

SWEEP_S = 1.0
"""Seconds between looks for segments in which nothing lives."""

PATIENCE_S = 1.0
"""Seconds to wait for another process's lock before records are dropped. Locks are held for milliseconds; longer only
by a process that is stopped or whose disk hangs."""


class Limits(NamedTuple):
    """What the writer keeps to; see `SsdStore`."""

    capacity_nbytes: int
    segment_nbytes: int
    min_free_nbytes: int
    fsync: FsyncPolicy


class Writer:
    """Changes the files of a folder: appends, seals, evicts, expires, forgets.

    Attributes:
        saved, dropped, renewed: Records written, that could not be, and that were written again to live longer.
        saved_nbytes, written_nbytes: Bytes of the first, and all bytes appended: footers and the last included.
    """

    def __init__(
        self,
        index: Index,
        folder: Folder,
        follower: Follower,
        clock: Clock,
        offload: Offload,
        limits: Limits,
        quotas: Quotas,
    ) -> None:
        self._index, self._folder, self._follower = index, folder, follower
        self._clock, self._offload = clock, offload
        self._limits, self._quotas = limits, quotas
        self._lock = Lock()
        self._open: dict[Group, Segment] = {}  # the one written last at the end
        self._trouble = Trouble(folder.path, clock)
        self._eraser = Eraser(self, index, folder, follower, offload)
        self._next_sweep = 0.0
        self._patience_s = PATIENCE_S
        self.saved = self.dropped = self.renewed = 0
        self.saved_nbytes = self.written_nbytes = 0

    @property
    def _disk(self) -> Disk:
        return self._folder.disk

    @property
    def disk_nbytes(self) -> int:
        """Bytes that the folder's files of records take on disk at most, as far as is known."""
        return sum(segment.disk_nbytes for segment in (*self._index.segments.values(), *self._eraser.doomed))

    async def begin(self) -> None:
        """Bring what was found in the folder within the limits."""
        async with self._lock:
            await self._sweep()
            await self._reserve(Wish())

    async def end(self) -> None:
        """Forget what could not be forgotten yet, and seal what is open."""
        async with self._lock:
            await self._eraser.again()
            await self.seal_all()

    async def save(self, lives: Sequence[Life]) -> None:
        """Append records that are not held, batch by batch; a cancelled call leaves between batches."""
        asked = self._follower.erasures
        async with self._lock:
            with CancelScope(shield=True):
                await self._sweep()
            refused: set[bytes] = set()
            while lives:
                await checkpoint()
                with CancelScope(shield=True):
                    lives = lives[await self._save_batch(lives, asked, refused) :]
        await self.renew()

    async def renew(self) -> None:
        """Write again what was used in the last quarter of its life; a cancelled call leaves between batches."""
        if not self._index.due:
            return
        async with self._lock:
            while self._index.due:
                await checkpoint()
                with CancelScope(shield=True):
                    await self._renew_batch()

    async def forget(self, which: NamespaceFilter) -> Forgotten:
        """Remove every record of certain owners from index and disk, whoever wrote it."""
        forgotten = Forgotten(records=0, nbytes=0)
        async with self._lock:
            with CancelScope(shield=True):
                forgotten = await self._eraser.forget(Erased.of(which))
        return forgotten

    # -- one batch --------------------------------------------------------------------------------

    def _group(self, life: Life) -> Group:
        """What shares a segment: class, expiry hour, and the tenant where its bytes are counted."""
        tag = tag_of(life.record.tenant) if self._quotas.quota(life.record.tenant) else ""
        return life.record.retention.traffic, int(life.expires // HOUR_S), tag

    async def _save_batch(self, lives: Sequence[Life], asked: int, refused: set[bytes]) -> int:
        """Append leading records that share a segment; returns how many were dealt with, at least one.

        Args:
            lives: Records.
            asked: How much had been forgotten when they were given to us; what was forgotten since is dropped.
            refused: Keys of records that were too many for their tenant; those that continue them are, too.
        """
        now = self._clock.wall()
        group = self._group(lives[0])
        quota = self._quotas.quota(lives[0].record.tenant) if group[2] else 0
        limit = min(self._limits.segment_nbytes, quota // 8) if quota else self._limits.segment_nbytes
        segment = self._open.get(group)
        batch: dict[bytes, Life] = {}
        held: list[Segment] = []
        nbytes = taken = 0
        for life in lives[:BATCH_RECORDS]:
            if nbytes >= BATCH_NBYTES or self._group(life) != group:
                break
            record = life.record
            id_ = record_id(record.ref)
            place = self._index.seek(id_, now)
            if place is not None and not (life.again and place[1].expires < life.expires):
                held.append(place[0])
                self._index.slide(id_, place[1], now, group[0], life.life_s)
            elif not writable(record) or record.parent in refused:
                self.dropped += 1
            elif id_ not in batch:
                more = header_nbytes(record) + record.ref.nbytes
                size = (segment.size if segment else 0) + nbytes
                if size and size + more > limit:
                    if batch:
                        break
                    if segment:
                        await self._seal(segment)
                        segment = None
                if life.again or self._quotas.take(record.tenant, more, self._clock.now()):
                    batch[id_] = life
                    nbytes += more
                else:
                    refused.add(record.ref.key)
                    self.dropped += 1
            taken += 1
        self._index.use(held, now)
        if batch:
            await self._append(segment or await self._create(group), batch, asked, quota)
        return taken

    async def _append(self, segment: Segment, batch: dict[bytes, Life], asked: int, quota: int) -> None:
        nbytes = sum(header_nbytes(life.record) + life.record.ref.nbytes for life in batch.values())
        owners = [_owner(life) for life in batch.values()]
        least = segment.reserved_nbytes(nbytes, len(batch), owners)
        usable = not self._follower.gone  # if it is not, why not is known
        if usable:
            self._trouble.blame("")
        if usable and least > self._folder.claims.get(segment.name, 0):
            most = least + (quota // 64 if quota else self._limits.capacity_nbytes // CLAIM_SHARE)
            await self._reserve(Wish(segment.name, least, most, segment.tag, quota))
        room = usable and least <= self._folder.claims.get(segment.name, 0)
        kept = room and await self._write(segment, batch, nbytes, asked)
        if not kept:
            dropped = sum(not life.again for life in batch.values())
            self.dropped += dropped
            self._trouble.dropped(dropped)
            if not segment.size:
                await self._discard(segment)
            return
        self._trouble.saved()
        offset = segment.size
        for id_, life in batch.items():
            head, payload = header_nbytes(life.record), life.record.ref.nbytes
            tag = segment.owner(_owner(life)) << 2 | KINDS.index(life.record.ref.kind)
            times = life.created, life.expires, life.life_s
            self._index.insert(segment, id_, Entry(id_[:PREFIX_NBYTES], offset, *times, payload, head, tag))
            offset += head + payload
            self._age(segment, life)
            self.renewed += life.again
            self.saved += not life.again
            self.saved_nbytes += 0 if life.again else head + payload
            self.written_nbytes += head + payload
        segment.size = offset
        segment.disk_nbytes = segment.reserved_nbytes()

    async def _renew_batch(self) -> None:
        now, asked = self._clock.wall(), self._follower.erasures
        wanted: list[tuple[Segment, bytes, Entry, Slide]] = []
        nbytes = 0
        while self._index.due and len(wanted) < BATCH_RECORDS and nbytes < BATCH_NBYTES:
            id_ = next(iter(self._index.due))
            slide = self._index.due.pop(id_)
            if (place := self._index.seek(id_, now)) is not None and place[1].expires < slide.expires:
                wanted.append((place[0], id_, place[1], slide))
                nbytes += place[1].nbytes
        if not wanted:
            return
        places = [(self._folder.path / segment.name, id_, entry) for segment, id_, entry, _ in wanted]
        lives: list[Life] = []
        for (segment, id_, entry, slide), record in zip(
            wanted, await self._offload(read_records, self._disk, places), strict=True
        ):
            if record is None:
                self._index.lose(segment, id_, entry)
            else:
                record = replace(record, retention=Retention(traffic=slide.traffic))
                lives.append(Life(record, entry.created, slide.expires, slide.life_s, again=True))
        lives.sort(key=self._group)
        while lives:
            lives = lives[await self._save_batch(lives, asked, set()) :]

    async def _write(self, segment: Segment, batch: dict[bytes, Life], nbytes: int, asked: int) -> bool:
        """Append to the file; false if nothing was kept, and then it is closed if it can take no more.

        What was forgotten meanwhile is taken out of `batch` and dropped.
        """
        unsynced_nbytes = segment.unsynced_nbytes + nbytes
        overdue = unsynced_nbytes >= SYNC_NBYTES or self._clock.now() - segment.synced_at >= SYNC_S
        sync = self._limits.fsync == "always" or (self._limits.fsync == "interval" and overdue)
        while True:
            for id_ in [i for i, life in batch.items() if self._follower.forgotten_since(asked, _owner(life))]:
                self.dropped += not batch.pop(id_).again
            if not batch:
                return False
            args = segment.name, segment.fd, segment.size, list(batch.values()), sync, self._follower.heard
            try:
                segment.fd, error = await self.patiently(self._folder.append, *args)
                break
            except Unheard:
                if not await self._heed():
                    return False
            except BlockingIOError as locked:
                self._blame(locked)
                return False
            except OSError as failed:
                self._blame(failed)
                segment.fd = None
                del self._open[segment.group]
                self._follower.mine.discard(segment.name)
                return False
        if error is None:
            segment.unsynced_nbytes = 0 if sync else unsynced_nbytes
            segment.synced_at = self._clock.now() if sync else segment.synced_at
            self._open[segment.group] = self._open.pop(segment.group)
        else:
            self._blame(error)
        return error is None

    def _blame(self, error: OSError) -> None:
        self._trouble.blame(error)
        if isinstance(error, Gone):
            self._follower.hurry()

    def _age(self, segment: Segment, life: Life) -> None:
        """A record makes its segment no younger than its parent's, so that a tail's segment goes before its head's.

        One without a parent to be reached through leaves the segment as old as it is.
        """
        record, now = life.record, self._clock.wall()
        above = record.ref.key if record.ref.kind == "snapshot" else record.parent
        parent = self._index.seek(above, now)
        if parent is not None:
            segment.used = max(segment.used, parent[0].used)
        elif record.parent == record.namespace or record.ref.kind == "tail":
            segment.used = self._index.tick(now)

    # -- files ------------------------------------------------------------------------------------

    async def _create(self, group: Group) -> Segment:
        if len(self._open) >= MOST_CLAIMS:
            await self._seal(next(iter(self._open.values())))
        traffic, hour, tag = group
        segment = Segment(traffic, hour, self._index.next_serial(), self._folder.writer, tag)
        segment.synced_at = self._clock.now()
        self._follower.mine.add(segment.name)
        self._index.begin(segment)
        self._open[group] = segment
        return segment

    async def seal_all(self) -> None:
        """Seal what is open."""
        for segment in list(self._open.values()):
            await self._seal(segment)

    async def _seal(self, segment: Segment) -> None:
        """Write the footer and close the file; where that fails somebody's look seals it later."""
        fd = segment.fd
        segment.rows = bytearray(segment.rows)  # without the room that it grew into
        while fd is not None and not segment.owed:
            rows = segment.live_rows().tobytes()
            nbytes = footer_nbytes(len(rows) // ROW.size, segment.owners)
            args = segment.name, fd, segment.size, rows, segment.owners, segment.used, self._follower.heard
            try:
                segment.sealed = await self.patiently(self._folder.seal, *args)
            except Unheard:
                if await self._heed():
                    continue
            except OSError:
                pass
            if segment.sealed:
                self.written_nbytes += nbytes
                segment.disk_nbytes = allocated(segment.size + nbytes)
            break
        if fd is not None:
            await self._offload(_close, self._disk, fd, self._limits.fsync != "none")
        segment.fd = None
        del self._open[segment.group]
        self._follower.mine.discard(segment.name)

    async def _discard(self, segment: Segment) -> None:
        """Give up a file to which nothing could be appended."""
        await self.remove([segment], "")
        if segment.name in self._index.names:  # it is still there, and is nobody's: the next look reads it
            await self.let_go(segment, "")

    async def remove(self, segments: Sequence[Segment], why: str) -> None:
        """Remove files, and from the index those that are gone; `why` is a word of `Match.missed`."""
        fds = [segment.fd for segment in segments]
        paths = [self._folder.path / segment.name for segment in segments]
        gone = await self._offload(_remove, self._disk, paths, [fd for fd in fds if fd is not None])
        for segment, is_gone in zip(segments, gone, strict=True):
            segment.fd = None
            if is_gone:
                await self.let_go(segment, why)

    async def let_go(self, segment: Segment, why: str) -> None:
        """Take a file that is gone, or not to be found again, out of the index."""
        if self._index.names.get(segment.name) is segment:
            await self._follower.drop(segment, why)
        if self._open.get(segment.group) is segment:
            del self._open[segment.group]
        self._follower.mine.discard(segment.name)

    async def _sweep(self) -> None:
        """Follow the others, and remove segments whose hour is over or that hold nothing alive."""
        if self._follower.due or self._follower.gone:
            await self.follow()
        now = self._clock.wall()
        if now < self._next_sweep:
            return
        self._next_sweep = now + SWEEP_S
        segments = [segment for segment in self._index.segments.values() if not segment.living]
        over = [segment for segment in segments if segment.over(now)]
        ours = self._follower.mine
        empty = [s for s in segments if not s.live and (s.sealed or s.name in ours) and not s.over(now)]
        await self._eraser.again()
        if over:
            await self.remove(over, "expired")
        if empty:
            await self.remove(empty, "")

    async def _reserve(self, wish: Wish) -> None:
        """Have room claimed, if there is room; then `Folder.claims` says how much the file may take."""
        mine = self._open.values()
        used = self._index.touched | {segment.name: segment.used for segment in mine}
        fds = {segment.name: segment.fd for segment in mine if segment.fd is not None}
        try:
            evicted = await self.patiently(self._folder.reserve, wish, used, fds)
        except OSError as error:
            self._blame(error)
            return
        self._trouble.blame(self._folder.lack)
        for name in evicted:
            if (segment := self._index.names.get(name)) is not None:
                segment.fd = None
                await self.let_go(segment, "evicted")

    # -- other processes ----------------------------------------------------------------------------

    async def follow(self) -> bool:
        """Take over what changed in the folder, made anew if it is gone; false if it cannot be read."""
        if not self._follower.gone:
            found = await self._follower.follow()
            if not self._follower.gone:
                return found
        fds = [segment.fd for segment in self._open.values() if segment.fd is not None]
        for segment in self._open.values():
            segment.fd = None
        self._open.clear()
        self._follower.mine = {segment.name for segment in self._eraser.doomed}
        await self._offload(_remove, self._disk, (), fds)
        await self._heed()  # what was announced before it went still holds for what waits to be saved
        try:
            heard = await self.patiently(self._folder.enter)
        except OSError as error:
            self._trouble.blame(error)
            return False
        self._follower.restart(heard)
        while self._index.purge():
            await checkpoint()
        self._trouble.replaced()
        return await self._follower.follow()

    async def _heed(self) -> bool:
        """Heed what others announced; false if it cannot be read."""
        try:
            self._follower.heed(*await self._offload(self._folder.news, self._follower.heard))
        except OSError as error:
            self._trouble.blame(error)
            return False
        return True

    async def patiently(self, function: Callable[[*Ts], T], *args: *Ts) -> T:
        """Run a function that may find something locked; who was locked out once is not waited for again."""
        try:
            done = await patiently(self._offload, self._patience_s, function, *args)
        except BlockingIOError:
            self._patience_s = 0.0
            raise
        self._patience_s = PATIENCE_S
        return done


def _owner(life: Life) -> Owner:
    """Whose a record is."""
    return Owner(life.record.namespace, life.record.tenant, life.record.model)


def _close(disk: Disk, fd: int, sync: bool) -> None:
    if sync:
        with suppress(OSError):
            disk.sync(fd)
    disk.close(fd)


def _remove(disk: Disk, paths: Sequence[Path], fds: Sequence[int]) -> list[bool]:
    for fd in fds:
        disk.close(fd)
    return unlink_all(disk, paths)
