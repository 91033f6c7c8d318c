"""Simulations against arithmetic, against each other, and against what a trace is known to share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import trio
from trio._core import _run as trio_loop

from deepinfra.bench.simulate.run import PoolSetup, Setup, simulate
from deepinfra.bench.simulate.store import ModelledStore, TierSpeed
from deepinfra.bench.simulate.traces import Arrival, LengthClass, agents, first, generated, read_workload
from deepinfra.core.cost import StepCost, StepWork
from deepinfra.core.kv import FRAME_NBYTES
from deepinfra.engine import cache_aware
from deepinfra.errors import ConfigError
from deepinfra.executors.simulated import SimulatedExecutor
from deepinfra.interfaces.kvstore import KVStore
from deepinfra.interfaces.scheduler import Scheduler
from deepinfra.schedulers import Bucketed, Fcfs
from deepinfra.speculators import Ngram

TRACE = Path(__file__).parents[2] / "data" / "traces" / "mooncake_conversation.jsonl.xz"
COST = StepCost(step=0.01, chunk_token=1e-4, chunk_read=1e-8, decode_row=1e-3, decode_read=1e-7, draft=1e-4)


WITHOUT_BUDGET = partial(Fcfs, step_budget_s=None)


def setup(
    scheduler: Callable[[], Scheduler] = WITHOUT_BUDGET,
    *,
    replicas: int = 1,
    store: Callable[[SimulatedExecutor], KVStore] | None = None,
    cost: StepCost = COST,
    at_once: int | None = None,
    retry: bool = False,
    **room: int,
) -> Setup:
    executor = partial(SimulatedExecutor, cost=cost, **{"block_size": 16, "max_step_tokens": 1000, **room})
    pool = PoolSetup(scheduler=scheduler, executor=executor, store=store, replicas=replicas)
    return Setup(name="test", pools=[pool], at_once=at_once, retry=retry)


def ram(blocks: int, executor: SimulatedExecutor) -> KVStore:
    """A RAM tier of so many blocks that costs no time."""
    return ModelledStore(
        "ram",
        block_nbytes=executor.block_nbytes,
        block_tokens=executor.layout.block_size,
        record_nbytes=FRAME_NBYTES + executor.layout.block_nbytes,
        capacity_nbytes=blocks * 2 * executor.block_nbytes,
        speed=TierSpeed(1e18, 1e18),
    )


# -- arithmetic -----------------------------------------------------------------------------------


def test_a_lone_request_takes_the_sum_of_its_steps() -> None:
    (row,) = simulate([Arrival(3.0, 2500, 4)], setup()).requests
    chunks = [StepWork().chunk(0, 1000), StepWork().chunk(1000, 1000), StepWork().chunk(2000, 500)]
    decodes = [COST.seconds(StepWork().decode(2500 + i, 1)) for i in range(3)]
    assert (row.at_s, row.opened_s, row.output, row.uncached, row.outcome) == (3.0, 0.0, 4, 2500, "length")
    assert row.first_s == pytest.approx(sum(map(COST.seconds, chunks)), abs=1e-9)
    assert row.last_s == pytest.approx(row.first_s + sum(decodes), abs=1e-9)
    assert row.worst_gap_s == pytest.approx(max(decodes), abs=1e-9)


def test_who_comes_during_a_step_waits_for_its_end() -> None:
    result = simulate([Arrival(0.0, 900, 1), Arrival(0.05, 100, 1)], setup())
    long, short = result.requests
    whole_s = COST.seconds(StepWork().chunk(0, 900))
    assert long.first_s == pytest.approx(whole_s, abs=1e-9)
    assert short.opened_s == pytest.approx(whole_s - 0.05, abs=1e-9)
    assert short.first_s == pytest.approx(whole_s - 0.05 + COST.seconds(StepWork().chunk(0, 100)), abs=1e-9)
    assert result.span_s == pytest.approx(0.05 + short.last_s, abs=1e-9)


def test_gaps_between_tokens_are_counted_by_how_long_they_are() -> None:
    result = simulate([Arrival(0.0, 100, 11)], setup(cost=StepCost(step=0.2)))
    (gaps,) = [counts for counts in result.gaps if any(counts)]
    (place,) = [i for i, many in enumerate(gaps) if many]
    assert gaps[place] == 10
    assert result.gap_bounds[place - 1] < 0.2 <= result.gap_bounds[place]


def test_samples_tell_what_went_on_between_two_moments() -> None:
    work = [Arrival(0.0, 1000, 1), Arrival(2.6, 1000, 1)]
    whole = replace(setup(cost=StepCost(step=0.5)), interval_s=1.0)
    samples = simulate(work, whole).samples
    assert [(s.at_s, s.busy, s.prompt_tokens, s.output_tokens) for s in samples] == [
        (1.0, 0.5, 1000, 1),
        (2.0, 0.0, 0, 0),
        (3.0, pytest.approx(0.4), 0, 0),
        (4.0, pytest.approx(0.1), 1000, 1),
    ]
    assert [s.running for s in samples] == [0, 0, 1, 0]


def test_those_who_came_later_and_began_earlier_have_overtaken() -> None:
    work = [Arrival(0.0, 3000, 1), Arrival(0.01, 900, 1), Arrival(0.02, 900, 1, priority=5), Arrival(0.03, 10, 1)]

    class LastFirst(Fcfs):
        def plan(self, view):  # type: ignore[no-untyped-def]
            choice = super().plan(view)
            return choice._replace(run=tuple(sorted(choice.run, key=lambda grant: -grant.seq)))

    rows = simulate(work, setup(partial(LastFirst, step_budget_s=None), max_seqs=2)).requests
    passed = [
        sum(
            other.at_s > row.at_s
            and other.at_s + other.opened_s < row.at_s + row.opened_s
            and other.priority <= row.priority
            for other in rows
        )
        for row in rows
    ]
    assert [row.overtaken for row in rows] == passed


# -- the same each time -----------------------------------------------------------------------------


BUSY = generated(30, 8.0, [LengthClass(0.8, 300, 20), LengthClass(0.2, 3000, 30)], seed=4)


@pytest.mark.parametrize("scheduler", [Fcfs, Bucketed])
def test_the_same_workload_and_setup_give_an_equal_result(scheduler: type[Scheduler]) -> None:
    whole = setup(scheduler, replicas=2, num_blocks=4096, max_context=50_000)
    assert simulate(BUSY, whole) == simulate(BUSY, whole)


@pytest.mark.parametrize("scheduler", [Fcfs, Bucketed])
def test_repeated_steps_change_nothing(scheduler: type[Scheduler]) -> None:
    whole = setup(scheduler, replicas=2, store=partial(ram, 2000), num_blocks=4096, max_context=50_000)
    assert simulate(BUSY, whole) == simulate(BUSY, replace(whole, repeat=False))


def test_requests_that_come_at_once_are_taken_in_order() -> None:
    rows = simulate([Arrival(1.0, 20_000, 1)] * 9, setup(num_blocks=20_000)).requests
    assert [row.opened_s for row in rows] == sorted(row.opened_s for row in rows if row.opened_s is not None)
    assert {row.overtaken for row in rows} == {0}


def test_nothing_is_left_behind_in_the_event_loop() -> None:
    before = trio_loop._r
    simulate([Arrival(0.0, 10, 1)], setup())
    assert trio_loop._r is before
    assert not hasattr(trio_loop, "id")
    trio.run(trio.sleep, 0)


# -- what is served -----------------------------------------------------------------------------------


def full_blocks_hit(workload: Sequence[Arrival]) -> list[int]:
    """For each request the leading full blocks that some request before it had."""
    seen: set[int] = set()
    hits = []
    for arrival in workload:
        full = arrival.blocks[: arrival.prompt // 512]
        hits.append(next((i for i, block in enumerate(full) if block not in seen), len(full)))
        seen.update(full)
    return hits


def found(workload: Sequence[Arrival]) -> list[int]:
    """The same of a simulation of one request after the other, on a device and a store that forget nothing."""
    whole = setup(
        store=partial(ram, 10**6),
        cost=StepCost(step=1e-6),
        at_once=1,
        block_size=512,
        num_blocks=500,
        max_step_tokens=200_000,
        max_context=200_000,
    )
    rows = simulate([arrival._replace(output=1) for arrival in workload], whole).requests
    assert {row.outcome for row in rows} == {"length"}
    return [-(-sum(row.cached.values()) // 512) for row in rows]


def test_prompts_share_what_the_trace_says_they_share() -> None:
    workload = first(read_workload(TRACE), 80)
    assert found(workload) == full_blocks_hit(workload)
    assert sum(full_blocks_hit(workload)) > 50


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_whole_trace_hits_as_often_as_it_is_known_to() -> None:
    workload = read_workload(TRACE)
    hits = found(workload)
    assert hits == full_blocks_hit(workload)
    # 36.64 % is the trace's own figure, which counts partial blocks too; an engine shares full ones.
    assert sum(hits) / sum(len(arrival.blocks) for arrival in workload) == pytest.approx(0.3664, abs=0.003)


def test_agents_find_their_own_turns_again() -> None:
    workload = first(agents(1, sessions=4, days=0.2), 40, context=20_000)
    whole = setup(block_size=64, num_blocks=6000, max_context=40_000, max_step_tokens=8192)
    rows = simulate([arrival._replace(output=2) for arrival in workload], whole).requests
    assert sum(sum(row.cached.values()) for row in rows) > 0.7 * sum(row.prompt for row in rows)


def test_prompts_are_computed_in_one_pool_and_answered_in_another() -> None:
    pool = PoolSetup(scheduler=Fcfs, executor=partial(SimulatedExecutor, cost=COST, block_size=16))
    whole = Setup(name="split", prefill=[replace(pool, name="p", replicas=2)], decode=[replace(pool, name="d")])
    result = simulate(BUSY[:12], whole)
    assert list(result.pools) == ["p-0", "p-1", "d"]
    assert {row.pool for row in result.requests} <= {0, 1}
    assert [row.output for row in result.requests] == [arrival.output for arrival in BUSY[:12]]


def test_a_route_decides_who_serves() -> None:
    work = [Arrival(i // 2 + 0.01 * (i % 2), 2000, 1, blocks=(i % 2, 2, 3, 4)) for i in range(10)]
    whole = replace(setup(replicas=2), route=cache_aware())
    rows = simulate(work, whole).requests
    assert [row.pool for row in rows] == [0, 1] * 5
    assert all(row.cached for row in rows[2:])


def test_drafts_are_verified_and_save_steps() -> None:
    work = [Arrival(0.0, 100, 400)]
    plain = setup()
    pool = replace(
        plain.pools[0],
        speculator=Ngram,
        executor=partial(SimulatedExecutor, cost=COST, block_size=16, acceptance=0.95),
    )
    guessed = simulate(work, replace(plain, pools=[pool]))
    assert guessed.requests[0].output == 400
    assert guessed.steps < 0.7 * simulate(work, plain).steps


def test_who_is_refused_is_told_when_to_come_and_comes_once_more() -> None:
    work = [Arrival(0.0, 900, 2)] * 8
    crowded = setup(partial(Fcfs, max_queue=3), max_seqs=1)
    rows = simulate(work, crowded).requests
    refused = [row for row in rows if row.outcome != "length"]
    assert refused
    assert all(row.retry_after_s is not None and row.first_s is None and row.pool == -1 for row in refused)
    again = simulate(work, replace(crowded, retry=True)).requests
    assert sum(row.outcome == "length" for row in again) > sum(row.outcome == "length" for row in rows)
    late = [row for row in again if row.retry_after_s is not None and row.opened_s is not None]
    assert late
    assert all(row.opened_s >= row.retry_after_s for row in late if row.opened_s is not None)


def test_a_deadline_ends_a_request() -> None:
    rows = simulate([Arrival(0.0, 900, 50), Arrival(0.0, 900, 50, deadline_s=0.3)], setup()).requests
    assert rows[0].outcome == "length"
    assert rows[1].outcome == "deadline-exceeded"
    assert rows[1].last_s == pytest.approx(0.3, abs=0.2)


def test_no_more_are_under_way_than_there_may_be_at_once() -> None:
    rows = simulate([Arrival(0.0, 100, 5)] * 10, setup(at_once=2)).requests
    for row in rows:
        here = sum(other.at_s <= row.at_s < other.at_s + other.last_s for other in rows)
        assert here <= 2


def test_a_vocabulary_has_to_have_room_for_the_prompts() -> None:
    with pytest.raises(ConfigError, match="vocab_size"):
        simulate(BUSY, setup(vocab_size=1000))
