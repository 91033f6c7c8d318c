"""Repeated steps are single steps: the same workload gives the same schedule, tokens and predictions either way."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import anyio
import pytest

from deepinfra.bench.simulate.clock import ModelledOffload, VirtualClock, run_virtually
from deepinfra.bench.simulate.recipe import RawTokens
from deepinfra.core.cost import StepCost
from deepinfra.core.events import Failed, Finished
from deepinfra.core.ids import BlockKey
from deepinfra.core.kv import KVRecord, Loaded, Match, RecordRef
from deepinfra.core.request import GenerateRequest
from deepinfra.core.step import StepPlan, StepReport, StepResult
from deepinfra.engine import Engine, Pool, cache_aware, least_loaded
from deepinfra.engine.stats import PoolStats
from deepinfra.errors import Overloaded
from deepinfra.executors.simulated import SimulatedExecutor, SimulatedStep
from deepinfra.interfaces.executor import StepHandle
from deepinfra.kvstores.memory import MemoryStore
from deepinfra.schedulers.bucketed import Bucketed
from deepinfra.schedulers.fcfs import Fcfs

COST = StepCost(step=5e-3, chunk_token=1e-4, chunk_read=1e-8, decode_row=1e-3, decode_read=1e-6)


@dataclass
class Seen:
    """All that can be told apart from outside: reports and token times of each pool, and what became of requests."""

    reports: list[list[StepReport]] = field(default_factory=list)
    tokens: list[list[tuple[float, int, tuple[int, ...]]]] = field(default_factory=list)
    outcomes: dict[int, tuple[object, ...]] = field(default_factory=dict)
    costs: list[object] = field(default_factory=list)
    pools: list[PoolStats] = field(default_factory=list)
    requests: Mapping[str, int] = field(default_factory=dict)
    cached: Mapping[str, int] = field(default_factory=dict)
    generated: int = 0
    gaps: tuple[int, ...] = ()
    events: int = 0


class Distant(MemoryStore):
    """Takes its time, so that nothing happens at the same moment: who comes first then is not for this law to say."""

    async def match(self, keys: Sequence[BlockKey]) -> Match:
        await anyio.sleep(1.1e-3)
        return await super().match(keys)

    async def load(self, refs: Sequence[RecordRef], into: Sequence[memoryview]) -> Loaded:
        await anyio.sleep(1.7e-3 * len(refs))
        return await super().load(refs, into)

    async def save(self, records: Sequence[KVRecord]) -> None:
        await anyio.sleep(1.3e-3 * len(records))
        await super().save(records)


class Noting(SimulatedExecutor):
    """Notes at what time which sequence got which token."""

    def __init__(self, *, repeats: bool, **options: object) -> None:
        super().__init__(**options)  # type: ignore[arg-type]
        self.repeats, self.events = repeats, 0
        self.tokens: list[tuple[float, int, tuple[int, ...]]] = []

    @property
    def provides(self) -> frozenset[str]:
        return super().provides if self.repeats else super().provides - {"repeat"}

    def submit(self, plan: StepPlan) -> StepHandle:
        self.events += 1
        step = super().submit(plan)
        assert isinstance(step, SimulatedStep)
        return _Noted(self, step)


class _Noted(StepHandle):
    def __init__(self, executor: Noting, step: SimulatedStep) -> None:
        self._executor, self._step = executor, step

    def cut(self) -> StepResult | None:
        return self._step.cut()

    async def result(self) -> StepResult:
        result = await self._step.result()
        if result.each_s:
            for time, end in enumerate(self._step.ends[: len(result.each_s)]):
                for output in result.outputs:
                    self._executor.tokens.append((end, output.seq, output.tokens[time : time + 1]))
        else:
            for output in result.outputs:
                if output.tokens:
                    self._executor.tokens.append((self._step.end, output.seq, output.tokens))
        return result


def one_pool(rng: random.Random, name: str, repeats: bool, seen: Seen) -> Pool:
    executor = Noting(
        repeats=repeats,
        cost=COST,
        num_blocks=rng.choice((20, 20, 28, 200)),
        block_size=16,
        num_slots=rng.choice((2, 8)),
        max_step_tokens=rng.choice((24, 64, 512)),
        max_seqs=rng.choice((2, 6, 32)),
        max_context=320,
        noise=rng.choice((0.0, 0.2)),
        block_nbytes=1 << 20,
        copy_nbytes_per_s=rng.uniform(1e9, 2e9),
    )
    most_s = rng.choice((None, 0.5))
    kind = rng.choice((Fcfs, Bucketed))
    patience = {"aging_steps": rng.choice((2, 256))} if kind is Bucketed else {}
    scheduler = kind(max_queue=rng.choice((4, 4096)), max_queue_s=most_s, **patience)
    reports: list[StepReport] = []
    commit = scheduler.commit

    def noted(report: StepReport) -> None:
        reports.append(report)
        commit(report)

    scheduler.commit = noted  # type: ignore[method-assign]
    seen.reports.append(reports)
    seen.tokens.append(executor.tokens)
    store = Distant(capacity_nbytes=1 << 16) if rng.random() < 0.4 else None
    return Pool(scheduler, executor, store=store, name=name)


async def ask(engine: Engine, clock: VirtualClock, seed: int, index: int, seen: Seen) -> None:
    rng = random.Random(seed * 1000 + index)
    common = random.Random(seed * 10 + rng.randrange(3))
    shared = [common.randrange(1000) for _ in range(rng.choice((0, 16, 48, 96)))]
    request = GenerateRequest(
        input=(*shared, *(rng.randrange(1000) for _ in range(rng.choice((1, 5, 40, 120))))),
        max_tokens=rng.choice((1, 2, 7, 60, 150)),
        n=rng.choice((1, 1, 1, 2)),
        fit=True,
        seed=index,
        ignore_eos=rng.random() < 0.9,
        priority=rng.choice((0, 0, 3, -5)),
        deadline_s=rng.choice((None, None, None, 0.02, 0.3, 1.0)),
        stop=("never",) if rng.random() < 0.1 else (),
    )
    leaves_s = rng.choice((None, None, None, 0.01, 0.2, 0.5))
    ended: list[tuple[object, ...]] = []
    with anyio.move_on_after(leaves_s if leaves_s is not None else float("inf")) as scope:
        try:
            async with engine.generate(request) as stream:
                async for event in stream:
                    if isinstance(event, Finished | Failed):
                        how = event.reason if isinstance(event, Finished) else event.code
                        ended.append((event.choice, how, event.usage))
        except Overloaded as error:
            ended.append((0, error.code, error.retry_after_s))
    seen.outcomes[index] = (scope.cancelled_caught, *sorted(ended, key=lambda end: end[0]), clock.now())


class InOrder(random.Random):
    """Instead of the loop's dice, which turn every other batch of tasks round: both runs see one order."""

    def random(self) -> float:
        return 1.0


