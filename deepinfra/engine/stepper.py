"""The loop of a pool: what lasts as long as its executor is entered."""

from __future__ import annotations

import logging

import anyio
from anyio.abc import TaskGroup

from deepinfra.core.ids import SeqId
from deepinfra.core.request import SeqSpec
from deepinfra.core.step import Choice, StepReport, StepResult, StepView
from deepinfra.engine.blocks import BlockPool
from deepinfra.engine.committing import Committer
from deepinfra.engine.drafting import Drafting
from deepinfra.engine.live import Ending, Live, Source
from deepinfra.engine.loader import Loader
from deepinfra.engine.matcher import masks_of
from deepinfra.engine.planner import Planned, Planner
from deepinfra.engine.prefixes import Prefixes
from deepinfra.engine.repeating import Repeated, behind, times_of
from deepinfra.engine.roster import Roster
from deepinfra.engine.saver import Saver
from deepinfra.engine.snapshots import Snapshots
from deepinfra.engine.staging import Slots
from deepinfra.engine.stats import StepTally
from deepinfra.engine.windows import WindowPlan
from deepinfra.errors import DeadlineExceededError, ExecutorLost, Overloaded, StepFailed
from deepinfra.interfaces.executor import Executor
from deepinfra.interfaces.given import Clock, Offload
from deepinfra.interfaces.scheduler import Scheduler

__all__ = ("Stepper",)

_log = logging.getLogger("deepinfra.engine")

_LOAD_TIMEOUT_S = 30.0
"""A store that takes longer to deliver a prompt's blocks is late: what it has not brought is a miss."""


