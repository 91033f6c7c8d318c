"""Wrappers that break what they wrap, reproducibly: what a store may do to an engine without hurting anybody."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from typing import Literal, Self

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
)
from deepinfra.interfaces.given import Clock, Offload
from deepinfra.interfaces.kvstore import KVStore

__all__ = ("BrokenStore", "FlakyStore")


class BrokenStore(KVStore):
    """A store that works until it is told to raise, to hang or to forget everything.

    Args:
        inner: The store that works; entered and left with this one.

    Attributes:
        mode: `works`; `raises` OSError from every call, which no store should; `hangs` until the call is cancelled.
        calls: How often it was called, by method.
    """

    def __init__(self, inner: KVStore) -> None:
        self.inner = inner
        self.durable, self.promotes = inner.durable, inner.promotes
        self.mode: Literal["works", "raises", "hangs"] = "works"
        self.calls: Counter[str] = Counter()

    def give(self, clock: Clock, offload: Offload) -> None:
        """See `Component.give`."""
        super().give(clock, offload)
        self.inner.give(clock, offload)

    @asynccontextmanager
    async def __asynccontextmanager__(self) -> AsyncGenerator[Self]:
        async with self.inner:
            yield self

    async def match(self, keys: Sequence[BlockKey]) -> Match:
        """See `KVStore.match`."""
        await self._called("match")
        return await self.inner.match(keys)

    async def load(self, refs: Sequence[RecordRef], into: Sequence[memoryview]) -> Loaded:
        """See `KVStore.load`."""
        await self._called("load")
        return await self.inner.load(refs, into)

    async def save(self, records: Sequence[KVRecord]) -> None:
        """See `KVStore.save`."""
        await self._called("save")
        await self.inner.save(records)

    async def touch(self, keys: Sequence[BlockKey], retention: Retention) -> Sequence[BlockKey]:
        """See `KVStore.touch`."""
        await self._called("touch")
        return await self.inner.touch(keys, retention)

    async def successors(self, parent: BlockKey, most: int = 64) -> Sequence[tuple[int, ...]]:
        """See `KVStore.successors`."""
        await self._called("successors")
        return await self.inner.successors(parent, most)

    async def forget(self, which: NamespaceFilter) -> Forgotten:
        """See `KVStore.forget`."""
        await self._called("forget")
        return await self.inner.forget(which)

    def stats(self) -> KVStats:
        """The inner store's."""
        return self.inner.stats()

    async def _called(self, method: str) -> None:
        self.calls[method] += 1
        if self.mode == "raises":
            raise OSError("broken on purpose")
        if self.mode == "hangs":
            await anyio.sleep_forever()


