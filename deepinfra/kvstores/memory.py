"""MemoryStore: records in this process's RAM; gone when the store is left."""

from __future__ import annotations

import heapq
from array import array
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from itertools import count
from typing import Self

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
from deepinfra.interfaces.kvstore import KVStore
from deepinfra.kvstores.retention import Departed, Lifetimes

__all__ = ("MemoryStore",)

RECORD_OVERHEAD_NBYTES = 640
"""Counted for each record besides its bytes and 4 a token; measured 500 (CPython 3.11, 64-bit), with a margin."""

COPY_NBYTES = 1 << 20
"""Bytes copied before the loop gets a turn: about 0.1 ms."""

KEYS_PER_TURN = 1024
"""Keys looked up before the loop gets a turn: about 0.5 ms."""

SWEEP_S = 60.0
"""Seconds between looks at all records for expired ones; a look-up never returns an expired one anyway."""


class _Held:
    __slots__ = ("data", "expires", "id", "model", "parent", "queued", "saved_at", "tenant", "tokens", "ttl_s", "used")

    def __init__(self, record: KVRecord, now: float, ttl_s: float, used: int) -> None:
        self.id = _id(record.ref)
        self.parent = _parent(record)
        self.data = bytes(record.data)
        self.tokens = array("I", record.tokens)
        self.tenant, self.model = record.tenant, record.model
        self.saved_at, self.ttl_s, self.expires = now, ttl_s, now + ttl_s
        self.used = used
        self.queued = False

    @property
    def nbytes(self) -> int:
        return _cost(len(self.data), len(self.tokens))


def _id(ref: RecordRef) -> bytes:
    return ref.key if ref.kind == "block" else ref.key + ref.kind.encode()


def _cost(data_nbytes: int, tokens: int) -> int:
    return data_nbytes + 4 * tokens + RECORD_OVERHEAD_NBYTES


def _parent(record: KVRecord) -> bytes:
    """What must not go before this record: a snapshot hangs from its block, the rest from the block before."""
    return record.ref.key if record.ref.kind == "snapshot" else record.parent


