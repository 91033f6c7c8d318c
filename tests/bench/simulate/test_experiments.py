"""What an order of service is held to, on one simulated node of eight H100 with a model of 70 billion parameters."""

from __future__ import annotations

from pathlib import Path

import pytest

from deepinfra.bench.simulate.experiments import Bench, giant, orders, sustained
from deepinfra.bench.simulate.traces import LengthClass, first, generated, giant_then_short, read_workload

TRACES = Path(__file__).parents[2] / "data" / "traces"

MIX = [LengthClass(0.5, 100, 8), LengthClass(0.3, 1500, 8), LengthClass(0.2, 20_000, 8)]


@pytest.mark.parametrize("after_s", [0.3, 1.7, 60.0])
def test_a_short_prompt_behind_a_giant_waits_two_steps_at_most(after_s: float) -> None:
    """600,000 tokens, whose steps late in the prompt are the fullest."""
    bench = Bench(max_context=700_000)
    found = giant(giant_then_short(after_s=after_s), bench)
    assert found.giant_alone_s > 60.0
    assert found.short_s <= found.short_alone_s + 2 * bench.step_budget_s
    assert found.giant_s <= 1.02 * found.giant_alone_s


def test_in_order_of_arrival_it_would_wait_for_all_of_the_giant() -> None:
    bench = Bench(max_context=700_000)
    found = giant(giant_then_short(after_s=1.7), bench, bench.fcfs)
    assert found.short_s > 0.2 * found.giant_alone_s


def test_short_prompts_do_not_wait_for_long_ones_at_nearly_full_load() -> None:
    bench = Bench()
    (at,) = orders(generated(300, 10.0, MIX, seed=5), bench, shares=[0.95])
    *short, _, (_, _, fcfs_long_s, long_s) = at.first_token_s()
    assert len(short) == 2
    assert all(other_s <= fcfs_s / 5 for _, _, fcfs_s, other_s in short)
    assert long_s < 1.5 * fcfs_long_s
    assert at.throughput > 0.97


def test_what_is_sustained_is_what_the_machine_can_compute() -> None:
    workload = generated(200, 10.0, [LengthClass(1.0, 4000, 4, 0.3)], seed=6)
    bench = Bench()
    cost = bench.setup("", bench.fcfs).pools[0].executor().cost  # type: ignore[attr-defined]
    prompts_s = sum(cost.chunk_token * a.prompt + cost.chunk_read * a.prompt**2 / 2 for a in workload)
    assert prompts_s < sustained(workload, bench) < 1.5 * prompts_s


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("trace", "count"), [("mooncake_conversation.jsonl.xz", 1000), ("azure_llm_2023_code.csv.xz", 3000)]
)
def test_a_trace_at_nearly_full_load_is_served_five_times_sooner_where_it_is_short(trace: str, count: int) -> None:
    workload = first(read_workload(TRACES / trace), count, context=200_000)
    (at,) = orders(workload, Bench(), shares=[0.95])
    told = at.first_token_s()
    assert len(told) == 4
    for _, _, fcfs_s, other_s in told[:2]:
        assert other_s <= fcfs_s / 5
    assert told[-1][3] <= 1.3 * told[-1][2]
    assert at.throughput >= 0.98
    assert at.other.max_overtakes is not None
    assert max(row.overtaken for row in at.other.requests) <= at.other.max_overtakes
