"""A simulation: the real engine, pools, schedulers and stores in virtual time, around executors without a model."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from itertools import count
from statistics import median

import anyio

from deepinfra.bench.simulate.clock import ModelledOffload, VirtualClock, run_virtually
from deepinfra.bench.simulate.measure import GAP_BOUNDS, REQUEST, MeasuredExecutor, Meter, watch
from deepinfra.bench.simulate.recipe import RawTokens
from deepinfra.bench.simulate.results import PoolSample, RequestRow, SimulationResult
from deepinfra.bench.simulate.traces import LEAST_VOCABULARY, Arrival, prompt_ids
from deepinfra.core.buckets import DEFAULT_EDGES
from deepinfra.core.events import Failed, Finished
from deepinfra.core.kv import Retention
from deepinfra.core.request import CachedTokens, GenerateRequest
from deepinfra.core.sampling import SamplingParams
from deepinfra.engine import Engine, Pool, Route, least_loaded
from deepinfra.errors import ConfigError, DeepinfraError, EngineError, Overloaded
from deepinfra.executors.simulated import SimulatedExecutor
from deepinfra.interfaces.executor import Executor
from deepinfra.interfaces.given import Clock, Offload, SystemClock, ThreadOffload
from deepinfra.interfaces.kvstore import KVStore
from deepinfra.interfaces.placer import ExpertPlacer
from deepinfra.interfaces.scheduler import Scheduler
from deepinfra.interfaces.speculator import Speculator

__all__ = ("PoolSetup", "Setup", "measure", "simulate")

_SAMPLES = 500
"""Samples of each pool that a run is meant to have, if nobody says how far they are apart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSetup:
    """Pools of one kind: what makes their parts, each time new ones.

    Attributes:
        scheduler: Makes a scheduler.
        executor: Makes an executor.
        store: Makes a store for a simulated executor, if there is one.
        speculator: Makes a speculator.
        placer: Makes a placer.
        name: With a number behind it where there are several.
        replicas: How many.
    """

    scheduler: Callable[[], Scheduler]
    executor: Callable[[], Executor]
    store: Callable[[SimulatedExecutor], KVStore] | None = None
    speculator: Callable[[], Speculator] | None = None
    placer: Callable[[], ExpertPlacer] | None = None
    name: str = "pool"
    replicas: int = 1

    @property
    def names(self) -> tuple[str, ...]:
        """Of each pool."""
        return (self.name,) if self.replicas == 1 else tuple(f"{self.name}-{i}" for i in range(self.replicas))


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What is simulated.

    Attributes:
        name: What it is called in a report.
        pools: Pools that do everything; or
        prefill: pools that compute prompts, and
        decode: pools that go on from there.
        route: Chooses among several pools of one kind.
        settings: What to say of it in a report besides.
        devices: Of all pools together.
        edges: Of the report's length buckets.
        at_once: Requests under way at most: the next one comes when another is over. `None`: whenever it is due.
        retry: Whether who is refused comes once more, when he was told to.
        interval_s: Between two samples; `None`: as seems good.
        offload_s: What work that a server gives to a thread takes.
        repeat: Whether unchanged decoding batches may be run as one event; without it the result is the same, later.
    """

    name: str
    pools: Sequence[PoolSetup] = ()
    prefill: Sequence[PoolSetup] = ()
    decode: Sequence[PoolSetup] = ()
    route: Route = least_loaded
    settings: Mapping[str, str] = field(default_factory=dict)
    devices: int = 1
    edges: Sequence[int] = DEFAULT_EDGES
    at_once: int | None = None
    retry: bool = False
    interval_s: float | None = None
    offload_s: float = 0.5e-3
    repeat: bool = True

    @property
    def pool_names(self) -> tuple[str, ...]:
        """Of all pools."""
        return tuple(name for kind in (*self.pools, *self.prefill, *self.decode) for name in kind.names)


def simulate(
    workload: Sequence[Arrival], setup: Setup, *, progress: Callable[[int, float], None] = lambda done, now_s: None
) -> SimulationResult:
    """Put a workload through a setup in virtual time; the same both give an equal result.

    Args:
        workload: By time.
        setup: What serves it.
        progress: Told whenever a request is over: how many are, and the virtual time.

    Raises:
        ConfigError: The setup has no pool, or its vocabulary is too small for the prompts.
        PoolFailedError: A pool failed.
        EngineError: Blocks were left behind.
    """
    began = SystemClock().now()
    clock = VirtualClock()
    result = run_virtually(_Simulation(workload, setup, clock, progress, ModelledOffload(setup.offload_s)).run, clock)
    return replace(result, took_s=SystemClock().now() - began)


async def measure(
    workload: Sequence[Arrival], setup: Setup, *, progress: Callable[[int, float], None] = lambda done, now_s: None
) -> SimulationResult:
    """Put a workload through a setup in real time, which takes as long as it takes; for executors of any kind.

    Raises:
        PoolFailedError: A pool failed.
        EngineError: Blocks were left behind.
    """
    clock = SystemClock()
    began = clock.now()
    result = await _Simulation(workload, setup, clock, progress, ThreadOffload()).run()
    return replace(result, took_s=clock.now() - began)


@dataclass(slots=True)
class _Outcome:
    """What the requester saw."""

    at_s: float
    over_s: float = 0.0
    output: int = 0
    cached: CachedTokens = field(default_factory=CachedTokens)
    how: str = ""
    retry_after_s: float | None = None


class _Simulation:
    def __init__(
        self,
        workload: Sequence[Arrival],
        setup: Setup,
        clock: Clock,
        progress: Callable[[int, float], None],
        offload: Offload,
    ) -> None:
        self._workload, self._setup, self._clock = workload, setup, clock
        self._progress, self._over, self._ended = progress, 0, False
        self._meter = Meter(setup.edges)
        self._executors: list[MeasuredExecutor] = []
        self._outcomes: list[_Outcome] = []
        self._samples: list[PoolSample] = []
        whole, prefill, decode = (self._pools(kind) for kind in (setup.pools, setup.prefill, setup.decode))
        self._engine = Engine(
            RawTokens(),
            whole,
            prefill=prefill,
            decode=decode,
            route=setup.route,
            clock=clock,
            offload=offload,
        )

    def _pools(self, setups: Sequence[PoolSetup]) -> list[Pool]:
        return [self._pool(setup, name) for setup in setups for name in setup.names]

    def _pool(self, setup: PoolSetup, name: str) -> Pool:
        executor, scheduler = setup.executor(), setup.scheduler()
        store = None
        if isinstance(executor, SimulatedExecutor):
            if executor.limits.vocab_size < LEAST_VOCABULARY:
                raise ConfigError(f"vocab_size: the prompts of a simulation need {LEAST_VOCABULARY} tokens")
            store = setup.store(executor) if setup.store is not None else None
        watch(scheduler, self._meter)
        measured = MeasuredExecutor(executor, len(self._executors), self._meter, repeat=self._setup.repeat)
        self._executors.append(measured)
        return Pool(
            scheduler,
            measured,
            store=store,
            speculator=setup.speculator() if setup.speculator is not None else None,
            placer=setup.placer() if setup.placer is not None else None,
            name=name,
        )

    async def run(self) -> SimulationResult:
        """Everything, from the first arrival to the last block given back."""
        engine, clock, setup = self._engine, self._clock, self._setup
        async with engine:
            start = clock.now()
            async with self._sampling(start):
                await self._requests(start)
                over = clock.now()
            drained = await engine.drain(3600.0)
            stats = engine.stats()
            if failure := next((pool.failure for pool in engine.pools if pool.failure is not None), None):
                raise failure  # by then all requests have failed, which says nothing of the setup
        left = {pool.name: pool.blocks_total - pool.blocks_free for pool in stats.pools}
        if not drained or any(left.values()):
            raise EngineError(f"blocks were left behind: {left}")
        schedulers = [pool.scheduler for pool in stats.pools]
        rows = self._rows(start)
        return SimulationResult(
            name=setup.name,
            settings=dict(setup.settings),
            edges=tuple(setup.edges),
            requests=rows,
            samples=self._samples,
            interval_s=self._interval_s,
            gaps=self._meter.gaps,
            gap_bounds=GAP_BOUNDS,
            pools=[pool.name for pool in stats.pools],
            blocks=[pool.blocks_total for pool in stats.pools],
            devices=setup.devices,
            span_s=over - start - (rows[0].at_s if rows else 0.0),
            steps=sum(pool.steps for pool in stats.pools),
            preemptions=sum(pool.preemptions for pool in stats.pools),
            own_edges=tuple(bucket.least for bucket in schedulers[0].buckets[1:]),
            overhead_s=round(sum(pool.overhead_seconds for pool in stats.pools), 9),
            error_median=_median(each.error_median for each in schedulers),
            error_p95=_median(each.error_p95 for each in schedulers),
            max_overtakes=max(
                (each.max_overtakes for each in schedulers if each.max_overtakes is not None), default=None
            ),
        )

    # -- requests -------------------------------------------------------------------------------------

    async def _requests(self, start: float) -> None:
        at_once = self._setup.at_once
        room = anyio.Semaphore(at_once) if at_once is not None else None
        async with anyio.create_task_group() as tasks:
            for index, arrival in enumerate(self._workload):
                now = self._clock.now()
                if start + arrival.at_s > now:
                    await anyio.sleep(start + arrival.at_s - now)
                if room is not None:
                    await room.acquire()
                self._meter.arrives(arrival.prompt, arrival.output)
                self._outcomes.append(_Outcome(self._clock.now()))
                tasks.start_soon(self._request, index, arrival, room)

    async def _request(self, index: int, arrival: Arrival, room: anyio.Semaphore | None) -> None:
        REQUEST.set(index)
        outcome = self._outcomes[index]
        request = GenerateRequest(
            input=prompt_ids(arrival, index),
            seed=index,
            max_tokens=arrival.output,
            ignore_eos=True,
            sampling=_DRAWN,
            tenant=arrival.tenant,
            priority=arrival.priority,
            deadline_s=arrival.deadline_s,
            retention=Retention(traffic=arrival.traffic),
        )
        if not await self._ask(request, outcome) and self._setup.retry:
            await anyio.sleep(outcome.retry_after_s or 0.0)
            await self._ask(request, outcome)
        outcome.over_s = self._clock.now()
        self._over += 1
        self._progress(self._over, outcome.over_s)
        if room is not None:
            room.release()

    async def _ask(self, request: GenerateRequest, outcome: _Outcome) -> bool:
        """Ask once; whether that was not refused."""
        try:
            async with self._engine.generate(request) as stream:
                async for event in stream:
                    if isinstance(event, Finished | Failed):
                        outcome.how = event.reason if isinstance(event, Finished) else event.code
                        outcome.output, outcome.cached = event.usage.completion_tokens, event.usage.cached
        except Overloaded as error:
            outcome.how = error.code
            if outcome.retry_after_s is None:
                outcome.retry_after_s = error.retry_after_s
            return False
        except ConfigError:  # a route that means nothing: it will not for others
            raise
        except DeepinfraError as error:
            outcome.how = error.code
        return True

    # -- what is told -----------------------------------------------------------------------------------

    @property
    def _interval_s(self) -> float:
        if self._setup.interval_s is not None:
            return self._setup.interval_s
        span_s = self._workload[-1].at_s if self._workload else 0.0
        least = max(1.0, span_s / _SAMPLES)
        magnitude = 10.0 ** math.floor(math.log10(least))
        return next(step * magnitude for step in (1.0, 2.0, 5.0, 10.0) if step * magnitude >= least)

    @asynccontextmanager
    async def _sampling(self, start: float) -> AsyncGenerator[None]:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._sample, start)
            yield
            self._ended = True  # one more sample, so that what all of them count is all there was

    async def _sample(self, start: float) -> None:
        interval_s, before = self._interval_s, [(0.0, 0, 0)] * len(self._executors)
        for number in count(1):
            at_s = start + number * interval_s
            await anyio.sleep(at_s - self._clock.now())
            for i, (pool, executor) in enumerate(zip(self._engine.pools, self._executors, strict=True)):
                view, (busy_s, prompt, output) = pool.view(), executor.so_far(at_s)
                self._samples.append(
                    PoolSample(
                        at_s=number * interval_s,
                        pool=i,
                        waiting=view.waiting,
                        running=view.running,
                        blocks_used=view.blocks_total - view.blocks_free,
                        busy=min(1.0, round((busy_s - before[i][0]) / interval_s, 9)),
                        prompt_tokens=prompt - before[i][1],
                        output_tokens=output - before[i][2],
                    )
                )
                before[i] = busy_s, prompt, output
            if self._ended:
                return

    def _rows(self, start: float) -> list[RequestRow]:
        passed = self._passed()
        rows = []
        for index, (arrival, outcome, track) in enumerate(
            zip(self._workload, self._outcomes, self._meter.tracks, strict=True)
        ):
            came = outcome.at_s
            cached = {"device": outcome.cached.device, **outcome.cached.store}
            rows.append(
                RequestRow(
                    at_s=came - start,
                    prompt=arrival.prompt,
                    output=outcome.output,
                    cached={tier: tokens for tier, tokens in cached.items() if tokens},
                    uncached=track.uncached,
                    tenant=arrival.tenant,
                    priority=arrival.priority,
                    pool=track.pool,
                    opened_s=None if track.opened is None else track.opened - came,
                    first_s=None if track.first is None else track.first - came,
                    last_s=outcome.over_s - came,
                    worst_gap_s=track.worst,
                    overtaken=passed[index],
                    outcome=outcome.how,
                    retry_after_s=outcome.retry_after_s,
                    own_bucket=track.own_bucket,
                )
            )
        return rows

    def _passed(self) -> list[int]:
        """How many came later to each request's pool and were opened before it, with no higher priority."""
        passed = [0] * len(self._workload)
        later: dict[int, list[tuple[int, int]]] = defaultdict(list)  # by pool: place among openings, priority
        for index in range(len(passed) - 1, -1, -1):
            track, priority = self._meter.tracks[index], self._workload[index].priority
            if track.opened is None:
                continue
            line = later[track.pool]
            before = line[: bisect_left(line, (track.order, priority))]
            passed[index] = sum(other <= priority for _, other in before)
            insort(line, (track.order, priority))
        return passed


_DRAWN = SamplingParams()


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None
