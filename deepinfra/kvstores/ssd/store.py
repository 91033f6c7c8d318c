"""SsdStore: records for days in append-only files on a local disk."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Self

from anyio import CancelScope, move_on_after
from anyio.lowlevel import checkpoint

from deepinfra.core.ids import BlockKey
from deepinfra.core.kv import (
    Forgotten,
    KVRecord,
    KVStats,
    Loaded,
    Match,
    NamespaceFilter,
    RecordRef,
    Retention,
    TierHit,
)
from deepinfra.errors import ConfigError, ResourceError
from deepinfra.interfaces.kvstore import KVStore
from deepinfra.kvstores.quotas import Quotas
from deepinfra.kvstores.retention import Lifetimes
from deepinfra.kvstores.ssd.appending import Life
from deepinfra.kvstores.ssd.disk import Disk
from deepinfra.kvstores.ssd.folder import Folder
from deepinfra.kvstores.ssd.follower import Follower, patiently
from deepinfra.kvstores.ssd.format import Entry, record_id, snapshot_id
from deepinfra.kvstores.ssd.index import Index
from deepinfra.kvstores.ssd.listing import read_successors
from deepinfra.kvstores.ssd.loader import Loader
from deepinfra.kvstores.ssd.segment import Segment
from deepinfra.kvstores.ssd.writer import FsyncPolicy, Limits, Writer

__all__ = ("SsdStore",)

BATCH_NBYTES = 8 << 20
"""Bytes per offloaded read: a few milliseconds, after which a cancelled caller is let go."""

BATCH_RECORDS = 256
"""Records per offloaded read, so that the loop's own share of it stays under 1 ms."""

KEYS_PER_TURN = 256
"""Keys looked up before the loop gets a turn: measured 2 µs a key."""

LOOK_S = 0.25
"""Seconds that a match waits for a look at the folder before it answers from what is known."""

ENTER_S = 10.0
"""Seconds to wait for the folder's lock when entering."""

MOST_READ = 20_000
"""Headers read for `successors`: half a second of reading that the page cache holds."""


