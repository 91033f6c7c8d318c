"""A pool: one Scheduler, one Executor, maybe a KVStore and a Speculator, and the loop that joins them."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Self

import anyio
from anyio import AsyncContextManagerMixin
from anyio.abc import TaskGroup, TaskStatus

from deepinfra.core.ids import SeqId
from deepinfra.core.kv import KVStats, root_key
from deepinfra.core.model import ExecutorLimits
from deepinfra.core.request import SeqSpec
from deepinfra.core.step import Choice, Job, StepReport, StepView
from deepinfra.engine.blocks import BlockPool
from deepinfra.engine.collapse import collapsed
from deepinfra.engine.committing import Committer
from deepinfra.engine.drafting import Drafting
from deepinfra.engine.handoff import Handoff, HandoffStore, export
from deepinfra.engine.live import Ending, Live, Source
from deepinfra.engine.loader import Loader
from deepinfra.engine.planner import Planned, Planner
from deepinfra.engine.saver import Saver
from deepinfra.engine.sources import find_source, namespace_of
from deepinfra.engine.staging import Slots
from deepinfra.engine.stats import Histogram, PoolStats, State
from deepinfra.engine.stream import Signal
from deepinfra.errors import (
    EngineNotRunningError,
    ExecutorLost,
    Overloaded,
    PoolFailedError,
    StepFailed,
    UnsupportedCombination,
)
from deepinfra.interfaces.executor import Executor
from deepinfra.interfaces.given import Clock, Offload, SystemClock, ThreadOffload
from deepinfra.interfaces.kvstore import KVStore
from deepinfra.interfaces.placer import ExpertPlacer
from deepinfra.interfaces.scheduler import Scheduler
from deepinfra.interfaces.speculator import Speculator

__all__ = ("Pool",)

_log = logging.getLogger("deepinfra.engine")

MAX_LOSSES = 3
"""Executor losses in a row after which a pool gives up."""

_HEALTHY_STEPS, _HEALTHY_S = 256, 60.0
"""A loss after so many good steps, or so long after entering, is no longer in a row with the one before."""

_MATCH_TIMEOUT_S, _LOAD_TIMEOUT_S = 1.0, 30.0
"""A store that takes longer to answer, or to deliver a prompt's blocks, is late: what it has not brought is a miss."""

_INLINE_TOKENS = 16384
"""Longer prompts are hashed off the loop: SHA-256 over 16k tokens takes about 0.5 ms."""


class _Core:
    """What exists only while the executor is entered: device blocks, staging, and what works on them."""

    def __init__(self, pool: Pool, tasks: TaskGroup) -> None:
        limits, layout = pool.executor.limits, pool.executor.layout
        self.tasks = tasks
        self.blocks = BlockPool(limits.num_blocks, layout.block_size)
        self.slots = Slots(pool.executor.memory.num_slots)
        self.planner = Planner(self.blocks, limits)
        self.loader = Loader(self.blocks, self.slots, pool.executor.memory, pool.offload)


