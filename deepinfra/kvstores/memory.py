"""MemoryStore: records in this process's RAM; gone when the store is left."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from types import MappingProxyType
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
from deepinfra.errors import ConfigError
from deepinfra.interfaces.kvstore import KVStore
from deepinfra.kvstores.leaves import Held, Leaves, cost, parent_of, record_id
from deepinfra.kvstores.policy import RANKINGS, PolicyName
from deepinfra.kvstores.quotas import Quotas
from deepinfra.kvstores.retention import Departed, Lifetimes

__all__ = ("MemoryStore",)

COPY_NBYTES = 1 << 20
"""Bytes copied before the loop gets a turn: about 0.1 ms."""

KEYS_PER_TURN = 1024
"""Keys looked up before the loop gets a turn: about 0.5 ms."""

SWEEP_S = 60.0
"""Seconds between looks at all records for expired ones; a look-up never returns an expired one anyway."""


class MemoryStore(KVStore):
    """Keeps records in RAM up to a number of bytes, overhead included.

    Of the records that no held record continues, the one that `policy` ranks lowest goes first, so a prefix loses its
    tail before its head and what is left can be matched. A record that fits only in place of its own prefix is
    dropped, and so is one whose parent is not held. A life slides when a record is loaded, touched or saved again.

    Args:
        capacity_nbytes: Bytes held at most; what the policy remembers of evicted records comes on top, up to 5 MB.
        default_ttl_s: Seconds that records of no particular traffic live.
        agent_ttl_s: Seconds for traffic `agent`.
        chat_ttl_s: Seconds for traffic `chat`.
        policy: `reuse`: what came back stays longer than what was asked for once; `lru`: what was used last.
        quotas: Bytes by tenant, overhead included; over it that tenant's own lowest goes.
        tenant_quota_nbytes: Bytes for each other tenant; 0: no limit.
        tenant_write_nbytes_per_s: Bytes that each tenant may save per second; more is dropped; 0: no limit.

    Raises:
        ConfigError: There is no such policy.
    """

    durable = False

    def __init__(
        self,
        *,
        capacity_nbytes: int = 1 << 30,
        default_ttl_s: float = Lifetimes().default_s,
        agent_ttl_s: float = Lifetimes().agent_s,
        chat_ttl_s: float = Lifetimes().chat_s,
        policy: PolicyName = "reuse",
        quotas: Mapping[str, int] = MappingProxyType({}),
        tenant_quota_nbytes: int = 0,
        tenant_write_nbytes_per_s: float = 0,
    ) -> None:
        if policy not in RANKINGS:
            raise ConfigError(f"policy = {policy!r} is not one of {', '.join(RANKINGS)}")
        self.capacity_nbytes = capacity_nbytes
        self._lifetimes = Lifetimes(default_ttl_s, agent_ttl_s, chat_ttl_s)
        self._ranking = RANKINGS[policy]
        self._limits = tenant_quota_nbytes, dict(quotas), tenant_write_nbytes_per_s
        self._clear()

    def _clear(self) -> None:
        self._held: dict[bytes, Held] = {}
        self._children: dict[bytes, int] = {}  # parent's id -> held records that continue it
        self._leaves = Leaves(self._held, self._children)
        self._leaves_of: dict[str, Leaves] = {}  # the same by tenant, of those that have a quota
        self._nbytes_of: dict[str, int] = {}
        self._ranks = self._ranking()
        self._quotas = Quotas(*self._limits)
        self._departed = Departed()
        self._nbytes = 0
        self._block_tokens = 0  # of a block, as saved last
        self._unswept: list[bytes] = []
        self._next_sweep = 0.0
        self._hits = self._misses = self._saved = self._dropped = self._evicted = self._expired = 0
        self._saved_nbytes = 0

    @asynccontextmanager
    async def __asynccontextmanager__(self) -> AsyncGenerator[Self]:
        self._clear()
        try:
            yield self
        finally:
            self._clear()

    async def match(self, keys: Sequence[BlockKey]) -> Match:
        """See `KVStore.match`; tier `ram`."""
        now = self.clock.wall()
        run: list[Held] = []
        snapshots: list[int] = []
        deepest: Held | None = None  # the snapshot that a sequence goes on from
        missed = ""
        for i, key in enumerate(keys):
            if i % KEYS_PER_TURN == 0:
                await checkpoint()
            held = self._get(key, now)
            if held is None:
                missed = self._departed.why(key)
                break
            run.append(held)
            if (snapshot := self._get(key + b"snapshot", now)) is not None:
                snapshots.append(i)
                deepest = snapshot
        rank = self._ranks.asked(keys, len(run), self._block_tokens, self.clock.now())
        for held in (*run, deepest) if deepest is not None else run:
            held.rank = rank
        self._hits += len(run)
        self._misses += len(keys) - len(run)
        return Match(
            refs=tuple(RecordRef(BlockKey(held.id), "block", len(held.data)) for held in run),
            tiers=(TierHit("ram", len(run), now - min(held.saved_at for held in run)),) if run else (),
            snapshots=tuple(snapshots),
            missed=missed,
        )

    async def load(self, refs: Sequence[RecordRef], into: Sequence[memoryview]) -> Loaded:
        """See `KVStore.load`."""
        now, copied = self.clock.wall(), COPY_NBYTES
        for i, (ref, buffer) in enumerate(zip(refs, into, strict=True)):
            if copied >= COPY_NBYTES:
                copied = 0
                await checkpoint()
            held = self._get(record_id(ref), now)
            if held is None or len(held.data) != ref.nbytes:
                return Loaded(count=i, stopped=self._departed.why(record_id(ref)))
            buffer[:] = held.data
            copied += ref.nbytes
            held.expires = max(held.expires, now + held.ttl_s)  # its rank was said by the match that led here
        return Loaded(count=len(refs))

    async def save(self, records: Sequence[KVRecord]) -> None:
        """See `KVStore.save`."""
        now, copied = self.clock.wall(), COPY_NBYTES
        self._sweep(now)
        for record in records:
            if copied >= COPY_NBYTES:
                copied = 0
                await checkpoint()
            ttl_s = self._lifetimes.of(record.retention)
            if ttl_s > 0:
                copied += self._keep(record, now, ttl_s)

    async def touch(self, keys: Sequence[BlockKey], retention: Retention) -> Sequence[BlockKey]:
        """See `KVStore.touch`."""
        now, rank, ttl_s = self.clock.wall(), self._ranks.used(self.clock.now()), self._lifetimes.of(retention)
        deepest: Held | None = None
        for i, key in enumerate(keys):
            if i % KEYS_PER_TURN == 0:
                await checkpoint()
            if (held := self._get(key, now)) is not None:
                held.use(rank, now + ttl_s)
            if (snapshot := self._get(key + b"snapshot", now)) is not None:
                deepest = snapshot
        if deepest is not None:
            deepest.use(rank, now + ttl_s)
        return ()

    async def successors(self, parent: BlockKey, most: int = 64) -> Sequence[tuple[int, ...]]:
        """See `KVStore.successors`."""
        found: list[tuple[int, ...]] = []
        if parent in self._children:
            for i, id_ in enumerate(list(self._held)):
                if i % KEYS_PER_TURN == 0:
                    await checkpoint()
                held = self._held.get(id_)
                if held is not None and held.parent == parent and len(id_) == len(parent):  # no snapshot, no tail
                    found.append(tuple(held.tokens))
                    if len(found) == most:
                        break
        await checkpoint()
        return found

    async def forget(self, which: NamespaceFilter) -> Forgotten:
        """See `KVStore.forget`."""
        records = nbytes = 0
        for i, id_ in enumerate(list(self._held)):
            if i % KEYS_PER_TURN == 0:
                await checkpoint()
            held = self._held.get(id_)
            if held is not None and which.matches(held.tenant, held.model, held.namespace):
                self._drop(held)
                records, nbytes = records + 1, nbytes + held.nbytes
        await checkpoint()
        return Forgotten(records=records, nbytes=nbytes)

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
            saved_nbytes=self._saved_nbytes,
            written_nbytes=self._saved_nbytes,
        )

    def _get(self, id_: bytes, now: float) -> Held | None:
        held = self._held.get(id_)
        if held is not None and held.expires <= now:
            self._expire(held)
            return None
        return held

    def _keep(self, record: KVRecord, now: float, ttl_s: float) -> int:
        """Take one record if it can be had; returns the bytes copied."""
        id_, parent, ticking = record_id(record.ref), parent_of(record), self.clock.now()
        if (held := self._get(id_, now)) is not None:
            held.use(self._ranks.used(ticking), now + ttl_s)
            return 0
        if record.ref.kind != "tail" and parent != record.namespace and self._get(parent, now) is None:
            self._dropped += 1  # nothing could match it, and it would cost a prefix that something can
            return 0
        if not self._quotas.take(record.tenant, record.ref.nbytes, ticking):
            self._dropped += 1
            return 0
        self._children[parent] = self._children.get(parent, 0) + 1  # before making room: it may not cost its own parent
        if not self._make_room(record.tenant, cost(record.ref.nbytes, len(record.tokens))):
            self._release(parent)
            self._dropped += 1
            return 0
        held = self._held[id_] = Held(record, now, ttl_s, self._ranks.saved(id_, ticking))
        self._count(held, held.nbytes)
        if record.ref.kind == "block":
            self._block_tokens = len(held.tokens)
        self._saved += 1
        self._saved_nbytes += len(held.data)
        self._add_leaf(held)
        return len(held.data)

    def _make_room(self, tenant: str, nbytes: int) -> bool:
        """Let go of what ranks lowest until a tenant can have so much more: its own for its quota, any for the cap."""
        if nbytes > self.capacity_nbytes or self._quotas.excess(tenant, nbytes):
            return False
        while self._quotas.excess(tenant, self._nbytes_of.get(tenant, 0) + nbytes):
            if not self._evict(self._leaves_of[tenant]):
                return False
        while self._nbytes + nbytes > self.capacity_nbytes:
            if not self._evict(self._leaves):
                return False
        return True

    def _evict(self, leaves: Leaves) -> bool:
        held = leaves.pop()
        if held is None:
            return False
        self._drop(held)
        self._departed.add(held.id, "evicted")
        self._ranks.evicted(held.id)
        self._evicted += 1
        return True

    def _sweep(self, now: float) -> None:
        """Look at some records for expired ones."""
        if now >= self._next_sweep:
            self._next_sweep = now + SWEEP_S
            self._unswept = list(self._held)
        for id_ in self._unswept[-KEYS_PER_TURN:]:
            self._get(id_, now)
        del self._unswept[-KEYS_PER_TURN:]

    def _expire(self, held: Held) -> None:
        self._drop(held)
        self._departed.add(held.id, "expired")
        self._expired += 1

    def _drop(self, held: Held) -> None:
        del self._held[held.id]
        self._count(held, -held.nbytes)
        self._release(held.parent)

    def _release(self, parent: bytes) -> None:
        self._children[parent] -= 1
        if not self._children[parent]:
            del self._children[parent]
            if (held := self._held.get(parent)) is not None:
                self._add_leaf(held)

    def _add_leaf(self, held: Held) -> None:
        self._leaves.add(held)
        if held.tenant in self._leaves_of:
            self._leaves_of[held.tenant].add(held)

    def _count(self, held: Held, nbytes: int) -> None:
        self._nbytes += nbytes
        of = self._nbytes_of[held.tenant] = self._nbytes_of.get(held.tenant, 0) + nbytes
        if not of:
            del self._nbytes_of[held.tenant]
            self._leaves_of.pop(held.tenant, None)
        elif self._quotas.quota(held.tenant) and held.tenant not in self._leaves_of:
            self._leaves_of[held.tenant] = Leaves(self._held, self._children)
