"""Models with windows behind a whole engine: what is cached, restored and replayed changes no token."""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from deepinfra.core.events import Finished, TextDelta
from deepinfra.core.request import GenerateRequest, Usage
from deepinfra.core.sampling import SamplingParams
from deepinfra.engine import Engine, Pool
from deepinfra.executors.torch import TorchExecutor
from deepinfra.interfaces.kvstore import KVStore
from deepinfra.kvstores import MemoryStore, SsdStore
from deepinfra.schedulers import Bucketed
from deepinfra.testing.tiny import TinyRecipe

NEW = 8


def pool(path: Path, store: KVStore | None, **settings: Any) -> Pool:
    """Room for little more than one prompt: the next one pushes its blocks out."""
    executor = TorchExecutor(
        str(path), dtype="float32", num_blocks=40, block_size=4, max_step_tokens=32, max_context=140, threads=1
    )
    return Pool(Bucketed(), executor, store=store, **settings)


async def ask(engine: Engine, prompt: list[int], salt: str = "") -> tuple[str, Usage]:
    sampling = SamplingParams(temperature=0.0)
    request = GenerateRequest(input=tuple(prompt), sampling=sampling, max_tokens=NEW, ignore_eos=True, salt=salt)
    async with engine.generate(request) as stream:
        events = [event async for event in stream]
    last = events[-1]
    assert isinstance(last, Finished), last
    return "".join(event.text for event in events if isinstance(event, TextDelta)), last.usage


async def settled(pool: Pool) -> None:
    """Until the sequence's blocks are given back and saved."""
    with anyio.fail_after(60):
        while (stats := pool.stats()).saves_waiting or stats.blocks_free < stats.blocks_total:
            await anyio.lowlevel.checkpoint()


def conversation(rows: int, window: int) -> list[list[int]]:
    """Prompts that end on another's path: inside, at and past a window, and past what exact replay computes again."""
    draw = random.Random(3)
    one, two = ([draw.randrange(256) for _ in range(120)] for _ in range(2))
    ends = (window - 3, window, window + 5, rows + 9)
    return [one[:100], two[:100], one, *(one[:end] + two[:7] for end in ends), two]


FAST = {("gemma3", "ssd", "disk"), ("gpt-oss", "memory", "ram")}
CASES = [
    pytest.param(*case, marks=() if case in FAST else pytest.mark.slow, id="-".join(case))
    for case in itertools.product(("gemma3", "gpt-oss"), ("memory", "ssd"), ("ram", "disk", "off"))
]


@pytest.mark.parametrize(("hybrid", "kind", "snapshots"), CASES)
async def test_exact_replay_and_snapshots_give_the_text_of_no_cache(
    hybrid: str, kind: str, snapshots: Any, made: Any, tmp_path: Path
) -> None:
    path, model = made(f"{hybrid}-bytes")
    window, sliding = model.config.sliding_window, model.config.layer_types.count("sliding_attention")
    prompts = conversation(window + (sliding - 1) * (window - 1), window)
    expected = []
    async with Engine(TinyRecipe(), pool(path, None)) as engine:
        for index, prompt in enumerate(prompts):
            answer, usage = await ask(engine, prompt, salt=str(index))  # of its own: nothing is cached
            assert not usage.cached.total
            expected.append(answer)
    assert len(set(expected)) > len(expected) // 2, "texts so alike that nothing is shown"
    store: KVStore = MemoryStore() if kind == "memory" else SsdStore(tmp_path)
    tiers: dict[str, int] = {}
    for _ in range(2):  # the second time on a disk that another process left
        under = pool(path, store, snapshots=snapshots)
        async with Engine(TinyRecipe(), under) as engine:
            for prompt, text in zip(prompts, expected, strict=True):
                answer, usage = await ask(engine, prompt)
                assert answer == text
                assert not usage.cached.approximate
                for tier, count in {"device": usage.cached.device, **usage.cached.store}.items():
                    tiers[tier] = tiers.get(tier, 0) + count
                await settled(under)
            stats = under.stats()
            if snapshots == "off" or (snapshots, kind) == ("ram", "ssd"):
                assert stats.snapshots_restored == 0
                assert stats.rows_replayed > 0
            else:
                assert stats.snapshots_restored > 0
    assert len([tier for tier, count in tiers.items() if count]) > 1, tiers


async def test_bounded_replay_is_named_an_approximation(hybrid: str, made: Any) -> None:
    path, _ = made(f"{hybrid}-bytes")
    prompt = conversation(40, 8)[0]
    under = pool(path, None, replay="bounded", snapshots="off")
    async with Engine(TinyRecipe(), under) as engine:
        _, first = await ask(engine, prompt)
        _, again = await ask(engine, prompt)
        assert not first.cached.approximate
        assert again.cached.approximate
        assert under.stats().rows_replayed == under.executor.layout.groups[1].window