class Pool(AsyncContextManagerMixin):
    """One scheduling domain. The engine enters it; a sequence lives in it inside `async with pool.run(...)`.

    Args:
        scheduler: Who runs next.
        executor: The model.
        store: Where KV goes when the device forgets it.
        speculator: Guesses tokens.
        placer: Places experts; refused unless the executor provides `placement`.
        name: For logs and metrics.

    Attributes:
        limits: The executor's; while a lost one is replaced, and after the pool gave up, those of its last life.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        *,
        store: KVStore | None = None,
        speculator: Speculator | None = None,
        placer: ExpertPlacer | None = None,
        name: str = "pool",
        clock: Clock | None = None,
        offload: Offload | None = None,
    ) -> None:
        self.scheduler, self.executor, self.store, self.speculator = scheduler, executor, store, speculator
        self.placer = placer
        self.name = name
        self.clock: Clock = clock or SystemClock()
        self.offload: Offload = offload or ThreadOffload()
        self.state: State = "stopped"
        self.failure: PoolFailedError | None = None
        self._recipe_version = ""
        self._core: _Core | None = None
        self.limits: ExecutorLimits
        self._step_seconds = Histogram()
        self._overhead = 0.0
        self._preemptions = self._losses = self._steps = 0
        self._check()

    def _check(self) -> None:
        """Refuse parts that do not fit, before anything is acquired."""
        provides, layout = self.executor.provides, self.executor.layout
        if any(group.kind != "full" for group in layout.groups):
            raise UnsupportedCombination(
                "this engine keeps full KV only; the executor's layout has window or state groups"
            )
        if self.placer is not None and "placement" not in provides:
            raise UnsupportedCombination("a placer is configured, but the executor does not place experts")
        if self.speculator is not None and "drafts" not in provides:
            raise UnsupportedCombination("a speculator is configured, but the executor does not verify drafts")
        if self.speculator is not None and self.speculator.head is not None:
            raise UnsupportedCombination(f"the executor has no draft head named {self.speculator.head!r}")

    # -- life ---------------------------------------------------------------------------------------

    def give(self, clock: Clock, offload: Offload, recipe_version: str) -> None:
        """Receive time, threads and the recipe's part of the namespace; called by the engine before `async with`."""
        self.clock, self.offload, self._recipe_version = clock, offload, recipe_version
        for part in self._parts():
            part.give(clock, offload)

    def _parts(self) -> list[Scheduler | Executor | KVStore | Speculator | ExpertPlacer]:
        parts = (self.scheduler, self.executor, self.store, self.speculator, self.placer)
        return [part for part in parts if part is not None]

    @asynccontextmanager
    async def __asynccontextmanager__(self) -> AsyncGenerator[Self]:
        self.state, self.failure = "starting", None
        self._lives: dict[SeqId, Live] = {}
        self._gone: list[Live] = []
        self._fetchable: set[SeqId] = set()
        self._loading: set[SeqId] = set()
        self._wake = Signal()
        self._empty = anyio.Event()
        self._core = None
        self._drafting = Drafting(self.speculator) if self.speculator is not None else None
        self._saver = (
            Saver(self.store, self.executor.layout, self.executor.identity.model) if self.store is not None else None
        )
        self._commits = Committer(self.scheduler, self._saver, self._drafting)
        try:
            with collapsed():
                async with AsyncExitStack() as stack:
                    for part in (self.store, self.scheduler, self.speculator, self.placer):
                        if part is not None:
                            await stack.enter_async_context(part)
                    tasks = await stack.enter_async_context(anyio.create_task_group())
                    stack.callback(tasks.cancel_scope.cancel)
                    await tasks.start(self._serve)
                    yield self
        finally:
            self.state = "stopped"

    async def _serve(self, *, task_status: TaskStatus[None]) -> None:
        """Keep an executor entered and step it; a lost one is entered again, up to a limit."""
        started, in_a_row = False, 0
        while True:
            lost: ExecutorLost | None = None
            steps_before, entered_at = self._steps, self.clock.now()
            try:
                with collapsed():
                    async with self.executor, anyio.create_task_group() as tasks:
                        self.limits = self.executor.limits
                        self._core = core = _Core(self, tasks)
                        if self._saver is not None:
                            tasks.start_soon(self._saving, self._saver, core)
                        self.state = "ready"
                        if not started:
                            started = True
                            task_status.started()
                        lost = await self._steps_until_lost(core)
                        tasks.cancel_scope.cancel()
            except ExecutorLost as error:
                if not started:
                    raise
                lost = error
            except Exception as error:  # the pool's door: a broken part ends its sequences, not the process
                if not started:
                    raise
                _log.exception("pool %s failed", self.name)
                self._fail(PoolFailedError(f"one of its parts raised {type(error).__name__}; the log says more"))
                return
            self._core = None
            if lost is None:
                return
            healthy = self._steps - steps_before >= _HEALTHY_STEPS or self.clock.now() - entered_at >= _HEALTHY_S
            in_a_row = 1 if healthy else in_a_row + 1
            self._losses += 1
            _log.warning("pool %s lost its executor (%d in a row): %s", self.name, in_a_row, lost)
            if in_a_row >= MAX_LOSSES:
                self._fail(PoolFailedError(f"its executor was lost {in_a_row} times in a row, last: {lost}"))
                return
            self.state = "starting"
            try:
                self._recover(lost)
            except Exception as error:
                _log.exception("pool %s failed", self.name)
                self._fail(PoolFailedError(f"one of its parts raised {type(error).__name__}; the log says more"))
                return

    async def _saving(self, saver: Saver, core: _Core) -> None:
        """Run the saver; a store that raises although it must not costs a log line and the queue, not the pool."""
        while True:
            try:
                await saver.run(self.executor.memory, core.blocks, core.slots, self._wake)
                return
            except Exception:
                _log.exception("pool %s: the store failed to save", self.name)

    async def _load(self, core: _Core, live: Live, source: Source) -> None:
        """Run one load; a store that raises although it must not is a miss."""
        self._loading.add(live.spec.seq)
        try:
            with anyio.move_on_after(_LOAD_TIMEOUT_S) as scope:
                await core.loader.run(live, source, self._wake.set)
            if scope.cancelled_caught:
                _log.warning("pool %s: a load took more than %g s and was given up", self.name, _LOAD_TIMEOUT_S)
        except Exception:
            _log.exception("pool %s: the store failed to load", self.name)
        finally:
            self._loading.discard(live.spec.seq)
            self._wake.set()

    def _fail(self, failure: PoolFailedError) -> None:
        self.state, self.failure = "failed", failure
        self._core = None
        self._empty.set()
        for live in self._lives.values():
            live.push((), (), Ending(failure.code, str(failure)))
        for live in self._gone:
            self._lives.pop(live.spec.seq, None)

    def _recover(self, lost: ExecutorLost) -> None:
        """Put running sequences back into the queue, to be computed once more from their tokens and seed."""
        preempted: list[SeqId] = []
        for live in self._lives.values():
            if not live.running:
                continue
            live.reset()
            live.losses += 1
            if live.losses > 1:
                live.push((), (), Ending(lost.code, f"{lost}; it was lost before while this request ran"))
            preempted.append(live.spec.seq)
        self.scheduler.commit(StepReport(step=-1, seconds=0.0, rows=(), preempted=tuple(preempted)))
        for live in self._gone:
            live.reset()

    # -- a sequence's life ---------------------------------------------------------------------------

    @asynccontextmanager
    async def run(
        self, spec: SeqSpec, *, handoff: Handoff | None = None, prefill_only: bool = False
    ) -> AsyncGenerator[Live]:
        """A sequence's life in this pool; leaving by any door gives its blocks back at the next step boundary.

        Raises:
            Overloaded: The scheduler does not admit it.
            PoolFailedError: The pool no longer serves; says why.
        """
        namespace = namespace_of(self.executor, self._recipe_version, spec.tenant)
        live = Live(spec=spec, root=root_key(namespace), tokens=list(spec.tokens), prefill_only=prefill_only)
        if len(live.tokens) > _INLINE_TOKENS:
            await self.offload(live.extend_keys, self.executor.layout.block_size)
        else:
            live.extend_keys(self.executor.layout.block_size)
        await self._find_source(live, handoff)
        # Not before the wait: a pool that failed meanwhile has told every sequence it knew, and not this one.
        if self.state in ("failed", "stopped"):
            raise self.failure or EngineNotRunningError
        core = self._core
        device = 0 if core is None else len(core.blocks.match(live.keys))
        held = len(live.source.refs) if live.source is not None else 0
        if held > device:
            self._fetchable.add(spec.seq)
        cached = min(max(device, held) * self.executor.layout.block_size, len(live.tokens) - 1)
        self.scheduler.add(
            Job(
                seq=spec.seq,
                tokens=len(live.tokens),
                cached=cached,
                max_new=live.room,
                arrived_at=spec.arrived_at,
                tenant=spec.tenant,
                priority=spec.priority,
                deadline=spec.deadline,
            )
        )
        self._lives[spec.seq] = live
        if self._empty.is_set():
            self._empty = anyio.Event()
        self._wake.set()
        try:
            yield live
        finally:
            live.over = True
            if self.state in ("failed", "stopped"):
                self._lives.pop(spec.seq, None)
            else:
                self._gone.append(live)
                self._wake.set()

    async def _find_source(self, live: Live, handoff: Handoff | None) -> None:
        """Note what the handoff, or else the store, holds of the prompt."""
        store: KVStore | None = HandoffStore(handoff) if handoff is not None else self.store
        if store is None or not live.keys:
            return
        try:
            with anyio.move_on_after(_MATCH_TIMEOUT_S):
                live.source = await find_source(store, live, self.executor.layout)
        except Exception:
            _log.exception("pool %s: the store failed to match", self.name)
        if handoff is None and self._saver is not None:
            self._saver.missed(live.keys[len(live.source.refs) if live.source is not None else 0 :])

    async def export(self, live: Live) -> Handoff:
        """Copy a prefilled sequence's published blocks out; call inside `run`, after its first token."""
        core = self._core
        if core is None:
            raise ExecutorLost("the executor was lost before the handoff")
        return await export(live, core.blocks, core.slots, self.executor.memory, self._wake)

    def view(self) -> tuple[int, int]:
        """(waiting, running) sequences; what a route needs to know."""
        running = len(self._core.planner.running) if self._core is not None else 0
        return len(self._lives) - running, running

    async def settle(self) -> None:
        """Wait until no sequence and no load is left and queued KV is saved."""
        while (self._lives or self._loading) and self.state in ("ready", "starting"):
            await self._empty.wait()
        if self._saver is not None and self.state == "ready":
            await self._saver.flush()

    # -- the loop ------------------------------------------------------------------------------------

    async def _steps_until_lost(self, core: _Core) -> ExecutorLost | None:
        """Plan, submit, wait, commit, until cancelled or the executor is lost."""
        boundary = self.clock.now()
        while True:
            self._reap(core)
            choice = self.scheduler.plan(self._view(core))
            for seq in choice.fetch:
                self._fetch(core, seq)
            self._shed(choice)
            arrived = core.loader.collect()
            planned = core.planner.plan(choice, self._lives, arrived)
            self._mark_opened(planned)
            if planned is None or not (planned.plan.items or planned.plan.fills):
                core.slots.give([record.slot for record in arrived])
                self._preempted(planned)
                await self._idle(core)
                boundary = self.clock.now()
                continue
            try:
                seconds = await self._one_step(core, planned)
            except ExecutorLost as error:
                return error
            now = self.clock.now()
            self._step_seconds.add(seconds)
            self._overhead += max(0.0, now - boundary - seconds)
            boundary = now

    async def _one_step(self, core: _Core, planned: Planned) -> float:
        """Run one step; returns the executor's seconds."""
        handle = self.executor.submit(planned.plan)
        try:
            # Only the end of the pool cancels this wait; then nobody plans on, so no block is reused under the step.
            result = await handle.result()
        except StepFailed as error:
            self._commits.failed(core.blocks, planned, error)
            return 0.0
        except ExecutorLost:
            self._commits.lost(planned)
            raise
        finally:
            core.slots.give(planned.slots)
            core.loader.slots_freed()
        self._steps += 1
        self._preemptions += len(planned.preempted)
        self._commits.step(core.blocks, planned, result)
        if self._drafting is not None and result.seconds > 0 and all(item.samples for item in planned.plan.items):
            self._drafting.timed(sum(item.length for item in planned.plan.items), result.seconds)
        return result.seconds

    def _view(self, core: _Core) -> StepView:
        if self._drafting is not None:
            self._drafting.propose(core.planner.running, self.executor.limits)
        limits = self.executor.limits
        return StepView(
            now=self.clock.now(),
            step=self._steps,
            max_step_tokens=limits.max_step_tokens,
            max_seqs=limits.max_seqs,
            block_size=core.blocks.block_size,
            num_blocks=core.blocks.num_blocks,
            free_blocks=core.blocks.free_blocks,
            running=tuple(self._commits.row(live) for live in core.planner.running.values() if not live.over),
            fetchable=frozenset(self._fetchable),
            loading=frozenset(self._loading),
            grid=limits.grid,
        )

    def _reap(self, core: _Core) -> None:
        """Forget sequences that are over; the only place where blocks of a live sequence are given back."""
        gone, self._gone = self._gone, []
        for live in gone:
            self.scheduler.finish(live.spec.seq)
            if self._drafting is not None:
                self._drafting.forget(live)
            core.planner.close(live)
            self._lives.pop(live.spec.seq, None)
            self._fetchable.discard(live.spec.seq)

    def _fetch(self, core: _Core, seq: SeqId) -> None:
        live = self._lives.get(seq)
        if live is not None and live.source is not None and seq in self._fetchable:
            self._fetchable.discard(seq)
            core.tasks.start_soon(self._load, core, live, live.source)

    def _shed(self, choice: Choice) -> None:
        for seq in choice.shed:
            live = self._lives.get(seq)
            if live is not None and not live.running:
                live.push((), (), Ending(Overloaded.code, "shed from the queue: the server is overloaded"))

    def _mark_opened(self, planned: Planned | None) -> None:
        if planned is None:
            return
        now = self.clock.now()
        for seq in planned.opened:
            live = planned.lives[seq]
            self._fetchable.discard(seq)
            if live.opened_at is None:
                live.opened_at = now
            if self._saver is not None:
                self._saver.touch(live.keys[: live.published], live.spec.retention)

    def _preempted(self, planned: Planned | None) -> None:
        if planned is not None and planned.preempted:
            self.scheduler.commit(StepReport(step=planned.plan.step, seconds=0.0, rows=(), preempted=planned.preempted))

    async def _idle(self, core: _Core) -> None:
        """Wait for work; with sequences alive at most 50 ms, so that a Scheduler that forgets to ask cannot hang us."""
        if not self._lives and not self._loading:
            self._empty.set()
        wake_at = self.scheduler.wake_at()
        timeout = 0.05 if self._lives else float("inf")
        if wake_at is not None:
            timeout = min(timeout, max(0.0, wake_at - self.clock.now()))
        with anyio.move_on_after(timeout):
            await self._wake.wait()

    def stats(self) -> PoolStats:
        """Numbers so far."""
        core = self._core
        waiting, running = self.view() if self.state != "stopped" else (0, 0)
        saver = self._saver if self.state != "stopped" else None
        verified, accepted = (0, 0) if self.state == "stopped" or self._drafting is None else self._drafting.counts
        store: KVStats | None = self.store.stats() if self.store is not None and saver is not None else None
        return PoolStats(
            name=self.name,
            state=self.state,
            waiting=waiting,
            running=running,
            blocks_total=core.blocks.num_blocks if core else 0,
            blocks_free=core.blocks.free_blocks if core else 0,
            blocks_cached=core.blocks.cached_blocks if core else 0,
            slots_total=core.slots.num_slots if core else 0,
            slots_free=core.slots.free if core else 0,
            steps=self._steps,
            preemptions=self._preemptions,
            executor_losses=self._losses,
            saves_waiting=saver.waiting if saver else 0,
            saves_dropped=saver.dropped if saver else 0,
            records_damaged=core.loader.damaged if core else 0,
            drafts_verified=verified,
            drafts_accepted=accepted,
            step_seconds=self._step_seconds.snapshot(),
            overhead_seconds=self._overhead,
            store=store,
        )
