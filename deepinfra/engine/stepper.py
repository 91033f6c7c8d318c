"""The loop of a pool: what lasts as long as its executor is entered."""

from __future__ import annotations

import logging
from collections import deque

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
from deepinfra.interfaces.executor import Executor, StepHandle
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
        unguessed = drafting is None and not windows.rows
        self._depth = executor.depth if unguessed else 1
        self._repeats = unguessed and "repeat" in executor.provides
        self._repeated: Repeated | None = None
        self._broken: Exception | None = None
        self._asked = 0  # the step that policy was asked about last
        self._boundary = clock.now()
        self._free_at: float | None = None  # since when the executor has had no step
        roster.wake.heard = self._heard

    async def run(self) -> ExecutorLost:
        """Plan, submit, wait, commit, until cancelled or the executor is lost; returns the loss."""
        try:
            return await self._run()
        finally:
            self._asked = self._tally.steps  # who leaves from now on changes no step
            self.snapshots.end()

    async def _run(self) -> ExecutorLost:
        while True:
            self.reap()
            self._roster.stirred, self._asked = False, self._tally.steps
            choice = self._scheduler.plan(self._view(self._clock.now()))
            for seq in choice.fetch:
                self._fetch(seq)
            self._shed(choice)
            arrived = self.loader.collect()
            planned = self.planner.plan(choice, self._roster.lives, arrived, self.snapshots.due())
            self._mark_opened(planned)
            if planned is None or not (planned.plan.items or planned.plan.fills or planned.plan.snapshots):
                self.slots.give([record.slot for record in arrived])
                self._preempted(planned)
                await self._idle()
                self._boundary, self._free_at = self._clock.now(), None
                continue
            try:
                await self._steps(planned, choice)
            except ExecutorLost as error:
                return error

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

    async def _steps(self, planned: Planned, choice: Choice) -> None:
        """Run a step, and while nothing happens those after it, each submitted before the one before it is over.

        Only the end of the pool cancels these waits; then nobody plans on, so no block is reused under a step.
        """
        if (more := self._unchanged(planned, choice)) and self._repeats:
            planned.plan = planned.plan._replace(repeat=times_of(choice, planned, self.blocks.block_size))
            if planned.plan.repeat > 1:
                await self._repeat(planned)
                return
        flight = deque([(planned, self._submit(planned))])
        failed = False
        while flight:
            while more and len(flight) < self._depth and not (failed or self._roster.stirred):
                if (after := self.planner.follow(flight[-1][0])) is None:
                    break
                flight.append((after, self._submit(after)))
                self._tally.ahead += 1
                more -= 1
            planned, handle = flight.popleft()
            failed = not await self._over(planned, handle, more=bool(flight), astray=failed) or failed
            if self._broken is not None:
                raise self._broken

    def _unchanged(self, planned: Planned, choice: Choice) -> int:
        """How many steps after this one would be planned like it if nothing happened but what they sample."""
        plan, roster = planned.plan, self._roster
        if choice.repeat <= 1 or roster.loading or len(plan.items) != len(roster.lives) or planned.slots:
            return 0
        if plan.opened or plan.fills or plan.masked or plan.snapshots or planned.preempted:
            return 0
        if any(item.length != 1 or planned.lives[item.seq].prefill_only for item in plan.items):
            return 0
        steady = (self._repeats or self._depth > 1) and self._scheduler.wake_at() is None
        return choice.repeat - 1 if steady else 0

    def _submit(self, planned: Planned) -> StepHandle:
        """Hand a step to the executor, and note for how long it had none although there was one to be computed."""
        handle = self._executor.submit(planned.plan)
        if self._free_at is not None:
            self._tally.gaps.add(self._clock.now() - self._free_at)
            self._free_at = None
        return handle

    async def _over(self, planned: Planned, handle: StepHandle, *, more: bool, astray: bool) -> bool:
        """Wait for a step and apply what came of it; returns whether it was good, for all of its sequences.

        Args:
            planned: The step.
            handle: Of it.
            more: Whether the executor has another one behind it.
            astray: A step before it failed, for which it cannot but fail too: that is nobody's fault.
        """
        result: StepResult | None = None
        try:
            result = await self._executed(planned, handle)
        except StepFailed as error:
            _log.warning("pool %s: %s", self._name, error)
            self._tally.failures += not astray
            self._tally.seconds.add(0.0)
            self.snapshots.failed()
            self._commits.failed(self.blocks, planned, error, astray=astray)
        except ExecutorLost:
            self._commits.lost(planned)
            raise
        finally:
            now = self._clock.now()
            self.slots.give(planned.slots)
            self.loader.slots_freed()
        if more:
            self._tally.gaps.add(0.0)
        else:
            self._free_at = now
        self._took(now, 0.0 if result is None else result.seconds)
        if result is not None:
            self._commit(planned, result)
        return result is not None and not result.failed

    def _took(self, now: float, seconds: float) -> None:
        """A step is over, for so many seconds of which it was computed."""
        self._tally.overhead += max(0.0, now - self._boundary - seconds)
        self._boundary = now

    def _commit(self, planned: Planned, result: StepResult) -> None:
        """Apply a good step."""
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

    async def _executed(self, planned: Planned, handle: StepHandle) -> StepResult:
        """Compute a step's masks while the model computes, and wait for it."""
        if planned.plan.masked:
            work = [
                (item.seq, matcher, item.drafts)
                for item in planned.plan.items
                if item.samples and (matcher := planned.lives[item.seq].matcher) is not None
            ]
            # Off the loop, because a single mask may take some milliseconds.
            handle.masks(await self._offload(masks_of, work, self._executor.limits.vocab_size))
        return await handle.result()

    async def _repeat(self, planned: Planned) -> None:
        """Run a repeated step while others may cut it."""
        begin = self._clock.now()
        repeated = self._repeated = Repeated(planned, self._submit(planned), begin)
        try:
            result = await repeated.handle.result()
        finally:
            self._repeated = None
        if self._broken is not None:
            raise self._broken
        self._commit_times(repeated, result)
        self._took(self._clock.now(), result.seconds)

    def _heard(self) -> None:
        """Something changed; while steps follow each other only those who come and leave matter."""
        if self._repeated is not None or self._roster.stirred:
            self.catch_up()

    def catch_up(self) -> None:
        """Let policy know what single steps would have told it by now; a repeated step ends behind the time under way.

        Called by whoever comes or leaves, before that changes anything, and whenever a step is to be planned anew.
        """
        repeated, self._repeated = self._repeated, None
        try:
            if repeated is not None:
                if (result := repeated.handle.cut()) is None:
                    return
                self._ask_again(self._commit_times(repeated, result))
            elif self._asked < self._tally.steps:
                self._ask_again(self._clock.now())
        except Exception as error:  # it is the pool that is broken, not whoever came
            self._broken = error

    def _ask_again(self, now: float) -> None:
        """Ask policy about the step under way, which was not planned by itself; the choice is the same."""
        self._asked = self._tally.steps
        self._scheduler.plan(self._view(now))

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
            self._roster.stirred = True
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
