"""Who is let in, who makes room, and how long the others are told to wait: in virtual time."""

from __future__ import annotations

import copy
import math
import random
import statistics
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepinfra.core.cost import StepCost, StepWork
from deepinfra.core.ids import SeqId
from deepinfra.core.request import PUBLIC
from deepinfra.core.step import DoneRow, Job, StepReport, StepView
from deepinfra.errors import Overloaded
from deepinfra.interfaces.scheduler import Scheduler
from deepinfra.schedulers import Bucketed, Fcfs
from deepinfra.schedulers.admission import UNKNOWN_OUT, Admission, OutputGuess
from deepinfra.schedulers.predictor import READY
from deepinfra.schedulers.tenants import Tenant
from deepinfra.testing.clock import ManualClock
from deepinfra.testing.mini_pool import MiniPool

COST = StepCost(step=0.03, chunk_token=0.0012, chunk_read=1e-6, decode_row=0.002, decode_read=5e-6, draft=0.002)

Shape = Callable[[random.Random], tuple[int, int]]

Asked = tuple[int, int, str]
"""Tokens of a prompt, tokens allowed of its answer, and whose it is."""


class Street(MiniPool):
    """A pool with a queue before its door: steps take what `COST` says, and sequences arrive in the middle of them."""

    def __init__(
        self,
        make: Callable[[], Scheduler],
        shape: Shape,
        *,
        seed: int,
        short: float = 1.0,
        tenants: Sequence[str] = (PUBLIC,),
    ) -> None:
        super().__init__(make, max_step_tokens=512, max_seqs=16, num_blocks=4000, block_size=16)
        self.schedulers = self.schedulers[:1]
        self.draw, self.shape, self.short, self.tenants = random.Random(seed), shape, short, tenants
        self.next_s = self.clock.now()
        self.step_ends_s = 0.0
        self.told: list[tuple[float, Asked, Street]] = []
        self.open = True
        self._took_s = 0.0

    def seconds(self, rows: Sequence[DoneRow]) -> float:
        self._took_s = COST.seconds(StepWork.of(rows)) * self.draw.lognormvariate(0.0, 0.05)
        return self._took_s

    def elapse(self, seconds: float) -> None:
        self.step_ends_s = self.clock.now() + (self._took_s if seconds else 0.05)
        while self.open and self.next_s <= self.step_ends_s:
            self.clock.advance(max(0.0, self.next_s - self.clock.now()))
            self.knock((*self.shape(self.draw), self.draw.choice(self.tenants)))
            self.next_s += self.draw.expovariate(4.0)
        self.clock.advance(self.step_ends_s - self.clock.now())

    def knock(self, asked: Asked) -> None:
        """Somebody arrives; of those who are refused every 25th is remembered, with all that was so at that moment."""
        tokens, new, tenant = asked
        scheduler = self.schedulers[0]
        try:
            scheduler.add(Job(SeqId(10**9), tokens, 0, new, self.clock.now(), tenant))
        except Overloaded as error:
            if self.draw.random() < 0.04:
                told, self.told = self.told, []
                told.append((error.retry_after_s, asked, copy.deepcopy(self)))
                self.told = told
            return
        scheduler.finish(SeqId(10**9))
        seq = self.add(tokens, new, tenant=tenant)
        if seq is not None:
            self.seqs[seq].left = max(1, int(self.short * new))

    def first_admitted_after(self, asked: Asked) -> float:
        """Seconds until the same would be let in if nobody else came."""
        began_s, self.open = self.clock.now(), False
        self.clock.advance(self.step_ends_s - began_s)
        self.flush()
        tokens, new, tenant = asked
        while self.add(tokens, new, tenant=tenant) is None:
            self.step()
        return self.clock.now() - began_s


def chat(draw: random.Random) -> tuple[int, int]:
    return draw.choice([50, 100, 200, 400]), draw.choice([50, 100, 200])


