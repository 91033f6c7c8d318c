import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepinfra.core.cost import StepCost, StepWork
from deepinfra.core.step import DoneRow, Job, RunRow, StepReport, StepView
from deepinfra.schedulers import Bucketed
from deepinfra.schedulers.predictor import READY
from deepinfra.schedulers.turns import PART
from deepinfra.testing.mini_pool import MiniPool

COST = StepCost(step=0.010, chunk_token=0.001, decode_row=0.001)


def view(**fields: object) -> StepView:
    base = StepView(0.0, READY, 4096, 64, 16, 10**6, 10**6, ())
    return base._replace(**fields)


def taught(**settings: object) -> Bucketed:
    """A scheduler that has seen steps of `COST`."""
    scheduler = Bucketed(**settings)
    draw = random.Random(0)
    for step in range(300):
        rows = [DoneRow(10**6, 0, draw.choice([16, 64, 256]), 0, 0, False)] * draw.randrange(2)
        rows += [DoneRow(10**6 + 1, 100, 1, 0, 1, False)] * draw.randrange(1, 30)
        scheduler.commit(StepReport(step, COST.seconds(StepWork.of(rows)), tuple(rows)))
    return scheduler


def start(scheduler: Bucketed, seq: int, tokens: int) -> None:
    """A sequence that decodes, with `tokens` known."""
    row = DoneRow(seq, 0, tokens - 1, 0, 1, True)
    scheduler.add(Job(seq, tokens - 1, 0, 1000, 0.0))
    scheduler.commit(StepReport(0, COST.seconds(StepWork.of([row])), (row,)))


def test_a_short_prompt_shares_the_step_of_a_giant_that_came_first():
    pool = MiniPool(lambda: Bucketed(edges=(8,)), max_step_tokens=64, num_blocks=10_000)
    pool.add(10_000)
    for _ in range(3):
        pool.step()
    short = pool.add(6)
    pool.step()
    assert short not in pool.seqs


def giant_beside_short_prompts(steps: int, alone: int) -> tuple[int, int]:
    """Tokens that a giant has computed, and tokens of short prompts, after so many steps in which it was not alone."""
    pool = MiniPool(lambda: Bucketed(edges=(100,), max_overtakes=10**6), max_step_tokens=64, num_blocks=100_000)
    giant = pool.add(100_000)
    for _ in range(alone):
        pool.step()
    before = pool.seqs[giant].computed
    for _ in range(steps):
        for _ in range(4):
            pool.add(32)
        pool.step()
    done = pool.seqs[giant].computed - before
    return done, steps * 64 - done


def test_a_part_of_the_work_is_done_out_of_order_and_no_more():
    giant, short = giant_beside_short_prompts(steps=100, alone=0)
    assert short == pytest.approx(PART * 100 * 64, abs=64)
    assert giant == pytest.approx((1 - PART) * 100 * 64, abs=64)


def test_what_may_be_done_out_of_order_is_saved_for_one_step_at_most():
    _, short = giant_beside_short_prompts(steps=10, alone=200)
    assert short <= PART * 10 * 64 + 2 * 64


def test_short_prompts_do_not_wait_for_one_that_came_first_while_they_are_few():
    pool = MiniPool(lambda: Bucketed(edges=(100,)), max_step_tokens=64, num_blocks=100_000)
    pool.add(100_000)
    for _ in range(100):
        short = pool.add(10)
        pool.step()
        assert short not in pool.seqs


def test_a_step_of_prompts_ends_within_its_budget():
    scheduler = taught(step_budget_s=0.2)
    scheduler.add(Job(1, 5000, 0, 1, 0.0))
    scheduler.add(Job(2, 5000, 0, 1, 0.0))
    (grant,) = scheduler.plan(view()).run
    assert COST.seconds(StepWork().chunk(0, grant.max_tokens)) == pytest.approx(0.2, rel=0.05)


def test_a_lone_prompt_may_end_in_a_step_of_two_budgets():
    scheduler = taught(step_budget_s=0.05)
    scheduler.add(Job(1, 85, 0, 1, 0.0))
    assert scheduler.plan(view()).run[0].max_tokens == 85


def test_a_lone_prompt_that_would_not_end_takes_one_budget():
    scheduler = taught(step_budget_s=0.05)
    scheduler.add(Job(1, 95, 0, 1, 0.0))
    (grant,) = scheduler.plan(view()).run
    assert COST.seconds(StepWork().chunk(0, grant.max_tokens)) == pytest.approx(0.05, rel=0.05)


def test_without_a_budget_a_step_is_filled():
    scheduler = taught(step_budget_s=None, decode_share=0.0)
    scheduler.add(Job(1, 5000, 0, 1, 0.0))
    assert scheduler.plan(view()).run[0].max_tokens == 4096


