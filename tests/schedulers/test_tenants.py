"""What a tenant that floods the queue costs others: nothing but their share of the work."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfra.core.ids import SeqId
from deepinfra.core.step import Job, SchedulerStats, StepView
from deepinfra.errors import Overloaded, TenantFullError
from deepinfra.interfaces.scheduler import Scheduler
from deepinfra.schedulers import Bucketed, Fcfs
from deepinfra.schedulers.admission import Amount, Ask
from deepinfra.schedulers.entry import Entry, Rank
from deepinfra.schedulers.tenants import MAX_RESTING, MAX_TOLD, OTHERS, Tenant, Tenants
from deepinfra.testing.clock import ManualClock
from deepinfra.testing.mini_pool import MiniPool

Make = Callable[..., Scheduler]
BOTH = pytest.mark.parametrize("make", [Fcfs, Bucketed])


def opened(pool: MiniPool, steps: int) -> list[SeqId]:
    """Sequences in the order in which they are first computed."""
    order: list[SeqId] = []
    for _ in range(steps):
        order += [grant.seq for grant in pool.step().run if grant.seq not in order]
    return order


def told(pool: MiniPool) -> SchedulerStats:
    return pool.schedulers[0].stats()


@BOTH
def test_one_sequence_of_another_tenant_goes_before_all_but_the_first_of_a_flood(make: Make) -> None:
    pool = MiniPool(make, max_seqs=1, num_blocks=100)
    flood = [pool.add(4, 2, tenant="flood") for _ in range(50)]
    for _ in range(3):
        pool.step()
    one = pool.add(4, 2, tenant="modest")
    order = opened(pool, 20)
    assert order.index(one) <= 1  # type: ignore[arg-type]
    assert flood[-1] in pool.seqs


@BOTH
def test_tenants_that_flood_alike_get_alike(make: Make) -> None:
    pool = MiniPool(make, max_seqs=1, num_blocks=100)
    first = {pool.add(4, 2, tenant="a") for _ in range(20)}
    second = {pool.add(4, 2, tenant="b") for _ in range(20)}
    order = opened(pool, 60)[:20]
    assert abs(len(first.intersection(order)) - len(second.intersection(order))) <= 1


@BOTH
def test_a_tenants_weight_is_its_share(make: Make) -> None:
    pool = MiniPool(lambda: make(tenants={"b": Tenant(weight=3.0)}), max_seqs=1, num_blocks=100)
    for _ in range(30):
        pool.add(4, 2, tenant="a")
    heavy = {pool.add(4, 2, tenant="b") for _ in range(30)}
    assert len(heavy.intersection(opened(pool, 100)[:24])) in (17, 18, 19)


@BOTH
def test_a_share_is_of_work_not_of_sequences(make: Make) -> None:
    pool = MiniPool(make, max_seqs=1, max_step_tokens=64, num_blocks=1000)
    large = {pool.add(60, 2, tenant="a") for _ in range(10)}
    small = {pool.add(6, 2, tenant="b") for _ in range(60)}
    order = opened(pool, 60)[:22]
    assert len(small.intersection(order)) > 5 * len(large.intersection(order)) > 0


@BOTH
def test_who_was_served_while_nobody_waited_owes_nothing(make: Make) -> None:
    pool = MiniPool(make, max_seqs=1, num_blocks=100)
    for _ in range(10):
        pool.add(4, 2, tenant="a")
        pool.drain(50)
    blocker = pool.add(4, 10, tenant="a")
    pool.step()
    first = pool.add(4, 1, tenant="a")
    second = pool.add(4, 1, tenant="b")
    assert opened(pool, 40) == [blocker, first, second]


@BOTH
@given(st.data())
@settings(deadline=None, max_examples=12)
def test_of_one_tenant_the_order_is_what_it_would_be_without_any(make: Make, data: st.DataObject) -> None:
    """The tags of one tenant never change a place: the same life with tags forgotten gives the same choices."""
    draw = random.Random(data.draw(st.integers(0, 10**9)))
    pool, plain = (MiniPool(make, max_seqs=2, num_blocks=24) for _ in range(2))
    for scheduler in plain.schedulers:
        scheduler._queue.tenants.place = lambda name, step: (step, 0.0)  # type: ignore[attr-defined]
    for _ in range(60):
        what, tokens, new = draw.random(), draw.randint(1, 20), draw.choice([1, 5, 20])
        priority = draw.choice([0, 0, 1, -1])
        if what < 0.4:
            assert pool.add(tokens, new, priority=priority) == plain.add(tokens, new, priority=priority)
        elif what < 0.5 and pool.seqs:
            seq = draw.choice(sorted(pool.seqs))
            pool.finish(seq)
            plain.finish(seq)
        else:
            assert pool.step() == plain.step()


class Life:
    """A queue with tenants that come and go, played at random."""

    def __init__(self, make: Make, seed: int) -> None:
        limits = {"b": Tenant(weight=2.0, max_queue=6, max_running=1), "c": Tenant(max_queue_tokens=60)}
        self.pool = MiniPool(lambda: make(tenants=limits, max_queue=20), max_seqs=3, num_blocks=24)
        self.draw = random.Random(seed)

    def act(self) -> None:
        draw, pool = self.draw, self.pool
        what = draw.random()
        if what < 0.5:
            tenant = draw.choice(["a", "b", "b", "c", f"t{draw.randrange(200)}"])
            pool.add(draw.randint(1, 20), draw.choice([1, 5, 20]), tenant=tenant, priority=draw.choice([0, 0, 1, -1]))
        elif what < 0.6 and pool.seqs:
            pool.finish(draw.choice(sorted(pool.seqs)))
        elif what < 0.7:
            pool.step(lambda seq, tokens: tokens // 2, fails=draw.random() < 0.3)
        else:
            pool.step()


@BOTH
@pytest.mark.parametrize("seed", range(4))
def test_limits_hold_in_any_life_and_everybody_is_served_and_forgotten(make: Make, seed: int) -> None:
    life = Life(make, seed)
    for _ in range(400):
        life.act()
        running = [s for s in life.pool.seqs.values() if s.running and s.job.tenant == "b"]
        assert len(running) <= 1
        queue = life.pool.schedulers[0]._queue  # type: ignore[attr-defined]
        waiting = [e for e in queue.entries.values() if not e.running and not e.leaving]
        assert sum(t.waiting for t in told(life.pool).tenants) == len(waiting)
        assert sum(e.job.tenant == "b" and e.served < 0 for e in waiting) <= 6
        assert len(list(queue.tenants.all())) <= len(queue.entries) + 30
    life.pool.drain(3000)
    life.pool.flush()
    assert not queue.tenants._tags
    assert not any(queue.lines)
    stats = told(life.pool)
    assert all(t.waiting == t.waiting_tokens == t.running == 0 for t in stats.tenants)
    assert stats.backlog_tokens == sum(bucket.waiting_tokens for bucket in stats.buckets) == 0
    assert len(stats.tenants) <= 2 + MAX_TOLD + 1


def test_tenants_nobody_hears_of_again_are_forgotten() -> None:
    pool = MiniPool(Bucketed, num_blocks=100)
    most = 0
    for number in range(500):
        pool.add(3, 1, tenant=f"t{number}")
        pool.step()
        most = max(most, len(list(pool.schedulers[0]._queue.tenants.all())))  # type: ignore[attr-defined]
    assert most < 20


def test_tenants_are_forgotten_too_while_every_request_comes_under_a_new_name_and_somebody_waits() -> None:
    tenants = Tenants({}, 1000.0)
    amount = Amount.of(0, 10)

    def wait(number: int) -> Entry:
        name = f"t{number}"
        counts_as, tag = tenants.place(name, 0.0)
        job, ask = Job(SeqId(number), 10, 0, 1, 0.0, name), Ask(SeqId(number), amount, 0, number)
        entry = Entry(job, Rank(counts_as, tag, number), 10, ask, 0, work_s=1.0)
        tenants.wait(tenants.account(name), entry)
        return entry

    wait(0)
    for number in range(1, 3 * MAX_RESTING):
        tenants.leave(tenants.account(f"t{number}"), wait(number), opened=True)
    assert len(list(tenants.all())) <= MAX_RESTING + 1


def test_those_that_keep_coming_do_not_pass_one_for_ever() -> None:
    pool = MiniPool(lambda: Bucketed(aging_steps=1), max_seqs=1, num_blocks=100)
    pool.add(4, 1, tenant="a")
    waits = [pool.add(4, 1, tenant="a") for _ in range(3)][-1]
    for number in range(pool.schedulers[0].stats().max_wait_steps or 2000):
        pool.add(4, 1, tenant=f"t{number}")
        pool.step()
        if waits not in pool.seqs:
            return
    pool.drain(0)


# -- limits ---------------------------------------------------------------------------------------


def scheduler(make: Make, **tenants: Tenant) -> Scheduler:
    made = make(tenants=tenants, max_queue=8)
    made.give(ManualClock(), made.offload)
    return made


def add(made: Scheduler, seq: int, tenant: str, tokens: int = 10, priority: int = 0) -> None:
    made.add(Job(SeqId(seq), tokens, 0, 10, 0.0, tenant, priority))


@BOTH
@pytest.mark.parametrize("limit", [Tenant(max_queue=3), Tenant(max_queue_tokens=30)])
def test_a_tenants_own_limit_is_named_and_keeps_nobody_else_out(make: Make, limit: Tenant) -> None:
    made = scheduler(make, team=limit)
    for seq in range(3):
        add(made, seq, "team")
    with pytest.raises(TenantFullError, match=r"tenant 'team' has 3 sequences with 30 .* max_queue") as caught:
        add(made, 3, "team")
    assert caught.value.retry_after_s > 0
    add(made, 4, "other")
    assert (made.stats().refused, made.stats().refused_by_tenant) == (1, 1)


@BOTH
def test_the_limits_of_others_are_each_ones_own(make: Make) -> None:
    made = scheduler(make, **{OTHERS: Tenant(max_queue=1)})
    add(made, 1, "a")
    add(made, 2, "b")
    with pytest.raises(TenantFullError, match="'a'"):
        add(made, 3, "a")


@BOTH
def test_more_than_a_tenant_may_run_are_left_waiting_and_hold_nobody_back(make: Make) -> None:
    pool = MiniPool(lambda: make(tenants={"a": Tenant(max_running=1)}), max_step_tokens=32, num_blocks=200)
    first, second = pool.add(4, 5, tenant="a"), pool.add(4, 5, tenant="a")
    flood = [pool.add(4, 5, tenant="a") for _ in range(100)]
    other = pool.add(4, 5, tenant="b")
    assert {grant.seq for grant in pool.step().run} == {first, other}
    while first in pool.seqs:
        pool.step()
    pool.step()
    assert pool.seqs[second].running  # type: ignore[index]
    assert not any(pool.seqs[seq].running for seq in flood)  # type: ignore[index]


def test_of_a_tenant_that_may_run_no_more_the_higher_priority_is_next() -> None:
    pool = MiniPool(lambda: Bucketed(tenants={"a": Tenant(max_running=1)}), max_step_tokens=32, num_blocks=200)
    pool.add(4, 3, tenant="a")
    pool.step()
    pool.add(4, 3, tenant="a")
    urgent = pool.add(4, 3, tenant="a", priority=2)
    order = opened(pool, 20)
    assert order[1] == urgent


@BOTH
def test_a_queue_full_of_one_tenant_lets_another_in_and_its_last_leaves(make: Make) -> None:
    made = scheduler(make)
    for seq in range(8):
        add(made, seq, "flood")
    with pytest.raises(Overloaded):
        add(made, 8, "flood")
    add(made, 9, "modest")
    assert made.plan(StepView(0.0, 0, 4096, 0, 16, 1000, 1000, ())).shed == (7,)
    told = {tenant.tenant: tenant for tenant in made.stats().tenants}
    assert (told["flood"].refused, told["flood"].shed, told["modest"].waiting) == (1, 1, 1)


def test_between_tenants_too_a_lower_priority_pushes_nobody_out() -> None:
    made = scheduler(Bucketed)
    for seq in range(8):
        add(made, seq, "flood", priority=1)
    with pytest.raises(Overloaded):
        add(made, 9, "modest")


def test_a_tenants_priorities_count_as_its_highest() -> None:
    made = scheduler(Bucketed, flood=Tenant(max_priority=0))
    for seq in range(8):
        add(made, seq, "flood", priority=8)
    add(made, 9, "modest")
    assert made.plan(StepView(0.0, 0, 4096, 0, 16, 1000, 1000, ())).shed == (7,)


def test_two_tenants_share_a_full_queue_and_neither_pushes_the_other_out_further() -> None:
    made = scheduler(Bucketed)
    for seq in range(8):
        add(made, seq, "a")
    for seq in range(10, 14):
        add(made, seq, "b")
    with pytest.raises(Overloaded):
        add(made, 14, "b")
    with pytest.raises(Overloaded):
        add(made, 15, "a")


# -- numbers --------------------------------------------------------------------------------------


def test_numbers_of_few_are_told_alone_and_of_further_ones_together() -> None:
    tenants = Tenants({"named": Tenant()}, 10.0)
    for number in range(MAX_TOLD + 5):
        tenants.told(f"t{number}").refused += 1
    stats = {tenant.tenant: tenant for tenant in tenants.stats()}
    assert len(stats) == MAX_TOLD + 2
    assert stats["named"].refused == 0
    assert stats[OTHERS].refused == 5


@BOTH
def test_buckets_count_what_waits_and_for_how_long(make: Make) -> None:
    pool = MiniPool(make, max_seqs=1, num_blocks=1000)
    pool.add(4, 30)
    pool.step()
    pool.add(4)
    pool.clock.advance(2.0)
    pool.add(600)
    pool.step()
    buckets = told(pool).buckets
    assert sum(b.waiting for b in buckets) == 2
    assert sum(b.waiting_tokens for b in buckets) == 604 == pool.schedulers[0].backlog().tokens
    assert buckets[0].oldest_s >= 2.0
    assert sum(b.opened for b in buckets) == 1
    assert sum(b.tokens for b in buckets) == 4


@BOTH
def test_those_whose_deadline_passed_are_counted(make: Make) -> None:
    pool = MiniPool(make, max_seqs=1)
    pool.add(4, 10)
    pool.step()
    pool.add(4, deadline=pool.clock.now() + 1.0)
    pool.add(4, deadline=pool.clock.now() + 100.0)
    pool.clock.advance(2.0)
    pool.drain(100)
    assert (told(pool).expired, told(pool).shed) == (1, 0)


@BOTH
def test_deadlines_of_what_is_over_are_not_kept(make: Make) -> None:
    pool = MiniPool(make, num_blocks=100)
    for _ in range(500):
        pool.add(2, 1, deadline=pool.clock.now() + 10**6)
        pool.step()
    assert len(pool.schedulers[0]._queue._deadlines) < 100  # type: ignore[attr-defined]