def mixed(draw: random.Random) -> tuple[int, int]:
    return draw.choice([50, 100, 200, 400, 400, 2000, 6000]), draw.choice([20, 50, 100, 200])


def prompts(draw: random.Random) -> tuple[int, int]:
    return draw.choice([200, 1000, 2000]), 4


LIMITS: list[dict[str, float]] = [
    {"max_queue": 64},
    {"max_queue": 10**6, "max_queue_tokens": 30_000},
    {"max_queue": 10**6, "max_queue_s": 40.0},
]


class Wait(NamedTuple):
    """What somebody who was refused was told, and how long it was."""

    told_s: float
    true_s: float


def waits(
    make: Callable[[], Scheduler],
    shape: Shape,
    *,
    seed: int,
    seconds: float,
    short: float = 1.0,
    tenants: Sequence[str] = (PUBLIC,),
    keep: int = 8,
) -> list[Wait]:
    """Some who were refused, the last ones."""
    street = Street(make, shape, seed=seed, short=short, tenants=tenants)
    end = street.clock.now() + seconds
    while street.clock.now() < end:
        street.step()
    return [Wait(told, then.first_admitted_after(asked)) for told, asked, then in street.told[-keep:]]


def hold(found: Sequence[Wait], least: int) -> None:
    """What was told is right for most, and for all not half of the truth once it is in a header."""
    assert len(found) > least
    assert statistics.median(abs(wait.told_s / wait.true_s - 1.0) for wait in found) <= 0.25
    assert min(max(1.0, math.ceil(wait.told_s)) / wait.true_s for wait in found) >= 0.5


def all_waits(seeds: Sequence[int], seconds: float) -> list[Wait]:
    return [
        wait
        for make in (Fcfs, Bucketed)
        for shape in (chat, mixed, prompts)
        for limits in LIMITS
        for seed in seeds
        for wait in waits(lambda make=make, limits=limits: make(**limits), shape, seed=seed, seconds=seconds)
    ]


def test_the_time_told_is_when_the_same_request_is_first_let_in():
    found = [
        wait
        for make, limits in ((Bucketed, LIMITS[0]), (Fcfs, LIMITS[1]), (Bucketed, LIMITS[2]))
        for wait in waits(lambda make=make, limits=limits: make(**limits), mixed, seed=1, seconds=45.0, keep=3)
    ]
    hold(found, 5)


@pytest.mark.slow
def test_the_time_told_is_when_the_same_request_is_first_let_in_for_every_limit_and_traffic():
    found = all_waits(seeds=(1,), seconds=80.0)
    hold(found, 80)


def test_answers_that_end_early_are_expected_to_after_some_have():
    hold(waits(lambda: Fcfs(max_queue=64), chat, seed=2, seconds=400.0, short=0.3), 3)


def test_answers_with_a_limit_and_without_are_expected_by_their_own_kind():
    guess = OutputGuess()
    limited, open_ended, other = (Job(SeqId(1), 10, 0, max_new, 0.0) for max_new in (100, 128_000, 4_000))
    assert guess.left(open_ended, 0) == UNKNOWN_OUT
    for _ in range(150):
        guess.ended(100, limited.max_new)
        guess.ended(300, open_ended.max_new)
    assert guess.left(limited, 0) == pytest.approx(100.0)
    assert guess.left(open_ended, 0) == pytest.approx(300.0)
    assert guess.left(open_ended, 200) == pytest.approx(100.0)
    assert 100.0 < guess.left(other, 0) < 300.0


TOWN = ("flood",) * 8 + ("team", "team", "modest")
TENANT_LIMITS: list[dict[str, Any]] = [
    {"max_queue": 64},
    {"max_queue": 10**6, "tenants": {"*": Tenant(max_queue=24)}},
    {"max_queue": 10**6, "tenants": {"*": Tenant(max_queue_tokens=8000)}},
    {"max_queue": 10**6, "tenants": {"*": Tenant(max_queue=16, max_running=3)}},
    {"max_queue": 10**6, "tenants": {"*": Tenant(max_queue=24), "flood": Tenant(max_queue=40, weight=4.0)}},
]


