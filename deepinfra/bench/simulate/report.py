"""What simulations came to: summaries by length bucket and pool, and the JSON document of them."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from deepinfra.bench.simulate.results import PoolSample, RequestRow, SimulationResult
from deepinfra.core.buckets import bucket_of

__all__ = (
    "SCHEMA",
    "SERVED",
    "BucketSummary",
    "PoolSummary",
    "Spread",
    "Summary",
    "bucket_name",
    "bucket_names",
    "percentile",
    "rows_document",
    "spread",
    "summarise",
)

SCHEMA = "deepinfra-simulation/1"
"""Name of the JSON document's form; a new number when a field changes its meaning or goes away."""

SERVED = "length"
"""The outcome of a request that got all its tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Percentiles of some values, by nearest rank: each is a value that occurred.

    With fewer than 100 values `p99` is the worst of them, with fewer than 10 `p90` is.
    """

    n: int
    mean: float
    p50: float
    p90: float
    p99: float
    worst: float


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketSummary:
    """Requests whose uncached prompt tokens, as they arrived, lie in one range.

    Attributes:
        name: The range, in words.
        first: Least uncached tokens.
        last: Most; `None` for the last bucket.
        requests: That arrived.
        served: Of them, those that got all their tokens.
        prompt_tokens: Of all that arrived.
        uncached_tokens: Of all that arrived.
        output_tokens: Given.
        first_token_s: From arrival to first token; `None` if none got one.
        opened_s: From arrival to first step.
        whole_s: From arrival to end, of those served.
        gap_s: Times between two tokens. Percentiles are upper ends of the histogram's bins, but never above the
            longest gap seen; the mean is of requests: time from first to last token over tokens between.
        overtaken: How often one was passed before its first step.
    """

    name: str
    first: int
    last: int | None
    requests: int
    served: int
    prompt_tokens: int
    uncached_tokens: int
    output_tokens: int
    first_token_s: Spread | None
    opened_s: Spread | None
    whole_s: Spread | None
    gap_s: Spread | None
    overtaken: Spread | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSummary:
    """One pool over the whole simulation; shares are from 0 to 1.

    Attributes:
        name: Its name.
        blocks: It has.
        busy: Share of time in which a step ran.
        waiting: Mean number of sequences that wait.
        waiting_worst: Most.
        running: Mean number of sequences that hold blocks.
        blocks_used: Mean share of its blocks in use.
        blocks_used_worst: Largest share.
        prompt_tokens: Computed.
        output_tokens: Generated.
    """

    name: str
    blocks: int
    busy: float
    waiting: float
    waiting_worst: int
    running: float
    blocks_used: float
    blocks_used_worst: float
    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """One simulation in numbers; times are virtual seconds unless they say otherwise.

    Attributes:
        name: What it is called.
        settings: What was simulated.
        requests: That arrived.
        outcomes: How many ended how: `length` got all their tokens, others by their error's code.
        served_share: Share of requests that got all their tokens.
        span_s: From the first arrival to the last token.
        prompt_tokens: Of all requests.
        output_tokens: Given.
        output_tokens_per_s: Of all pools together, over the span.
        prompt_tokens_per_s: The same, cached ones included.
        requests_per_s: Served ones over the span.
        hit_rate: Share of prompt tokens that were cached as their request was first opened.
        hit_rate_by_tier: The same by where they were: `device` and the store's tiers.
        devices: Of all pools.
        price: Per device and hour; `None` if it was not given.
        cost_per_million_output: Devices, idle or not, over the span, per million output tokens; in the price's money.
        cost_per_million: The same per million tokens, those of prompts included.
        steps: Of all pools.
        preemptions: Sequences that lost their blocks.
        max_overtakes: The scheduler's published bound.
        error_median: Relative error of the step-time predictor.
        error_p95: The error that 95 % of its predictions do not exceed.
        took_s: Real seconds.
        all: All requests as one bucket.
        buckets: By uncached prompt tokens.
        pools: One by one.
        tenants: Requests of each, as a bucket of that name without times between tokens; empty if there is only one.
    """

    name: str
    settings: Mapping[str, str]
    requests: int
    outcomes: Mapping[str, int]
    served_share: float
    span_s: float
    prompt_tokens: int
    output_tokens: int
    output_tokens_per_s: float
    prompt_tokens_per_s: float
    requests_per_s: float
    hit_rate: float
    hit_rate_by_tier: Mapping[str, float]
    devices: int
    price: float | None
    cost_per_million_output: float | None
    cost_per_million: float | None
    steps: int
    preemptions: int
    max_overtakes: int | None
    error_median: float | None
    error_p95: float | None
    took_s: float
    all: BucketSummary
    buckets: Sequence[BucketSummary] = field(default=())
    pools: Sequence[PoolSummary] = field(default=())
    tenants: Sequence[BucketSummary] = field(default=())


