"""The torch executor keeps the laws of every executor, with and without windows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from deepinfra.executors.torch import TorchExecutor
from deepinfra.interfaces.executor import Executor
from deepinfra.testing.executor import ExecutorConformance
from deepinfra.testing.window_laws import WindowLaws


class TestTorch(ExecutorConformance):
    family = "llama"
    kernels = "torch"
    weights = "auto"
    num_blocks = 24
    batch_invariant = False
    path: Path

    @pytest.fixture(autouse=True)
    def _model(self, made: Any) -> None:
        type(self).path = made(self.family)[0]

    def make(self) -> Executor:
        return TorchExecutor(
            str(self.path),
            dtype="float32",
            num_blocks=self.num_blocks,
            block_size=4,
            max_step_tokens=32,
            max_seqs=8,
            num_slots=4,
            threads=1,
            kernels=self.kernels,
            weights=self.weights,
            batch_invariant=self.batch_invariant,
        )


class TestKernels(TestTorch):
    family = "llama-wide"
    rounds = 40

    @pytest.fixture(autouse=True)
    def _path(self, path_of_kernels: str) -> None:
        type(self).kernels = path_of_kernels


class TestKernelsOnStoredWeights(TestKernels):
    weights = "stored"

    @pytest.fixture(autouse=True)
    def _model(self, mixed: Path) -> None:
        type(self).path = mixed


class TestBatchInvariant(TestKernelsOnStoredWeights):
    batch_invariant = True


class TestGemma(TestTorch):
    family = "gemma3"
    num_blocks = 48
    rounds = 40


@pytest.mark.slow
class TestGptOss(TestTorch):
    family = "gpt-oss"
    num_blocks = 48
    rounds = 40


class TestWindowsOfGptOss(WindowLaws):
    path: Path

    @pytest.fixture(autouse=True)
    def _model(self, made: Any) -> None:
        type(self).path = made("gpt-oss")[0]

    def make(self) -> Executor:
        return TorchExecutor(
            str(self.path), dtype="float32", num_blocks=48, block_size=4, max_step_tokens=32, max_seqs=8, threads=1
        )
