"""First come, first served: the plain policy that others are measured against."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Self

from deepinfra.core.ids import SeqId
from deepinfra.core.step import Backlog, Choice, Job, RunRow, SchedulerStats, StepReport, StepView
from deepinfra.interfaces.scheduler import Scheduler
from deepinfra.schedulers.admission import Limits
from deepinfra.schedulers.entry import Entry
from deepinfra.schedulers.grants import Grants
from deepinfra.schedulers.pacing import Allowance, Pacing
from deepinfra.schedulers.queue import Queue
from deepinfra.schedulers.tenants import HasLimits
from deepinfra.schedulers.timings import Timings, kept

__all__ = ("Fcfs",)


class Fcfs(Scheduler):
    """Decoding sequences first, then prefills under way, then waiting ones, each in order of arrival.

    Steps are as long as those of `Bucketed`, and decoding keeps the same share: only the order differs. A prompt that
    exceeds what is left of a step is computed in chunks. A waiting sequence is opened when its blocks are free, and
    none behind it is opened before; only those whose KV is being loaded are passed. The latest arrival is preempted
    first and returns to its old place. Priorities are ignored. Of several tenants, each counts as having come when its
    turn is; see `schedulers.tenants`.

    Args:
        step_budget_s: Aim for a step's seconds; `None` fills steps up to the executor's token limit.
        itl_target_s: Aim for the time between two tokens of a stream; `None` is the step's budget.
        decode_share: Part of the predicted time that decoding keeps in any few steps in which something decodes; 0
            protects nothing. See `Pacing`.
        max_queue: Waiting sequences beyond which `add` refuses.
        max_queue_tokens: Prompt tokens without cache that may wait; `None` is no limit.
        max_queue_s: Predicted seconds of prompts that may wait; `None` is no limit.
        tenants: What each tenant may have; `"*"` is for those not named.
        timings: Folder in which measured step times are kept for the next start; `None` keeps none. A life of fewer
            than `predictor.MEMORY` steps leaves the file as it is.
    """

    def __init__(
        self,
        *,
        step_budget_s: float | None = 0.25,
        itl_target_s: float | None = None,
        decode_share: float = 0.25,
        max_queue: int = 4096,
        max_queue_tokens: int | None = None,
        max_queue_s: float | None = 300.0,
        tenants: Mapping[str, HasLimits] = MappingProxyType({}),
        timings: str | Path | None = None,
    ) -> None:
        self._pacing = Pacing(step_budget_s, itl_target_s, decode_share)
        limits = Limits(max_queue, max_queue_tokens, max_queue_s)
        self._queue = Queue(lines=1, limits=limits, allowance=self._pacing.prompts_s, tenants=tenants)
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

    def add(self, job: Job) -> None:
        """See `Scheduler.add`."""
        self._queue.add(job, now=self.clock.now(), step=self._step)

    def finish(self, seq: SeqId) -> None:
        """See `Scheduler.finish`."""
        self._queue.finish(seq, self.clock.now())

    def commit(self, report: StepReport) -> None:
        """See `Scheduler.commit`."""
        self._pacing.ran(self.predictor.guess, report)
        self._queue.commit(report)

    def plan(self, view: StepView) -> Choice:
        """See `Scheduler.plan`."""
        self._step = view.step
        return self._pacing.choose(self._queue, view, self._give_chunks)

    def _give_chunks(
        self,
        view: StepView,
        rows: list[tuple[Entry, RunRow]],
        held: frozenset[SeqId],
        grants: Grants,
        allowance: Allowance,
    ) -> None:
        """Grant prompt tokens in order, until one finds no time, no seat or no room."""
        for entry, row in rows:
            if row.todo > 1 and not allowance.give(grants, entry.job.seq, entry.tokens - row.todo, row.todo):
                return
        seats = view.max_seqs - len(view.running)
        room = self._queue.headroom(view, rows)
        for entry in self._queue.candidates(0, view, held):
            blocks = entry.blocks(view.block_size)
            alone = seats == view.max_seqs
            if seats <= 0 or (blocks > room and not alone):
                return
            if not allowance.give(grants, entry.job.seq, entry.tokens - entry.uncached, entry.uncached):
                return
            self._queue.choose(entry)
            seats -= 1
            room -= blocks

    def wake_at(self) -> float | None:
        """See `Scheduler.wake_at`."""
        return self._queue.wake_at(self.clock.now())

    def backlog(self) -> Backlog:
        """See `Scheduler.backlog`."""
        return self._queue.backlog()

    def stats(self) -> SchedulerStats:
        """See `Scheduler.stats`."""
        return self._queue.stats()._replace(max_overtakes=0)
