"""Scheduler: policy only. Who runs next, and how much."""

from __future__ import annotations

from abc import abstractmethod

from deepinfra.core.ids import SeqId
from deepinfra.core.step import Backlog, Choice, Job, SchedulerStats, StepReport, StepView
from deepinfra.interfaces.component import Component

__all__ = ("Scheduler",)


class Scheduler(Component):
    """Chooses; the engine's planner does blocks, positions and drafts.

    Synchronous and deterministic: the same calls give the same answers. All calls come from one task. A sequence is
    *waiting* from `add` (or from being named in `StepReport.preempted`) until a `StepReport.rows` entry of it has
    `opened`, then *running*. What a Scheduler owes: every admitted sequence is planned in bounded time, `finish`
    frees everything it holds, and running sequences keep decoding while others prefill.
    """

    def meet(self, speed: str) -> None:
        """Hear which executor it will schedule for, before `async with`; default: takes no notice.

        Args:
            speed: `Executor.speed`: what was measured with one text holds for the same text.
        """

    @abstractmethod
    def add(self, job: Job) -> None:
        """Queue a sequence.

        Raises:
            Overloaded: It is not admitted; nothing was kept. Carries a predicted `retry_after_s`.
        """

    @abstractmethod
    def finish(self, seq: SeqId) -> None:
        """Forget a sequence, waiting or running; unknown or repeated: no effect."""

    @abstractmethod
    def plan(self, view: StepView) -> Choice:
        """Choose for one step.

        Grants need not add up to `view.max_step_tokens`; what does not fit is cut or left out by the planner, in
        order. With nothing to do return `Choice()`. Must not assume that a grant was honoured: `commit` tells.
        """

    @abstractmethod
    def commit(self, report: StepReport) -> None:
        """Learn what became of the last choice; called once for each `plan` whose step ran, also if it failed."""

    def wake_at(self) -> float | None:
        """When to call `plan` again though nothing happened, in clock seconds; `None`: only on events."""
        return None

    def stats(self) -> SchedulerStats:
        """Numbers so far; default: none."""
        return SchedulerStats()

    def backlog(self) -> Backlog:
        """What waits now; asked for every sequence that is routed, so override it where `stats` takes long."""
        stats = self.stats()
        return Backlog(stats.backlog_tokens, stats.backlog_s)
