"""How long steps are and what decoding gets of them, whatever the order: with costs that a scheduler has learned."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from deepinfra.core.cost import StepCost, StepWork
from deepinfra.core.step import Choice, DoneRow, Grant, Job, RunRow, StepReport, StepView
from deepinfra.interfaces.scheduler import Scheduler
from deepinfra.schedulers import Bucketed, Fcfs
from deepinfra.schedulers.pacing import FOREVER, WINDOW, Allowance, Pacing
from deepinfra.schedulers.predictor import READY
from deepinfra.testing.mini_pool import MiniPool

BOTH = pytest.mark.parametrize("make", [Bucketed, Fcfs])


def taught(make: Callable[..., Bucketed | Fcfs], cost: StepCost, **settings: object) -> Bucketed | Fcfs:
    """A scheduler that has seen steps of `cost`."""
    scheduler = make(**settings)
    draw = random.Random(0)
    for step in range(120):
        rows = [DoneRow(10**6, draw.choice([0, 500]), draw.choice([16, 64, 256]), 0, 0, False)] * draw.randrange(2)
        rows += [DoneRow(10**6 + 1, draw.choice([10, 400]), 1, 0, 1, False)] * draw.randrange(1, 30)
        scheduler.commit(StepReport(step, cost.seconds(StepWork.of(rows)), tuple(rows)))
    return scheduler


class Watched(MiniPool):
    """Notes, of each step in which something can decode, what it takes without prompts and what these add."""

    def __init__(self, make: Callable[[], Scheduler], share: float, grid: int) -> None:
        super().__init__(make, max_step_tokens=256, max_seqs=6, num_blocks=4000, grid=grid)
        self.share = share
        self.noted: list[tuple[float, float, list[int]]] = []
        self.without = 0

    def note(self) -> Choice:
        """One step; holds the share and the progress of prompts over the window that ends with it."""
        cost, before = self.schedulers[0].predictor.cost, {seq: (s.todo, s.tokens) for seq, s in self.seqs.items()}
        begun = {seq for seq, s in self.seqs.items() if s.running}
        choice = self.step()
        base, chunks_s, chunks = StepWork(), 0.0, []
        for grant in choice.run:
            todo, tokens = before[grant.seq]
            if grant.seq in begun and todo == 1:
                base = base.decode(tokens - 1, grant.max_tokens)
            else:
                chunks.append(grant.max_tokens)
                chunks_s += cost.seconds(StepWork().chunk(tokens - todo, grant.max_tokens)) - cost.step
        if not any(before[seq][0] == 1 for seq in begun):
            return choice
        self.noted.append((cost.seconds(base), chunks_s, chunks))
        waits = any(before[seq][0] > 1 for seq in begun)
        self.without = 0 if chunks or not waits else self.without + 1
        assert self.without < WINDOW, "no prompt went on in a whole window"
        if len(self.noted) >= WINDOW:
            self.hold(self.noted[-WINDOW:])
        return choice

    def notes(self, steps: int) -> None:
        """So many steps."""
        for _ in range(steps):
            self.note()

    def hold(self, window: list[tuple[float, float, list[int]]]) -> None:
        base_s, chunks_s = sum(step[0] for step in window), sum(step[1] for step in window)
        chunks = [chunk for step in window for chunk in step[2]]
        if len(chunks) == 1 and chunks[0] <= self.grid:
            return  # the shortest there is
        assert base_s >= self.share * (base_s + chunks_s) * (1 - 1e-4), (base_s, chunks_s, chunks)


@BOTH
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    share=st.sampled_from([0.1, 0.25, 0.5, 0.9]),
    grid=st.sampled_from([1, 1, 8, 64]),
    chunk_token=st.sampled_from([1e-5, 1e-3, 2e-2]),
    budget_s=st.sampled_from([None, 0.001, 0.05, 1.0]),
    arrivals=st.lists(
        st.tuples(st.sampled_from([1, 2, 17, 300, 3000]), st.sampled_from([1, 20, 200]), st.integers(0, 12)),
        min_size=3,
        max_size=20,
    ),
)
def test_decoding_keeps_its_share_of_any_window_and_prompts_go_on_in_each(
    make: Callable[..., Bucketed | Fcfs],
    share: float,
    grid: int,
    chunk_token: float,
    budget_s: float | None,
    arrivals: list[tuple[int, int, int]],
):
    cost = StepCost(step=0.01, chunk_token=chunk_token, chunk_read=chunk_token / 5000, decode_row=0.001)

    def scheduler() -> Scheduler:
        return taught(make, cost, decode_share=share, step_budget_s=budget_s)

    pool = Watched(scheduler, share, grid)
    pool.seconds = lambda rows: cost.seconds(StepWork.of(rows))  # type: ignore[method-assign]
    for tokens, out, steps in arrivals:
        pool.add(tokens, out)
        pool.notes(steps)
    pool.notes(40)


@BOTH
@pytest.mark.parametrize(
    "cost",
    [
        StepCost(step=0.03, chunk_token=1e-3, chunk_read=2e-8, decode_row=2e-3, decode_read=1e-7),
        StepCost(step=0.02, chunk_token=1e-4, chunk_read=1e-9, decode_row=1e-4, decode_read=1e-8),
        StepCost(step=0.008, chunk_token=1.5e-5, chunk_read=3e-10, decode_row=3e-5, decode_read=3e-9),
    ],
    ids=["cpu", "small-gpu", "gpu"],
)
@pytest.mark.parametrize("streams", [0, 3])
def test_the_first_steps_are_short_too_though_nothing_was_learned(
    make: Callable[[], Bucketed | Fcfs], cost: StepCost, streams: int
):
    """Until then a machine is taken for a slow one: a giant that comes first fills no step to the executor's limit."""
    took: list[float] = []
    pool = MiniPool(make, max_step_tokens=8192, max_seqs=32, num_blocks=1 << 13, block_size=16, drafts=False)

    def seconds(rows: Sequence[DoneRow]) -> float:
        took.append(cost.seconds(StepWork.of(rows)))
        return took[-1]

    pool.seconds = seconds  # type: ignore[method-assign]
    for _ in range(streams):
        pool.add(20, 500)
    giant = pool.add(60_000)
    while len(took) < 2 * READY:
        pool.step()
    assert max(took) <= 0.25 * 1.5, took
    assert giant not in pool.seqs or pool.seqs[giant].computed > 10 * READY, "it is not starved for that"


