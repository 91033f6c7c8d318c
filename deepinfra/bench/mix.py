"""Short chats beside giants on a real model: two schedulers in one run, and the simulator's word for both."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import anyio

from deepinfra.bench.machine import CpuUse, CpuWatch
from deepinfra.bench.simulate.compare import summaries
from deepinfra.bench.simulate.report import Summary
from deepinfra.bench.simulate.results import SimulationResult
from deepinfra.bench.simulate.run import PoolSetup, Setup, measure, simulate
from deepinfra.bench.simulate.traces import Arrival
from deepinfra.core.cost import StepCost
from deepinfra.errors import ConfigError
from deepinfra.executors.simulated import SimulatedExecutor
from deepinfra.interfaces.executor import Executor
from deepinfra.interfaces.given import SystemClock
from deepinfra.schedulers import Bucketed, Fcfs

__all__ = ("MixReport", "MixRun", "mixed", "run_mix")


@dataclass(frozen=True, slots=True, kw_only=True)
class MixRun:
    """What to run.

    Attributes:
        chats: Short requests.
        chat: Median tokens of their prompts, which scatter (log-normal).
        giants: Long requests.
        giant: Tokens of their prompts.
        new: Tokens that every request is given.
        over_s: Seconds over which they arrive: giants evenly, chats at random.
        step_budget_s: Of both schedulers.
        seed: Of everything drawn.
    """

    chats: int = 50
    chat: int = 120
    giants: int = 4
    giant: int = 6000
    new: int = 48
    over_s: float = 60.0
    step_budget_s: float = 0.25
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class MixReport:
    """Everything a run found; its fields are those of the JSON output.

    Attributes:
        kind: `mix`.
        speed: What decides how long steps take.
        run: What was run.
        summaries: `fcfs` and `bucketed` measured, then both `simulated`, each with the step times learned in its own
            run and the time that was measured between steps: with another run's, what the machine's speed drifts
            (20 % between two quiet runs here) would be held against the simulator.
        errors: How far simulated figures are off the measured ones, as a share of these, by scheduler.
        cpu: What else the machine did while measuring; with `noisy` the figures are not to be trusted.
    """

    kind: str
    speed: str
    run: MixRun
    summaries: Sequence[Summary]
    errors: Mapping[str, Mapping[str, float]]
    cpu: CpuUse


@dataclass(frozen=True, slots=True)
class _Measured:
    """A scheduler's run: the result, the step times learned in it, and an executor of the same size without a model."""

    result: SimulationResult
    cost: StepCost
    sized: Callable[[StepCost], SimulatedExecutor]
    speed: str


def mixed(run: MixRun) -> list[Arrival]:
    """The requests, by time; no two prompts begin alike."""
    draw = random.Random(run.seed)
    most = 8 * run.chat
    found = [Arrival((i + 0.25) * run.over_s / run.giants, run.giant, run.new) for i in range(run.giants)]
    for _ in range(run.chats):
        prompt = min(most, max(1, int(run.chat * draw.lognormvariate(0.0, 0.5))))
        found.append(Arrival(draw.uniform(0.0, run.over_s), prompt, run.new))
    return sorted(found, key=lambda arrival: arrival.at_s)


def run_mix(
    executor: Callable[[], Executor], run: MixRun, *, progress: Callable[[str], None] = lambda what: None
) -> tuple[MixReport, list[SimulationResult]]:
    """Measure `fcfs` and `bucketed` with the same budget, one after the other, then simulate both; blocks.

    Args:
        executor: Makes the executor, anew for each scheduler.
        run: What to run.
        progress: Told what is measured.

    Returns:
        The report, and the results behind it, to be drawn.

    Raises:
        ConfigError: The executor cannot hold a giant, or the run was too short to learn what steps cost.
    """
    clock = SystemClock()
    watch, began = CpuWatch(), clock.now()
    budget_s = run.step_budget_s
    policies: dict[str, Callable[[], Fcfs | Bucketed]] = {
        "fcfs": lambda: Fcfs(step_budget_s=budget_s),
        "bucketed": lambda: Bucketed(step_budget_s=budget_s),
    }
    measured = {name: anyio.run(_measure, name, policy, executor(), run, progress) for name, policy in policies.items()}
    cpu = watch.stop(clock.now() - began)
    results = [each.result for each in measured.values()]
    for name, policy in policies.items():
        own = measured[name]
        progress(f"{name}, simulated")
        pool = PoolSetup(scheduler=policy, executor=partial(own.sized, own.cost))
        setup = Setup(name=f"{name}, simulated", pools=[pool], edges=own.result.edges)
        results.append(simulate(mixed(run), setup))
    found = summaries(results)
    report = MixReport(
        kind="mix",
        speed=measured["fcfs"].speed,
        run=run,
        summaries=found,
        errors={name: _errors(found[i], found[i + len(policies)]) for i, name in enumerate(policies)},
        cpu=cpu,
    )
    return report, results


async def _measure(
    name: str,
    policy: Callable[[], Fcfs | Bucketed],
    executor: Executor,
    run: MixRun,
    progress: Callable[[str], None],
) -> _Measured:
    scheduler = policy()
    workload = mixed(run)

    def told(done: int, now_s: float) -> None:
        progress(f"{name}: {done} of {len(workload)} requests")

    async with executor:  # once before, to ask how much it takes
        limits, layout = executor.limits, executor.layout
    told(0, 0.0)
    pool = PoolSetup(scheduler=lambda: scheduler, executor=lambda: executor)
    setup = Setup(name=name, pools=[pool], edges=(run.giant // 2,))
    result = await measure(workload, setup, progress=told)
    if failed := next((row.outcome for row in result.requests if row.outcome != "length"), None):
        raise ConfigError(f"a request ended with {failed!r}: the executor cannot run this mix")
    cost = scheduler.predictor.cost
    if cost is None:
        raise ConfigError("the run was too short to learn what steps cost")

    def sized(cost: StepCost) -> SimulatedExecutor:
        return SimulatedExecutor(
            cost=cost,
            num_blocks=limits.num_blocks,
            block_size=layout.block_size,
            max_step_tokens=limits.max_step_tokens,
            max_seqs=limits.max_seqs,
            max_context=limits.max_context,
            vocab_size=limits.vocab_size,
        )

    between_s = result.overhead_s / result.steps
    return _Measured(result, cost._replace(step=cost.step + between_s), sized, executor.speed)


def _errors(measured: Summary, simulated: Summary) -> dict[str, float]:
    """Of the figures that a prediction is asked for."""
    first, predicted = measured.all.first_token_s, simulated.all.first_token_s
    assert first is not None
    assert predicted is not None
    pairs = {
        "first_token_p50": (first.p50, predicted.p50),
        "first_token_p90": (first.p90, predicted.p90),
        "output_tokens_per_s": (measured.output_tokens_per_s, simulated.output_tokens_per_s),
    }
    return {name: value / true - 1.0 for name, (true, value) in pairs.items()}
