"""Which plots a report has, and what is in them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from deepinfra.bench.simulate.plots import (
    Axis,
    Line,
    Range,
    Segment,
    axis_for,
    lines,
    number_text,
    ranges,
    seconds_text,
    stacks,
)
from deepinfra.bench.simulate.report import BucketSummary, Spread, Summary, percentile
from deepinfra.bench.simulate.results import PoolSample, SimulationResult
from deepinfra.bench.simulate.series import Course, courses
from deepinfra.core.buckets import bucket_of

__all__ = ("Plot", "figures")

UNCACHED = "by uncached prompt tokens"


class Plot(NamedTuple):
    """A caption and a drawing."""

    caption: str
    svg: str


class Measure(NamedTuple):
    """What is drawn over time: caption, how its axis is written, whether pools are added up, and a sample's value."""

    caption: str
    text: Callable[[float], str]
    total: bool
    value: Callable[[PoolSample, int], float]


def figures(results: Sequence[SimulationResult], found: Sequence[Summary]) -> list[tuple[str, str, Sequence[Plot]]]:
    """(heading, words, plots) of each section."""
    spreads = [
        _spreads("Time to first token", found, lambda bucket: bucket.first_token_s),
        _spreads("Time between tokens", found, lambda bucket: bucket.gap_s),
        _spreads("Time from arrival to the first step", found, lambda bucket: bucket.opened_s),
    ]
    return [
        (
            "How long it takes",
            "Marks are p50, p90 and p99, growing in size. Times are on logarithmic scales.",
            [plot for plot in spreads if plot],
        ),
        ("Share of requests with their first token by then", "", _shares(results, found)),
        (
            "Over time",
            "Pools of one kind are drawn together: lines are means, bands reach from the lowest to the highest.",
            _over_time(results),
        ),
        ("Cached prompt tokens", "Share of all prompt tokens by the tier that had them.", _hits(found)),
        (
            "Overtaking",
            "How often a later request of no higher priority was begun first; a dashed line is a published bound.",
            _overtakes(found),
        ),
    ]


def _spreads(caption: str, found: Sequence[Summary], of: Callable[[BucketSummary], Spread | None]) -> Plot | None:
    rows: list[tuple[str, list[Range]]] = []
    values: list[float] = []
    for index, bucket in enumerate(found[0].buckets):
        group: list[Range] = []
        for style, summary in enumerate(found):
            spread = of(summary.buckets[index])
            marks = [] if spread is None else [("p50", spread.p50), ("p90", spread.p90), ("p99", spread.p99)]
            values += [value for _, value in marks]
            n = 0 if spread is None else spread.n
            group.append(Range(style, f"{summary.name} (n={n:,})", marks))
        if any(summary.buckets[index].requests for summary in found):
            rows.append((bucket.name, group))
    if not values:
        return None
    title = f"{caption}, {UNCACHED}"
    return Plot(title, ranges(title, axis_for(caption.lower(), values, log=True, text=seconds_text), rows))


def _shares(results: Sequence[SimulationResult], found: Sequence[Summary]) -> list[Plot]:
    plots: list[Plot] = []
    for index, bucket in enumerate(found[0].buckets):
        curves: list[Line] = []
        for style, result in enumerate(results):
            times = sorted(
                row.first_s
                for row in result.requests
                if row.first_s is not None and bucket_of(row.uncached, result.edges) == index
            )
            if times:
                steps = [(percentile(times, percent), percent / 100) for percent in range(1, 101)]
                curves.append(Line(style, result.name, [(times[0], 0.0), *steps]))
        if curves:
            values = [at for curve in curves for at, _ in curve.points]
            x = axis_for("time to first token", values, log=True, text=seconds_text)
            y = Axis("share of requests", 0.0, 1.0, False, _percent)
            title = f"Time to first token, {bucket.name} uncached tokens"
            plots.append(Plot(title, lines(title, x, y, curves)))
    return plots


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


