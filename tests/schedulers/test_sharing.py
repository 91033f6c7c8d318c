"""Schedulers follow what waiting sequences would find: who waits for whom, in which bucket, and for how long."""

from collections.abc import Callable

import pytest

from deepinfra.core.ids import BlockKey
from deepinfra.core.step import DoneRow, Job, Prefix, RunRow, StepReport, StepView
from deepinfra.interfaces.given import InlineOffload
from deepinfra.interfaces.scheduler import Scheduler
from deepinfra.schedulers import Bucketed, Fcfs
from deepinfra.schedulers.entry import PATIENCE_S
from deepinfra.testing.clock import ManualClock
from deepinfra.testing.mini_pool import MiniPool

both = pytest.mark.parametrize("make", [Fcfs, Bucketed])


def view(**fields: object) -> StepView:
    return StepView(0.0, 0, 4096, 64, 16, 10**6, 10**6, ())._replace(**fields)


def run_of(scheduler: Scheduler, **fields: object) -> list[int]:
    return [grant.seq for grant in scheduler.plan(view(**fields)).run]


def lacks(key: str, cached: int = 0, *, under_way: bool = False) -> Prefix:
    return Prefix(cached, BlockKey(key.encode()), under_way)


def computed_of(pool: MiniPool) -> int:
    """Drain a pool; returns the rows that it computed."""
    rows: list[DoneRow] = []
    for scheduler in pool.schedulers[:1]:
        commit = scheduler.commit

        def seen(report: StepReport, commit: Callable[[StepReport], None] = commit) -> None:
            rows.extend(report.rows)
            commit(report)

        scheduler.commit = seen  # type: ignore[method-assign]
    pool.drain(2000)
    return sum(row.length - row.drafts for row in rows)


@both
@pytest.mark.parametrize("budget", [8, 64, 4096])
def test_what_many_begin_with_is_computed_once(make: Callable[[], Scheduler], budget: int) -> None:
    pool = MiniPool(make, max_step_tokens=budget, max_seqs=64, num_blocks=10_000, drafts=False)
    for _ in range(20):
        pool.add(106, 1, like="a", common=100)
    assert computed_of(pool) == 100 + 20 * 6


@both
def test_of_several_that_lack_the_same_block_one_is_opened(make: Callable[[], Scheduler]) -> None:
    scheduler = make()
    for seq in range(4):
        scheduler.add(Job(seq, 100, 0, 1, 0.0))
    assert run_of(scheduler, waiting={0: lacks("x"), 1: lacks("x"), 2: lacks("y"), 3: Prefix(96)}) == [0, 2, 3]


@both
def test_nobody_behind_followers_waits_for_them(make: Callable[[], Scheduler]) -> None:
    scheduler = make()
    for seq in range(4):
        scheduler.add(Job(seq, 100, 0, 1, 0.0))
    following = {seq: lacks("x", under_way=True) for seq in range(3)}
    assert run_of(scheduler, waiting=following) == [3]


@both
def test_a_follower_is_let_go_as_soon_as_nothing_is_under_way(make: Callable[[], Scheduler]) -> None:
    scheduler = make()
    scheduler.add(Job(0, 100, 0, 1, 0.0))
    assert run_of(scheduler, waiting={0: lacks("x", under_way=True)}) == []
    assert run_of(scheduler, waiting={0: lacks("x")}) == [0]


@both
def test_patience_ends_only_without_progress(make: Callable[[], Scheduler]) -> None:
    scheduler, clock = make(), ManualClock()
    scheduler.give(clock, InlineOffload())
    scheduler.add(Job(0, 10_000, 0, 1, clock.now()))
    for step in range(10):
        assert run_of(scheduler, now=clock.now(), waiting={0: lacks(f"{step}", 16 * step, under_way=True)}) == []
        clock.advance(0.9 * PATIENCE_S)
    stuck = {0: lacks("9", 16 * 9, under_way=True)}
    assert run_of(scheduler, now=clock.now(), waiting=stuck) == []
    assert scheduler.wake_at() == pytest.approx(clock.now() + 0.1 * PATIENCE_S)
    clock.advance(0.2 * PATIENCE_S)
    assert run_of(scheduler, now=clock.now(), waiting=stuck) == [0]


