"""Logits and greedy texts equal those of transformers on the same weights in float32."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from deepinfra.errors import UnsupportedModelError
from deepinfra.executors.torch import TorchExecutor
from deepinfra.testing.host import Host


def prompts(count: int, length: int, vocab: int = 320) -> list[list[int]]:
    draw = random.Random(5)
    return [[draw.randrange(vocab) for _ in range(length + 3 * i)] for i in range(count)]


def oracle(model: Any, prompt: list[int], new: int) -> list[int]:
    """Greedy text by whole forward passes, without transformers' cache and generation settings."""
    tokens = list(prompt)
    with torch.inference_mode():
        for _ in range(new):
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


def test_logits_of_every_position_equal_those_of_transformers(family: str, made: Any, passes: Any) -> None:
    path, reference = made(family)
    (prompt,) = prompts(1, 100)
    ours = passes(path)(prompt)
    with torch.inference_mode():
        theirs = reference(torch.tensor([prompt])).logits[0]
    assert theirs.std() > 0.5, "logits so flat that nothing is shown"
    assert (ours - theirs).abs().max() <= 1e-3


@pytest.mark.parametrize("name", ["gemma3", "gemma3-wide", "gpt-oss", "mistral", "qwen2-windows"])
def test_logits_of_long_chunks_equal_those_of_transformers(name: str, made: Any, passes: Any) -> None:
    """Chunks of more rows than are looked at together, shorter and longer than windows."""
    path, reference = made(name)
    (prompt,) = prompts(1, 250)
    with torch.inference_mode():
        theirs = reference(torch.tensor([prompt])).logits[0]
    for cuts in ([250], [3, 250], [130, 131, 250]):
        ours, run = [], passes(path)
        for start, end in zip([0, *cuts], cuts, strict=False):
            ours.append(run(prompt[start:end], start))
        assert (torch.cat(ours) - theirs).abs().max() <= 1e-3, cuts


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gemma3-long", "gpt-oss-long"])
def test_logits_of_two_thousand_positions_equal_those_of_transformers(name: str, made: Any, passes: Any) -> None:
    path, reference = made(name)
    (prompt,) = prompts(1, 2000)
    with torch.inference_mode():
        theirs = reference(torch.tensor([prompt])).logits[0]
    run = passes(path, block_size=16, max_tokens=2048)
    ours = torch.cat([run(prompt[start : start + 512], start) for start in range(0, 2000, 512)])
    assert (ours - theirs).abs().max() <= 1e-3


async def test_greedy_text_equals_that_of_transformers_whatever_the_chunk(family: str, made: Any) -> None:
    path, reference = made(family)
    async with TorchExecutor(
        str(path), dtype="float32", num_blocks=64, block_size=4, max_step_tokens=64, threads=1
    ) as executor:
        for prompt in prompts(2, 40):
            expected = oracle(reference, prompt, 12)
            for chunk in (1, 7, 64):
                host = Host(executor)
                line = host.line(prompt)
                assert await host.generate(line, 12, chunk=chunk) == expected
                host.close(line)
                await host.step()


@pytest.mark.parametrize("name", ["mistral", "gemma3", "gpt-oss"])
async def test_a_mix_of_eight_gives_each_what_it_gets_alone(name: str, made: Any) -> None:
    path, reference = made(name)
    texts = prompts(8, 5)
    expected = [oracle(reference, prompt, 10) for prompt in texts]
    async with TorchExecutor(str(path), dtype="float32", num_blocks=128, block_size=4, threads=1) as executor:
        host = Host(executor)
        lines = [host.line(prompt) for prompt in texts]
        turn = 0
        while lacking := [line for line in lines if len(line.output) < 10]:
            turn += 1
            await host.step(*((line, host.work(line, 6)) for line in lacking[: turn // 2 + 1]))
        assert [line.output[:10] for line in lines] == expected


def test_positions_of_dynamic_rope_end_where_it_would_depend_on_chunks(made: Any) -> None:
    path, _ = made("dynamic")
    with pytest.raises(UnsupportedModelError, match="dynamic"):
        TorchExecutor(str(path), max_context=257)