class SsdStore(KVStore):
    """Keeps records in append-only files, grouped by class and expiry hour so that expiry is an unlink.

    Saved records are the kernel's when `save` returns, so kill -9 loses none of them; a power cut loses what was not
    synced. Every load checks header and payload; whatever is wrong with a record or the disk is a miss.

    Several processes may use a folder at a time: each appends to files of its own and reads those of all, and looks
    for what others did before a `match` or `save` if it did not within a second. Cap, quotas, lives and `forget` hold
    for the folder as a whole; what a process that was killed had claimed is free at once. All have to be on one
    machine and under one user. If the folder is removed meanwhile, all of it is a miss, and the next save makes it
    anew. What the disk keeps from being saved is logged (`deepinfra.kvstores`), once a minute at most.

    When the cap or the free-space floor asks for room, the least recently used file goes as a whole, whoever wrote it;
    of files used together, the one with the tail of the prefix goes first. A tenant with a quota has files of its own,
    of which the least recently used goes when it is over; what it wrote before it had one is not counted. A life
    slides: a record that is loaded, touched or saved again in the last quarter of its life is appended once more, with
    a new life, by the next `touch` or `save`. Files of an hour that is over go with the next `save`.

    Args:
        path: Folder, made if missing, `~` expanded; only `*.kvseg`, `*.kvproc`, `forgotten` and `lock` in it are
            touched.
        capacity_nbytes: Bytes on disk at most, at every moment: dead bytes, footers and whole file-system blocks
            count. Of processes with different caps, each keeps the folder within its own when it writes.
        segment_nbytes: Bytes after which a file is sealed; at most an eighth of the capacity or quota is used.
        fsync: `none` leaves it to the kernel, `interval` syncs every 16 MiB or 5 s of writing and when a file is
            sealed, `always` before `save` returns.
        min_free_nbytes: Free space to leave on the file system; below it, old records make place for new ones.
        default_ttl_s: Seconds that records of no particular traffic live.
        agent_ttl_s: Seconds for traffic `agent`.
        chat_ttl_s: Seconds for traffic `chat`.
        quotas: Bytes on disk at most by tenant; 0: no limit.
        tenant_quota_nbytes: For every tenant that is not in `quotas`.
        tenant_write_nbytes_per_s: What each tenant may write through this process, with bursts of ten seconds of it.

    Attributes:
        disk: The system calls; a test may put its own here before entering.

    Raises:
        ResourceError: On entering: the folder cannot be made, read or locked.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        capacity_nbytes: int = 10 << 30,
        segment_nbytes: int = 64 << 20,
        fsync: FsyncPolicy = "interval",
        min_free_nbytes: int = 1 << 30,
        default_ttl_s: float = Lifetimes().default_s,
        agent_ttl_s: float = Lifetimes().agent_s,
        chat_ttl_s: float = Lifetimes().chat_s,
        quotas: Mapping[str, int] = MappingProxyType({}),
        tenant_quota_nbytes: int = 0,
        tenant_write_nbytes_per_s: float = 0,
    ) -> None:
        if fsync not in ("none", "interval", "always"):
            raise ConfigError(f"fsync = {fsync!r} is not one of none, interval, always")
        self.path = Path(path).expanduser()
        self.disk = Disk()
        self._limits = Limits(capacity_nbytes, min(segment_nbytes, capacity_nbytes // 8), min_free_nbytes, fsync)
        self._lifetimes = Lifetimes(default_ttl_s, agent_ttl_s, chat_ttl_s)
        self._quotas = partial(Quotas, tenant_quota_nbytes, dict(quotas), tenant_write_nbytes_per_s)
        self._entered = False
        self._reset()

    def _reset(self) -> None:
        clock, offload = self.clock, self.offload
        self._index = Index()
        quotas = self._quotas()
        limits = self._limits
        self._folder = Folder(self.disk, self.path, limits.capacity_nbytes, limits.min_free_nbytes, quotas.quota)
        self._loader = Loader(self._index, self.disk, self.path, clock, offload)
        self._follower = Follower(self._index, self._folder, clock, offload)
        self._writer = Writer(self._index, self._folder, self._follower, clock, offload, limits, quotas)
        self._hits = self._misses = 0

    @asynccontextmanager
    async def __asynccontextmanager__(self) -> AsyncGenerator[Self]:
        self._reset()
        with CancelScope(shield=True):
            await self._enter()
        try:
            yield self
        finally:
            self._entered = False
            with CancelScope(shield=True):
                await self._writer.end()
                await self.offload(self._folder.leave)
            self._reset()

    async def _enter(self) -> None:
        """Become one of the folder's processes and learn what is in it."""
        try:
            heard = await patiently(self.offload, ENTER_S, self._folder.enter)
            try:
                await self._follower.begin(heard)
                await self._writer.begin()
            except BaseException:
                await self.offload(self._folder.leave)
                raise
        except BlockingIOError:
            raise ResourceError(
                f"the KV folder {self.path} is locked by a process that does not answer; stop that one, or give this"
                " one its own folder (`path` of the store) or no store (`deepinfra serve --no-store`)"
            ) from None
        except OSError as error:
            raise ResourceError(f"the KV folder {self.path} cannot be used: {error.strerror or error}") from error
        self._entered = True

    async def match(self, keys: Sequence[BlockKey]) -> Match:
        """See `KVStore.match`; tier `ssd`. Answers from memory, once a second after a look at the folder."""
        if self._entered and self._follower.due:
            with move_on_after(LOOK_S):
                await self._follower.follow()
        now = oldest = self.clock.wall()
        refs: list[RecordRef] = []
        snapshots: list[int] = []
        run: list[Segment] = []
        missed = ""
        for i, key in enumerate(keys):
            if i % KEYS_PER_TURN == 0:
                await checkpoint()
            place = self._index.seek(key, now)
            if place is None:
                missed = self._index.why(key)
                break
            segment, entry = place
            if not run or run[-1] is not segment:
                run.append(segment)
            refs.append(RecordRef(key, "block", entry.nbytes))
            oldest = min(oldest, entry.created)
            if self._index.snapshots and self._index.seek(snapshot_id(key), now) is not None:
                snapshots.append(i)
        self._index.use(run, now)
        self._hits += len(refs)
        self._misses += len(keys) - len(refs)
        tiers = (TierHit("ssd", len(refs), now - oldest),) if refs else ()
        return Match(refs=tuple(refs), tiers=tiers, snapshots=tuple(snapshots), missed=missed)

    async def load(self, refs: Sequence[RecordRef], into: Sequence[memoryview]) -> Loaded:
        """See `KVStore.load`. A cancelled call leaves after the batch of 8 MiB that is being read."""
        pairs = list(zip(refs, into, strict=True))
        if any(buffer.nbytes != ref.nbytes for ref, buffer in pairs):
            raise ValueError("every buffer must have the size of its record")
        done = 0
        while done < len(pairs):
            await checkpoint()
            end, nbytes = done, 0
            most = min(len(pairs), done + BATCH_RECORDS)
            while end < most and (end == done or nbytes + pairs[end][0].nbytes <= BATCH_NBYTES):
                nbytes += pairs[end][0].nbytes
                end += 1
            done += await self._loader.load(pairs[done:end])
            if done < end:
                return Loaded(count=done, stopped=self._index.why(record_id(refs[done])))
        return Loaded(count=done)

    async def save(self, records: Sequence[KVRecord]) -> None:
        """See `KVStore.save`. A cancelled call leaves after the batch of 8 MiB that is being written."""
        now = self.clock.wall()
        timed = [(record, self._lifetimes.of(record.retention)) for record in records]
        lives = [
            Life(record, now, now + life_s, life_s) for record, life_s in timed if life_s > 0 and record.retention.disk
        ]
        if self._entered:
            await self._writer.save(lives)

    async def touch(self, keys: Sequence[BlockKey], retention: Retention) -> Sequence[BlockKey]:
        """See `KVStore.touch`. Records in the last quarter of such a life are written again before this returns."""
        now, life_s = self.clock.wall(), self._lifetimes.of(retention)
        run: list[Segment] = []
        deepest: tuple[bytes, Segment, Entry] | None = None  # the one snapshot that its sequence goes on from

        def use(id_: bytes, segment: Segment, entry: Entry) -> None:
            run.append(segment)
            if retention.disk:
                self._index.slide(id_, entry, now, retention.traffic, life_s)

        for i, key in enumerate(keys):
            if i % KEYS_PER_TURN == 0:
                await checkpoint()
            if (place := self._index.seek(key, now)) is not None:
                use(key, *place)
            id_ = snapshot_id(key)
            if self._index.snapshots and (place := self._index.seek(id_, now)) is not None:
                deepest = id_, *place
        if deepest is not None:
            use(*deepest)
        self._index.use(run, now)
        if self._entered:
            await self._writer.renew()
        return ()

    async def forget(self, which: NamespaceFilter) -> Forgotten:
        """See `KVStore.forget`. The records' bytes are overwritten or unlinked when this returns.

        What the disk does not let be overwritten or told to others then, later saves try again, and so does who enters
        the folder after a crash: then everything goes that the folder holds of these owners, whenever it was saved.
        """
        return await self._writer.forget(which) if self._entered else Forgotten(records=0, nbytes=0)

    def stats(self) -> KVStats:
        """See `KVStore.stats`; `nbytes` are those of whole file-system blocks, room for footers included."""
        index, writer, nbytes = self._index, self._writer, self._writer.disk_nbytes
        return KVStats(
            records=len(index),
            nbytes=nbytes,
            capacity_nbytes=self._limits.capacity_nbytes,
            hits=self._hits,
            misses=self._misses,
            saved=writer.saved,
            dropped=writer.dropped,
            damaged=index.damaged,
            evicted=index.evicted,
            expired=index.expired,
            by_tier={"ssd": nbytes},
            renewed=writer.renewed,
            saved_nbytes=writer.saved_nbytes,
            written_nbytes=writer.written_nbytes,
            processes=self._follower.writers,
            erasures=self._follower.erasures,
        )

    async def successors(self, parent: BlockKey, most: int = 64) -> Sequence[tuple[int, ...]]:
        """See `KVStore.successors`. Reads headers, from the youngest file on, until there are enough."""
        found: dict[tuple[int, ...], None] = {}
        now, left = self.clock.wall(), MOST_READ
        for segment in sorted(self._index.segments.values(), key=lambda segment: -segment.serial):
            if len(found) >= most or left <= 0:
                break
            tokens = await self.offload(read_successors, self.disk, self.path / segment.name, parent, now, left)
            left -= len(segment)
            found |= dict.fromkeys(tokens)
        return list(found)[:most]
