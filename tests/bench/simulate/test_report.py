from __future__ import annotations

import dataclasses
import itertools
import json
import math
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepinfra.bench.simulate.compare import document
from deepinfra.bench.simulate.report import bucket_names, percentile, spread, summarise
from deepinfra.bench.simulate.results import PoolSample, RequestRow, SimulationResult

Make = Callable[..., SimulationResult]


def request(**changes: object) -> RequestRow:
    row = RequestRow(0.0, 100, 10, {}, 100, "", 0, 0, 0.1, 1.0, 2.0, 0.2, 0, "length")
    return row._replace(**changes)  # type: ignore[arg-type]


# -- percentiles ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("percent", "expected"), [(0, 15.0), (5, 15.0), (30, 20.0), (40, 20.0), (50, 35.0), (99, 50.0), (100, 50.0)]
)
def test_a_percentile_is_of_the_nearest_rank(percent: int, expected: float) -> None:
    assert percentile([15.0, 20.0, 35.0, 40.0, 50.0], percent) == expected


def test_of_a_hundred_values_each_percentile_is_one() -> None:
    values = [float(n) for n in range(1, 101)]
    assert [percentile(values, percent) for percent in range(1, 101)] == values


@given(st.lists(st.floats(0, 1e6), min_size=1), st.integers(1, 100))
def test_a_percentile_is_the_smallest_value_that_enough_do_not_exceed(values: list[float], percent: int) -> None:
    found = percentile(sorted(values), percent)
    enough = math.ceil(len(values) * percent / 100 - 1e-9)
    assert sum(value <= found for value in values) >= enough
    assert sum(value < found for value in values) < enough


def test_of_no_values_there_is_no_percentile() -> None:
    assert spread([None, None]) is None
    with pytest.raises(ValueError, match="no percentile"):
        percentile([], 50)


def test_a_spread_says_how_many_values_it_is_of() -> None:
    found = spread([3.0, None, 1.0])
    assert found is not None
    assert (found.n, found.p50, found.p90, found.p99, found.worst, found.mean) == (2, 1.0, 3.0, 3.0, 3.0, 2.0)


# -- a simulation's numbers -------------------------------------------------------------------------


def pick(row: RequestRow, edges: Sequence[int]) -> int:
    return sum(row.uncached >= edge for edge in edges)


def test_the_numbers_of_each_bucket_are_those_of_its_rows(make_result: Make) -> None:
    result = make_result(refuse_over=12)
    told = json.loads(json.dumps(document([result], rows=True), allow_nan=False))
    (simulation,) = told["simulations"]
    for index, bucket in enumerate(simulation["buckets"]):
        rows = [row for row in simulation["rows"] if pick(RequestRow(**row), told["edges"]) == index]
        firsts = sorted(row["first_s"] for row in rows if row["first_s"] is not None)
        assert bucket["requests"] == len(rows)
        assert bucket["served"] == len(firsts) == bucket["first_token_s"]["n"]
        assert bucket["prompt_tokens"] == sum(row["prompt"] for row in rows)
        assert bucket["first_token_s"]["p90"] == firsts[math.ceil(0.9 * len(firsts)) - 1]
        assert bucket["first_token_s"]["worst"] == firsts[-1]
    refused = sum(row["outcome"] == "overloaded" for row in simulation["rows"])
    assert refused > 0
    assert simulation["outcomes"] == {"length": 300 - refused, "overloaded": refused}
    assert simulation["served_share"] == (300 - refused) / 300
    assert simulation["all"]["requests"] == simulation["requests"] == 300


def test_rates_and_cached_shares_are_of_the_rows(make_result: Make) -> None:
    result = make_result()
    found = summarise(result)
    prompts = sum(row.prompt for row in result.requests)
    assert found.output_tokens_per_s == sum(row.output for row in result.requests) / result.span_s
    assert found.prompt_tokens_per_s == prompts / result.span_s
    by_tier = {tier: sum(row.cached.get(tier, 0) for row in result.requests) / prompts for tier in ("device", "ssd")}
    assert found.hit_rate_by_tier == pytest.approx(by_tier)
    assert found.hit_rate == pytest.approx(sum(by_tier.values()))


