"""Length buckets with fair service, a time budget per step, protected decoding and bounded overtaking."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from math import inf
from pathlib import Path
from types import MappingProxyType
from typing import Self

import anyio

from deepinfra.core.buckets import DEFAULT_EDGES, bucket_of
from deepinfra.core.cost import StepCost, StepWork
from deepinfra.core.ids import SeqId
from deepinfra.core.step import Backlog, Choice, Job, RunRow, SchedulerStats, StepReport, StepView
from deepinfra.interfaces.scheduler import Scheduler
from deepinfra.schedulers.admission import Limits
from deepinfra.schedulers.entry import Entry
from deepinfra.schedulers.grants import Grants, give_decode
from deepinfra.schedulers.overtaking import Overtakes
from deepinfra.schedulers.predictor import MEMORY
from deepinfra.schedulers.queue import Queue
from deepinfra.schedulers.tenants import HasLimits
from deepinfra.schedulers.timings import Timings
from deepinfra.schedulers.turns import Chunk, Lane, Turns, chunk_work

__all__ = ("ALONE", "FAIR", "MAX_PRIORITY", "Bucketed")

MAX_PRIORITY = 8
"""Priorities beyond this, in either direction, count as this: it bounds how long aging takes."""

FAIR = 64
"""Points of priority by which a modest tenant's sequence may be before those of a flood, at most."""

_PREFILL_FLOOR = 0.1
"""Share of the decoding time that prompts get at least, when decoding alone exceeds the step's budget."""


ALONE = 4
"""How many budgets long a step may be when only one sequence is here, so that a newcomer waits no longer than that.

Shorter steps serve those who wait or decode; for a lone prompt they only cost: 512 tokens of SmolLM2 in bfloat16 took
590 ms in steps of 0.25 s and 400 ms in one.
"""

_SAVE_EVERY_S = 60.0


