from __future__ import annotations

from collections.abc import Callable

import pytest

from deepinfra.bench.simulate import LengthClass, PoolSetup, Setup, generated, simulate
from deepinfra.core.step import Choice, StepView
from deepinfra.errors import PoolFailedError
from deepinfra.executors.simulated import SimulatedExecutor
from deepinfra.schedulers import Fcfs


class Broken(Fcfs):
    def plan(self, view: StepView) -> Choice:
        raise RuntimeError("broken")


def setup(scheduler: Callable[[], Fcfs]) -> Setup:
    return Setup(name="one pool", pools=[PoolSetup(scheduler=scheduler, executor=SimulatedExecutor)])


def test_a_pool_that_fails_is_an_error_and_no_result() -> None:
    with pytest.raises(PoolFailedError, match="RuntimeError"):
        simulate(generated(3, 1.0), setup(Broken))


def test_samples_count_every_token() -> None:
    workload = generated(20, 7.0, [LengthClass(1.0, 300, 20)])
    result = simulate(workload, setup(Fcfs))
    assert sum(sample.output_tokens for sample in result.samples) == sum(arrival.output for arrival in workload)
    assert sum(sample.prompt_tokens for sample in result.samples) == sum(arrival.prompt for arrival in workload)
    assert result.samples[-1].at_s >= workload[-1].at_s
    assert (result.samples[-1].running, result.samples[-1].waiting) == (0, 0)
