"""First come, first served: the plain policy that others are measured against."""

from __future__ import annotations

from collections.abc import Mapping
from math import inf
from types import MappingProxyType

from deepinfra.core.ids import SeqId
from deepinfra.core.step import Backlog, Choice, Job, SchedulerStats, StepReport, StepView
from deepinfra.interfaces.scheduler import Scheduler
from deepinfra.schedulers.admission import Limits
from deepinfra.schedulers.grants import Grants, give_decode
from deepinfra.schedulers.queue import Queue
from deepinfra.schedulers.tenants import HasLimits

__all__ = ("Fcfs",)


class Fcfs(Scheduler):
    """Decoding sequences first, then prefills under way, then waiting ones, each in order of arrival.

    A prompt that exceeds what is left of a step is computed in chunks. A waiting sequence is opened when its blocks
    are free, and none behind it is opened before; only those whose KV is being loaded are passed. The latest arrival
    is preempted first and returns to its old place. Priorities are ignored.

    Args:
        max_queue: Waiting sequences beyond which `add` refuses.
        max_queue_tokens: Prompt tokens without cache that may wait; `None` is no limit.
        max_queue_s: Predicted seconds of prompts that may wait; `None` is no limit.
        tenants: What each tenant may have; `"*"` is for those not named.
    """

    def __init__(
        self,
        *,
        max_queue: int = 4096,
        max_queue_tokens: int | None = None,
        max_queue_s: float | None = 300.0,
        tenants: Mapping[str, HasLimits] = MappingProxyType({}),
    ) -> None:
        limits = Limits(max_queue, max_queue_tokens, max_queue_s)
        self._queue = Queue(lines=1, limits=limits, allowance=lambda base_s, decodes: inf, tenants=tenants)
        self._step = 0

    def add(self, job: Job) -> None:
        """See `Scheduler.add`."""
        self._queue.add(job, now=self.clock.now(), step=self._step)

    def finish(self, seq: SeqId) -> None:
        """See `Scheduler.finish`."""
        self._queue.finish(seq)

    def commit(self, report: StepReport) -> None:
        """See `Scheduler.commit`."""
        self._queue.commit(report)

    def plan(self, view: StepView) -> Choice:
        """See `Scheduler.plan`."""
        queue = self._queue
        queue.planning(view)
        self._step = view.step
        rows = queue.running(view)
        in_flight = frozenset(row.seq for row in view.running)
        shed = queue.expired(view, in_flight)
        held = in_flight.union(shed)
        prefills = [(entry, row) for entry, row in rows if row.todo > 1]

        grants = Grants(view)
        give_decode(grants, rows, prefill_waits=bool(prefills) or queue.waiting > len(shed))
        for entry, row in prefills:
            grants.give(entry.job.seq, row.todo)

        seats = view.max_seqs - len(view.running)
        room = queue.headroom(view, rows)
        for entry in queue.candidates(0, view, held):
            blocks = entry.blocks(view.block_size)
            alone = seats == view.max_seqs
            if seats <= 0 or (blocks > room and not alone) or not grants.give(entry.job.seq, entry.uncached):
                break
            self._queue.choose(entry)
            seats -= 1
            room -= blocks
        return Choice(grants.take(), queue.victims(rows), queue.fetches(view, held), shed + queue.leaving(in_flight))

    def wake_at(self) -> float | None:
        """See `Scheduler.wake_at`."""
        return self._queue.wake_at(self.clock.now())

    def backlog(self) -> Backlog:
        """See `Scheduler.backlog`."""
        return self._queue.backlog()

    def stats(self) -> SchedulerStats:
        """See `Scheduler.stats`."""
        return self._queue.stats()
