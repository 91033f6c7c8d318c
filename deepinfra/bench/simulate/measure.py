"""Measuring where things happen: an executor that notes its steps and tokens, and what schedulers are asked."""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Self

from deepinfra.core.buckets import bucket_of
from deepinfra.core.ids import SeqId
from deepinfra.core.kv import KVLayout
from deepinfra.core.model import ExecutorIdentity, ExecutorLimits
from deepinfra.core.step import Job, MaskRows, StepPlan, StepResult
from deepinfra.executors.simulated import SimulatedStep
from deepinfra.interfaces.executor import Executor, KVMemory, StepHandle
from deepinfra.interfaces.given import Clock, Offload
from deepinfra.interfaces.scheduler import Scheduler
from deepinfra.schedulers.edges import Edges

__all__ = ("GAP_BOUNDS", "REQUEST", "MeasuredExecutor", "Meter", "Track", "watch")

GAP_BOUNDS = tuple(1e-3 * 1.05**i for i in range(240))
"""Seconds between two tokens are told to 5 %, from 1 ms to two minutes."""

REQUEST: ContextVar[int] = ContextVar("REQUEST")
"""Index of the request that the current task is about."""


@dataclass(slots=True)
class Track:
    """What has been seen of one request; times are those of the clock.

    Attributes:
        left: Tokens that it has still to get.
        uncached: Prompt tokens to be computed as it arrived.
        bucket: Index of its length bucket.
        pool: Index of the pool that opened it first; -1 if none did.
        opened: When.
        order: Place among all openings.
        first: When it had its first token.
        last: When it had its latest one.
        worst: Longest time between two.
        own_bucket: Index of the bucket that the scheduler put it into; -1 for none.
    """

    left: int
    uncached: int
    bucket: int
    pool: int = -1
    opened: float | None = None
    order: int = 0
    first: float | None = None
    last: float = 0.0
    worst: float | None = None
    own_bucket: int = -1


@dataclass(slots=True)
class Meter:
    """What all pools of a simulation share: tracks by request, and gaps between tokens, by bucket and bound.

    Attributes:
        edges: Of the buckets.
    """

    edges: Sequence[int]
    tracks: list[Track] = field(default_factory=list)
    gaps: list[list[int]] = field(default_factory=list)
    openings: int = 0

    def __post_init__(self) -> None:
        self.gaps = [[0] * (len(GAP_BOUNDS) + 1) for _ in range(len(self.edges) + 1)]

    def arrives(self, prompt: int, output: int) -> Track:
        """Begin to track a request, for the time being as if nothing of it were cached."""
        track = Track(output, prompt, bucket_of(prompt, self.edges))
        self.tracks.append(track)
        return track

    def queued(self, job: Job, own_bucket: int) -> None:
        """A scheduler is asked to take the request of this task."""
        track = self.tracks[REQUEST.get()]
        if track.opened is None:
            track.own_bucket = own_bucket
            track.uncached, track.bucket = job.uncached, bucket_of(job.uncached, self.edges)

    def open(self, index: int, pool: int, now: float) -> Track:
        """A request is given its first step, or is opened once more."""
        track = self.tracks[index]
        if track.opened is None:
            self.openings += 1
            track.opened, track.pool, track.order = now, pool, self.openings
        return track

    def tokens(self, tracks: Sequence[Track], counts: Sequence[int], ends: Sequence[float]) -> None:
        """Note tokens.

        Args:
            tracks: Who got some.
            counts: How many each.
            ends: When: all at the only end there is, or one at each of several.
        """
        common = [bisect_left(GAP_BOUNDS, after - before) for before, after in itertools.pairwise(ends)]
        longest = max((after - before for before, after in itertools.pairwise(ends)), default=0.0)
        for track, count in zip(tracks, counts, strict=True):
            got = min(count, track.left)
            if not got:
                continue
            track.left -= got
            gaps = self.gaps[track.bucket]
            if track.first is None:
                track.first = ends[0]
            else:
                gap = ends[0] - track.last
                gaps[bisect_left(GAP_BOUNDS, gap)] += 1
                track.worst = gap if track.worst is None else max(track.worst, gap)
            if len(ends) == 1:
                track.last = ends[0]
                if got > 1:  # verified drafts, all at once
                    gaps[0] += got - 1
                    track.worst = track.worst or 0.0
                continue
            track.last = ends[got - 1]
            for bound in common[: got - 1]:
                gaps[bound] += 1
            if got > 1:
                most = longest if got == len(ends) else max(b - a for a, b in itertools.pairwise(ends))
                track.worst = most if track.worst is None else max(track.worst, most)


