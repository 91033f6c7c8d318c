from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from deepinfra.bench.profile import ProfileRun, run_profile
from deepinfra.core.cost import StepCost, StepWork
from deepinfra.core.step import MaskRows, StepPlan, StepResult
from deepinfra.errors import ConfigError
from deepinfra.executors.toy import ToyExecutor
from deepinfra.interfaces.executor import StepHandle
from deepinfra.schedulers.predictor import StepPredictor

TRUTH = StepCost(step=0.03, chunk_token=1e-3, chunk_read=1e-6, decode_row=3e-3, decode_read=5e-6, draft=2e-3)


class Timed(ToyExecutor):
    """Says that its steps take what `TRUTH` says."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"num_blocks": 4096, "max_context": 4096, "max_step_tokens": 512, "max_seqs": 32, **options})
        self.plans: list[StepPlan] = []

    def submit(self, plan: StepPlan) -> StepHandle:
        self.plans.append(plan)
        return TimedStep(super().submit(plan), plan)


class TimedStep:
    def __init__(self, inner: StepHandle, plan: StepPlan) -> None:
        self.inner, self.plan = inner, plan

    def masks(self, rows: MaskRows) -> None:
        self.inner.masks(rows)

    async def result(self) -> StepResult:
        work = StepWork()
        for item in self.plan.items:
            if item.length - len(item.drafts) > 1:
                work = work.chunk(item.start, item.length)
            else:
                work = work.decode(item.start, item.length)
        return (await self.inner.result())._replace(seconds=TRUTH.seconds(work))


async def test_the_figures_of_an_executor_are_found() -> None:
    predictor = StepPredictor()
    async with Timed() as executor:
        report = await run_profile(executor, ProfileRun(steps=300, context=1024), predictor)
    assert report.cost == pytest.approx(TRUTH._asdict(), rel=0.05)
    assert [row.name for row in report.errors] == ["prompts", "decoding", "both", "drafts", "all"]
    assert sum(row.steps for row in report.errors[:-1]) == report.errors[-1].steps == 150
    assert report.errors[-1].p95 < 0.01
    assert (report.model, report.speed) == ("toy", executor.speed)


async def test_the_mix_has_every_kind_of_step_and_keeps_the_limits() -> None:
    async with Timed() as executor:
        await run_profile(executor, ProfileRun(steps=300, context=1024), StepPredictor())
        limits = executor.limits
    assert max(len(plan.items) for plan in executor.plans) > limits.max_seqs // 2
    assert max(sum(item.length for item in plan.items) for plan in executor.plans) <= limits.max_step_tokens
    assert max(item.start for plan in executor.plans for item in plan.items) > 900
    assert {min(16, item.length) for plan in executor.plans for item in plan.items} >= {1, 2, 4, 16}


@pytest.mark.parametrize(
    "options",
    [
        {"num_blocks": 8, "max_context": 32},
        {"max_seqs": 2, "max_step_tokens": 3},
        {"grid": 64, "max_step_tokens": 128},
        {"grid": 4, "max_step_tokens": 4},
    ],
)
async def test_small_executors_get_a_mix_too(options: dict[str, int]) -> None:
    predictor = StepPredictor()
    async with Timed(**options) as executor:
        await run_profile(executor, ProfileRun(steps=100), predictor)
    assert predictor.learned == 100


async def test_an_executor_that_measures_no_time_is_refused() -> None:
    async with ToyExecutor() as executor:
        with pytest.raises(ConfigError, match="does not measure"):
            await run_profile(executor, ProfileRun(steps=10), StepPredictor())


@pytest.mark.slow
def test_a_profile_of_smollm2_is_saved_where_the_server_looks(outside: Any) -> None:
    """The errors are printed, not judged: other programs may run on this machine."""
    done: subprocess.CompletedProcess[str] = outside.run(
        "deepinfra", "profile", "smollm2", "--steps", "120", "--context", "1024", "--json", timeout_s=240.0
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    print(told["errors"], told["cpu"])
    assert told["cost"]["chunk_token"] > 0.0
    saved = Path(told["saved"])
    assert saved.parent == Path(outside.environ["XDG_CACHE_HOME"]) / "deepinfra" / "timings"
    assert len(json.loads(saved.read_text())["steps"]) > 50
