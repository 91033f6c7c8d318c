"""Whoever is refused and comes again when told to gets in: a crowd of clients before one pool, in virtual time."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from heapq import heappop, heappush

import pytest

from deepinfra.core.cost import StepCost, StepWork
from deepinfra.core.ids import SeqId
from deepinfra.core.step import DoneRow, Job
from deepinfra.interfaces.scheduler import Scheduler
from deepinfra.schedulers import Bucketed, Fcfs
from deepinfra.schedulers.admission import Amount
from deepinfra.schedulers.promises import MAX_PROMISES, Promises
from deepinfra.testing.mini_pool import MiniPool

COST = StepCost(step=0.03, chunk_token=0.001, decode_row=0.002)
QUEUE = 32
NEW = 16
PER_S = 30.0
"""Several times what the pool can serve."""


class Crowd(MiniPool):
    """Clients that come at random for some time; of those refused a share waits, in whole seconds, and comes once more.

    Steps take what `COST` says, and clients come in the middle of them.
    """

    def __init__(self, make: Callable[[], Scheduler], *, patient: float, seconds: float) -> None:
        super().__init__(make, max_step_tokens=512, max_seqs=8, num_blocks=2000, block_size=16, drafts=False)
        self.schedulers = self.schedulers[:1]
        self.draw, self.patient = random.Random(1), patient
        self.coming: list[tuple[float, int, bool]] = []
        self.again: list[bool] = []
        self.waits: list[float] = []
        self.most = self.served = self.idle = 0
        self._took_s = 0.0
        at, number = self.clock.now(), 0
        self.until = at + seconds
        while (at := at + self.draw.expovariate(PER_S)) < self.until:
            heappush(self.coming, (at, number := number + 1, False))

    def seconds(self, rows: Sequence[DoneRow]) -> float:
        self._took_s = COST.seconds(StepWork.of(rows)) * self.draw.lognormvariate(0.0, 0.05)
        self.served += sum(row.sampled for row in rows)
        return self._took_s

    def elapse(self, seconds: float) -> None:
        end = self.clock.now() + (self._took_s if seconds else 0.05)
        while self.coming and self.coming[0][0] <= end:
            at, prompt, second = heappop(self.coming)
            self.clock.advance(max(0.0, at - self.clock.now()))
            seq = self.add(20 + prompt % 50, NEW, prompt=prompt)
            if second:
                self.again.append(seq is not None)
            elif seq is None:
                self.waits.append(self.told_s)
                if self.draw.random() < self.patient:
                    heappush(self.coming, (self.clock.now() + math.ceil(self.told_s) + 0.01, prompt, True))
            if seq is not None:
                self.most = max(self.most, sum(bucket.waiting for bucket in self.schedulers[0].stats().buckets))
        self.clock.advance(end - self.clock.now())

    def run(self) -> Crowd:
        """Until the time is over; then until all have come and gone."""
        while self.clock.now() < self.until:
            self.step()
        self.in_time = self.served
        while self.coming or self.seqs:
            self.step()
        return self


def crowd(make: Callable[..., Scheduler], patient: float, seconds: float = 12.0) -> Crowd:
    return Crowd(lambda: make(max_queue=QUEUE), patient=patient, seconds=seconds).run()


@pytest.mark.parametrize(("make", "patient"), [(Fcfs, 0.1), (Bucketed, 1.0)])
def test_who_waits_as_told_and_comes_once_more_gets_in(make: Callable[..., Scheduler], patient: float) -> None:
    _gets_in(crowd(make, patient))


@pytest.mark.slow
@pytest.mark.parametrize("make", [Fcfs, Bucketed])
@pytest.mark.parametrize("patient", [0.1, 0.5, 1.0])
def test_who_waits_as_told_and_comes_once_more_gets_in_for_a_minute(
    make: Callable[..., Scheduler], patient: float
) -> None:
    _gets_in(crowd(make, patient, 60.0))


def _gets_in(found: Crowd) -> None:
    assert len(found.waits) > 200
    assert len(found.again) > 0.05 * len(found.waits)
    assert sum(found.again) >= 0.8 * len(found.again)
    assert found.most <= QUEUE


def test_a_crowd_that_does_not_come_again_keeps_nobody_waiting() -> None:
    waiting, leaving = crowd(Bucketed, 1.0), crowd(Bucketed, 0.0)
    assert max(leaving.waits[-50:]) < 5.0 < max(waiting.waits[-50:])
    assert leaving.in_time >= 0.97 * waiting.in_time


def job(prompt: int, tenant: str = "public") -> Job:
    return Job(SeqId(1), 10, 0, 4, 0.0, tenant, prompt=prompt)


def test_all_are_expected_until_some_did_not_come() -> None:
    promises = Promises()
    for prompt in range(1, 11):
        promises.make(job(prompt), Amount(1, 10, 50.0), 0.0, 4.0)
    assert promises.expected(0.0) == Amount(10, 100, 500.0)
    assert (promises.due(job(3)), promises.due(job(11)), promises.due(job(3, "other"))) == (4.0, None, None)
    for prompt in range(1, 6):
        promises.came(job(prompt))
    assert promises.expected(4.0) == Amount(5, 50, 250.0)
    assert promises.expected(7.0) == Amount()  # who did not come by now comes as a newcomer
    assert promises.due(job(7)) is None
    promises.make(job(99), Amount(100, 1000, 5000.0), 7.0, 4.0)
    assert 40 < promises.expected(7.0).requests < 65


def test_promises_are_bounded_and_the_unknown_are_promised_nothing() -> None:
    promises = Promises()
    for prompt in range(1, MAX_PROMISES + 100):
        promises.make(job(prompt), Amount(1, 10, 50.0), 0.0, 4.0)
    promises.make(job(0), Amount(1, 10, 50.0), 0.0, 4.0)
    assert promises.expected(0.0).requests == MAX_PROMISES
    assert promises.due(job(0)) is None
    assert promises.expected(100.0) == Amount()


def test_who_comes_too_early_is_told_the_same_time_again() -> None:
    pool = MiniPool(lambda: Fcfs(max_queue=4), max_step_tokens=64, max_seqs=1, num_blocks=200, drafts=False)
    prompt = 0
    while pool.add(8, 50, prompt=(prompt := prompt + 1)) is not None:
        pool.step() if prompt < 3 else None
    told_s = pool.told_s
    pool.clock.advance(0.25 * told_s)
    assert pool.add(8, 50, prompt=prompt) is None
    assert pool.told_s == pytest.approx(0.75 * told_s)