def town(
    make: Callable[..., Scheduler], limits: dict[str, Any], shape: Shape, *, seconds: float, keep: int
) -> list[Wait]:
    return waits(lambda: make(**limits), shape, seed=1, seconds=seconds, tenants=TOWN, keep=keep)


def test_so_it_is_with_tenants_and_limits_of_their_own():
    found = [
        wait
        for make, limits in ((Bucketed, TENANT_LIMITS[1]), (Fcfs, TENANT_LIMITS[2]), (Bucketed, TENANT_LIMITS[3]))
        for wait in town(make, limits, chat, seconds=33.0, keep=4)
    ]
    hold(found, 5)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_so_it_is_with_tenants_for_every_limit_and_traffic():
    found = [
        wait
        for make in (Fcfs, Bucketed)
        for limits in TENANT_LIMITS
        for shape in (chat, mixed)
        for wait in town(make, limits, shape, seconds=60.0, keep=8)
    ]
    hold(found, 60)


# -- one at a time --------------------------------------------------------------------------------


def scheduler(make: Callable[..., Scheduler] = Bucketed, **limits: float) -> Scheduler:
    made = make(**limits)
    made.give(ManualClock(), made.offload)
    for step in range(3 * READY):
        rows = (DoneRow(SeqId(10**6), 0, 16 + 16 * step, 0, 0, False),)
        made.commit(StepReport(step, COST.seconds(StepWork.of(rows)), rows))
    return made


def add(made: Scheduler, seq: int, tokens: int = 100, priority: int = 0) -> bool:
    try:
        made.add(Job(SeqId(seq), tokens, 0, 10, 0.0, priority=priority))
    except Overloaded:
        return False
    return True


def shed(made: Scheduler) -> list[int]:
    return list(made.plan(StepView(0.0, 0, 4096, 0, 16, 1000, 1000, ())).shed)


@pytest.mark.parametrize("make", [Fcfs, Bucketed])
@pytest.mark.parametrize("limits", [{"max_queue": 8}, {"max_queue_tokens": 800}, {"max_queue_s": 1.1}])
def test_the_queue_is_full_at_each_limit(make: Callable[..., Scheduler], limits: dict[str, float]):
    made = scheduler(make, **limits)
    assert [add(made, seq) for seq in range(12)] == [True] * 8 + [False] * 4
    assert made.stats().refused == 4


@pytest.mark.parametrize("limits", [{"max_queue_tokens": 800}, {"max_queue_s": 1.0}])
def test_what_exceeds_a_limit_alone_is_let_in_when_nothing_waits(limits: dict[str, float]):
    made = scheduler(**limits)
    assert add(made, 1, tokens=5000)
    assert not add(made, 2)
    made.finish(SeqId(1))
    assert add(made, 2)
    assert not add(made, 3, tokens=5000)


def test_who_is_refused_is_told_what_waits():
    made = scheduler(max_queue=1)
    assert add(made, 1)
    with pytest.raises(Overloaded, match=r"^1 sequence with 100 prompt tokens is waiting"):
        made.add(Job(SeqId(2), 100, 0, 10, 0.0))


def test_a_full_queue_opens_again_at_three_quarters():
    made = scheduler(max_queue=8)
    assert [add(made, seq) for seq in range(9)] == [True] * 8 + [False]
    made.finish(SeqId(0))
    assert not add(made, 10)
    made.finish(SeqId(1))
    assert add(made, 11)


def test_a_giant_that_finds_no_room_closes_no_door():
    made = scheduler(max_queue_tokens=1000)
    assert add(made, 1, tokens=300)
    assert not add(made, 2, tokens=900)
    assert add(made, 3, tokens=300)


