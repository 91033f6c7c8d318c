"""What an engine counts: plain numbers, updated on the loop, read as frozen snapshots by whoever exports them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from deepinfra.core.kv import KVStats
from deepinfra.core.step import SchedulerStats

__all__ = ("EngineStats", "Histogram", "HistogramSnapshot", "PoolStats", "State", "StepTally")

State = Literal["stopped", "starting", "ready", "draining", "failed"]

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
"""Upper bounds of buckets, in seconds; one ladder for all histograms but that of gaps."""

GAPS = (5e-5, 1e-4, 2.5e-4, 5e-4, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.1)
"""Upper bounds for the gaps between steps, in seconds."""


@dataclass(frozen=True, slots=True)
class HistogramSnapshot:
    """Counts per bucket: `counts[i]` values in `(bounds[i-1], bounds[i]]`, the last one above all bounds."""

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    total: float

    @property
    def count(self) -> int:
        """Number of values."""
        return sum(self.counts)


class Histogram:
    """A counter per bucket."""

    def __init__(self, bounds: tuple[float, ...] = SECONDS) -> None:
        self._bounds, self._counts = bounds, [0] * (len(bounds) + 1)
        self._total = 0.0

    def add(self, seconds: float, times: int = 1) -> None:
        """Count a value, `times` over."""
        self._counts[bisect_left(self._bounds, seconds)] += times
        self._total += seconds * times

    def snapshot(self) -> HistogramSnapshot:
        """What was counted so far."""
        return HistogramSnapshot(self._bounds, tuple(self._counts), self._total)


@dataclass(slots=True, eq=False)
class StepTally:
    """A pool's steps so far: how many, how many preemptions, seconds inside and outside the executor.

    Attributes:
        ahead: Steps submitted before the one before was over.
        failures: Steps that failed.
        gaps: Of each step that did not come after idleness, how long the executor had none before it was submitted.
        replayed: Rows computed again although their blocks were there, for the windows' sake.
        hits_too_short: Sequences that began at their first token, because what was cached saves nothing.
        snapshots: Taken.
        snapshots_dropped: Wanted and not taken, or not kept: no slot, out of reach, or the step failed.
        restored: Sequences that began behind a snapshot.
    """

    steps: int = 0
    failures: int = 0
    replayed: int = 0
    hits_too_short: int = 0
    snapshots: int = 0
    snapshots_dropped: int = 0
    restored: int = 0
    preemptions: int = 0
    seconds: Histogram = field(default_factory=Histogram)
    gaps: Histogram = field(default_factory=lambda: Histogram(GAPS))
    overhead: float = 0.0
    ahead: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolStats:
    """One pool's numbers.

    Attributes:
        waiting: Sequences without blocks.
        running: Sequences with blocks.
        slots_free: Staging slots in nobody's hands.
        step_seconds: Time inside the executor per step.
        step_gap_seconds: From a step's result to the next one's submission, if work was there; 0 if that was before.
        overhead_seconds: Wall time of steps outside the executor, summed.
        step_failures: Steps that failed.
        least_prefix: Tokens of the smallest cached prefix that saves computing where there is no snapshot at its end.
        rows_replayed: Rows computed again although their blocks were cached, for the windows' sake.
        hits_too_short: Sequences computed from their first token although something shorter than that was cached.
        snapshots_taken: Snapshots of windows taken.
        snapshots_dropped: Snapshots wanted and not taken, or not kept.
        snapshots_restored: Sequences that began behind a snapshot.
        steps_ahead: Steps submitted before the result of the one before was there.
    """

    name: str
    state: State
    waiting: int
    running: int
    blocks_total: int
    blocks_free: int
    blocks_cached: int
    slots_total: int
    slots_free: int
    steps: int
    preemptions: int
    executor_losses: int
    saves_waiting: int
    saves_dropped: int
    records_damaged: int
    drafts_verified: int
    drafts_accepted: int
    step_seconds: HistogramSnapshot
    overhead_seconds: float
    step_gap_seconds: HistogramSnapshot
    store: KVStats | None
    scheduler: SchedulerStats = SchedulerStats()
    step_failures: int = 0
    least_prefix: int = 0
    rows_replayed: int = 0
    hits_too_short: int = 0
    snapshots_taken: int = 0
    snapshots_dropped: int = 0
    snapshots_restored: int = 0
    steps_ahead: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """An engine's numbers; sums over its pools where a pool has the same name for it.

    Attributes:
        requests: Answers that ended, by finish reason or error code.
        cached_tokens: Prompt tokens that were not computed, by tier.
        ttft: Seconds from arrival to the first token, per answer.
        itl: Seconds between tokens of an answer.
        queue_wait: Seconds from arrival to the first step, per answer.
        loop_lag: How late the event loop ran a timer, in seconds.
    """

    state: State
    requests: Mapping[str, int]
    waiting: int
    running: int
    prompt_tokens: int
    generated_tokens: int
    cached_tokens: Mapping[str, int]
    ttft: HistogramSnapshot
    itl: HistogramSnapshot
    queue_wait: HistogramSnapshot
    loop_lag: HistogramSnapshot
    pools: tuple[PoolStats, ...]

    @property
    def blocks_total(self) -> int:
        """Device blocks of all pools."""
        return sum(pool.blocks_total for pool in self.pools)

    @property
    def blocks_free(self) -> int:
        """Device blocks that can be taken, of all pools."""
        return sum(pool.blocks_free for pool in self.pools)
