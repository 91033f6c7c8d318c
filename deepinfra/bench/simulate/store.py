"""Stores as index and policy: they hold what a real one would hold, count what it would count, and move no bytes.

Records are as small as the simulated executor makes them; capacities, quotas and times are those of the blocks that the
simulated model has.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from types import MappingProxyType
from typing import Any, NamedTuple, Self

import anyio

from deepinfra.config import Part
from deepinfra.core.ids import BlockKey
from deepinfra.core.kv import (
    FRAME_NBYTES,
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
from deepinfra.executors.simulated import SimulatedExecutor
from deepinfra.interfaces.given import Clock, Offload
from deepinfra.interfaces.kvstore import KVStore
from deepinfra.kvstores.leaves import cost
from deepinfra.kvstores.memory import MemoryStore
from deepinfra.kvstores.tiered.guard import SLOWEST_NBYTES_PER_S
from deepinfra.kvstores.tiered.store import Tier, TieredStore

__all__ = ("SPEEDS", "ModelledStore", "TierSpeed", "modelled")


class TierSpeed(NamedTuple):
    """How fast a tier is: bytes a second that all who read or write share, and seconds that each call takes besides."""

    read_nbytes_per_s: float
    write_nbytes_per_s: float
    latency_s: float = 0.0


SPEEDS: Mapping[str, TierSpeed] = MappingProxyType(
    {
        "ram": TierSpeed(50e9, 50e9),
        "ssd": TierSpeed(6.5e9, 3.5e9, 1e-4),
        "remote": TierSpeed(25e9, 25e9, 5e-4),
    }
)
"""By name of a tier: copies in host memory, what data sheets of one data-centre NVMe say (PCIe 4.0 x4), and one network
card of 200 Gbit/s. None of it was measured here."""


class _Channel:
    """What all transfers in one direction share, one after the other."""

    def __init__(self, nbytes_per_s: float, latency_s: float) -> None:
        self._nbytes_per_s, self._latency_s = nbytes_per_s, latency_s
        self._free_at = 0.0

    async def move(self, nbytes: int, clock: Clock) -> None:
        now = clock.now()
        self._free_at = max(now, self._free_at) + nbytes / self._nbytes_per_s
        await anyio.sleep(self._free_at + self._latency_s - now)


class ModelledStore(KVStore):
    """One tier: a `MemoryStore` that takes records for blocks of another size, and the time that moving those takes.

    Args:
        tier: What hits in it are called.
        block_nbytes: Of a block of the simulated model.
        block_tokens: Of it.
        record_nbytes: Bytes of the records that it is given.
        capacity_nbytes: Bytes held at most, of blocks as they would be.
        speed: How fast; `None`: as `SPEEDS` says of such a tier.
        durable: See `KVStore.durable`.
        tenant_quota_nbytes: See `MemoryStore`, of blocks as they would be.
        tenant_write_nbytes_per_s: The same.
        quotas: The same.
        policy: Further keys of `MemoryStore`.
    """

    def __init__(
        self,
        tier: str,
        *,
        block_nbytes: int,
        block_tokens: int,
        record_nbytes: int,
        capacity_nbytes: int,
        speed: TierSpeed | None = None,
        durable: bool = False,
        quotas: Mapping[str, int] = MappingProxyType({}),
        tenant_quota_nbytes: int = 0,
        tenant_write_nbytes_per_s: float = 0.0,
        **policy: Any,
    ) -> None:
        self.tier, self.durable = tier, durable
        self._capacity_nbytes, self._block_nbytes = capacity_nbytes, block_nbytes
        self._speed = speed or SPEEDS[tier]
        held, meant = cost(record_nbytes, block_tokens), cost(FRAME_NBYTES + block_nbytes, block_tokens)
        self._held_nbytes, self._meant_nbytes = held, meant
        self._moved = (FRAME_NBYTES + block_nbytes) / record_nbytes

        def scaled(nbytes: int) -> int:
            return max(held, nbytes // meant * held) if nbytes else 0  # a limit of 0 is none

        self._index = MemoryStore(
            capacity_nbytes=capacity_nbytes // meant * held,
            quotas={tenant: scaled(nbytes) for tenant, nbytes in quotas.items()},
            tenant_quota_nbytes=scaled(tenant_quota_nbytes),
            tenant_write_nbytes_per_s=tenant_write_nbytes_per_s / self._moved,
            **policy,
        )

    def give(self, clock: Clock, offload: Offload) -> None:
        """See `Component.give`."""
        super().give(clock, offload)
        self._index.give(clock, offload)

    @asynccontextmanager
    async def __asynccontextmanager__(self) -> AsyncGenerator[Self]:
        speed = self._speed
        self._reads = _Channel(speed.read_nbytes_per_s, speed.latency_s)
        self._writes = _Channel(speed.write_nbytes_per_s, speed.latency_s)
        async with self._index:
            yield self

    async def match(self, keys: Sequence[BlockKey]) -> Match:
        """See `KVStore.match`."""
        match = await self._index.match(keys)
        return replace(match, tiers=tuple(TierHit(self.tier, hit.count, hit.age_s) for hit in match.tiers))

    async def load(self, refs: Sequence[RecordRef], into: Sequence[memoryview]) -> Loaded:
        """See `KVStore.load`."""
        loaded = await self._index.load(refs, into)
        await self._reads.move(loaded.count * self._block_nbytes, self.clock)
        return loaded

    async def save(self, records: Sequence[KVRecord]) -> None:
        """See `KVStore.save`."""
        before = self._index.stats().saved
        await self._index.save(records)
        await self._writes.move((self._index.stats().saved - before) * self._block_nbytes, self.clock)

    async def touch(self, keys: Sequence[BlockKey], retention: Retention) -> Sequence[BlockKey]:
        """See `KVStore.touch`."""
        return await self._index.touch(keys, retention)

    async def successors(self, parent: BlockKey, most: int = 64) -> Sequence[tuple[int, ...]]:
        """See `KVStore.successors`."""
        return await self._index.successors(parent, most)

    async def forget(self, which: NamespaceFilter) -> Forgotten:
        """See `KVStore.forget`."""
        gone = await self._index.forget(which)
        return Forgotten(records=gone.records, nbytes=gone.records * self._meant_nbytes)

    def stats(self) -> KVStats:
        """See `KVStore.stats`; bytes are those of blocks as they would be."""
        stats = self._index.stats()
        nbytes = stats.nbytes // self._held_nbytes * self._meant_nbytes
        moved = int(stats.saved_nbytes * self._moved)
        return replace(
            stats,
            nbytes=nbytes,
            capacity_nbytes=self._capacity_nbytes,
            by_tier={self.tier: nbytes},
            saved_nbytes=moved,
            written_nbytes=moved,
        )


_TIERS = {"memory": "ram", "ssd": "ssd"}

_POLICY = ("default_ttl_s", "agent_ttl_s", "chat_ttl_s", "quotas", "tenant_quota_nbytes", "tenant_write_nbytes_per_s")


def modelled(store: Part[KVStore], speeds: Mapping[str, TierSpeed] = SPEEDS) -> Callable[[SimulatedExecutor], KVStore]:
    """What makes a model of a configured store, for the blocks of an executor.

    `memory` keeps its policy; `ssd`, which lets go of whole files by last use, is taken for LRU of the same capacity;
    `tiered` is the real one over models of its tiers.

    Raises:
        ConfigError: The store is of another kind.
    """
    for part in store.flat():
        if part.entry.name not in (*_TIERS, "tiered"):
            raise ConfigError(f"store {part.entry.name!r} cannot be simulated; known: memory, ssd, tiered")

    def make(executor: SimulatedExecutor) -> KVStore:
        return _modelled(store, executor, speeds)

    return make


def _modelled(store: Part[KVStore], executor: SimulatedExecutor, speeds: Mapping[str, TierSpeed]) -> KVStore:
    options, name = store.options, store.entry.name
    record_nbytes = FRAME_NBYTES + executor.layout.block_nbytes
    if name == "tiered":
        own = options.model_dump()
        tiers = [
            Tier(_modelled(part, executor, speeds), given["write"])
            for part, given in zip(store.nested, own["tiers"], strict=True)
        ]
        # Its limits are for records as they would be.
        meant = FRAME_NBYTES + executor.block_nbytes
        return TieredStore(
            tiers,
            queue_nbytes=max(record_nbytes, own["queue_nbytes"] // meant * record_nbytes),
            drain_s=own["drain_s"],
            timeout_s=own["timeout_s"] + executor.limits.num_slots * meant / SLOWEST_NBYTES_PER_S,
        )
    kept = options.model_dump(include={*_POLICY, "policy", "capacity_nbytes"})
    tier = _TIERS[name]
    return ModelledStore(
        tier,
        block_nbytes=executor.block_nbytes,
        block_tokens=executor.layout.block_size,
        record_nbytes=record_nbytes,
        speed=speeds[tier],
        durable=tier != "ram",
        **{"policy": "lru", **kept},
    )