class MemoryStore(KVStore):
    """Keeps records in RAM up to a number of bytes, overhead included.

    The least recently used record that no held record continues goes first, so a prefix loses its tail before its
    head and what is left can be matched. A record that fits only in place of its own prefix is dropped, and so is one
    whose parent is not held. A life slides when a record is loaded, touched or saved again.

    Args:
        capacity_nbytes: Bytes held at most.
        default_ttl_s: Seconds that records of no particular traffic live.
        agent_ttl_s: Seconds for traffic `agent`.
        chat_ttl_s: Seconds for traffic `chat`.
    """

    durable = False

    def __init__(
        self,
        *,
        capacity_nbytes: int = 1 << 30,
        default_ttl_s: float = Lifetimes().default_s,
        agent_ttl_s: float = Lifetimes().agent_s,
        chat_ttl_s: float = Lifetimes().chat_s,
    ) -> None:
        self.capacity_nbytes = capacity_nbytes
        self._lifetimes = Lifetimes(default_ttl_s, agent_ttl_s, chat_ttl_s)
        self._clear()

    def _clear(self) -> None:
        self._held: dict[bytes, _Held] = {}
        self._children: dict[bytes, int] = {}  # parent's id -> held records that continue it
        self._leaves: list[tuple[int, int, _Held]] = []  # heap by last use; stale entries are skipped or renewed
        self._departed = Departed()
        self._nbytes = 0
        self._next_sweep = 0.0
        self._ticks = count(1)
        self._hits = self._misses = self._saved = self._dropped = self._evicted = self._expired = 0

    @asynccontextmanager
    async def __asynccontextmanager__(self) -> AsyncGenerator[Self]:
        self._clear()
        try:
            yield self
        finally:
            self._clear()

    async def match(self, keys: Sequence[BlockKey]) -> Match:
        """See `KVStore.match`; tier `ram`."""
        now, used = self.clock.wall(), next(self._ticks)
        refs: list[RecordRef] = []
        snapshots: list[int] = []
        oldest = now
        missed = ""
        for i, key in enumerate(keys):
            if i % KEYS_PER_TURN == 0:
                await checkpoint()
            held = self._get(key, now)
            if held is None:
                missed = self._departed.why(key)
                break
            held.used = used
            oldest = min(oldest, held.saved_at)
            refs.append(RecordRef(key, "block", len(held.data)))
            if self._get(key + b"snapshot", now) is not None:
                snapshots.append(i)
        self._hits += len(refs)
        self._misses += len(keys) - len(refs)
        tiers = (TierHit("ram", len(refs), now - oldest),) if refs else ()
        return Match(refs=tuple(refs), tiers=tiers, snapshots=tuple(snapshots), missed=missed)

    async def load(self, refs: Sequence[RecordRef], into: Sequence[memoryview]) -> Loaded:
        """See `KVStore.load`."""
        now, used, copied = self.clock.wall(), next(self._ticks), COPY_NBYTES
        for i, (ref, buffer) in enumerate(zip(refs, into, strict=True)):
            if copied >= COPY_NBYTES:
                copied = 0
                await checkpoint()
            held = self._get(_id(ref), now)
            if held is None or len(held.data) != ref.nbytes:
                return Loaded(count=i, stopped=self._departed.why(_id(ref)))
            buffer[:] = held.data
            copied += ref.nbytes
            held.used = used
            held.expires = max(held.expires, now + held.ttl_s)
        return Loaded(count=len(refs))

    async def save(self, records: Sequence[KVRecord]) -> None:
        """See `KVStore.save`."""
        now, copied = self.clock.wall(), COPY_NBYTES
        if now >= self._next_sweep:
            self._next_sweep = now + SWEEP_S
            for held in [held for held in self._held.values() if held.expires <= now]:
                self._expire(held)
        for record in records:
            if copied >= COPY_NBYTES:
                copied = 0
                await checkpoint()
            ttl_s = self._lifetimes.of(record.retention)
            if ttl_s > 0:
                copied += self._keep(record, now, ttl_s)

    async def touch(self, keys: Sequence[BlockKey], retention: Retention) -> None:
        """See `KVStore.touch`."""
        now, used, ttl_s = self.clock.wall(), next(self._ticks), self._lifetimes.of(retention)
        for i, key in enumerate(keys):
            if i % KEYS_PER_TURN == 0:
                await checkpoint()
            held = self._get(key, now)
            if held is not None:
                held.used = used
                held.expires = max(held.expires, now + ttl_s)

    async def forget(self, which: NamespaceFilter) -> Forgotten:
        """See `KVStore.forget`."""
        await checkpoint()
        gone = [
            held
            for held in self._held.values()
            if which.tenant in ("", held.tenant) and which.model in ("", held.model)
        ]
        for held in gone:
            self._drop(held)
        return Forgotten(records=len(gone), nbytes=sum(held.nbytes for held in gone))

    def stats(self) -> KVStats:
        """See `KVStore.stats`."""
        return KVStats(
            records=len(self._held),
            nbytes=self._nbytes,
            capacity_nbytes=self.capacity_nbytes,
            hits=self._hits,
            misses=self._misses,
            saved=self._saved,
            dropped=self._dropped,
            evicted=self._evicted,
            expired=self._expired,
            by_tier={"ram": self._nbytes},
        )

    async def tokens(self, key: BlockKey) -> tuple[int, ...] | None:
        """Token ids of a block that is held, so that a miss behind it can be explained in text; `None`: not held."""
        await checkpoint()
        held = self._get(key, self.clock.wall())
        return None if held is None else tuple(held.tokens)

    def _get(self, record_id: bytes, now: float) -> _Held | None:
        held = self._held.get(record_id)
        if held is not None and held.expires <= now:
            self._expire(held)
            return None
        return held

    def _keep(self, record: KVRecord, now: float, ttl_s: float) -> int:
        """Take one record if it can be had; returns the bytes copied."""
        used = next(self._ticks)
        if (held := self._get(_id(record.ref), now)) is not None:
            held.used = used
            held.expires = max(held.expires, now + ttl_s)
            return 0
        parent = _parent(record)
        if record.ref.kind != "tail" and parent != record.namespace and self._get(parent, now) is None:
            self._dropped += 1  # nothing could match it, and it would cost a prefix that something can
            return 0
        self._children[parent] = self._children.get(parent, 0) + 1  # before making room: it may not cost its own parent
        if not self._make_room(_cost(record.ref.nbytes, len(record.tokens))):
            self._release(parent)
            self._dropped += 1
            return 0
        held = _Held(record, now, ttl_s, used)
        self._held[held.id] = held
        self._nbytes += held.nbytes
        self._saved += 1
        self._queue(held)
        return len(held.data)

    def _make_room(self, nbytes: int) -> bool:
        if nbytes > self.capacity_nbytes:
            return False
        while self._nbytes + nbytes > self.capacity_nbytes:
            if not self._leaves:
                return False
            used, _, held = heapq.heappop(self._leaves)
            held.queued = False
            if self._held.get(held.id) is not held or self._children.get(held.id):
                continue  # gone, or a parent again: it is queued when its last child goes
            if held.used != used:
                self._queue(held)
                continue
            self._drop(held)
            self._departed.add(held.id, "evicted")
            self._evicted += 1
        return True

    def _expire(self, held: _Held) -> None:
        self._drop(held)
        self._departed.add(held.id, "expired")
        self._expired += 1

    def _drop(self, held: _Held) -> None:
        del self._held[held.id]
        self._nbytes -= held.nbytes
        self._release(held.parent)

    def _release(self, parent: bytes) -> None:
        self._children[parent] -= 1
        if not self._children[parent]:
            del self._children[parent]
            if (held := self._held.get(parent)) is not None:
                self._queue(held)

    def _queue(self, held: _Held) -> None:
        if held.queued or self._children.get(held.id):
            return
        held.queued = True
        heapq.heappush(self._leaves, (held.used, next(self._ticks), held))
        if len(self._leaves) > 2 * len(self._held) + 64:  # records that left by other doors keep no bytes alive
            self._leaves = [leaf for leaf in self._leaves if self._held.get(leaf[2].id) is leaf[2]]
            heapq.heapify(self._leaves)
