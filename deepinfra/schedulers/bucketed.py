"""Length buckets: short prompts out of order for a part of the work, and bounded overtaking."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import Self

from deepinfra.core.ids import SeqId
from deepinfra.core.step import Backlog, Choice, Job, RunRow, SchedulerStats, StepReport, StepView
from deepinfra.interfaces.scheduler import Scheduler
from deepinfra.schedulers.admission import Limits
from deepinfra.schedulers.edges import Edges
from deepinfra.schedulers.entry import Entry
from deepinfra.schedulers.grants import Grants
from deepinfra.schedulers.overtaking import Overtakes
from deepinfra.schedulers.pacing import Allowance, Pacing
from deepinfra.schedulers.queue import SCAN, Queue
from deepinfra.schedulers.tenants import HasLimits
from deepinfra.schedulers.timings import Timings, kept
from deepinfra.schedulers.turns import Chunk, Lane, OutOfOrder, Turns

__all__ = ("FAIR", "MAX_PRIORITY", "Bucketed")

MAX_PRIORITY = 8
"""Priorities beyond this, in either direction, count as this: it bounds how long aging takes."""

FAIR = 64
"""Points of priority by which a modest tenant's sequence may be before those of a flood, at most."""


class Bucketed(Scheduler):
    """Short prompts do not wait behind giants, giants are not starved by short ones, and streams keep flowing.

    Prompts are sorted by uncached tokens into buckets. Within a step decoding sequences come first, then prompts in
    order, those under way in a bucket before those that wait in it; but half of the work may go out of order to
    the short buckets, and an eighth to any, the shortest first. How many prompt tokens fit is predicted from past
    steps.

    The order of waiting sequences is by arrival, moved forward by `aging_steps` steps per point of priority: of two
    sequences the one with the higher priority is first unless the other came that much earlier. A sequence is passed
    by at most `max_overtakes` sequences behind it in that order while it has room. Of several tenants, a sequence
    counts as having arrived when its turn is, at most `FAIR` points of priority before; see `schedulers.tenants`.
    Whatever its priority and tenant, one that has waited for `max_wait_steps` steps, `2 * MAX_PRIORITY + FAIR` times
    `aging_steps`, is opened before all that came later, as soon as it has room. Who is kept out of line by its tenant's
    `max_running` is not passed and does not wait, for both bounds, until it gets into line.

    Args:
        edges: Uncached tokens at which the second and further buckets begin; `None` learns three, see `edges`.
        step_budget_s: Aim for a step's seconds; `None` fills steps up to the executor's token limit.
        itl_target_s: Aim for the time between two tokens of a stream; `None` is the step's budget.
        decode_share: Part of the predicted time that decoding keeps in any few steps in which something decodes; 0
            protects nothing. See `Pacing`.
        max_queue: Waiting sequences beyond which `add` refuses.
        max_queue_tokens: Prompt tokens without cache that may wait; `None` is no limit.
        max_queue_s: Predicted seconds of prompts that may wait; `None` is no limit.
        max_overtakes: See above.
        aging_steps: See above.
        tenants: What each tenant may have; `"*"` is for those not named.
        timings: Folder in which measured step times are kept for the next start; `None` keeps none. A life of fewer
            than `predictor.MEMORY` steps leaves the file as it is.
    """

    def __init__(
        self,
        *,
        edges: Sequence[int] | None = None,
        step_budget_s: float | None = 0.25,
        itl_target_s: float | None = None,
        decode_share: float = 0.25,
        max_queue: int = 4096,
        max_queue_tokens: int | None = None,
        max_queue_s: float | None = 300.0,
        max_overtakes: int = 1024,
        aging_steps: int = 256,
        tenants: Mapping[str, HasLimits] = MappingProxyType({}),
        timings: str | Path | None = None,
    ) -> None:
        self.edges = Edges(edges)
        self.max_overtakes = max_overtakes
        self.max_wait_steps = (2 * MAX_PRIORITY + FAIR) * aging_steps
        self._pacing = Pacing(step_budget_s, itl_target_s, decode_share)
        self._overtakes = Overtakes(max_overtakes, self.max_wait_steps)
        self._out_of_order = OutOfOrder(len(self.edges) + 1)
        self._queue = Queue(
            lines=len(self.edges) + 1,
            place=self.edges.bucket,
            limits=Limits(max_queue, max_queue_tokens, max_queue_s),
            allowance=self._pacing.prompts_s,
            patience=self._overtakes.left,
            tenants=tenants,
            aging=aging_steps,
            fair_steps=FAIR * aging_steps,
            entered=self._overtakes.wait,
            left=self._overtakes.leave,
            out_of_order=self._out_of_order,
        )
        self.predictor = self._queue.predictor
        self._step = 0
        self._folder = timings
        self._timings: Timings | None = None

    def meet(self, speed: str) -> None:
        """See `Scheduler.meet`."""
        self._timings = Timings(self._folder, speed) if self._folder is not None else None

    @asynccontextmanager
    async def __asynccontextmanager__(self) -> AsyncGenerator[Self]:
        async with kept(self.predictor, self._timings, self.offload):
            yield self

    def stats(self) -> SchedulerStats:
        """See `Scheduler.stats`."""
        stats = self._queue.stats(self.edges.now)
        told = self._overtakes.told(len(self._queue.lines))
        buckets = tuple(
            bucket._replace(overtaken=times, overtaken_most=most)
            for bucket, (times, most) in zip(stats.buckets, told, strict=True)
        )
        return stats._replace(buckets=buckets, max_overtakes=self.max_overtakes, max_wait_steps=self.max_wait_steps)

    def backlog(self) -> Backlog:
        """See `Scheduler.backlog`."""
        return self._queue.backlog()

    # -- what happens -----------------------------------------------------------------------------

    def add(self, job: Job) -> None:
        """See `Scheduler.add`."""
        priority = max(-MAX_PRIORITY, min(MAX_PRIORITY, job.priority))
        self._queue.add(job, now=self.clock.now(), step=self._step, priority=priority)
        self.edges.saw(job.uncached)

    def finish(self, seq: SeqId) -> None:
        """See `Scheduler.finish`."""
        self._queue.finish(seq, self.clock.now())

    def commit(self, report: StepReport) -> None:
        """See `Scheduler.commit`."""
        self._pacing.ran(self.predictor.guess, report)
        self._queue.commit(report)

    def wake_at(self) -> float | None:
        """See `Scheduler.wake_at`."""
        return self._queue.wake_at(self.clock.now())

    # -- choosing ---------------------------------------------------------------------------------

    def plan(self, view: StepView) -> Choice:
        """See `Scheduler.plan`."""
        self._step = self._overtakes.step = view.step
        return self._pacing.choose(self._queue, view, self._give_chunks)

    def _give_chunks(
        self,
        view: StepView,
        rows: list[tuple[Entry, RunRow]],
        held: frozenset[SeqId],
        grants: Grants,
        allowance: Allowance,
    ) -> None:
        """Grant prompt tokens."""
        queue = self._queue

        def ready(entry: Entry) -> bool:
            if entry.job.seq in held:
                return False
            alone = queue.sharing.left_alone(entry)
            self._overtakes.count(entry, ready=not alone)
            return not alone

        def waiting(line: int) -> Iterator[Entry]:
            return filter(ready, islice(queue.lines[line], SCAN))

        lanes = [Lane(waiting(line)) for line in range(len(queue.lines))]
        for entry, row in rows:
            if row.todo > 1:
                lanes[entry.line].begun.append(Chunk(entry, entry.tokens - row.todo, row.todo))
        turns = Turns(
            view=view,
            grants=grants,
            allowance=allowance,
            lanes=lanes,
            out_of_order=self._out_of_order,
            room=queue.headroom(view, rows),
            overtakes=self._overtakes,
            ready=ready,
            choose=queue.choose,
        )
        turns.take()