@both
def test_patience_is_for_all_leaders_together(make: Callable[[], Scheduler]) -> None:
    """Those who come, are followed, and leave before they computed anything keep nobody waiting for long."""
    scheduler = make()
    scheduler.add(Job(0, 100, 0, 1, 0.0))
    for step in range(12):
        now = 0.2 * PATIENCE_S * step
        if run_of(scheduler, now=now, waiting={0: lacks(f"{step}", under_way=True)}) == [0]:
            break
        run_of(scheduler, now=now + 0.1 * PATIENCE_S, max_seqs=0, waiting={0: lacks(f"{step}")})
    assert step == 10


def test_no_two_loads_bring_the_same() -> None:
    scheduler = Fcfs()
    for seq in range(4):
        scheduler.add(Job(seq, 100, 64, 1, 0.0))
    fetchable = frozenset(range(4))
    waiting = {0: lacks("x", 64), 1: lacks("x", 64), 2: lacks("y", 64), 3: lacks("z", 64, under_way=True)}
    assert scheduler.plan(view(fetchable=fetchable, waiting=waiting)).fetch == (0, 2)


def test_a_bucket_follows_what_is_cached_by_now() -> None:
    scheduler = Bucketed(edges=(64, 1000))
    scheduler.add(Job(0, 5000, 0, 1, 0.0))
    assert [bucket.waiting for bucket in scheduler.stats().buckets] == [0, 0, 1]
    for cached, expected in ((4960, [1, 0, 0]), (4900, [0, 1, 0]), (0, [0, 0, 1])):
        scheduler.plan(view(max_seqs=0, waiting={0: Prefix(cached)}))
        stats = scheduler.stats()
        assert [bucket.waiting for bucket in stats.buckets] == expected
        assert [bucket.waiting_tokens for bucket in stats.buckets] == [n * (5000 - cached) for n in expected]
        assert stats.backlog_tokens == 5000 - cached


def test_all_that_wait_are_counted_anew_in_turn() -> None:
    scheduler = Bucketed(edges=(64,))
    for seq in range(200):
        scheduler.add(Job(seq, 5000, 0, 1, 0.0))
    waiting = {seq: Prefix(4990) for seq in range(100, 200)}
    for _ in range(60):
        scheduler.plan(view(max_seqs=0, waiting=waiting))
    assert [bucket.waiting for bucket in scheduler.stats().buckets] == [100, 100]


def test_a_limit_counts_what_is_left_to_compute() -> None:
    scheduler = Bucketed(max_queue_tokens=6000)
    scheduler.add(Job(0, 5000, 0, 1, 0.0))
    scheduler.plan(view(max_seqs=0, waiting={0: Prefix(4900)}))
    scheduler.add(Job(1, 5000, 0, 1, 0.0))
    assert scheduler.stats().backlog_tokens == 5100


def test_a_plan_reads_a_bounded_number_of_prefixes() -> None:
    class Counted(dict[int, Prefix]):
        reads = 0

        def get(self, key: int, default: Prefix | None = None) -> Prefix | None:  # type: ignore[override]
            self.reads += 1
            return super().get(key, default)

    scheduler = Bucketed(max_queue=4096, max_queue_s=None)
    for seq in range(3000):
        scheduler.add(Job(seq, 600 + seq % 5000, 0, 1, 0.0))
    rows = tuple(RunRow(10**6 + i, 1, 100, 7) for i in range(64))
    idle = Counted({seq: Prefix(0) for seq in range(3000)})
    scheduler.plan(view(running=rows, max_seqs=64, waiting=idle))
    assert idle.reads <= 4 * (2 + 4) + 10
    following = Counted({seq: lacks("x", under_way=True) for seq in range(3000)})
    scheduler.plan(view(waiting=following))
    assert following.reads <= 4 * (64 + 2 + 4) + 300
