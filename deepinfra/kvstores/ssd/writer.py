"""Saves on the loop's side: which segment, what must go to make room, when to sync; one at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias

from anyio import CancelScope, Lock
from anyio.lowlevel import checkpoint

from deepinfra.core.kv import Forgotten, KVRecord, NamespaceFilter, Retention
from deepinfra.interfaces.given import Clock, Offload
from deepinfra.kvstores.ssd.appending import Life, append, forget_records, seal, unlink_all
from deepinfra.kvstores.ssd.disk import Disk
from deepinfra.kvstores.ssd.format import (
    KINDS,
    PREFIX_NBYTES,
    ROW,
    Entry,
    Owner,
    Traffic,
    footer_nbytes,
    header_nbytes,
    record_id,
    writable,
)
from deepinfra.kvstores.ssd.index import Index, Slide
from deepinfra.kvstores.ssd.reading import read_records
from deepinfra.kvstores.ssd.segment import Segment, allocated

__all__ = ("FsyncPolicy", "Limits", "Writer")

FsyncPolicy: TypeAlias = Literal["none", "interval", "always"]

BATCH_NBYTES = 8 << 20
"""Bytes per offloaded append: a few milliseconds, after which a cancelled caller is let go."""

BATCH_RECORDS = 256
"""Records per offloaded append, so that the loop's own share of it stays short."""

OPEN_SEGMENTS = 8
"""Segments open for appending at most; one per class and expiry hour, more only with unusual lifetimes."""

SYNC_NBYTES, SYNC_S = 16 << 20, 5.0
"""Policy `interval`: the append that finds this much, or this long, unsynced in its segment syncs it."""


class Limits(NamedTuple):
    """What the writer keeps to; see `SsdStore`."""

    capacity_nbytes: int
    segment_nbytes: int
    min_free_nbytes: int
    fsync: FsyncPolicy