COST = StepCost(step=0.010, chunk_token=0.001, decode_row=0.001)


def forget_the_books(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Pacing, "end", lambda self, step: self._steps.clear())


def owe_nothing(patch: pytest.MonkeyPatch) -> None:
    original = Allowance.__init__
    patch.setattr(
        Allowance, "__init__", lambda self, cost, **given: original(self, cost, **{**given, "owed": cost is None})
    )


@pytest.mark.parametrize(("mutate", "said"), [(forget_the_books, r"\[64"), (owe_nothing, "no prompt went on")])
def test_the_laws_of_pacing_can_fail(
    monkeypatch: pytest.MonkeyPatch, mutate: Callable[[pytest.MonkeyPatch], None], said: str
):
    pool = Watched(lambda: taught(Bucketed, COST, decode_share=0.9), share=0.9, grid=64)
    pool.add(1, 200)
    pool.note()
    pool.add(3000, 1)
    pool.note()
    mutate(monkeypatch)
    with pytest.raises(AssertionError, match=said):
        pool.notes(40)


def view(**fields: object) -> StepView:
    base = StepView(0.0, READY, 4096, 64, 16, 10**6, 10**6, ())
    return base._replace(**fields)


def decoding(scheduler: Scheduler, count: int) -> tuple[RunRow, ...]:
    """Sequences that decode, made known to the scheduler."""
    for seq in range(count):
        row = DoneRow(seq, 0, 16, 0, 1, True)
        scheduler.add(Job(seq, 16, 0, 1000, 0.0))
        scheduler.commit(StepReport(0, COST.seconds(StepWork.of([row])), (row,)))
    return tuple(RunRow(seq, 1, 17, 2) for seq in range(count))