class MeasuredExecutor(Executor):
    """An executor, simulated or real, that notes its steps.

    Args:
        inner: Does the work. Only a simulated one may repeat steps: no other says when each was over.
        pool: Index of its pool.
        meter: Where tokens are noted.
        repeat: Whether it says that it can repeat steps.
    """

    def __init__(self, inner: Executor, pool: int, meter: Meter, *, repeat: bool = True) -> None:
        self.inner, self.pool, self.meter = inner, pool, meter
        self._repeat = repeat
        self._tracks: dict[SeqId, Track] = {}
        self._running: _MeasuredStep | None = None
        self._busy_s = 0.0
        self._prompt_tokens = self._output_tokens = 0

    @property
    def provides(self) -> frozenset[str]:
        """See `Executor.provides`."""
        provides = self.inner.provides
        return provides if self._repeat else provides - {"repeat"}

    @property
    def layout(self) -> KVLayout:
        """See `Executor.layout`."""
        return self.inner.layout

    @property
    def identity(self) -> ExecutorIdentity:
        """See `Executor.identity`."""
        return self.inner.identity

    @property
    def speed(self) -> str:
        """See `Executor.speed`."""
        return self.inner.speed

    @property
    def limits(self) -> ExecutorLimits:
        """See `Executor.limits`."""
        return self.inner.limits

    @property
    def memory(self) -> KVMemory:
        """See `Executor.memory`."""
        return self.inner.memory

    def give(self, clock: Clock, offload: Offload) -> None:
        """See `Component.give`."""
        super().give(clock, offload)
        self.inner.give(clock, offload)

    @asynccontextmanager
    async def __asynccontextmanager__(self) -> AsyncGenerator[Self]:
        async with self.inner:
            yield self

    def submit(self, plan: StepPlan) -> StepHandle:
        """See `Executor.submit`."""
        step = _MeasuredStep(self, plan, self.inner.submit(plan), self.clock.now())
        for seq in plan.closed:
            self._tracks.pop(seq, None)
        for opened in plan.opened:
            self._tracks[opened.seq] = self.meter.open(opened.seed, self.pool, step.begin)
        self._running = step
        return step

    def note(self, step: _MeasuredStep, result: StepResult) -> None:
        """Take a step's result into account."""
        ends = step.ends[: len(result.each_s) or 1]
        outputs = [output for output in result.outputs if output.tokens]
        counts = [len(output.tokens) for output in outputs]
        self.meter.tokens([self._tracks[output.seq] for output in outputs], counts, ends)
        self._busy_s += ends[-1] - step.begin
        self._prompt_tokens += step.prompt_tokens
        self._output_tokens += sum(counts)
        self._running = None

    def so_far(self, now: float) -> tuple[float, int, int]:
        """Busy seconds, prompt tokens and output tokens up to `now`, what is being repeated included."""
        step = self._running
        if step is None:
            return self._busy_s, self._prompt_tokens, self._output_tokens
        done = bisect_left(step.ends, now) if step.repeats else 0
        busy_s = self._busy_s + min([now, *step.ends[-1:]]) - step.begin
        return busy_s, self._prompt_tokens, self._output_tokens + done * step.rows


class _MeasuredStep(StepHandle):
    """`ends` are known at once of a simulated step, and of another one when it is over."""

    def __init__(self, executor: MeasuredExecutor, plan: StepPlan, step: StepHandle, now: float) -> None:
        self._executor, self._step = executor, step
        self.begin = now
        self.ends: Sequence[float] = step.ends if isinstance(step, SimulatedStep) else ()
        items = plan.items
        self.repeats, self.rows = plan.repeat > 1, len(items)
        self.prompt_tokens = sum(item.length for item in items if item.length - len(item.drafts) > 1)

    def masks(self, rows: MaskRows) -> None:
        self._step.masks(rows)

    def cut(self) -> StepResult | None:
        return self._step.cut()

    async def result(self) -> StepResult:
        result = await self._step.result()
        self.ends = self.ends or (self._executor.clock.now(),)
        self._executor.note(self, result)
        return result


def watch(scheduler: Scheduler, meter: Meter) -> None:
    """Note a scheduler's jobs as they arrive.

    The one method is replaced on the object: a wrapper would have to pass on whatever else a pool may ask of it.
    """
    add, edges = scheduler.add, getattr(scheduler, "edges", None)

    def noted(job: Job) -> None:
        meter.queued(job, edges.bucket(job.uncached) if isinstance(edges, Edges) else -1)
        add(job)

    scheduler.add = noted  # type: ignore[method-assign]