_MEASURES = (
    Measure("sequences waiting", number_text, False, lambda sample, blocks: sample.waiting),
    Measure("sequences running", number_text, False, lambda sample, blocks: sample.running),
    Measure("time in steps", _percent, False, lambda sample, blocks: sample.busy),
    Measure("blocks used", _percent, False, lambda sample, blocks: sample.blocks_used / blocks if blocks else 0.0),
    Measure("prompt tokens/s", number_text, True, lambda sample, blocks: sample.prompt_tokens),
    Measure("output tokens/s", number_text, True, lambda sample, blocks: sample.output_tokens),
)


def _over_time(results: Sequence[SimulationResult]) -> list[Plot]:
    found = [courses(result, [measure.value for measure in _MEASURES]) for result in results]
    plots: list[Plot] = []
    kinds = dict.fromkeys(kind for each in found for kind in each)
    last = max((each.points[-1][0] for by_kind in found for kind in by_kind.values() for each in kind), default=0.0)
    unit, seconds = _clock(last)
    x = Axis(f"virtual time ({unit})", 0.0, last / seconds or 1.0, False, number_text)
    for kind in kinds:
        for at, measure in enumerate(_MEASURES):
            curves = [
                _curve(style, result, by_kind[kind][at], measure, seconds)
                for style, (result, by_kind) in enumerate(zip(results, found, strict=True))
                if kind in by_kind
            ]
            tops = [high for curve in curves for _, high in (curve.band or curve.points)]
            limit = Axis(measure.caption, 0.0, 1.0, False, _percent)
            y = limit if measure.text is _percent else axis_for(measure.caption, tops, text=measure.text)
            title = f"{kind}: {measure.caption}{', all pools together' if measure.total and _several(curves) else ''}"
            plots.append(Plot(title, lines(title, x, y, curves)))
    return plots


def _several(curves: Sequence[Line]) -> bool:
    return any(" pools" in curve.name for curve in curves)


def _curve(style: int, result: SimulationResult, course: Course, measure: Measure, seconds: float) -> Line:
    """A course as a line, over units of time of so many seconds."""
    name = result.name if course.total == 1 else f"{result.name}, {course.total} pools"
    factor = course.total / result.interval_s if measure.total else 1.0
    points = [(at / seconds, factor * value) for at, value in course.points]
    return Line(style, name, points, () if measure.total else course.band)


def _clock(last: float) -> tuple[str, float]:
    """The unit of an axis that ends after so many seconds, and its own seconds."""
    return next(((unit, each) for unit, each in (("h", 3600.0), ("min", 60.0)) if last > 4 * each), ("s", 1.0))


def _hits(found: Sequence[Summary]) -> list[Plot]:
    tiers = list(dict.fromkeys(tier for summary in found for tier in summary.hit_rate_by_tier))
    if not tiers:
        return []
    rows: list[tuple[str, list[Segment]]] = []
    for summary in found:
        shares = summary.hit_rate_by_tier
        told = ", ".join(f"{tier} {100 * share:.1f} %" for tier, share in shares.items()) or "none"
        segments = [Segment(tiers.index(tier) % 5, tier, share) for tier, share in shares.items()]
        rows.append((f"{summary.name}: {told}", segments))
    title = "Prompt tokens from a cache"
    return [Plot(title, stacks(title, Axis("share of prompt tokens", 0.0, 1.0, False, _percent), rows))]


def _overtakes(found: Sequence[Summary]) -> list[Plot]:
    rows: list[tuple[str, list[Range]]] = []
    for index, bucket in enumerate(found[0].buckets):
        group = []
        for style, summary in enumerate(found):
            spread = summary.buckets[index].overtaken
            marks = [] if spread is None else [("p50", spread.p50), ("p99", spread.p99), ("most", spread.worst)]
            group.append(Range(style, summary.name, marks))
        if any(row.marks for row in group):
            rows.append((bucket.name, group))
    if not rows:
        return []
    values = [value for _, group in rows for row in group for _, value in row.marks]
    title = f"Times overtaken, {UNCACHED}"
    bounds = [(summary.name, summary.max_overtakes) for summary in found if summary.max_overtakes is not None]
    x = axis_for("times overtaken (p50, p99, most)", [*values, *(bound for _, bound in bounds)])
    return [Plot(title, ranges(title, x, rows, limits=bounds))]
