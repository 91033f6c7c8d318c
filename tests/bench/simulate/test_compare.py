from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from deepinfra.bench.simulate.compare import Comparison, compare, document, summaries
from deepinfra.bench.simulate.report import percentile
from deepinfra.bench.simulate.results import RequestRow, SimulationResult

Make = Callable[..., SimulationResult]


REFERENCE = Path(__file__).parents[3] / "docs" / "reference" / "simulate.md"


def fields(told: object) -> set[str]:
    """Names of all fields of the document, but not those of maps whose keys are names themselves."""
    if isinstance(told, dict):
        maps = ("settings", "outcomes", "hit_rate_by_tier", "cached")
        return {*told, *(name for key, each in told.items() if key not in maps for name in fields(each))}
    return {name for each in told for name in fields(each)} if isinstance(told, list) else set()


def row(first_s: float, output: int = 10) -> RequestRow:
    return RequestRow(0.0, 100, output, {}, 100, "", 0, 0, 0.1, first_s, first_s + 1, 0.2, 0, "length")


def simulation(name: str, first_s: float, output: int = 10) -> SimulationResult:
    return SimulationResult(name=name, settings={}, requests=[row(first_s, output)] * 100, span_s=100.0)


def named(rows: list[Comparison], name: str) -> Comparison:
    return next(row for row in rows if row.name == name)


def test_ratios_are_to_the_first_and_fewer_seconds_are_better() -> None:
    found = compare(summaries([simulation("a", 2.0), simulation("b", 0.5), simulation("c", 8.0)]))
    figures = named(found, "first token p99, 0–511").figures
    assert [(each.value, each.ratio, each.verdict, each.n) for each in figures] == [
        (2.0, None, None, 100),
        (0.5, 0.25, "better", 100),
        (8.0, 4.0, "worse", 100),
    ]


def test_more_tokens_are_better() -> None:
    found = compare(summaries([simulation("a", 1.0, output=10), simulation("b", 1.0, output=15)]))
    figure = named(found, "output tokens per second").figures[1]
    assert (figure.value, figure.ratio, figure.verdict) == (15.0, 1.5, "better")


@pytest.mark.parametrize(("first_s", "verdict"), [(1.0, "same"), (1.015, "same"), (1.05, "worse"), (0.95, "better")])
def test_what_hardly_differs_is_the_same(first_s: float, verdict: str) -> None:
    found = compare(summaries([simulation("a", 1.0), simulation("b", first_s)]))
    assert named(found, "first token p50, all").figures[1].verdict == verdict


def test_beside_nothing_there_is_no_ratio_but_a_verdict() -> None:
    worse = dataclasses.replace(simulation("b", 1.0), preemptions=5)
    figure = named(compare(summaries([simulation("a", 1.0), worse])), "preemptions").figures[1]
    assert (figure.value, figure.ratio, figure.verdict) == (5.0, None, "worse")
    nothing = named(compare(summaries([simulation("a", 1.0), simulation("b", 1.0)])), "preemptions").figures[1]
    assert (nothing.value, nothing.verdict) == (0.0, "same")


def test_rows_without_any_value_are_left_out() -> None:
    names = [row.name for row in compare(summaries([simulation("a", 1.0)]))]
    assert "first token p99, 0–511" in names
    assert "first token p99, 512–4,095" not in names
    assert "cost per million tokens" not in names


def test_shortest_first_is_told_to_be_better_for_the_short(make_result: Make) -> None:
    results = [make_result("in order"), make_result("shortest first", shortest_first=True)]
    figure = named(compare(summaries(results)), "first token p99, 512–4,095").figures[1]
    lasts = [
        percentile(sorted(r.first_s or 0.0 for r in result.requests if 512 <= r.uncached < 4096), 99)
        for result in results
    ]
    assert figure.value == lasts[1]
    assert figure.ratio == lasts[1] / lasts[0]
    assert (figure.verdict, lasts[1] < lasts[0]) == ("better", True)


def test_every_field_of_the_document_is_documented(make_result: Make) -> None:
    told = document([make_result("a"), make_result("b")], price=1.0, rows=True)
    found = fields(json.loads(json.dumps(told, allow_nan=False)))
    assert len(found) > 60
    documented = re.findall(r"`(?:[\w.\[\]]+\.)?(\w+)`", REFERENCE.read_text())
    assert sorted(found - set(documented)) == []


@pytest.mark.parametrize(
    ("results", "why"),
    [
        ([], "1 to 6 simulations, not 0"),
        ([simulation(str(n), 1.0) for n in range(7)], "1 to 6 simulations, not 7"),
        ([simulation("a", 1.0), simulation("a", 2.0)], "different names: a, a"),
        ([simulation("a", 1.0), dataclasses.replace(simulation("b", 1.0), edges=(7,))], "same bucket edges"),
    ],
)
def test_what_cannot_be_compared_is_refused(results: list[SimulationResult], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        summaries(results)


def test_overtaking_is_neither_better_nor_worse() -> None:
    often = [each._replace(overtaken=9) for each in simulation("b", 1.0).requests]
    found = compare(summaries([simulation("a", 1.0), dataclasses.replace(simulation("b", 1.0), requests=often)]))
    row = named(found, "most overtakes of one request")
    assert (row.more_is_better, row.figures[1].value, row.figures[1].verdict) == (None, 9, None)
