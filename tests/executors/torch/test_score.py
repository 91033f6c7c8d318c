"""Logits of a text, and the seconds of a step's parts: what benchmarks ask the torch executor for."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from deepinfra.errors import ExecutorError
from deepinfra.executors.torch import TorchExecutor
from deepinfra.testing.host import Host

PROMPT = [5, 9, 200, 31, 77, 6, 1, 300, 12]


def executor(made: Any, kernels: str, name: str = "llama-wide") -> TorchExecutor:
    options: dict[str, Any] = {"dtype": "float32", "num_blocks": 12, "block_size": 4, "threads": 1, "num_slots": 2}
    return TorchExecutor(str(made(name)[0]), kernels=kernels, max_step_tokens=24, **options)  # type: ignore[arg-type]


async def test_a_text_that_was_generated_is_the_likeliest_of_its_scores(made: Any, computes: str) -> None:
    async with executor(made, computes) as ex:
        host = Host(ex)
        line = host.line(PROMPT)
        output = await host.generate(line, 8)
        host.close(line)
        await host.step()
        logits = await ex.score([*PROMPT, *output])
        assert logits.shape == (17, ex.limits.vocab_size)
        assert logits.dtype == np.float32
        assert logits[len(PROMPT) - 1 : -1].argmax(-1).tolist() == output


async def test_no_text_is_scored_over_the_blocks_of_a_sequence(made: Any, computes: str) -> None:
    async with executor(made, computes) as ex:
        host = Host(ex)
        await host.generate(host.line(PROMPT), 1)
        with pytest.raises(ExecutorError, match="no sequence is open"):
            await ex.score(PROMPT)


@pytest.mark.parametrize("length", [0, 25])
async def test_a_text_that_does_not_fit_is_refused(made: Any, computes: str, length: int) -> None:
    async with executor(made, computes) as ex:
        with pytest.raises(ExecutorError, match=f"a text of {length} tokens does not fit"):
            await ex.score([1] * length)


async def test_models_with_windows_score_nothing(made: Any) -> None:
    async with executor(made, "torch", "gpt-oss") as ex:
        with pytest.raises(ExecutorError, match="without windows"):
            await ex.score(PROMPT)


async def test_a_step_of_kernels_tells_the_seconds_of_its_parts(made: Any, computes: str) -> None:
    async with executor(made, computes) as ex:
        host = Host(ex)
        line = host.line(PROMPT)
        result = await host.step((line, host.work(line, 24)))
        parts = await ex.parts()
    if computes == "torch":
        assert parts == {}
    else:
        assert {"attention", "head", "gate_up"} < parts.keys()
        assert 0.0 < sum(parts.values()) < result.seconds
