import pytest

from deepinfra.core.step import Grant
from deepinfra.errors import Overloaded
from deepinfra.schedulers import Fcfs
from deepinfra.schedulers.queue import MAX_LOADS
from deepinfra.testing.mini_pool import MiniPool


def test_waiting_sequences_run_in_order_of_arrival():
    pool = MiniPool(Fcfs, max_step_tokens=10, num_blocks=100)
    for tokens in (4, 4, 4):
        pool.add(tokens)
    assert pool.step().run == (Grant(0, 4), Grant(1, 4), Grant(2, 2))


def test_decoding_comes_before_prefills_under_way_and_those_before_waiting_ones():
    pool = MiniPool(Fcfs, max_step_tokens=10, num_blocks=100)
    pool.add(20, 2)
    pool.step()
    pool.step()
    stream = pool.add(2, 5)
    while pool.seqs[stream].todo != 1:
        pool.step()
    giant = pool.add(30)
    pool.step()
    late = pool.add(3)
    order = [grant.seq for grant in pool.step().run]
    assert order.index(stream) < order.index(giant)
    assert late not in order


def test_nobody_behind_a_prompt_without_room_is_opened():
    pool = MiniPool(Fcfs, max_step_tokens=100, num_blocks=10)
    pool.add(10, 5)
    pool.step()
    pool.add(12)
    pool.add(2)
    assert [grant.seq for grant in pool.step().run] == [0]


def test_a_prompt_opens_alone_though_it_seems_too_large():
    pool = MiniPool(Fcfs, max_step_tokens=100, num_blocks=10)
    pool.add(20)
    assert pool.step().run == (Grant(0, 20),)


def test_the_latest_arrival_is_preempted_first():
    pool = MiniPool(Fcfs, max_step_tokens=100, num_blocks=100)
    for _ in range(3):
        pool.add(4, 9)
    pool.step()
    assert pool.step().preempt == (2, 1, 0)


def test_a_preempted_sequence_goes_before_later_arrivals():
    pool = MiniPool(Fcfs, max_step_tokens=100, num_blocks=8, max_seqs=3)
    for _ in range(2):
        pool.add(4, 12)
    pool.step()
    while all(s.running for s in pool.seqs.values()):
        pool.step()
    pool.add(2)
    opened = []
    while 1 in pool.seqs and not pool.seqs[1].running:
        before = {seq for seq, s in pool.seqs.items() if s.running}
        opened += [grant.seq for grant in pool.step().run if grant.seq not in before]
    assert opened[0] == 1


def test_more_than_max_queue_are_refused_with_a_wait():
    scheduler_pool = MiniPool(lambda: Fcfs(max_queue=2))
    for _ in range(3):
        scheduler_pool.add(4)
    assert scheduler_pool.refused == 1
    assert len(scheduler_pool.seqs) == 2


def test_a_refusal_keeps_nothing():
    pool = MiniPool(lambda: Fcfs(max_queue=1))
    pool.add(4)
    scheduler = pool.schedulers[0]
    job = pool.seqs[0].job._replace(seq=9)
    with pytest.raises(Overloaded) as caught:
        scheduler.add(job)
    assert caught.value.retry_after_s > 0
    scheduler.finish(0)
    scheduler.add(job)


def test_a_sequence_is_not_added_twice():
    pool = MiniPool(Fcfs)
    pool.add(4)
    with pytest.raises(ValueError, match="twice"):
        pool.schedulers[0].add(pool.seqs[0].job)


def test_drafts_get_at_most_half_of_the_rest_while_a_prompt_waits():
    pool = MiniPool(Fcfs, max_step_tokens=11, num_blocks=100)
    pool.add(2, 20)
    pool.step()
    pool.seqs[0].drafts = 8
    pool.add(30)
    assert pool.step().run == (Grant(0, 6), Grant(1, 5))


def test_drafts_get_all_that_is_left_when_nothing_waits():
    pool = MiniPool(Fcfs, max_step_tokens=11, num_blocks=100)
    pool.add(2, 20)
    pool.step()
    pool.seqs[0].drafts = 8
    assert pool.step().run == (Grant(0, 9),)


def test_loads_in_flight_are_bounded():
    pool = MiniPool(Fcfs, num_blocks=100)
    for _ in range(MAX_LOADS + 5):
        pool.add(4, cached=2, stored=True)
    assert pool.step().fetch == tuple(range(MAX_LOADS))
    assert pool.step().fetch == ()
    pool.arrive(0)
    assert pool.step().fetch == (MAX_LOADS,)


def test_a_started_sequence_is_not_shed_at_its_deadline():
    pool = MiniPool(Fcfs, num_blocks=100)
    pool.add(30, deadline=pool.clock.now() + 1.0)
    pool.step()
    pool.clock.advance(5.0)
    assert pool.step().shed == ()


def test_those_that_wait_too_long_are_shed_and_forgotten():
    pool = MiniPool(Fcfs, max_seqs=1)
    pool.add(4, 30)
    pool.step()
    pool.add(4, deadline=pool.clock.now() + 1.0)
    assert pool.schedulers[0].wake_at() == pytest.approx(pool.clock.now() + 1.0)
    pool.clock.advance(2.0)
    assert pool.step().shed == (1,)
    assert pool.step().shed == ()
    assert pool.schedulers[0].wake_at() is None
