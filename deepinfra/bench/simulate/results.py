"""What a simulation measured: one row per request, and samples of its pools over time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from deepinfra.core.buckets import DEFAULT_EDGES

__all__ = ("PoolSample", "RequestRow", "SimulationResult")


class RequestRow(NamedTuple):
    """What became of one request; times are virtual seconds.

    Attributes:
        at_s: When it arrived.
        prompt: Tokens of its prompt.
        output: Tokens it was given.
        cached: Prompt tokens not computed, by tier (`device` and the store's), as it was first opened.
        uncached: Prompt tokens to be computed as it arrived: what its bucket is told by.
        tenant: Whose it is.
        priority: Its own.
        pool: Index of the pool that computed its prompt; -1 if none did.
        opened_s: From arrival to its first step; `None` if it never came to that.
        first_s: From arrival to its first token; `None` if there was none.
        last_s: From arrival to its end.
        worst_gap_s: Longest time between two of its tokens; `None` with fewer than two.
        overtaken: How often it was passed while it waited for its first step.
        outcome: `length` for one that got all its tokens, else the code of its error (`overloaded`, ...).
        retry_after_s: What one that was refused was told, if it was.
        own_bucket: Index of the bucket that its scheduler put it into as it came; -1 if that has none.
    """

    at_s: float
    prompt: int
    output: int
    cached: Mapping[str, int]
    uncached: int
    tenant: str
    priority: int
    pool: int
    opened_s: float | None
    first_s: float | None
    last_s: float
    worst_gap_s: float | None
    overtaken: int
    outcome: str
    retry_after_s: float | None = None
    own_bucket: int = -1


class PoolSample(NamedTuple):
    """A pool between two moments of virtual time, `interval_s` apart.

    Attributes:
        at_s: The later of the two.
        pool: Its index.
        waiting: Sequences that wait, then.
        running: Sequences that hold blocks, then.
        blocks_used: Blocks that hold somebody's positions, then.
        busy: Share of the time in which a step ran.
        prompt_tokens: Computed in it.
        output_tokens: Generated in it.
    """

    at_s: float
    pool: int
    waiting: int
    running: int
    blocks_used: int
    busy: float
    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationResult:
    """One simulation.

    Attributes:
        name: What it is called in a report, for example the scheduler's name.
        settings: What was simulated, in words for people: trace, scale of arrivals, scheduler, cost figures, ...
        edges: Uncached tokens at which the report's further buckets begin; the same for all that are compared.
        requests: One row per request, by arrival.
        samples: Of all pools, by time.
        interval_s: Between two samples.
        gaps: Counts of times between two tokens of one request, per bucket: `gaps[b][i]` lie in `(bounds[i-1],
            bounds[i]]`, the last one above all bounds.
        gap_bounds: Those bounds, in seconds.
        pools: Names.
        blocks: Blocks of each pool.
        devices: Of all pools together, for the cost of a token.
        span_s: Virtual seconds from the first arrival to the last token.
        steps: Steps of all pools.
        preemptions: Sequences that lost their blocks.
        error_median: Relative error of the step-time predictor's latest predictions, if it made any.
        error_p95: The error that 95 % of them do not exceed.
        max_overtakes: The scheduler's published bound, if it has one.
        took_s: Real seconds.
        overhead_s: Seconds of all pools' steps outside their executors.
        own_edges: Uncached tokens at which the first pool's scheduler had its further buckets begin at the end, if it
            has buckets.
    """

    name: str
    settings: Mapping[str, str]
    edges: tuple[int, ...] = DEFAULT_EDGES
    requests: Sequence[RequestRow] = ()
    samples: Sequence[PoolSample] = ()
    interval_s: float = 1.0
    gaps: Sequence[Sequence[int]] = ()
    gap_bounds: Sequence[float] = ()
    pools: Sequence[str] = ()
    blocks: Sequence[int] = ()
    devices: int = 1
    span_s: float = 0.0
    steps: int = 0
    preemptions: int = 0
    error_median: float | None = None
    error_p95: float | None = None
    max_overtakes: int | None = None
    took_s: float = field(default=0.0, compare=False)
    overhead_s: float = 0.0
    own_edges: tuple[int, ...] = ()
