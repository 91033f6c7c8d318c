"""Workloads: prompts that share what they are said to share, and generators that keep their averages."""

from __future__ import annotations

import statistics
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepinfra.bench.simulate.traces import (
    LEAST_VOCABULARY,
    Arrival,
    LengthClass,
    bursts,
    first,
    generated,
    giant_then_short,
    prompt_ids,
    stretched,
)

BLOCK = 512

CHAINS = st.lists(st.integers(0, 300_000), min_size=1, max_size=4, unique=True)


@given(CHAINS, CHAINS, st.integers(1, BLOCK))
def test_two_prompts_are_alike_as_far_as_their_blocks_are(left: list[int], right: list[int], last: int) -> None:
    both = [prompt_ids(Arrival(0.0, (len(ids) - 1) * BLOCK + last, 1, tuple(ids)), 0) for ids in (left, right)]
    assert [len(ids) for ids in both] == [(len(each) - 1) * BLOCK + last for each in (left, right)]
    shared = next((i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))
    alike = next((i for i, (a, b) in enumerate(zip(*both, strict=False)) if a != b), min(map(len, both)))
    # A block's name stands in its first tokens, so that blocks of an engine, which are larger than these, differ.
    assert shared * BLOCK <= alike < shared * BLOCK + 3 or alike == min(map(len, both))
    assert max(map(max, both)) < LEAST_VOCABULARY


def test_prompts_without_blocks_are_like_no_other() -> None:
    prompts = {prompt_ids(Arrival(0.0, 40, 1), serial)[:4] for serial in range(2000)}
    assert len(prompts) == 2000
    blocks = {prompt_ids(Arrival(0.0, 40, 1, (number,)), 0)[:4] for number in range(2000)}
    assert not prompts & blocks


def test_a_stretched_workload_is_the_same_at_other_times() -> None:
    workload = generated(20, 1.0)
    slow = stretched(workload, 3.0)
    assert [b.at_s for b in slow] == [3.0 * a.at_s for a in workload]
    assert [b._replace(at_s=0.0) for b in slow] == [a._replace(at_s=0.0) for a in workload]


def test_a_workload_is_cut_by_number_time_and_length() -> None:
    workload = [Arrival(float(i), 10 * i, 5) for i in range(1, 9)]
    assert first(workload, 3) == workload[:3]
    assert first(workload, seconds=3.0) == workload[:2]
    assert first(workload, 2, context=65) == workload[:2]
    assert first(workload, context=45) == workload[:4]


@pytest.mark.parametrize("burstiness", [0.0, 1.0, 3.0])
def test_arrivals_keep_their_rate_and_scatter(burstiness: float) -> None:
    times = [arrival.at_s for arrival in generated(6000, 5.0, burstiness=burstiness, seed=2)]
    gaps = [b - a for a, b in pairwise(times)]
    assert statistics.mean(gaps) == pytest.approx(0.2, rel=0.15)
    assert statistics.stdev(gaps) / statistics.mean(gaps) == pytest.approx(burstiness, rel=0.15, abs=1e-6)


def test_classes_keep_their_shares_medians_and_owners() -> None:
    classes = [LengthClass(3.0, 100, 20, tenant="a", priority=1), LengthClass(1.0, 5000, 50, traffic="agent")]
    workload = generated(4000, 5.0, classes, seed=3)
    small = [arrival for arrival in workload if arrival.tenant == "a"]
    assert len(small) / len(workload) == pytest.approx(0.75, abs=0.03)
    assert statistics.median(arrival.prompt for arrival in small) == pytest.approx(100, rel=0.05)
    large = [arrival for arrival in workload if arrival.traffic == "agent"]
    assert len(large) + len(small) == len(workload)
    assert statistics.median(arrival.output for arrival in large) == pytest.approx(50, rel=0.05)


def test_nothing_drawn_is_longer_than_it_may_be() -> None:
    workload = generated(500, 5.0, [LengthClass(1.0, 900, 900, 2.0)], longest=1000)
    assert max(arrival.prompt + arrival.output for arrival in workload) <= 1000
    assert min(min(arrival.prompt, arrival.output) for arrival in workload) >= 1


def test_bursts_come_at_once() -> None:
    assert [arrival.at_s for arrival in bursts(2, 3, 10.0)] == [0.0] * 3 + [10.0] * 3


def test_a_giant_comes_first_and_the_short_ones_behind_it() -> None:
    workload = giant_then_short(shorts=3, after_s=2.0, every_s=0.5)
    assert [(arrival.at_s, arrival.prompt) for arrival in workload] == [
        (0.0, 600_000),
        (2.0, 101),
        (2.5, 101),
        (3.0, 101),
    ]