def percentile(ordered: Sequence[float], percent: int) -> float:
    """The smallest of ascending values that `percent` % of them do not exceed (nearest rank).

    Raises:
        ValueError: There are none.
    """
    if not ordered:
        raise ValueError("no values have no percentile")
    return ordered[max(0, _rank(len(ordered), percent) - 1)]


def spread(values: Iterable[float | None]) -> Spread | None:
    """Percentiles of those values that are there."""
    ordered = sorted(value for value in values if value is not None)
    if not ordered:
        return None
    p50, p90, p99 = (percentile(ordered, percent) for percent in (50, 90, 99))
    return Spread(n=len(ordered), mean=sum(ordered) / len(ordered), p50=p50, p90=p90, p99=p99, worst=ordered[-1])


def bucket_name(first: int, last: int | None) -> str:
    """`512–4,095`."""
    return f"{first:,} or more" if last is None else f"{first:,}–{last:,}"


def bucket_names(edges: Sequence[int]) -> list[str]:
    """Of all buckets between some edges."""
    return [bucket_name(first, last) for first, last in _ranges(edges)]


def summarise(result: SimulationResult, *, price: float | None = None) -> Summary:
    """Count one simulation.

    Args:
        result: What was measured.
        price: Of a device for an hour, in any money.
    """
    rows: list[list[RequestRow]] = [[] for _ in range(len(result.edges) + 1)]
    cached: Counter[str] = Counter()
    for row in result.requests:
        rows[bucket_of(row.uncached, result.edges)].append(row)
        cached.update({tier: tokens for tier, tokens in row.cached.items() if tokens})
    buckets = [
        _bucket(inside, first, last, result.gaps[index] if index < len(result.gaps) else (), result.gap_bounds)
        for index, (inside, (first, last)) in enumerate(zip(rows, _ranges(result.edges), strict=True))
    ]
    every = _bucket(result.requests, 0, None, [sum(bins) for bins in zip(*result.gaps, strict=True)], result.gap_bounds)
    outcomes = Counter(row.outcome for row in result.requests)
    span, served = result.span_s, outcomes[SERVED]
    cost = None if price is None else price * result.devices * span / 3600.0
    return Summary(
        name=result.name,
        settings=dict(result.settings),
        requests=every.requests,
        outcomes=dict(outcomes.most_common()),
        served_share=_over(served, every.requests),
        span_s=span,
        prompt_tokens=every.prompt_tokens,
        output_tokens=every.output_tokens,
        output_tokens_per_s=_over(every.output_tokens, span),
        prompt_tokens_per_s=_over(sum(row.prompt for row in result.requests if row.first_s is not None), span),
        requests_per_s=_over(served, span),
        hit_rate=_over(sum(cached.values()), every.prompt_tokens),
        hit_rate_by_tier={tier: _over(tokens, every.prompt_tokens) for tier, tokens in sorted(cached.items())},
        devices=result.devices,
        price=price,
        cost_per_million_output=_per_million(cost, every.output_tokens),
        cost_per_million=_per_million(cost, every.output_tokens + every.prompt_tokens),
        steps=result.steps,
        preemptions=result.preemptions,
        max_overtakes=result.max_overtakes,
        error_median=result.error_median,
        error_p95=result.error_p95,
        took_s=result.took_s,
        all=dataclasses.replace(every, name="all"),
        buckets=buckets,
        pools=_pools(result),
        tenants=_tenants(result.requests),
    )


