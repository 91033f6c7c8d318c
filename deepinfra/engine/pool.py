"""A pool: one Scheduler, one Executor, maybe a KVStore and a Speculator, and the loop that joins them."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Callable, Generator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from typing import Self

import anyio
from anyio import AsyncContextManagerMixin
from anyio.abc import TaskGroup, TaskStatus

from deepinfra.core.ids import BlockKey, SeqId
from deepinfra.core.kv import KVStats
from deepinfra.core.model import ExecutorLimits
from deepinfra.core.request import SeqSpec
from deepinfra.core.step import Job, StepReport
from deepinfra.engine.collapse import collapsed
from deepinfra.engine.constraints import Constraints
from deepinfra.engine.drafting import Drafting
from deepinfra.engine.explain import Miss, look_in_time
from deepinfra.engine.handoff import Handoff, HandoffStore, export
from deepinfra.engine.live import Ending, Live
from deepinfra.engine.matcher import Matcher
from deepinfra.engine.roster import Roster
from deepinfra.engine.routes import PoolView
from deepinfra.engine.saver import Saver
from deepinfra.engine.sources import Chain, Kin, find_source
from deepinfra.engine.stats import PoolStats, State, StepTally
from deepinfra.engine.stepper import Stepper
from deepinfra.engine.windows import ReplayMode, SnapshotMode, window_plan
from deepinfra.errors import (
    EngineNotRunningError,
    ExecutorLost,
    Overloaded,
    PoolFailedError,
    UnsupportedCombination,
    UnsupportedFieldError,
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

_MATCH_TIMEOUT_S = 1.0
"""A store that takes longer to answer is late: what it has not said is a miss."""

_TELLING = 256
"""A prompt's last tokens tell whether it is one that was refused before; hashing them takes 3 us."""

_INLINE_TOKENS = 16384
"""Longer prompts are hashed off the loop: SHA-256 over 16k tokens takes about 0.5 ms."""


