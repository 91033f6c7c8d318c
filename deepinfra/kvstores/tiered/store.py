"""TieredStore: several stores as one, the fastest first."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from typing import Self

import anyio
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
    TierStats,
)
from deepinfra.errors import ConfigError
from deepinfra.interfaces.given import Clock, Offload
from deepinfra.interfaces.kvstore import KVStore
from deepinfra.kvstores.tiered.admission import Admission, WriteRules, parse_rule
from deepinfra.kvstores.tiered.behind import Behind
from deepinfra.kvstores.tiered.guard import Guard

__all__ = ("Tier", "TieredStore")

COPY_NBYTES = 1 << 20
"""Bytes copied before the loop gets a turn: about 0.1 ms."""

MOST_RUNS = 64
"""Pieces, each from another tier than the one before, of which one match is made; the rest is a miss."""


@dataclass(frozen=True, slots=True)
class Tier:
    """A store as a tier.

    Attributes:
        store: Entered and left with the tiers around it.
        write: What it is given: `all`, `second-touch` (what is asked for twice), `prefix-depth:N` (the first N blocks
            of a prefix), or one of these by class of traffic.
    """

    store: KVStore
    write: WriteRules = "all"


class TieredStore(KVStore):
    """Several stores as one: what the first does not hold is looked for in the next.

    Saved records are in the first tier when `save` returns; they are written to the others by tasks of their own,
    from one copy in memory, and what waits is written on leaving, within a deadline. A tier that raises, hangs or is
    gone is passed by, tried again from time to time, and costs no more than its own hits. What is loaded is offered
    to `save` again (`promotes`), so that faster tiers keep it. Records of `Retention.disk` false are given to no
    durable tier.

    Args:
        tiers: Fastest first; a `Tier` says what is written to it.
        queue_nbytes: Bytes that may wait for each tier but the first; what comes when they do is not written there.
        drain_s: How long leaving the store may take to write what waits.
        timeout_s: How long a call of a tier may take; more for many bytes, less for `match`.
    """

    promotes = True

    def __init__(
        self,
        tiers: Sequence[KVStore | Tier],
        *,
        queue_nbytes: int = 256 << 20,
        drain_s: float = 10.0,
        timeout_s: float = 5.0,
    ) -> None:
        self.tiers = tuple(tier if isinstance(tier, Tier) else Tier(tier) for tier in tiers)
        if len({id(tier.store) for tier in self.tiers}) < len(self.tiers) or not self.tiers:
            raise ConfigError("tiers must be one or more stores, each of them once")
        for i, tier in enumerate(self.tiers):
            for rule in (tier.write,) if isinstance(tier.write, str) else tier.write.values():
                try:
                    filters = parse_rule(rule).kind != "all"
                except ValueError as error:
                    raise ConfigError(f"tiers.{i}.write: {error}") from None
                if i == 0 and filters:
                    raise ConfigError("tiers.0.write: the first tier takes every record")
        self.durable = all(tier.store.durable for tier in self.tiers)
        self._queue_nbytes, self._drain_s, self._timeout_s = queue_nbytes, drain_s, timeout_s
        self._reset()

    def _reset(self) -> None:
        self._guards: list[Guard] = []
        for tier in self.tiers:
            guard = Guard(
                tier.store, type(tier.store).__name__.removesuffix("Store").lower(), self._timeout_s, self.clock
            )
            if len(own := list(guard.stats().by_tier)) == 1:
                guard.name = own[0]
            if guard.name in [other.name for other in self._guards]:
                guard.name += f"-{len(self._guards) + 1}"
            self._guards.append(guard)
        self._behind: list[Behind] = []
        self._snapshots = False
        self._hits = self._misses = 0

    def give(self, clock: Clock, offload: Offload) -> None:
        """See `Component.give`."""
        super().give(clock, offload)
        for tier in self.tiers:
            tier.store.give(clock, offload)

    @asynccontextmanager
    async def __asynccontextmanager__(self) -> AsyncGenerator[Self]:
        try:
            async with AsyncExitStack() as stack:
                for tier in self.tiers:
                    await stack.enter_async_context(tier.store)
                self._reset()
                pairs = zip(self._guards[1:], self.tiers[1:], strict=True)
                self._behind = [
                    Behind(guard, Admission(tier.write), self._queue_nbytes, self.clock) for guard, tier in pairs
                ]
                tasks = await stack.enter_async_context(anyio.create_task_group())
                for behind in self._behind:
                    tasks.start_soon(behind.run)
                try:
                    yield self
                finally:
                    await self._end()
        except BaseExceptionGroup as group:
            if len(group.exceptions) > 1:
                raise
            raise group.exceptions[0] from group.exceptions[0].__cause__  # no task raises: it came from the caller
        finally:
            self._reset()

    async def _end(self) -> None:
        with anyio.CancelScope(shield=True):
            async with anyio.create_task_group() as tasks:
                for behind in self._behind:
                    tasks.start_soon(behind.end, self._drain_s)

    async def flush(self) -> None:
        """Wait until every tier has what it was given so far; one that is down is waited for."""
        for behind in self._behind:
            await behind.flush()

    # -- reading ----------------------------------------------------------------------------------------

    async def match(self, keys: Sequence[BlockKey]) -> Match:
        """See `KVStore.match`. A run may go from one tier to the next, and back to a faster one."""
        refs: list[RecordRef] = []
        hits: list[TierHit] = []
        snapshots: set[int] = set()
        ended: dict[int, int] = {}  # tier -> where its last run ended
        why = [""] * len(self._guards)
        for _ in range(MOST_RUNS):
            at = len(refs)
            for i, guard in enumerate(self._guards):
                if at == len(keys) or ended.get(i) == at:
                    continue
                match = await guard.match(keys[at:])
                ended[i], why[i] = at + len(match.refs), match.missed
                self._missed(i, keys[ended[i] :])
                if match.refs:
                    refs += match.refs
                    hits += _hits(guard.name, match)
                    snapshots.update(at + index for index in match.snapshots)
                    break
            if len(refs) == at:
                break
        self._hits += len(refs)
        self._misses += len(keys) - len(refs)
        self._snapshots = self._snapshots or bool(snapshots)
        if self._snapshots and refs:
            snapshots |= await self._more_snapshots(keys[: len(refs)])
        missed = "" if len(refs) == len(keys) else _reason(why)
        return Match(refs=tuple(refs), tiers=tuple(hits), snapshots=tuple(sorted(snapshots)), missed=missed)

    async def _more_snapshots(self, keys: Sequence[BlockKey]) -> set[int]:
        """Snapshots of blocks that a faster tier holds without."""
        found: set[int] = set()
        for guard in self._guards:
            found.update((await guard.match(keys)).snapshots)
        return found

    def _missed(self, tier: int, keys: Sequence[BlockKey]) -> None:
        if tier > 0 and self._behind:
            self._behind[tier - 1].missed(keys)

    async def load(self, refs: Sequence[RecordRef], into: Sequence[memoryview]) -> Loaded:
        """See `KVStore.load`. Each piece comes from the fastest tier that delivers it."""
        await checkpoint()
        done = 0
        why = [""] * len(self._guards)
        while done < len(refs):
            before = done
            for i, guard in enumerate(self._guards):
                loaded = await guard.load(refs[done:], into[done:])
                if loaded.count:
                    self._used(i, refs[done : done + loaded.count])
                done, why[i] = done + loaded.count, loaded.stopped
                if done == len(refs):
                    return Loaded(count=done)
            if done == before:
                return Loaded(count=done, stopped=_reason(why))
        return Loaded(count=done)

    def _used(self, tier: int, refs: Sequence[RecordRef]) -> None:
        if tier > 0:
            self._behind[tier - 1].delivered(refs)
        for behind in self._behind[tier:]:
            behind.used(refs)

    async def successors(self, parent: BlockKey, most: int = 64) -> Sequence[tuple[int, ...]]:
        """See `KVStore.successors`."""
        found: dict[tuple[int, ...], None] = {}
        for guard in self._guards:
            if len(found) < most:
                found.update(dict.fromkeys(await guard.successors(parent, most)))
        return tuple(found)[:most]

    # -- writing ----------------------------------------------------------------------------------------

    async def save(self, records: Sequence[KVRecord]) -> None:
        """See `KVStore.save`; the first tier has the records when this returns."""
        first: list[KVRecord] = []
        for behind in self._behind:
            behind.mark()
        copied, now = COPY_NBYTES, self.clock.wall()
        for record in records:
            if copied >= COPY_NBYTES:
                copied = 0
                await checkpoint()
            if record.retention.traffic == "none":
                continue
            self._snapshots = self._snapshots or record.ref.kind == "snapshot"
            wanted = [
                behind for behind in self._behind if _may_have(behind.guard, record) and behind.wants(record, now)
            ]
            if wanted:
                record = replace(record, data=memoryview(bytes(record.data)))
                copied += record.ref.nbytes
                for behind in wanted:
                    behind.put(record)
            if _may_have(self._guards[0], record):
                first.append(record)
        if first:
            await self._guards[0].save(first)

    async def touch(self, keys: Sequence[BlockKey], retention: Retention) -> Sequence[BlockKey]:
        """See `KVStore.touch`; slower tiers are told later.

        What the device or a fast tier holds is not saved again, so this is how a filter learns of a second use.
        """
        wanted = set(await self._guards[0].touch(keys, retention))
        for behind in self._behind:
            wanted.update(await behind.touch(keys, retention))
        return [key for key in keys if key in wanted]

    async def forget(self, which: NamespaceFilter) -> Forgotten:
        """See `KVStore.forget`. A tier that is down forgets when it is back, before anything else is asked of it.

        Records that several tiers hold count once, as far as the largest of them tells; their bytes count in each.
        """
        done = [await self._guards[0].forget(which)]
        done += [await behind.forget(which) for behind in self._behind]
        return Forgotten(records=max(each.records for each in done), nbytes=sum(each.nbytes for each in done))

    def stats(self) -> KVStats:
        """See `KVStore.stats`; `records` are those of the tier that holds most, everything else is summed."""
        first = self._guards[0]
        tiers = (
            TierStats(name=first.name, up=first.up, held=first.stats(), failures=first.failures),
            *(behind.stats() for behind in self._behind),
        )
        held = [tier.held for tier in tiers]
        capacities = [stats.capacity_nbytes for stats in held]
        return KVStats(
            records=max(stats.records for stats in held),
            nbytes=sum(stats.nbytes for stats in held),
            capacity_nbytes=sum(capacities) if all(capacities) else 0,
            hits=self._hits,
            misses=self._misses,
            saved=sum(stats.saved for stats in held),
            dropped=sum(stats.dropped for stats in held) + sum(tier.dropped for tier in tiers),
            damaged=sum(stats.damaged for stats in held),
            evicted=sum(stats.evicted for stats in held),
            expired=sum(stats.expired for stats in held),
            by_tier={tier.name: tier.held.nbytes for tier in tiers},
            renewed=sum(stats.renewed for stats in held),
            saved_nbytes=sum(stats.saved_nbytes for stats in held),
            written_nbytes=sum(stats.written_nbytes for stats in held),
            tiers=tiers,
            erasures=sum(stats.erasures for stats in held),
        )


def _hits(name: str, match: Match) -> list[TierHit]:
    if sum(hit.count for hit in match.tiers) == len(match.refs):
        return list(match.tiers)
    return [TierHit(name, len(match.refs), 0.0)]


def _reason(why: Sequence[str]) -> str:
    """Why nobody has a record: a tier that cannot be asked may have it; else the word of the slowest that has one."""
    if "tier-down" in why:
        return "tier-down"
    return next((word for word in reversed(why) if word not in ("", "absent")), "absent")


def _may_have(guard: Guard, record: KVRecord) -> bool:
    return record.retention.disk or not guard.store.durable