class Stepper:
    """Device blocks, staging, and the loop that plans, submits and commits steps; one per life of an executor.

    Args:
        scheduler: Who runs next.
        executor: Entered.
        drafting: The pool's drafts, if it has a Speculator.
        saver: Takes published blocks, if it has a store.
        windows: What the executor's layout asks for.
        roster: The pool's sequences.
        tally: The pool's counts.
        clock: Time.
        offload: Threads.
        tasks: Where loads run.
        name: The pool's, for logs.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        *,
        drafting: Drafting | None,
        saver: Saver | None,
        windows: WindowPlan,
        roster: Roster,
        tally: StepTally,
        clock: Clock,
        offload: Offload,
        tasks: TaskGroup,
        name: str,
    ) -> None:
        limits, layout = executor.limits, executor.layout
        self._scheduler, self._executor, self._drafting, self._saver = scheduler, executor, drafting, saver
        self._roster, self._tally, self._clock, self._offload = roster, tally, clock, offload
        self._tasks, self._name = tasks, name
        self.blocks = BlockPool(limits.num_blocks, layout.block_size)
        self.slots = Slots(executor.memory.num_slots)
        self.snapshots = Snapshots(windows, self.slots, saver, tally, roster.wake)
        self.planner = Planner(self.blocks, limits, self.snapshots)
        self.prefixes = Prefixes(roster, self.planner.running, self.blocks, self.snapshots)
        self.loader = Loader(self.blocks, self.slots, executor.memory, self.snapshots, offload)
        self._commits = Committer(scheduler, saver, drafting, self.snapshots)
        self._repeats = "repeat" in executor.provides and drafting is None and not windows.rows
        self._repeated: Repeated | None = None
        self._broken: Exception | None = None
        roster.wake.heard = self.catch_up

    async def run(self) -> ExecutorLost:
        """Plan, submit, wait, commit, until cancelled or the executor is lost; returns the loss."""
        try:
            return await self._run()
        finally:
            self.snapshots.end()

    async def _run(self) -> ExecutorLost:
        boundary = self._clock.now()
        while True:
            self.reap()
            choice = self._scheduler.plan(self._view(self._clock.now()))
            for seq in choice.fetch:
                self._fetch(seq)
            self._shed(choice)
            arrived = self.loader.collect()
            planned = self.planner.plan(choice, self._roster.lives, arrived, self.snapshots.due())
            self._mark_opened(planned)
            if self._repeats and planned is not None and self._scheduler.wake_at() is None:
                times = times_of(choice, planned, self._roster, self.blocks.block_size)
                planned.plan = planned.plan._replace(repeat=times)
            if planned is None or not (planned.plan.items or planned.plan.fills or planned.plan.snapshots):
                self.slots.give([record.slot for record in arrived])
                self._preempted(planned)
                await self._idle()
                boundary = self._clock.now()
                continue
            try:
                seconds = await self._step(planned)
            except ExecutorLost as error:
                return error
            now = self._clock.now()
            self._tally.overhead += max(0.0, now - boundary - seconds)
            boundary = now

    def reap(self) -> None:
        """Forget sequences that are over; the only place where blocks of a live sequence are given back."""
        gone, self._roster.gone = self._roster.gone, []
        for live in gone:
            self._scheduler.finish(live.spec.seq)
            if self._drafting is not None:
                self._drafting.forget(live)
            self.snapshots.ended(live)
            self.planner.close(live)
            self._roster.forget(live)

    async def _step(self, planned: Planned) -> float:
        """Run one step; returns the executor's seconds."""
        try:
            # Only the end of the pool cancels this wait; then nobody plans on, so no block is reused under the step.
            if planned.plan.repeat > 1:
                return await self._repeat(planned)
            result = await self._executed(planned)
        except StepFailed as error:
            _log.warning("pool %s: %s", self._name, error)
            self._tally.failures += 1
            self._tally.seconds.add(0.0)
            self.snapshots.failed()
            self._commits.failed(self.blocks, planned, error)
            return 0.0
        except ExecutorLost:
            self._commits.lost(planned)
            raise
        finally:
            self.slots.give(planned.slots)
            self.loader.slots_freed()
        self._tally.steps += 1
        self._tally.seconds.add(result.seconds)
        self._tally.preemptions += len(planned.preempted)
        self.snapshots.taken()
        if self._saver is not None:
            for seq in planned.opened:
                self._saver.opened(planned.lives[seq])
            for record in planned.filled:
                self._saver.promote(record.live, record.index, record.tier)
        self._commits.step(self.blocks, planned, result)
        if self._drafting is not None and result.seconds > 0 and all(item.samples for item in planned.plan.items):
            self._drafting.timed(sum(item.length for item in planned.plan.items), result.seconds)
        return result.seconds

    async def _executed(self, planned: Planned) -> StepResult:
        """Submit a step, compute its masks while the model computes, and wait for it."""
        handle = self._executor.submit(planned.plan)
        if planned.plan.masked:
            work = [
                (item.seq, matcher, item.drafts)
                for item in planned.plan.items
                if item.samples and (matcher := planned.lives[item.seq].matcher) is not None
            ]
            # Off the loop, because a single mask may take some milliseconds.
            handle.masks(await self._offload(masks_of, work, self._executor.limits.vocab_size))
        return await handle.result()

    async def _repeat(self, planned: Planned) -> float:
        """Run a repeated step while others may cut it; returns the executor's seconds."""
        begin = self._clock.now()
        repeated = self._repeated = Repeated(planned, self._executor.submit(planned.plan), begin)
        try:
            result = await repeated.handle.result()
        finally:
            self._repeated = None
        if self._broken is not None:
            raise self._broken
        self._commit_times(repeated, result)
        return result.seconds

    def catch_up(self) -> None:
        """End a repeated step behind the time under way; what single steps would have committed by now is committed.

        Called by whoever comes or leaves, before that changes anything, and whenever a step is to be planned anew.
        """
        repeated, self._repeated = self._repeated, None
        if repeated is None or (result := repeated.handle.cut()) is None:
            return
        try:
            now = self._commit_times(repeated, result)
            self._scheduler.plan(self._view(now))  # of the time under way; the choice is the same
        except Exception as error:  # it is the pool that is broken, not whoever came
            self._broken = error

    def _commit_times(self, repeated: Repeated, result: StepResult) -> float:
        """Commit those times of a repeated step that nobody has been told of; returns when they were over."""
        ends, planned = repeated.ends(result)[repeated.told :], repeated.planned
        rest = behind(result, repeated.told)
        self._tally.steps += len(ends)
        for seconds in rest.each_s:
            self._tally.seconds.add(seconds)
        self._commits.repeated(self.blocks, planned, rest, ends)
        repeated.told += len(ends)
        self.planner.computed(planned, len(ends))
        return ends[-1]

    def _view(self, now: float) -> StepView:
        limits, running = self._executor.limits, self.planner.running
        if self._drafting is not None:
            self._drafting.propose(running, limits)
        return StepView(
            now=now,
            step=self._tally.steps,
            max_step_tokens=limits.max_step_tokens,
            max_seqs=limits.max_seqs,
            block_size=self.blocks.block_size,
            num_blocks=self.blocks.num_blocks,
            free_blocks=self.blocks.free_blocks,
            running=tuple(self._commits.row(live) for live in running.values() if not live.over),
            fetchable=self._roster.fetchable,
            loading=self._roster.loading,
            grid=limits.grid,
            waiting=self.prefixes.now(),
        )

    def _fetch(self, seq: SeqId) -> None:
        live = self._roster.lives.get(seq)
        if live is not None and live.source is not None and seq in self._roster.fetchable:
            self._roster.fetchable.discard(seq)
            # Not in the task, which may begin only after the next plan: then the sequence would not wait for it.
            self._roster.loading.add(seq)
            live.fetched = live.bringing = True
            self._tasks.start_soon(self._load, live, live.source)

    async def _load(self, live: Live, source: Source) -> None:
        """Run one load; a store that raises although it must not is a miss."""
        try:
            with anyio.move_on_after(_LOAD_TIMEOUT_S) as scope:
                await self.loader.run(live, source, self._roster.wake.set)
            if scope.cancelled_caught:
                _log.warning("pool %s: a load took more than %g s and was given up", self._name, _LOAD_TIMEOUT_S)
        except Exception:
            _log.exception("pool %s: the store failed to load", self._name)
        finally:
            self._roster.loading.discard(live.spec.seq)
            live.bringing = False
            self._roster.wake.set()

    def _shed(self, choice: Choice) -> None:
        for seq in choice.shed:
            live = self._roster.lives.get(seq)
            if live is not None and not live.running:
                live.push((), (), self._why_shed(live.spec))

    def _why_shed(self, spec: SeqSpec) -> Ending:
        if spec.deadline is not None and spec.deadline <= self._clock.now():
            late = DeadlineExceededError(spec.deadline - spec.arrived_at)
            return Ending(late.code, str(late))
        full = Overloaded("others were let in before this request", max(1.0, self._scheduler.backlog().seconds))
        return Ending(full.code, str(full), full.retry_after_s)

    def _mark_opened(self, planned: Planned | None) -> None:
        if planned is None:
            return
        now = self._clock.now()
        for seq in planned.opened:
            live = planned.lives[seq]
            self._roster.fetchable.discard(seq)
            if live.opened_at is None:
                live.opened_at = now

    def _preempted(self, planned: Planned | None) -> None:
        if planned is not None and planned.preempted:
            step = planned.plan.step
            self._scheduler.commit(StepReport(step=step, seconds=0.0, rows=(), preempted=planned.preempted))

    async def _idle(self) -> None:
        """Wait for work; with sequences alive at most 50 ms, so that a Scheduler that forgets to ask cannot hang us."""
        roster = self._roster
        if not roster.lives and not roster.loading:
            roster.empty.set()
        wake_at = self._scheduler.wake_at()
        timeout = 0.05 if roster.lives else float("inf")
        if wake_at is not None:
            timeout = min(timeout, max(0.0, wake_at - self._clock.now()))
        with anyio.move_on_after(timeout):
            await roster.wake.wait()