class Bucketed(Scheduler):
    """Short prompts do not wait behind giants, giants are not starved by short ones, and streams keep flowing.

    Prompts are sorted by uncached tokens into buckets. Within a step decoding sequences come first, then buckets take
    turns so that over time each gets equal work (attention included); inside a bucket, prefills under way come before
    waiting sequences. How many prompt tokens fit is predicted from past steps.

    The order of waiting sequences is by arrival, moved forward by `aging_steps` steps per point of priority: of two
    sequences the one with the higher priority is first unless the other came that much earlier. A sequence is passed
    by at most `max_overtakes` sequences behind it in that order while it has room.

    Args:
        edges: Uncached tokens at which the second and further buckets begin.
        step_budget_s: Aim for a step's seconds, `ALONE` times as long for a lone sequence; `None` fills steps up to
            the executor's token limit.
        decode_share: Part of a step's predicted time that decoding keeps, if anything decodes; 0 protects nothing.
        max_queue: Waiting sequences beyond which `add` refuses.
        max_queue_tokens: Prompt tokens without cache that may wait; `None` is no limit.
        max_queue_s: Predicted seconds of prompts that may wait; `None` is no limit.
        max_overtakes: See above.
        aging_steps: See above.
        tenants: What each tenant may have; `"*"` is for those not named.
        timings: Folder in which measured step times are kept for the next start; `None` keeps none. A life of fewer
            than `MEMORY` steps leaves the file as it is.
    """

    def __init__(
        self,
        *,
        edges: Sequence[int] = DEFAULT_EDGES,
        step_budget_s: float | None = 0.25,
        decode_share: float = 0.25,
        max_queue: int = 4096,
        max_queue_tokens: int | None = None,
        max_queue_s: float | None = 300.0,
        max_overtakes: int = 64,
        aging_steps: int = 256,
        tenants: Mapping[str, HasLimits] = MappingProxyType({}),
        timings: str | Path | None = None,
    ) -> None:
        self.edges = tuple(edges)
        self.max_overtakes = max_overtakes
        self._budget_s, self._share = step_budget_s, decode_share
        self._overtakes = Overtakes(max_overtakes)
        self._queue = Queue(
            lines=len(self.edges) + 1,
            place=lambda uncached: bucket_of(uncached, self.edges),
            limits=Limits(max_queue, max_queue_tokens, max_queue_s),
            allowance=self._prompts_s,
            patience=self._overtakes.patience,
            tenants=tenants,
            aging=aging_steps,
            fair_steps=FAIR * aging_steps,
            entered=self._overtakes.wait,
            left=self._overtakes.leave,
        )
        self.predictor = self._queue.predictor
        self._work = [0.0] * (len(self.edges) + 1)
        self._step = 0
        self._folder = timings
        self._timings: Timings | None = None
        self._saved = 0

    # -- what is kept between lives ---------------------------------------------------------------

    def meet(self, speed: str) -> None:
        """See `Scheduler.meet`."""
        self._timings = Timings(self._folder, speed) if self._folder is not None else None

    @asynccontextmanager
    async def __asynccontextmanager__(self) -> AsyncGenerator[Self]:
        timings = self._timings
        if timings is None:
            yield self
            return
        if not self.predictor.learned:
            self.predictor.restore(await self.offload(timings.load))
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._save_now_and_then, timings)
                try:
                    yield self
                finally:
                    tasks.cancel_scope.cancel()
                    with anyio.CancelScope(shield=True):
                        await self._save(timings)
        except BaseExceptionGroup as group:  # what was raised inside leaves as itself
            if len(group.exceptions) > 1:
                raise
            raise group.exceptions[0] from group.exceptions[0].__cause__

    async def _save_now_and_then(self, timings: Timings) -> None:
        while True:
            await anyio.sleep(_SAVE_EVERY_S)
            await self._save(timings)

    async def _save(self, timings: Timings) -> None:
        """Save what was learned since the last time, if it is worth it."""
        predictor = self.predictor
        if predictor.cost is not None and predictor.learned - self._saved >= MEMORY:
            self._saved = predictor.learned
            await self.offload(timings.save, predictor.cost, tuple(predictor.samples))

    def stats(self) -> SchedulerStats:
        """See `Scheduler.stats`."""
        return self._queue.stats(self.edges)

    def backlog(self) -> Backlog:
        """See `Scheduler.backlog`."""
        return self._queue.backlog()

    # -- what happens -----------------------------------------------------------------------------

    def add(self, job: Job) -> None:
        """See `Scheduler.add`."""
        priority = max(-MAX_PRIORITY, min(MAX_PRIORITY, job.priority))
        self._queue.add(job, now=self.clock.now(), step=self._step, priority=priority)

    def finish(self, seq: SeqId) -> None:
        """See `Scheduler.finish`."""
        entry = self._queue.finish(seq)
        if entry is not None and not entry.running and entry.asked:
            self._count_pass(entry)  # it may have been opened in a step whose report has not come

    def commit(self, report: StepReport) -> None:
        """See `Scheduler.commit`."""
        opened, _ = self._queue.commit(report)
        cost = self.predictor.cost
        for row in report.rows:
            known = self._queue.entries.get(row.seq)
            if known is not None and row.length - row.drafts > 1:
                self._work[known.line] += chunk_work(cost, row.start, row.length)
        for entry in opened:
            self._count_pass(entry)

    def _count_pass(self, entry: Entry) -> None:
        first = self._queue.first_waiting()
        self._overtakes.count += first is not None and first < entry.rank

    def wake_at(self) -> float | None:
        """See `Scheduler.wake_at`."""
        return self._queue.wake_at(self.clock.now())

    # -- choosing ---------------------------------------------------------------------------------

    def plan(self, view: StepView) -> Choice:
        """See `Scheduler.plan`."""
        queue = self._queue
        queue.planning(view)
        self._step = view.step
        rows = queue.running(view)
        in_flight = frozenset(row.seq for row in view.running)
        shed = queue.expired(view, in_flight)
        held = in_flight.union(shed)

        grants = Grants(view)
        prefill_waits = queue.waiting > len(shed) or any(row.todo > 1 for _, row in rows)
        give_decode(grants, rows, prefill_waits=prefill_waits)
        if prefill_waits:
            self._give_chunks(view, rows, held, grants)
        return Choice(grants.take(), queue.victims(rows), queue.fetches(view, held), shed + queue.leaving(in_flight))

    def _give_chunks(
        self, view: StepView, rows: list[tuple[Entry, RunRow]], held: frozenset[SeqId], grants: Grants
    ) -> None:
        """Grant prompt tokens, the buckets taking turns."""
        lanes = [Lane(self._queue.candidates(line, view, held)) for line in range(len(self._work))]
        for entry, row in rows:
            if row.todo > 1:
                lanes[entry.line].begun.append(Chunk(entry, entry.tokens - row.todo, row.todo))
        # A bucket that had nothing to do, or no room, may catch up by one step, not by all that others got meanwhile.
        least = max(self._work) - view.max_step_tokens
        for line, lane in enumerate(lanes):
            if lane.begun or lane.head:
                self._work[line] = max(self._work[line], least)
        cost = self.predictor.cost
        turns = Turns(
            view=view,
            grants=grants,
            lanes=lanes,
            work=list(self._work),
            cost=cost,
            seconds=self._allowance_s(cost, rows, grants),
            room=self._queue.headroom(view, rows),
            overtakes=self._overtakes,
            in_flight=sum(not entry.running for entry, _ in rows),
            ready=lambda entry: entry.job.seq not in held and not self._queue.left_alone(entry, view),
        )
        turns.take()

    def _allowance_s(self, cost: StepCost | None, rows: list[tuple[Entry, RunRow]], grants: Grants) -> float:
        """Seconds that prompts may add to the step; infinite while nothing is known."""
        if cost is None:
            return inf
        work = StepWork()
        for entry, row in rows:
            if row.todo == 1:
                work = work.decode(entry.tokens, grants.of(entry.job.seq))
        return self._prompts_s(cost.seconds(work), work.decode_rows > 0)

    def _prompts_s(self, base_s: float, decodes: bool) -> float:
        """Seconds that prompts may add to a step that takes `base_s` without them."""
        budget_s = self._budget_s
        if budget_s is not None and len(self._queue.entries) == 1:
            budget_s *= ALONE
        allowance_s = inf if budget_s is None else budget_s - base_s
        if decodes:
            if self._share > 0.0:
                allowance_s = min(allowance_s, base_s / self._share - base_s)
            allowance_s = max(allowance_s, _PREFILL_FLOOR * base_s)
        return allowance_s