class FlakyStore(KVStore):
    """A store that lies, truncates, corrupts, mixes up, stalls and forgets.

    Every fault strikes independently with probability `rate`: `match` claims keys that are not held (`lie`) or drops
    the end of a run (`shorten`); `load` delivers fewer records (`truncate`), flips a bit (`flip`), puts another
    record's bytes under a key (`swap`), says it delivered what it never wrote (`phantom`); `save` drops the rest of a
    batch (`drop`); each call stalls for up to five turns of the loop (`stall`).

    Args:
        inner: The store to be broken; entered and left with this one.
        rng: Where the faults come from; equal seeds and equal calls give equal faults.
        rate: Probability of each fault, between 0 and 1.
        kinds: Which faults happen; empty for all.

    Attributes:
        injected: How often each fault struck, so that a test can show that it tested something.
    """

    KINDS = frozenset(("lie", "shorten", "truncate", "flip", "swap", "phantom", "drop", "stall"))

    def __init__(
        self, inner: KVStore, rng: random.Random, *, rate: float = 0.2, kinds: frozenset[str] = frozenset()
    ) -> None:
        if unknown := kinds - self.KINDS:
            raise ValueError(f"no fault is named {sorted(unknown)}; known: {sorted(self.KINDS)}")
        self.inner = inner
        self.durable, self.promotes = inner.durable, inner.promotes
        self.injected: Counter[str] = Counter()
        self._rng = rng
        self._rate = rate
        self._kinds = kinds or self.KINDS
        self._seen: dict[RecordRef, None] = {}  # records ever saved, in order: what lies and swaps are made of

    def give(self, clock: Clock, offload: Offload) -> None:
        """See `Component.give`."""
        super().give(clock, offload)
        self.inner.give(clock, offload)

    @asynccontextmanager
    async def __asynccontextmanager__(self) -> AsyncGenerator[Self]:
        async with self.inner:
            yield self

    async def match(self, keys: Sequence[BlockKey]) -> Match:
        """Match, then perhaps claim more or less than is held."""
        await self._stall()
        match = await self.inner.match(keys)
        refs = list(match.refs)
        if refs and self._strikes("shorten"):
            del refs[self._rng.randrange(len(refs)) :]
        if len(refs) < len(keys) and self._seen and self._strikes("lie"):
            nbytes = next(iter(self._seen)).nbytes
            more = self._rng.randint(1, len(keys) - len(refs))
            refs += [RecordRef(key, "block", nbytes) for key in keys[len(refs) : len(refs) + more]]
        tiers = (TierHit("flaky", len(refs), 0.0),) if refs else ()
        snapshots = tuple(i for i in match.snapshots if i < len(refs))
        return Match(refs=tuple(refs), tiers=tiers, snapshots=snapshots, missed=match.missed)

    async def load(self, refs: Sequence[RecordRef], into: Sequence[memoryview]) -> Loaded:
        """Load, then perhaps deliver less, more or something else."""
        await self._stall()
        count = (await self.inner.load(refs, into)).count
        if count and self._strikes("truncate"):
            count = self._rng.randrange(count)
        for i in range(count):
            if refs[i].nbytes and self._strikes("flip"):
                into[i][self._rng.randrange(refs[i].nbytes)] ^= 1 << self._rng.randrange(8)
            if self._strikes("swap"):
                await self._swap(refs[i], into[i])
        if count < len(refs) and self._strikes("phantom"):
            count = self._rng.randint(count + 1, len(refs))
        await self._stall()
        return Loaded(count=count, stopped="" if count == len(refs) else "absent")

    async def save(self, records: Sequence[KVRecord]) -> None:
        """Save, perhaps only the first few."""
        await self._stall()
        kept = list(records)
        if kept and self._strikes("drop"):
            del kept[self._rng.randrange(len(kept)) :]
        self._seen.update(dict.fromkeys(record.ref for record in records))
        await self.inner.save(kept)
        await self._stall()

    async def touch(self, keys: Sequence[BlockKey], retention: Retention) -> Sequence[BlockKey]:
        """See `KVStore.touch`."""
        await self._stall()
        return await self.inner.touch(keys, retention)

    async def successors(self, parent: BlockKey, most: int = 64) -> Sequence[tuple[int, ...]]:
        """See `KVStore.successors`."""
        await self._stall()
        return await self.inner.successors(parent, most)

    async def forget(self, which: NamespaceFilter) -> Forgotten:
        """Forget faithfully."""
        await self._stall()
        return await self.inner.forget(which)

    def stats(self) -> KVStats:
        """The inner store's."""
        return self.inner.stats()

    def _strikes(self, kind: str) -> bool:
        if kind not in self._kinds or self._rng.random() >= self._rate:
            return False
        self.injected[kind] += 1
        return True

    async def _stall(self) -> None:
        if self._strikes("stall"):
            for _ in range(self._rng.randint(1, 5)):
                await checkpoint()

    async def _swap(self, ref: RecordRef, buffer: memoryview) -> None:
        others = [other for other in self._seen if other.nbytes == ref.nbytes and other != ref]
        if others:
            await self.inner.load([self._rng.choice(others)], [buffer])
