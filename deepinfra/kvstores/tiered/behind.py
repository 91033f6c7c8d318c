"""Write-behind: records wait in memory for their turn to be written to a slower tier."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from typing import NamedTuple

import anyio
from anyio.lowlevel import checkpoint

from deepinfra.core.ids import BlockKey
from deepinfra.core.kv import Forgotten, KVRecord, NamespaceFilter, RecordRef, Retention, TierStats
from deepinfra.interfaces.given import Clock
from deepinfra.kvstores.tiered.admission import Admission
from deepinfra.kvstores.tiered.guard import Guard
from deepinfra.kvstores.tiered.recent import Recent

__all__ = ("Behind",)

BATCH_NBYTES, BATCH_RECORDS = 8 << 20, 256
"""What is written to a tier at once."""

MOST_TOUCHES = 1 << 14
"""Keys whose use may wait to be told; the oldest is left out beyond it."""

KEYS_PER_TURN = 256
"""Keys looked up before the loop gets a turn: about 0.5 ms."""

TRUST_S = 60.0
"""How long what a tier wrote or delivered is believed to be there: it may expire, be evicted or forgotten unheard."""

POLL_S = 0.25
"""How often a tier that is passed by is looked at, so that a clock that is not the loop's is followed too."""


class _Waiting(NamedTuple):
    """A record, since when it waits, and how often the tier had forgotten something by then."""

    record: KVRecord
    since: float
    erasures: int


class _Written(NamedTuple):
    """What a tier has, or had: how long it was to keep it (`None`: another process said), and until when it has it."""

    retention: Retention | None
    until: float