class Writer:
    """Owns the files of a folder: appends, seals, evicts, expires, forgets.

    Attributes:
        saved, dropped, renewed: Records written, that could not be, and that were written again to live longer.
        saved_nbytes, written_nbytes: Bytes of the first, and all bytes appended: footers and the last included.
    """

    def __init__(self, index: Index, disk: Disk, folder: Path, clock: Clock, offload: Offload, limits: Limits) -> None:
        self._index = index
        self._disk, self._folder = disk, folder
        self._clock, self._offload = clock, offload
        self._limits = limits
        self._lock = Lock()
        self._open: dict[tuple[Traffic, int], Segment] = {}  # the one written last at the end
        self._doomed: list[Segment] = []  # out of the index, still on disk
        self.saved = self.dropped = self.renewed = 0
        self.saved_nbytes = self.written_nbytes = 0

    @property
    def disk_nbytes(self) -> int:
        """Bytes that our files take on disk at most."""
        return sum(segment.disk_nbytes for segment in (*self._index.segments.values(), *self._doomed))

    async def begin(self) -> None:
        """Bring what was found in the folder within the limits."""
        async with self._lock:
            await self._sweep(self._clock.wall())
            await self._make_room(0)

    async def end(self) -> None:
        """Seal what is open."""
        async with self._lock:
            for segment in list(self._open.values()):
                await self._seal(segment)
            await self._unlink_doomed()

    async def save(self, lives: Sequence[Life]) -> None:
        """Append records that are not held, batch by batch; a cancelled call leaves between batches."""
        async with self._lock:
            with CancelScope(shield=True):
                await self._sweep(self._clock.wall())
            while lives:
                await checkpoint()
                with CancelScope(shield=True):
                    lives = lives[await self._save_batch(lives) :]
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
        """Remove every record of certain owners from index and disk."""
        records = nbytes = 0
        async with self._lock:
            with CancelScope(shield=True):
                for segment in list(self._index.segments.values()):
                    if any(owner.matches(which) for owner in segment.owners):
                        gone = await self._forget_in(segment, which)
                        records, nbytes = records + gone.records, nbytes + gone.nbytes
                await self._unlink_doomed()
        return Forgotten(records=records, nbytes=nbytes)

    # -- one batch --------------------------------------------------------------------------------

    async def _save_batch(self, lives: Sequence[Life]) -> int:
        """Append leading records that share a segment; returns how many were dealt with, at least one."""
        now = self._clock.wall()
        group = lives[0].group
        segment = self._open.get(group)
        batch: dict[bytes, Life] = {}
        held: list[Segment] = []
        nbytes = taken = 0
        for life in lives[:BATCH_RECORDS]:
            if life.group != group or nbytes >= BATCH_NBYTES:
                break
            id_ = record_id(life.record.ref)
            place = self._index.seek(id_, now)
            if place is not None and not (life.again and place[1].expires < life.expires):
                held.append(place[0])
                self._index.slide(id_, place[1], now, group[0], life.life_s)
            elif not writable(life.record):
                self.dropped += 1
            elif id_ not in batch:
                more = header_nbytes(life.record) + life.record.ref.nbytes
                size = (segment.size if segment else 0) + nbytes
                if size and size + more > self._limits.segment_nbytes:
                    if batch:
                        break
                    if segment:
                        await self._seal(segment)
                        segment = None
                batch[id_] = life
                nbytes += more
            taken += 1
        self._index.use(held)
        if batch:
            await self._append(segment or await self._create(group), batch, nbytes)
        return taken

    async def _append(self, segment: Segment, batch: dict[bytes, Life], nbytes: int) -> None:
        owners = [Owner(life.record.namespace, life.record.tenant, life.record.model) for life in batch.values()]
        before, reserved = segment.disk_nbytes, segment.reserved_nbytes(nbytes, len(batch), owners)
        kept = False
        if await self._make_room(reserved - before, segment):
            segment.disk_nbytes = reserved
            kept = await self._write(segment, batch, nbytes)
            if not kept and segment.fd is not None:
                segment.disk_nbytes = before  # it was cut back
        if not kept:
            self.dropped += sum(not life.again for life in batch.values())
            if not segment.size:
                await self._doom(segment)
            return
        offset = segment.size
        for (id_, life), owner in zip(batch.items(), owners, strict=True):
            head, payload = header_nbytes(life.record), life.record.ref.nbytes
            tag = segment.owner(owner) << 2 | KINDS.index(life.record.ref.kind)
            times = life.created, life.expires, life.life_s
            self._index.insert(segment, id_, Entry(id_[:PREFIX_NBYTES], offset, *times, payload, head, tag))
            offset += head + payload
            self._age(segment, life.record)
            self.renewed += life.again
            self.saved += not life.again
            self.saved_nbytes += 0 if life.again else head + payload
        segment.size = offset
        self.written_nbytes += nbytes

    async def _renew_batch(self) -> None:
        now = self._clock.wall()
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
        places = [(self._folder / segment.name, id_, entry) for segment, id_, entry, _ in wanted]
        lives: list[Life] = []
        for (segment, id_, entry, slide), record in zip(
            wanted, await self._offload(read_records, self._disk, places), strict=True
        ):
            if record is None:
                self._index.lose(segment, id_, entry)
            else:
                record = replace(record, retention=Retention(traffic=slide.traffic))
                lives.append(Life(record, entry.created, slide.expires, slide.life_s, again=True))
        lives.sort(key=lambda life: life.group)
        while lives:
            lives = lives[await self._save_batch(lives) :]

    async def _write(self, segment: Segment, batch: dict[bytes, Life], nbytes: int) -> bool:
        """Append to the file; false if nothing was kept, and then `fd` is `None` if the file can take no more."""
        unsynced_nbytes = segment.unsynced_nbytes + nbytes
        overdue = unsynced_nbytes >= SYNC_NBYTES or self._clock.now() - segment.synced_at >= SYNC_S
        sync = self._limits.fsync == "always" or (self._limits.fsync == "interval" and overdue)
        path, lives = self._folder / segment.name, list(batch.values())
        try:
            segment.fd, kept = await self._offload(append, self._disk, path, segment.fd, segment.size, lives, sync)
        except OSError:
            segment.fd = None
            del self._open[segment.group]
            return False
        if kept:
            segment.unsynced_nbytes = 0 if sync else unsynced_nbytes
            segment.synced_at = self._clock.now() if sync else segment.synced_at
            self._open[segment.group] = self._open.pop(segment.group)
        return kept

    def _age(self, segment: Segment, record: KVRecord) -> None:
        """A record makes its segment no younger than its parent's, so that a tail's segment goes before its head's.

        One without a parent to be reached through leaves the segment as old as it is.
        """
        above = record.ref.key if record.ref.kind == "snapshot" else record.parent
        parent = self._index.seek(above, self._clock.wall())
        if parent is not None:
            segment.used = max(segment.used, parent[0].used)
        elif record.parent == record.namespace or record.ref.kind == "tail":
            segment.used = self._index.tick()

    # -- files ------------------------------------------------------------------------------------

    async def _create(self, group: tuple[Traffic, int]) -> Segment:
        if len(self._open) >= OPEN_SEGMENTS:
            await self._seal(next(iter(self._open.values())))
        segment = Segment(*group, self._index.next_serial())
        segment.synced_at = self._clock.now()
        self._index.begin(segment)
        self._open[group] = segment
        return segment

    async def _seal(self, segment: Segment) -> None:
        del self._open[segment.group]
        fd, segment.fd = segment.fd, None
        sync = self._limits.fsync != "none"
        rows = segment.live_rows().tobytes()
        segment.rows = bytearray(segment.rows)  # without the room that it grew into
        self.written_nbytes += footer_nbytes(len(rows) // ROW.size, segment.owners)
        await self._offload(seal, self._disk, fd, segment.size, rows, segment.owners, sync)

    async def _doom(self, segment: Segment, why: str = "") -> None:
        """Take a segment out of the index; its file goes as soon as nobody reads it."""
        self._index.remove(segment, why)
        while self._index.purge():
            await checkpoint()
        if self._open.get(segment.group) is segment:
            del self._open[segment.group]
        self._doomed.append(segment)
        if segment.fd is not None:
            fd, segment.fd = segment.fd, None
            await self._offload(self._disk.close, fd)

    async def _unlink_doomed(self) -> None:
        """Remove files of doomed segments; those that are being read or resist stay on the list, and in the sum."""
        going = [segment for segment in self._doomed if not segment.readers]
        if going:
            gone = await self._offload(unlink_all, self._disk, [self._folder / segment.name for segment in going])
            done = {id(segment) for segment, is_gone in zip(going, gone, strict=True) if is_gone}
            self._doomed = [segment for segment in self._doomed if id(segment) not in done]

    async def _sweep(self, now: float) -> None:
        """Remove segments whose hour is over or that hold nothing alive."""
        for segment in list(self._index.segments.values()):
            if segment.over(now):
                await self._doom(segment, "expired")
            elif not segment.live:
                await self._doom(segment)
        await self._unlink_doomed()

    async def _make_room(self, nbytes: int, keep: Segment | None = None) -> bool:
        """Evict least recently used segments until `nbytes` more fit; false, with nothing evicted, if they never do."""
        await self._unlink_doomed()
        short = self.disk_nbytes + nbytes - self._limits.capacity_nbytes
        if self._limits.min_free_nbytes:
            try:
                free = await self._offload(self._disk.free_nbytes, self._folder)
            except OSError:
                return False
            short = max(short, self._limits.min_free_nbytes + nbytes - free)
        if short <= 0:
            return True
        victims = [s for s in self._index.segments.values() if s is not keep and not s.readers]
        if sum(segment.disk_nbytes for segment in victims) < short:
            return False
        for segment in sorted(victims, key=lambda s: (s.used, -s.serial)):
            if short <= 0:
                break
            short -= segment.disk_nbytes
            await self._doom(segment, "evicted")
        await self._unlink_doomed()
        return self.disk_nbytes + nbytes <= self._limits.capacity_nbytes

    async def _forget_in(self, segment: Segment, which: NamespaceFilter) -> Forgotten:
        if self._open.get(segment.group) is segment:
            await self._seal(segment)
        records, nbytes = self._index.forget(segment, which)
        if not segment.live:
            await self._doom(segment)
            return Forgotten(records=records, nbytes=nbytes)
        args = (self._disk, self._folder / segment.name, segment.size, which, segment.live_rows().tobytes())
        file_nbytes = await self._offload(forget_records, *args, segment.owners)
        if file_nbytes is None:
            await self._doom(segment, "evicted")
        else:
            segment.disk_nbytes = allocated(file_nbytes)
        return Forgotten(records=records, nbytes=nbytes)