def test_the_newest_of_the_lowest_priority_makes_room_first():
    made = scheduler(max_queue=4)
    for seq, priority in enumerate([0, -1, -1, 0]):
        assert add(made, seq, priority=priority)
    assert not add(made, 4, priority=-1)
    order = []
    for seq in range(5, 10):
        if not add(made, seq, priority=1):
            break
        order += [seq for seq in shed(made) if seq not in order]
    assert order == [2, 1, 3, 0]
    assert made.stats().shed == 4


def test_nobody_makes_room_who_was_ever_started_or_is_about_to_be():
    made = scheduler(max_queue=2)
    assert add(made, 1)
    row = DoneRow(SeqId(1), 0, 50, 0, 0, True)
    made.commit(StepReport(0, 0.1, (row,)))
    made.commit(StepReport(1, 0.1, (), preempted=(SeqId(1),)))
    assert add(made, 2)
    view = StepView(0.0, 0, 4096, 1, 16, 1000, 1000, ())
    assert [grant.seq for grant in made.plan(view).run] == [1]
    assert add(made, 3, priority=1)
    assert shed(made) == [2]
    assert not add(made, 4, priority=1)


def test_one_whose_opening_came_to_nothing_makes_room_again():
    made = scheduler(max_queue=1)
    assert add(made, 1)
    view = StepView(0.0, 0, 4096, 1, 16, 1000, 1000, ())
    assert [grant.seq for grant in made.plan(view).run] == [1]
    assert not add(made, 2, priority=1)
    assert shed(made) == []
    assert add(made, 3, priority=1)
    assert shed(made) == [1]


def test_nobody_is_put_in_order_to_make_room_that_would_not_do(monkeypatch: pytest.MonkeyPatch):
    made = scheduler(max_queue_tokens=1000)
    assert all(add(made, seq, priority=seq % 2) for seq in range(10))
    counted, fits = [], Admission._fits
    monkeypatch.setattr(Admission, "_fits", lambda *args: counted.append(args) or fits(*args))
    assert not add(made, 10, tokens=600, priority=1)
    few = len(counted)
    assert add(made, 11, tokens=500, priority=1)
    assert len(counted) - few > few
    assert shed(made) == [8, 6, 4, 2, 0]


def test_one_that_has_waited_long_is_not_pushed_out_by_a_priority_that_its_wait_outweighs():
    made = scheduler(max_queue=1, aging_steps=4)
    assert add(made, 1)
    made.plan(StepView(0.0, 10, 4096, 0, 16, 1000, 1000, ()))
    assert not add(made, 2, priority=1)
    assert add(made, 3, priority=8)


def test_fcfs_knows_no_priorities():
    made = scheduler(Fcfs, max_queue=1)
    assert add(made, 1)
    assert not add(made, 2, priority=5)


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("add"), st.integers(1, 300), st.integers(-2, 2)),
            st.tuples(st.just("finish"), st.integers(0, 60), st.just(0)),
            st.tuples(st.just("step"), st.just(0), st.just(0)),
        ),
        max_size=80,
    )
)
def test_the_backlog_is_what_waits(actions: list[tuple[str, int, int]]):
    pool = MiniPool(lambda: Bucketed(edges=(8, 50), max_queue=6, max_queue_tokens=400), num_blocks=200, max_seqs=2)
    for what, number, priority in actions:
        if what == "add":
            pool.add(number, 5, priority=priority)
        elif what == "step":
            pool.step()
        elif pool.seqs:
            pool.finish(sorted(pool.seqs)[number % len(pool.seqs)])
        pool.flush()
        leaving = pool.schedulers[0].plan(pool.view()).shed
        assert pool.schedulers[1].plan(pool.view()).shed == leaving
        waiting = [s for seq, s in pool.seqs.items() if not s.running and seq not in leaving]
        assert pool.schedulers[0].stats().backlog_tokens == sum(s.job.tokens for s in waiting)