@BOTH
def test_a_step_with_streams_takes_no_longer_than_their_target(make: Callable[..., Bucketed | Fcfs]):
    scheduler = taught(make, COST, step_budget_s=0.5, itl_target_s=0.025, decode_share=0.0)
    running = decoding(scheduler, 8)
    scheduler.add(Job(99, 5000, 0, 1, 0.0))
    run = scheduler.plan(view(running=running)).run
    work = StepWork(decode_rows=8).chunk(0, run[-1].max_tokens)
    assert run[-1].seq == 99
    assert 0.022 < COST.seconds(work) <= 0.0252


@BOTH
def test_a_target_between_tokens_binds_no_step_without_streams(make: Callable[..., Bucketed | Fcfs]):
    scheduler = taught(make, COST, step_budget_s=0.5, itl_target_s=0.025)
    scheduler.add(Job(98, 5000, 0, 1, 0.0))
    scheduler.add(Job(99, 5000, 0, 1, 0.0))
    assert sum(grant.max_tokens for grant in scheduler.plan(view()).run) == pytest.approx(490, rel=0.02)


@BOTH
def test_both_orders_give_prompts_the_same_time(make: Callable[..., Bucketed | Fcfs]):
    scheduler = taught(make, COST, step_budget_s=0.1, decode_share=0.25)
    running = decoding(scheduler, 4)
    for seq in range(90, 99):
        scheduler.add(Job(seq, 20 * (seq - 89), 0, 1, 0.0))
    run = scheduler.plan(view(running=running)).run
    assert sum(grant.max_tokens for grant in run[4:]) == pytest.approx(3 * 14, abs=2)


@BOTH
def test_an_unchanged_decoding_batch_is_chosen_for_ever(make: Callable[..., Bucketed | Fcfs]):
    scheduler = taught(make, COST)
    running = decoding(scheduler, 3)
    assert scheduler.plan(view(running=running)).repeat == FOREVER


@BOTH
@pytest.mark.parametrize(
    "fields",
    [
        {"max_step_tokens": 2},
        {"loading": frozenset({99})},
        {"fetchable": frozenset({99})},
        {"drafts": 1},
        {"todo": 2},
        {"waits": True},
    ],
)
def test_a_batch_that_may_change_is_chosen_once(make: Callable[..., Bucketed | Fcfs], fields: dict[str, object]):
    scheduler, fields = taught(make, COST), dict(fields)
    running = decoding(scheduler, 3)
    row = running[0]._replace(**{name: fields.pop(name) for name in ("drafts", "todo") if name in fields})
    if fields.pop("waits", False):
        scheduler.add(Job(99, 10**8, 0, 1, 0.0))
    assert scheduler.plan(view(running=(row, *running[1:]), **fields)).repeat == 1


def test_steps_that_were_repeated_unasked_are_in_the_books():
    """What prompts may have after them is what it would be if each of them had been chosen."""
    asked, unasked = (taught(Bucketed, COST, decode_share=0.9, step_budget_s=1.0) for _ in range(2))
    given = []
    for scheduler in (asked, unasked):
        running = decoding(scheduler, 4)
        scheduler.add(Job(99, 17, 0, 1, 0.0))
        for step in range(READY, READY + WINDOW):
            if step == READY or scheduler is asked:
                now = tuple(row._replace(length=17 + step - READY) for row in running)
                choice = scheduler.plan(view(step=step, running=now, grid=16))
            if step == READY:
                assert choice.run[-1] == Grant(99, 16)
                scheduler.finish(99)
            rows = tuple(DoneRow(row.seq, 16 + step - READY, 1, 0, 1, False) for row in running)
            scheduler.commit(StepReport(step, COST.seconds(StepWork.of(rows)), rows))
        scheduler.add(Job(98, 5000, 0, 1, 0.0))
        now = tuple(row._replace(length=17 + WINDOW) for row in running)
        given.append(scheduler.plan(view(step=READY + WINDOW, running=now, grid=16)))
    assert given[0].run[-1] == Grant(98, 16)
    assert given[0] == given[1]


def test_a_step_that_exceeds_its_aims_without_prompts_leaves_these_a_tenth():
    assert Pacing(0.1, None, 0.25).prompts_s(0.5, True) == pytest.approx(0.05)
    assert Pacing(0.1, None, 0.25).prompts_s(0.5, False) == pytest.approx(0.05)
