from __future__ import annotations

from deepinfra.core.cost import StepCost
from deepinfra.executors.simulated import SimulatedExecutor
from deepinfra.executors.toy import ToyExecutor
from deepinfra.testing.executor import ExecutorConformance

SMALL = {"num_blocks": 20, "block_size": 2, "num_slots": 4, "max_seqs": 4, "max_step_tokens": 24}


class TestToy(ExecutorConformance):
    rounds = 500

    def make(self) -> ToyExecutor:
        return ToyExecutor(**SMALL)


class TestToyOnAGrid(ExecutorConformance):
    rounds = 500

    def make(self) -> ToyExecutor:
        return ToyExecutor(num_blocks=16, block_size=4, num_slots=4, max_seqs=4, grid=2)


WINDOWED = {**SMALL, "windows": (3, 3), "num_blocks": 40}


class TestToyWithWindows(ExecutorConformance):
    rounds = 500

    def make(self) -> ToyExecutor:
        return ToyExecutor(**WINDOWED)


class TestToyWithUnequalWindowsOnAGrid(ExecutorConformance):
    rounds = 500

    def make(self) -> ToyExecutor:
        return ToyExecutor(num_blocks=40, block_size=3, num_slots=4, max_seqs=4, grid=2, windows=(2, 5, 1))


class TestSimulated(ExecutorConformance):
    rounds = 500

    def make(self) -> SimulatedExecutor:
        return SimulatedExecutor(cost=StepCost(), vocab_size=260, **SMALL)


class TestSimulatedThatRepeatsItself(ExecutorConformance):
    rounds = 500

    def make(self) -> SimulatedExecutor:
        return SimulatedExecutor(cost=StepCost(), vocab_size=260, acceptance=0.7, noise=0.5, **SMALL)