@pytest.fixture(autouse=True)
def in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trio._core._run._r", InOrder())


def run(seed: int, *, repeats: bool) -> Seen:
    seen, clock = Seen(), VirtualClock()

    async def main() -> None:
        rng = random.Random(seed)
        pools = [one_pool(rng, name, repeats, seen) for name in rng.choice(("a", "a", "ab"))]
        route = rng.choice((least_loaded, cache_aware()))
        engine = Engine(RawTokens(), pools, route=route, clock=clock, offload=ModelledOffload(1e-4))
        rate = rng.choice((1.0, 5.0, 30.0))
        async with engine:
            async with anyio.create_task_group() as tasks:
                for index in range(40):
                    await anyio.sleep(rng.expovariate(rate))
                    tasks.start_soon(ask, engine, clock, seed, index, seen)
            assert await engine.drain(60.0)
            stats = engine.stats()
        seen.pools, seen.requests, seen.cached = list(stats.pools), stats.requests, stats.cached_tokens
        seen.generated, seen.gaps = stats.generated_tokens, stats.itl.counts
        seen.costs = [pool.scheduler._queue.predictor.cost for pool in pools]  # type: ignore[attr-defined]
        seen.events = sum(pool.executor.events for pool in pools)  # type: ignore[attr-defined]

    run_virtually(main, clock)
    return seen


def alike(one: Seen, other: Seen) -> None:
    for reports, others in zip(one.reports, other.reports, strict=True):
        assert [r._replace(seconds=0.0) for r in reports] == [r._replace(seconds=0.0) for r in others]
        assert [r.seconds for r in reports] == pytest.approx([r.seconds for r in others], rel=1e-9)
    for tokens, others in zip(one.tokens, other.tokens, strict=True):
        assert [token[1:] for token in tokens] == [token[1:] for token in others]
        assert [token[0] for token in tokens] == pytest.approx([token[0] for token in others], rel=1e-9)
    assert one.outcomes.keys() == other.outcomes.keys()
    for index, outcome in one.outcomes.items():
        *how, at = outcome
        *others_how, others_at = other.outcomes[index]
        assert how == others_how, index
        assert at == pytest.approx(others_at, rel=1e-9)
    assert (one.requests, one.cached) == (other.requests, other.cached)
    assert (one.generated, one.gaps) == (other.generated, other.gaps)
    for pool, others_pool in zip(one.pools, other.pools, strict=True):
        assert (pool.steps, pool.preemptions) == (others_pool.steps, others_pool.preemptions)
        assert pool.step_seconds.counts == others_pool.step_seconds.counts
    for cost, others in zip(one.costs, other.costs, strict=True):
        assert cost == pytest.approx(others, rel=1e-6, abs=1e-12)


def soak(seeds: Sequence[int]) -> Counter[str]:
    found: Counter[str] = Counter()
    for seed in seeds:
        single, repeated = run(seed, repeats=False), run(seed, repeats=True)
        alike(repeated, single)
        found["single"] += single.events
        found["repeated"] += repeated.events
        for pool in repeated.pools:
            found["preemptions"] += pool.preemptions
        found.update(repeated.requests)
        found.update(repeated.cached)
    return found


def check_covered(found: Counter[str]) -> None:
    for kind in ("preemptions", "length", "deadline-exceeded", "cancelled", "device", "ram"):
        assert found[kind], found
    assert found["repeated"] < 0.8 * found["single"]


def test_repeated_steps_are_the_single_steps_that_they_stand_for() -> None:
    check_covered(soak(range(8)))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_repeated_steps_are_single_steps_over_many_workloads() -> None:
    check_covered(soak(range(100, 250)))