def test_a_cost_charges_every_device_for_the_whole_time() -> None:
    rows = [request(output=1000), request(output=1000, prompt=8000)]
    found = summarise(SimulationResult(name="x", settings={}, requests=rows, devices=4, span_s=1800.0), price=3.0)
    assert found.cost_per_million_output == pytest.approx(4 * 3.0 * 0.5 / 2000 * 1e6)
    assert found.cost_per_million == pytest.approx(4 * 3.0 * 0.5 / 10_100 * 1e6)
    assert summarise(SimulationResult(name="x", settings={})).cost_per_million is None


def test_gaps_are_upper_ends_of_bins_but_never_above_the_longest() -> None:
    rows = [request(worst_gap_s=0.7, first_s=1.0, last_s=1.9, output=10)]
    result = SimulationResult(
        name="x", settings={}, edges=(), requests=rows, gaps=[[50, 40, 9, 1]], gap_bounds=[0.1, 0.2, 0.4]
    )
    gap = summarise(result).all.gap_s
    assert gap is not None
    assert (gap.n, gap.p50, gap.p90, gap.p99, gap.worst) == (100, 0.1, 0.2, 0.4, 0.7)
    assert gap.mean == pytest.approx(0.1)
    tight = summarise(dataclasses.replace(result, requests=[request(worst_gap_s=0.15)])).all.gap_s
    assert tight is not None
    assert (tight.p50, tight.p90, tight.p99) == (0.1, 0.15, 0.15)


def test_percentiles_of_gaps_are_within_a_bin_of_the_true_ones(make_result: Make) -> None:
    result = make_result(requests=100)
    gap = summarise(result).all.gap_s
    assert gap is not None
    assert 0.05 / 1.2 <= gap.p99 <= 0.05


def test_pools_are_told_one_by_one() -> None:
    samples = [PoolSample(1.0, 0, 4, 1, 50, 1.0, 10, 1), PoolSample(2.0, 0, 0, 3, 100, 0.5, 20, 2)]
    samples.append(PoolSample(1.0, 1, 9, 9, 1, 0.0, 7, 7))
    result = SimulationResult(name="x", settings={}, samples=samples, pools=("a", "b"), blocks=(100, 10))
    first, second = summarise(result).pools
    assert (first.name, first.busy, first.waiting, first.waiting_worst, first.running) == ("a", 0.75, 2.0, 4, 2.0)
    assert (first.blocks_used, first.blocks_used_worst) == (0.75, 1.0)
    assert (first.prompt_tokens, first.output_tokens) == (30, 3)
    assert (second.name, second.waiting_worst, second.blocks_used) == ("b", 9, 0.1)


def test_tenants_are_told_apart_where_there_are_several() -> None:
    rows = [request(tenant="b", output=3), request(tenant="a", first_s=5.0), request(tenant="a", outcome="overloaded")]
    a, b = summarise(SimulationResult(name="x", settings={}, requests=rows)).tenants
    assert (a.name, a.requests, a.served, a.output_tokens) == ("a", 2, 1, 20)
    assert a.first_token_s is not None
    assert a.first_token_s.worst == 5.0
    assert (b.name, b.requests, b.output_tokens) == ("b", 1, 3)
    assert summarise(SimulationResult(name="x", settings={}, requests=rows[:1])).tenants == []


def test_nothing_at_all_is_summarised_too() -> None:
    found = summarise(SimulationResult(name="x", settings={}), price=1.0)
    assert (found.requests, found.hit_rate, found.cost_per_million, found.all.first_token_s) == (0, 0.0, None, None)


def test_bucket_names_leave_no_length_out() -> None:
    assert bucket_names((512, 4096)) == ["0–511", "512–4,095", "4,096 or more"]
    lasts, firsts = zip(
        *((b.last, b.first) for b in summarise(SimulationResult(name="x", settings={})).buckets), strict=True
    )
    assert [after - 1 for after in firsts[1:]] == list(lasts[:-1])
    assert all(a < b for a, b in itertools.pairwise(firsts))
