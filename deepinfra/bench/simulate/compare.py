"""Several simulations of the same requests: each figure beside the first one's, and which is better."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

from deepinfra.bench.simulate.report import SCHEMA, Spread, Summary, rows_document, summarise
from deepinfra.bench.simulate.results import SimulationResult

__all__ = ("MOST_COMPARED", "SAME", "Comparison", "Figure", "Unit", "Verdict", "compare", "document", "summaries")

Unit: TypeAlias = Literal["s", "tok/s", "share", "money", "times"]
Verdict: TypeAlias = Literal["better", "worse", "same"]

SAME = 0.02
"""Figures that differ by less than this share are the same: no more is promised of a model of a machine."""

MOST_COMPARED = 6
"""Simulations in one report: as many styles of lines as can be told apart."""


class Figure(NamedTuple):
    """One simulation's value of a row.

    Attributes:
        value: `None` if there is none.
        ratio: Over the first simulation's; `None` for the first, and where one of the two is missing or the first 0.
        verdict: Beside the first one's; `None` for the first, and where neither more nor less is better.
        n: Values behind a percentile.
    """

    value: float | None
    ratio: float | None = None
    verdict: Verdict | None = None
    n: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """One row: what is compared, its unit, whether more is better, and each simulation's figure.

    `more_is_better` is `None` where neither is: overtaking within its bound is what a scheduler is for.
    """

    name: str
    unit: Unit
    more_is_better: bool | None
    figures: tuple[Figure, ...]


def summaries(results: Sequence[SimulationResult], *, price: float | None = None) -> list[Summary]:
    """Count simulations that are to be compared; the first one is what the others are compared with.

    Raises:
        ValueError: None, more than can be told apart, equal names, or different edges.
    """
    if not 1 <= len(results) <= MOST_COMPARED:
        raise ValueError(f"a report compares 1 to {MOST_COMPARED} simulations, not {len(results)}")
    names = [result.name for result in results]
    if len(set(names)) < len(names):
        raise ValueError(f"simulations of one report need different names: {', '.join(names)}")
    if len({tuple(result.edges) for result in results}) > 1:
        raise ValueError("simulations of one report need the same bucket edges")
    return [summarise(result, price=price) for result in results]


def compare(found: Sequence[Summary]) -> list[Comparison]:
    """All rows worth comparing; also for one simulation, without ratios then."""
    rows: list[Comparison] = []
    for name, unit, more, look in _rows(found[0]):
        looked = [look(summary) for summary in found]
        base = looked[0][0]
        figures = [_beside(base, value, n, more) if i else Figure(value, n=n) for i, (value, n) in enumerate(looked)]
        if any(figure.value is not None for figure in figures):
            rows.append(Comparison(name=name, unit=unit, more_is_better=more, figures=tuple(figures)))
    return rows


def document(
    results: Sequence[SimulationResult], *, price: float | None = None, rows: bool = False
) -> dict[str, object]:
    """The JSON document; docs/reference/simulate.md names its fields.

    Args:
        results: What was measured; the first is what the others are compared with.
        price: Of a device for an hour.
        rows: With one object per request.

    Raises:
        ValueError: See `summaries`.
    """
    found = summaries(results, price=price)
    told: list[dict[str, object]] = [dataclasses.asdict(summary) for summary in found]
    if rows:
        told = [{**each, "rows": rows_document(result)} for each, result in zip(told, results, strict=True)]
    table = [
        {**dataclasses.asdict(row), "figures": [figure._asdict() for figure in row.figures]} for row in compare(found)
    ]
    return {"schema": SCHEMA, "edges": list(results[0].edges), "simulations": told, "comparison": table}


_Look: TypeAlias = "Callable[[Summary], tuple[float | None, int | None]]"


def _rows(first: Summary) -> Iterator[tuple[str, Unit, bool | None, _Look]]:
    for percent in ("p50", "p99"):
        for index, name in _buckets(first):
            yield f"first token {percent}, {name}", "s", False, _of_spread(index, "first_token_s", percent)
    for percent in ("p50", "p99"):
        for index, name in _buckets(first, each=percent == "p99"):
            yield f"between tokens {percent}, {name}", "s", False, _of_spread(index, "gap_s", percent)
    yield "whole answer p50, all", "s", False, _of_spread(-1, "whole_s", "p50")
    yield "output tokens per second", "tok/s", True, lambda each: (each.output_tokens_per_s, None)
    yield "served requests", "share", True, lambda each: (each.served_share, each.requests)
    yield "prompt tokens from a cache", "share", True, lambda each: (each.hit_rate, None)
    yield "most overtakes of one request", "times", None, _of_spread(-1, "overtaken", "worst")
    yield "preemptions", "times", False, lambda each: (float(each.preemptions), None)
    yield "cost per million output tokens", "money", False, lambda each: (each.cost_per_million_output, None)
    yield "cost per million tokens", "money", False, lambda each: (each.cost_per_million, None)


def _buckets(first: Summary, *, each: bool = True) -> Iterable[tuple[int, str]]:
    buckets = enumerate(bucket.name for bucket in first.buckets) if each else ()
    return (*buckets, (-1, "all"))


def _of_spread(index: int, name: str, percent: str) -> _Look:
    def look(summary: Summary) -> tuple[float | None, int | None]:
        bucket = summary.all if index < 0 else summary.buckets[index]
        found: Spread | None = getattr(bucket, name)
        return (None, 0) if found is None else (getattr(found, percent), found.n)

    return look


def _beside(base: float | None, value: float | None, n: int | None, more_is_better: bool | None) -> Figure:
    if base is None or value is None:
        return Figure(value, n=n)
    verdict: Verdict | None = None
    if abs(value - base) <= SAME * max(abs(base), abs(value)):
        verdict = "same"
    elif more_is_better is not None:
        verdict = "better" if (value > base) is more_is_better else "worse"
    return Figure(value, value / base if base else None, verdict, n)