class Behind:
    """The queue before one tier, and the task that empties it.

    Bounded by bytes: what comes when it is full is dropped, and so is everything behind it in its prefix, since a
    record whose parent is not there could never be matched. (Dropping the oldest instead would lose heads and keep
    tails.) Records that the tier has already are not queued; that they were used is told.
    """

    def __init__(self, guard: Guard, admission: Admission, capacity_nbytes: int, clock: Clock) -> None:
        self.guard = guard
        self.dropped = self.filtered = 0
        self._admission, self._capacity_nbytes, self._clock = admission, capacity_nbytes, clock
        self._waiting: OrderedDict[bytes, _Waiting] = OrderedDict()
        self._erasures = 0
        self._nbytes = 0
        self._touches: OrderedDict[BlockKey, tuple[Retention, float]] = OrderedDict()
        self._written: Recent[_Written] = Recent()
        self._left_out: Recent[bool] = Recent()  # whether a filter did it
        self._block_nbytes = 0  # the largest so far
        self._changed, self._idle = anyio.Event(), anyio.Event()
        self._idle.set()
        self._writing = anyio.Lock()
        self._scope = anyio.CancelScope(shield=True)  # the queue is emptied although everything else is cancelled

    # -- what comes in --------------------------------------------------------------------------------

    def wants(self, record: KVRecord, now: float) -> bool:
        """Whether `put` should be called with a copy of the record now; counts what is left out.

        What was given to one `save` has the same `now`: of what the tier has already it is told as of one use.
        """
        id_ = _id(record.ref)
        if record.ref.kind == "block":
            self._block_nbytes = max(self._block_nbytes, record.ref.nbytes)
        if id_ in self._waiting:  # a new life begins; if it is just being written, it is written again
            again = replace(self._waiting[id_].record, retention=record.retention)
            self._waiting[id_] = self._waiting[id_]._replace(record=again, since=now)
            return False
        written = self._written.get(id_)
        if written is not None:
            self._written.add(id_, written._replace(retention=record.retention))
        if written is not None and now < written.until:
            self._use(record.ref.key, record.retention, now)
            return False
        orphaned = self._left_out.get(_parent(record))
        filtered = orphaned if orphaned is not None else written is None and not self._admits(record, id_)
        full = self._nbytes + record.ref.nbytes > self._capacity_nbytes
        if filtered or orphaned is not None or full:
            self._leave_out(id_, filtered)
            return False
        return True

    def mark(self) -> None:
        """Records come: note what the tier had forgotten before."""
        self._erasures = self.guard.stats().erasures

    def put(self, record: KVRecord) -> None:
        """Queue a record whose data nobody else will change."""
        id_ = _id(record.ref)
        self._left_out.discard(id_)
        self._waiting[id_] = _Waiting(record, self._clock.wall(), self._erasures)
        self._nbytes += record.ref.nbytes
        self._wake()

    async def touch(self, keys: Sequence[BlockKey], retention: Retention) -> list[BlockKey]:
        """Queue the news that blocks of one sequence were used above.

        Returns:
            Those that were left out before and would be let in if they were offered in this order now, as many as there
            is room for. What is neither known to be here nor to have been left out counts as offered now.
        """
        wanted: list[BlockKey] = []
        now, traffic = self._clock.wall(), retention.traffic
        room = (self._capacity_nbytes - self._nbytes) // max(1, self._block_nbytes)
        may_be_here = traffic != "none" and (retention.disk or not self.guard.store.durable)
        whole = may_be_here and self.guard.up  # nothing before this key is missing for good
        for i, key in enumerate(keys):
            if i % KEYS_PER_TURN == 0:
                await checkpoint()
            self._use(key, retention, now)
            if not may_be_here:
                continue
            if self._left_out.get(key) is not None:
                whole = whole and len(wanted) < room and self._admission.admits_again(key, traffic)
                if whole:
                    wanted.append(key)
            elif key not in self._waiting and key not in self._written and self._admission.asks_for_two(traffic):
                self._left_out.add(key, True)
                whole = False
        return wanted

    def _use(self, key: BlockKey, retention: Retention, now: float) -> None:
        self._touches[key] = (retention, now)
        self._touches.move_to_end(key)
        if len(self._touches) > MOST_TOUCHES:
            self._touches.popitem(last=False)
        self._wake()

    def delivered(self, refs: Sequence[RecordRef]) -> None:
        """Note that the tier has these: offered again, they need not be written."""
        until = self._clock.wall() + TRUST_S
        for ref in refs:
            before = self._written.get(_id(ref))
            self._written.add(_id(ref), _Written(None if before is None else before.retention, until))
            self._left_out.discard(_id(ref))  # another process wrote it

    def used(self, refs: Sequence[RecordRef]) -> None:
        """Tell the tier, some time, that a faster one delivered these: they live on here too."""
        now = self._clock.wall()
        for ref in refs:
            written = self._written.get(_id(ref))
            if written is not None and written.retention is not None:
                self._use(ref.key, written.retention, now)

    def missed(self, keys: Sequence[BlockKey]) -> None:
        """The tier did not say that it holds these: offered again, they are given to it again, and it looks itself."""
        for key in keys:
            self._written.discard(key)
            self._written.discard(key + b"snapshot")

    def _admits(self, record: KVRecord, id_: bytes) -> bool:
        return self._admission.admits(record, seen=id_ in self._left_out)

    def _leave_out(self, id_: bytes, filtered: bool) -> None:
        self._left_out.add(id_, filtered)
        if filtered:
            self.filtered += 1
        else:
            self.dropped += 1

    # -- what goes out --------------------------------------------------------------------------------

    async def run(self) -> None:
        """Write until stopped."""
        with self._scope:
            while True:
                if not self._waiting and not self._touches and not self.guard.owed:
                    self._idle.set()
                    self._changed = anyio.Event()
                    await self._changed.wait()
                elif (wait_s := self.guard.wait_s) > 0:
                    await anyio.sleep(min(wait_s, POLL_S))
                else:
                    async with self._writing:
                        await self.guard.settle()
                        await self._tell()
                        await self._write()
        self.dropped += len(self._waiting)
        self._waiting.clear()
        self._nbytes = 0

    async def flush(self) -> None:
        """Wait until everything queued so far is written or dropped; a tier that is down is waited for."""
        while not self._idle.is_set():
            await self._idle.wait()

    async def end(self, deadline_s: float) -> None:
        """Empty the queue, for at most `deadline_s` and not if the tier is down, and stop."""
        with anyio.CancelScope(shield=True, deadline=anyio.current_time() + deadline_s):
            while not self._idle.is_set() and self.guard.up:
                with anyio.move_on_after(POLL_S):
                    await self._idle.wait()
        self._scope.cancel()

    async def forget(self, which: NamespaceFilter) -> Forgotten:
        """Forget what waits and what the tier holds."""
        async with self._writing:
            self._drop_forgotten()
            before = self.guard.stats().erasures
            waiting = [record for record, *_ in self._waiting.values() if _fits(record, which)]
            for record in waiting:
                self._take(record)
            nbytes = sum(record.ref.nbytes for record in waiting)
            self._written.clear()  # it holds keys, which do not say whose they are
            held = await self.guard.forget(which)
            erasures = self.guard.stats().erasures
            if erasures <= before + 1:  # ours, which the rest of the queue has nothing to do with
                for id_, one in self._waiting.items():
                    if one.erasures == before:
                        self._waiting[id_] = one._replace(erasures=erasures)
        self._wake()
        return Forgotten(records=held.records + len(waiting), nbytes=held.nbytes + nbytes)

    def stats(self) -> TierStats:
        """The tier's accounting and the queue's."""
        return TierStats(
            name=self.guard.name,
            up=self.guard.up,
            held=self.guard.stats(),
            failures=self.guard.failures,
            waiting=len(self._waiting),
            waiting_nbytes=self._nbytes,
            dropped=self.dropped,
            filtered=self.filtered,
        )

    def _wake(self) -> None:
        if self._idle.is_set():
            self._idle = anyio.Event()
        self._changed.set()

    async def _tell(self) -> None:
        touches, self._touches = self._touches, OrderedDict()
        for (retention, since), group in groupby(touches.items(), key=lambda pair: pair[1]):
            if (rest := self._rest(retention, since)) is not None:
                await self.guard.touch([key for key, _ in group], rest)

    async def _write(self) -> None:
        self._drop_forgotten()
        batch: list[_Waiting] = []
        nbytes = 0
        for one in self._waiting.values():
            if batch and (nbytes + one.record.ref.nbytes > BATCH_NBYTES or len(batch) == BATCH_RECORDS):
                break
            batch.append(one)
            nbytes += one.record.ref.nbytes
        if batch:
            await self._write_batch(batch)

    def _drop_forgotten(self) -> None:
        """Another process had the tier forget something since some of these came: it may have been they."""
        erasures = self.guard.stats().erasures
        for one in list(self._waiting.values()):
            if one.erasures != erasures:
                self._leave_out(self._take(one.record), filtered=False)

    async def _write_batch(self, batch: Sequence[_Waiting]) -> None:
        begun = self._clock.wall()
        rests = [self._rest(record.retention, since) for record, since, _ in batch]
        lives = zip(batch, rests, strict=True)
        done = await self.guard.save([replace(one.record, retention=rest) for one, rest in lives if rest is not None])
        for one, rest in zip(batch, rests, strict=True):
            record = one.record
            if done and self._waiting[_id(record.ref)] is not one:
                continue
            id_ = self._take(record)
            if done and rest is not None:
                life_s = TRUST_S if rest.ttl_s is None else min(TRUST_S, rest.ttl_s)
                self._written.add(id_, _Written(record.retention, begun + life_s))
            elif not done:
                self._leave_out(id_, filtered=False)
        if not done:
            for record, *_ in list(self._waiting.values()):
                if _parent(record) in self._left_out:
                    self._leave_out(self._take(record), filtered=False)

    def _rest(self, retention: Retention, since: float) -> Retention | None:
        """What is left of a life of a given length; `None`: nothing. A class's own life begins with the writing."""
        waited = self._clock.wall() - since
        if retention.ttl_s is None or waited < 1:
            return retention
        ttl_s, least_s = retention.ttl_s - waited, max(0.0, retention.least_s - waited)
        return replace(retention, ttl_s=ttl_s, least_s=least_s) if ttl_s > 0 else None

    def _take(self, record: KVRecord) -> bytes:
        id_ = _id(record.ref)
        del self._waiting[id_]
        self._nbytes -= record.ref.nbytes
        return id_


def _id(ref: RecordRef) -> bytes:
    return ref.key if ref.kind == "block" else ref.key + ref.kind.encode()


def _parent(record: KVRecord) -> bytes:
    """What must be there for this record to be of use."""
    return record.ref.key if record.ref.kind == "snapshot" else record.parent


def _fits(record: KVRecord, which: NamespaceFilter) -> bool:
    return which.matches(record.tenant, record.model, record.namespace)