def rows_document(result: SimulationResult) -> list[dict[str, object]]:
    """One object per request, by arrival: the fields of `RequestRow`."""
    return [{**row._asdict(), "cached": dict(row.cached)} for row in result.requests]


# -- parts of a summary ---------------------------------------------------------------------------


def _bucket(
    rows: Sequence[RequestRow], first: int, last: int | None, gaps: Sequence[int], bounds: Sequence[float]
) -> BucketSummary:
    return BucketSummary(
        name=bucket_name(first, last),
        first=first,
        last=last,
        requests=len(rows),
        served=sum(row.outcome == SERVED for row in rows),
        prompt_tokens=sum(row.prompt for row in rows),
        uncached_tokens=sum(row.uncached for row in rows),
        output_tokens=sum(row.output for row in rows),
        first_token_s=spread(row.first_s for row in rows),
        opened_s=spread(row.opened_s for row in rows),
        whole_s=spread(row.last_s for row in rows if row.outcome == SERVED),
        gap_s=_gaps(rows, gaps, bounds),
        overtaken=spread(row.overtaken for row in rows),
    )


def _tenants(rows: Sequence[RequestRow]) -> list[BucketSummary]:
    found: dict[str, list[RequestRow]] = {}
    for row in rows:
        found.setdefault(row.tenant, []).append(row)
    if len(found) < 2:
        return []
    return [dataclasses.replace(_bucket(found[name], 0, None, (), ()), name=name) for name in sorted(found)]


def _gaps(rows: Sequence[RequestRow], counts: Sequence[int], bounds: Sequence[float]) -> Spread | None:
    n = sum(counts)
    worst = max((row.worst_gap_s for row in rows if row.worst_gap_s is not None), default=None)
    if not n or worst is None:
        return None
    found: list[float] = []
    for percent in (50, 90, 99):
        rank, index, below = _rank(n, percent), 0, counts[0]
        while below < rank:
            index += 1
            below += counts[index]
        found.append(min(bounds[index], worst) if index < len(bounds) else worst)
    between = [
        (row.last_s - row.first_s, row.output - 1)
        for row in rows
        if row.output > 1 and row.first_s is not None and row.outcome == SERVED
    ]
    mean = _over(sum(seconds for seconds, _ in between), sum(tokens for _, tokens in between))
    return Spread(n=n, mean=mean, p50=found[0], p90=found[1], p99=found[2], worst=worst)


def _pools(result: SimulationResult) -> list[PoolSummary]:
    samples: list[list[PoolSample]] = [[] for _ in result.pools]
    for sample in result.samples:
        samples[sample.pool].append(sample)
    return [_pool(result, index, own) for index, own in enumerate(samples)]


def _pool(result: SimulationResult, index: int, samples: Sequence[PoolSample]) -> PoolSummary:
    blocks = result.blocks[index] if index < len(result.blocks) else 0
    n = len(samples)
    return PoolSummary(
        name=result.pools[index],
        blocks=blocks,
        busy=_over(sum(sample.busy for sample in samples), n),
        waiting=_over(sum(sample.waiting for sample in samples), n),
        waiting_worst=max((sample.waiting for sample in samples), default=0),
        running=_over(sum(sample.running for sample in samples), n),
        blocks_used=_over(sum(sample.blocks_used for sample in samples), n * blocks),
        blocks_used_worst=_over(max((sample.blocks_used for sample in samples), default=0), blocks),
        prompt_tokens=sum(sample.prompt_tokens for sample in samples),
        output_tokens=sum(sample.output_tokens for sample in samples),
    )


def _rank(n: int, percent: int) -> int:
    """In whole numbers: 0.07 * 100 is more than 7."""
    return -(-n * percent // 100)


def _ranges(edges: Sequence[int]) -> list[tuple[int, int | None]]:
    return list(zip((0, *edges), (*(edge - 1 for edge in edges), None), strict=True))


def _over(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def _per_million(cost: float | None, tokens: int) -> float | None:
    return None if cost is None or not tokens else 1e6 * cost / tokens