def test_decoding_keeps_its_share_of_a_step():
    scheduler = taught(step_budget_s=10.0, decode_share=0.25)
    for seq in range(8):
        start(scheduler, seq, 17)
    scheduler.add(Job(99, 5000, 0, 1, 0.0))
    running = tuple(RunRow(seq, 1, 17, 2) for seq in range(8))
    run = scheduler.plan(view(running=running)).run
    assert [grant.seq for grant in run] == [*range(8), 99]
    work = StepWork(decode_rows=8)
    assert COST.seconds(work) / COST.seconds(work.chunk(0, run[-1].max_tokens)) == pytest.approx(0.25, rel=0.1)


def test_prompts_go_on_when_decoding_alone_exceeds_the_budget():
    scheduler = taught(step_budget_s=0.001)
    for seq in range(8):
        start(scheduler, seq, 17)
    scheduler.add(Job(99, 5000, 0, 1, 0.0))
    running = tuple(RunRow(seq, 1, 17, 2) for seq in range(8))
    assert scheduler.plan(view(running=running)).run[-1].seq == 99


def test_chunks_are_cut_on_the_grid():
    scheduler = taught(step_budget_s=0.2)
    scheduler.add(Job(1, 5000, 0, 1, 0.0))
    assert scheduler.plan(view(grid=64)).run[0].max_tokens % 64 == 0


def test_a_chunk_is_never_shorter_than_the_grid():
    scheduler = taught(step_budget_s=0.011)
    scheduler.add(Job(1, 5000, 0, 1, 0.0))
    scheduler.add(Job(2, 5000, 0, 1, 0.0))
    assert scheduler.plan(view(grid=128)).run[0].max_tokens == 128


def test_the_higher_priority_is_opened_first():
    pool = MiniPool(Bucketed, max_seqs=1, num_blocks=100)
    pool.add(4)
    pool.add(4, priority=1)
    assert [grant.seq for grant in pool.step().run] == [1]


def test_a_priority_is_worth_so_many_steps_of_waiting():
    pool = MiniPool(lambda: Bucketed(aging_steps=5), max_seqs=1, num_blocks=100)
    pool.add(4, 50)
    pool.step()
    old = pool.add(4)
    for _ in range(6):
        pool.step()
    pool.add(4, priority=1)
    pool.finish(0)
    assert [grant.seq for grant in pool.step().run] == [old]


@given(
    arrivals=st.lists(st.tuples(st.sampled_from([1, 3, 7, 20]), st.integers(0, 2)), min_size=1, max_size=60),
    bound=st.integers(0, 4),
    seats=st.integers(1, 3),
)
def test_nobody_is_overtaken_more_often_than_promised(arrivals: list[tuple[int, int]], bound: int, seats: int):
    pool = MiniPool(
        lambda: Bucketed(edges=(2, 5, 10), max_overtakes=bound),
        max_step_tokens=8,
        max_seqs=seats,
    )
    for tokens, steps in arrivals:
        pool.add(tokens)
        for _ in range(steps):
            pool.step()
    pool.drain(2000)


def short_beside_two_giants(steps: int) -> MiniPool:
    pool = MiniPool(lambda: Bucketed(edges=(8,), max_overtakes=5), max_step_tokens=8, num_blocks=10_000)
    pool.add(5000)
    pool.add(5000)
    for _ in range(steps):
        pool.add(4)
        pool.step()
    return pool


def test_the_bound_is_reached():
    """Short prompts do overtake: a bound that nothing comes near would prove nothing."""
    pool = short_beside_two_giants(steps=40)
    assert pool.schedulers[0].stats().buckets[1].overtaken_most == 5


def test_one_that_is_due_is_opened_beside_the_giant_before_it():
    """Otherwise everybody would wait for that giant."""
    pool = short_beside_two_giants(steps=60)
    assert pool.seqs[1].begun
    assert pool.seqs[0].computed < 500


def test_one_without_room_holds_nobody_back():
    pool = MiniPool(lambda: Bucketed(edges=(8,), max_overtakes=64), max_step_tokens=8, num_blocks=500)
    pool.add(700)
    pool.add(700)
    for step in range(48):
        if step % 4 == 0:
            pool.add(4)
        pool.step()
    assert not pool.seqs[1].begun
    assert len(pool.seqs) < 6


def test_one_without_room_is_not_starved():
    pool = MiniPool(lambda: Bucketed(edges=(8,), max_overtakes=2), max_step_tokens=8, num_blocks=30, max_seqs=8)
    large = None
    for step in range(200):
        pool.add(4, 12)
        if step == 10:
            large = pool.add(50)
        pool.step()
        if step > 10 and (large not in pool.seqs or pool.seqs[large].begun):
            return
    raise AssertionError("it was never opened")


@pytest.mark.parametrize("max_new", [1, 5])
def test_passes_in_steps_not_yet_reported_count(max_new: int):
    pool = MiniPool(lambda: Bucketed(edges=(4,), max_overtakes=3), depth=2, max_step_tokens=3, num_blocks=12)
    pool.add(4)
    for _ in range(8):
        pool.add(1, max_new)
    pool.drain(100)