class Pool(AsyncContextManagerMixin):
    """One scheduling domain. The engine enters it; a sequence lives in it inside `async with pool.run(...)`.

    Args:
        scheduler: Who runs next.
        executor: The model.
        store: Where KV goes when the device forgets it.
        speculator: Guesses tokens.
        placer: Places experts; refused unless the executor provides `placement`.
        name: For logs and metrics.
        replay: How windows are rebuilt behind a cached prefix where no snapshot is found; `bounded` is an
            approximation and has a cache of its own.
        snapshots: Where snapshots of windows are kept.

    Attributes:
        limits: The executor's, like `computing`; while a lost one is replaced, or the pool gave up, of its last life.
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
        replay: ReplayMode = "exact",
        snapshots: SnapshotMode = "disk",
        clock: Clock | None = None,
        offload: Offload | None = None,
    ) -> None:
        self.scheduler, self.executor, self.store, self.speculator = scheduler, executor, store, speculator
        self.placer = placer
        self.name, self.replay, self.snapshots = name, replay, snapshots
        self.clock: Clock = clock or SystemClock()
        self.offload: Offload = offload or ThreadOffload()
        self.state: State = "stopped"
        self.failure: PoolFailedError | None = None
        self._kin: Kin | None = None
        self._recipe_version: Callable[[], str] = str
        self._stepper: Stepper | None = None
        self._constraints: Constraints | None = None
        self.limits: ExecutorLimits
        self._tally = StepTally()
        self._losses = self._sent = self._sent_tokens = 0
        self._check()

    def _check(self) -> None:
        """Refuse parts that do not fit, before anything is acquired."""
        provides, layout = self.executor.provides, self.executor.layout
        if states := [group.name for group in layout.groups if group.kind == "state"]:
            raise UnsupportedCombination(
                f"this engine keeps full KV and windows; the executor's layout has state groups: {', '.join(states)}"
            )
        if self.placer is not None and "placement" not in provides:
            raise UnsupportedCombination("a placer is configured, but the executor does not place experts")
        if self.speculator is not None and "drafts" not in provides:
            raise UnsupportedCombination("a speculator is configured, but the executor does not verify drafts")
        if self.speculator is not None and self.speculator.head is not None:
            raise UnsupportedCombination(f"the executor has no draft head named {self.speculator.head!r}")

    # -- life ---------------------------------------------------------------------------------------

    def give(
        self,
        clock: Clock,
        offload: Offload,
        recipe_version: Callable[[], str],
        constraints: Constraints | None = None,
    ) -> None:
        """Receive what the engine's pools share; called by the engine before `async with`.

        Args:
            clock: Time.
            offload: Threads.
            recipe_version: Says the recipe's part of the namespace; not asked before there is a request.
            constraints: Compiles what sequences must match; without it constrained ones are refused.
        """
        self.clock, self.offload, self._recipe_version, self._constraints = clock, offload, recipe_version, constraints
        self._kin = None
        for part in self._parts():
            part.give(clock, offload)

    def _parts(self) -> list[Scheduler | Executor | KVStore | Speculator | ExpertPlacer]:
        parts = (self.scheduler, self.executor, self.store, self.speculator, self.placer)
        return [part for part in parts if part is not None]

    @asynccontextmanager
    async def __asynccontextmanager__(self) -> AsyncGenerator[Self]:
        self.state, self.failure = "starting", None
        self._roster = Roster()
        self._stepper = None
        self._drafting = Drafting(self.speculator) if self.speculator is not None else None
        self.scheduler.meet(self.executor.speed)
        self._saver = None
        if self.store is not None:
            self._saver = Saver(self.store, self.executor.layout, self.executor.identity.model, self.snapshots)
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
            steps_before, entered_at = self._tally.steps, self.clock.now()
            try:
                with collapsed():
                    async with self.executor, anyio.create_task_group() as tasks:
                        self.limits, self.computing, self._kin = self.executor.limits, self.executor.computing, None
                        self._windows = window_plan(self.executor.layout, self.replay, self.limits.grid)
                        self._stepper = stepper = self._new_stepper(tasks)
                        if self._saver is not None:
                            self._saver.begin()
                            tasks.start_soon(self._saving, self._saver, stepper)
                        self.state = "ready"
                        if not started:
                            started = True
                            if self._windows.rows:
                                kept = self.snapshots if self.store is not None else "off: no store"
                                _log.info("pool %s: %s", self.name, self._windows.sentence(kept))
                            task_status.started()
                        lost = await stepper.run()
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
            self._stepper = None
            self._roster.loading.clear()  # those of loads that were cancelled before they began
            healthy = self._tally.steps - steps_before >= _HEALTHY_STEPS or self.clock.now() - entered_at >= _HEALTHY_S
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

    def _new_stepper(self, tasks: TaskGroup) -> Stepper:
        return Stepper(
            self.scheduler,
            self.executor,
            drafting=self._drafting,
            saver=self._saver,
            windows=self._windows,
            roster=self._roster,
            tally=self._tally,
            clock=self.clock,
            offload=self.offload,
            tasks=tasks,
            name=self.name,
        )

    async def _saving(self, saver: Saver, stepper: Stepper) -> None:
        """Run the saver; a store that raises although it must not costs a log line and the queue, not the pool."""
        while True:
            try:
                await saver.run(self.executor.memory, stepper.blocks, stepper.slots, self._roster.wake)
                return
            except Exception:
                _log.exception("pool %s: the store failed to save", self.name)

    def _fail(self, failure: PoolFailedError) -> None:
        self.state, self.failure = "failed", failure
        self._stepper = None
        self._roster.empty.set()
        for live in self._roster.lives.values():
            live.push((), (), Ending(failure.code, str(failure)))
        for live in self._roster.gone:
            self._roster.forget(live)

    def _recover(self, lost: ExecutorLost) -> None:
        """Put running sequences back into the queue, to be computed once more from their tokens and seed."""
        preempted: list[SeqId] = []
        for live in self._roster.lives.values():
            live.fetched = live.bringing = False
            if not live.running:
                continue
            live.reset()
            live.losses += 1
            if live.losses > 1:
                live.push((), (), Ending(lost.code, f"{lost}; it was lost before while this request ran"))
            preempted.append(live.spec.seq)
        self.scheduler.commit(StepReport(step=-1, seconds=0.0, rows=(), preempted=tuple(preempted)))
        for live in self._roster.gone:
            live.reset()

    # -- a sequence's life ---------------------------------------------------------------------------

    @asynccontextmanager
    async def run(
        self,
        spec: SeqSpec,
        *,
        handoff: Handoff | None = None,
        prefill_only: bool = False,
        chain: Chain | None = None,
    ) -> AsyncGenerator[Live]:
        """A sequence's life in this pool; leaving by any door gives its blocks back at the next step boundary.

        Args:
            spec: What is asked.
            handoff: Brings blocks from another pool.
            prefill_only: End it after its first token.
            chain: `Pool.chain` of a pool of the same kin, if it was computed already.

        Raises:
            Overloaded: The scheduler does not admit it.
            PoolFailedError: The pool no longer serves; says why.
            RequestError: Its constraint is wrong.
        """
        with self._coming(spec):
            matcher = await self._matcher(spec)
            root, public, keys = chain or await self.chain(spec)
            live = Live(
                spec=spec,
                root=root,
                tokens=list(spec.tokens),
                prefill_only=prefill_only,
                keys=keys,
                matcher=matcher,
                public=public,
            )
            await self._find_source(live, handoff)
            if spec.explain and handoff is None:
                live.miss = await self._look(live)
        # Not before the wait: a pool that failed meanwhile has told every sequence it knew, and not this one.
        if self.state in ("failed", "stopped"):
            raise self.failure or EngineNotRunningError
        self.catch_up()  # the Scheduler is asked as of now
        cached = self._cached(live)
        if live.miss is not None:
            live.miss = live.miss._replace(usable=cached)
        job = Job(
            seq=spec.seq,
            tokens=len(live.tokens),
            cached=cached,
            max_new=live.room,
            arrived_at=spec.arrived_at,
            tenant=spec.tenant,
            priority=spec.priority,
            deadline=spec.deadline,
            begun=len(spec.tokens) > spec.prompt_len,
            prompt=hash(spec.tokens[-_TELLING:]),
        )
        try:
            self.scheduler.add(job)
        except Overloaded:
            self._roster.fetchable.discard(spec.seq)
            raise
        self._roster.enter(live)
        try:
            yield live
        finally:
            self._roster.leave(live)
            if self.state in ("failed", "stopped"):
                self._roster.forget(live)

    def catch_up(self) -> None:
        """Commit what a repeated step has computed by now; it ends at its next boundary."""
        if self._stepper is not None:
            self._stepper.catch_up()

    @property
    def kin(self) -> Kin:
        """What the keys of its blocks depend on, besides the sequence: pools of the same kin have the same."""
        if self._kin is None:
            self._kin = Kin.of(self.executor, self._recipe_version(), self.replay)
        return self._kin

    async def chain(self, spec: SeqSpec) -> Chain:
        """Name a sequence's blocks, off the loop if they are many."""
        if len(spec.tokens) > _INLINE_TOKENS:
            return await self.offload(self.kin.chain, spec)
        return self.kin.chain(spec)

    @contextmanager
    def _coming(self, spec: SeqSpec) -> Generator[None]:
        """Count a sequence that was sent here until it is queued: others may be routed meanwhile."""
        self._sent += 1
        self._sent_tokens += len(spec.tokens)
        try:
            yield
        finally:
            self._sent -= 1
            self._sent_tokens -= len(spec.tokens)

    def _cached(self, live: Live) -> int:
        """Tokens that need not be computed, as far as is known while no executor is there; notes if any are to load."""
        cached = 0 if self._stepper is None else self._stepper.prefixes.cached(live)
        self._tally.hits_too_short += bool(self._windows.rows and (live.found or live.source) and not cached)
        return cached

    async def _matcher(self, spec: SeqSpec) -> Matcher | None:
        if spec.constraint is None:
            return None
        if self._constraints is None or "masks" not in self.executor.provides:
            raise UnsupportedFieldError("constraint")
        return await self._constraints.matcher(spec)

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
            source = live.source
            self._saver.matched(live.keys, len(source.refs) if source else 0, source.snapshots if source else ())

    async def _look(self, live: Live) -> Miss:
        """Find out where the search for a sequence's blocks ends, for `Explanation`."""
        device = 0 if self._stepper is None else len(self._stepper.blocks.match(live.keys))
        given = live.root, live.keys, live.tokens, self.executor.layout.block_size
        return await look_in_time(self.name, self.store, *given, device=device, public=live.public)

    async def export(self, live: Live) -> Handoff:
        """Copy a prefilled sequence's published blocks out; call inside `run`, after its first token."""
        stepper = self._stepper
        if stepper is None:
            raise ExecutorLost("the executor was lost before the handoff")
        return await export(
            live,
            stepper.blocks,
            stepper.slots,
            self.executor.memory,
            self.executor.layout,
            self._roster.wake,
            stepper.snapshots,
            self.offload,
        )

    def view(self, keys: Sequence[BlockKey] = ()) -> PoolView:
        """What a route needs to know; `keys` are those of the sequence to be routed."""
        running = self._running
        backlog, blocks = self.scheduler.backlog(), self._stepper.blocks if self._stepper is not None else None
        return PoolView(
            name=self.name,
            waiting=len(self._roster.lives) - len(running) + self._sent,
            running=len(running),
            cached_tokens=0 if blocks is None else blocks.reach(keys) * blocks.block_size,
            backlog_tokens=backlog.tokens + self._sent_tokens,
            backlog_s=backlog.seconds,
            prefill_tokens=sum(live.todo for live in running.values() if live.todo > 1),
            blocks_free=0 if blocks is None else blocks.free_blocks,
            blocks_total=0 if blocks is None else blocks.num_blocks,
        )

    @property
    def _running(self) -> Mapping[SeqId, Live]:
        return self._stepper.planner.running if self._stepper is not None else {}

    async def settle(self) -> None:
        """Wait until no sequence and no load is left and queued KV is saved."""
        while self._busy and self.state in ("ready", "starting"):
            await self._roster.empty.wait()
        if self._saver is not None and self.state == "ready":
            await self._saver.flush()

    @property
    def _busy(self) -> bool:
        taking = self._stepper is not None and self._stepper.snapshots.busy
        return bool(self._roster.lives or self._roster.loading or taking)

    def stats(self) -> PoolStats:
        """Numbers so far."""
        stepper = self._stepper
        running = len(self._running)
        waiting = len(self._roster.lives) - running if self.state != "stopped" else 0
        saver = self._saver if self.state != "stopped" else None
        verified, accepted = (0, 0) if self.state == "stopped" or self._drafting is None else self._drafting.counts
        store: KVStats | None = self.store.stats() if self.store is not None and saver is not None else None
        return PoolStats(
            name=self.name,
            state=self.state,
            waiting=waiting,
            running=running,
            blocks_total=stepper.blocks.num_blocks if stepper else 0,
            blocks_free=stepper.blocks.free_blocks if stepper else 0,
            blocks_cached=stepper.blocks.cached_blocks if stepper else 0,
            slots_total=stepper.slots.num_slots if stepper else 0,
            slots_free=stepper.slots.free if stepper else 0,
            steps=self._tally.steps,
            preemptions=self._tally.preemptions,
            executor_losses=self._losses,
            saves_waiting=saver.waiting if saver else 0,
            saves_dropped=saver.dropped if saver else 0,
            records_damaged=stepper.loader.damaged if stepper else 0,
            drafts_verified=verified,
            drafts_accepted=accepted,
            step_seconds=self._tally.seconds.snapshot(),
            overhead_seconds=self._tally.overhead,
            step_gap_seconds=self._tally.gaps.snapshot(),
            store=store,
            scheduler=self.scheduler.stats(),
            step_failures=self._tally.failures,
            least_prefix=self._windows.least_prefix if stepper else 0,
            rows_replayed=self._tally.replayed,
            hits_too_short=self._tally.hits_too_short,
            snapshots_taken=self._tally.snapshots,
            snapshots_dropped=self._tally.snapshots_dropped,
            snapshots_restored=self._tally.restored,
            steps_ahead=self._tally.ahead,
        )
