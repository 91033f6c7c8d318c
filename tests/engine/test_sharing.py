"""Sequences that begin alike: their beginning is computed, or loaded, once."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path

import anyio
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from deepinfra.core.conversation import Conversation, Message, TextPart
from deepinfra.core.kv import Loaded, RecordRef
from deepinfra.core.request import GenerateRequest
from deepinfra.engine import Engine, Pool
from deepinfra.executors.toy import ToyExecutor
from deepinfra.interfaces.kvstore import KVStore
from deepinfra.interfaces.scheduler import Scheduler
from deepinfra.kvstores import SsdStore
from deepinfra.kvstores.memory import MemoryStore
from deepinfra.schedulers import Bucketed, Fcfs
from deepinfra.testing.asking import ask, end_of, events_of, tokens_of
from deepinfra.testing.engine import Ask, Scenario, reference, run_scenario
from deepinfra.testing.tiny import TinyRecipe

SHARED = tuple(range(100))

both = pytest.mark.parametrize("make", [Fcfs, Bucketed])


def toy(num_blocks: int = 1000, max_step_tokens: int = 32, windows: tuple[int, ...] = ()) -> ToyExecutor:
    return ToyExecutor(
        num_blocks=num_blocks, block_size=2, max_step_tokens=max_step_tokens, max_seqs=16, num_slots=16, windows=windows
    )


def engine_of(scheduler: Scheduler, executor: ToyExecutor, store: KVStore | None = None) -> Engine:
    return Engine(TinyRecipe(), Pool(scheduler, executor, store=store))


async def ask_all(engine: Engine, requests: Sequence[GenerateRequest]) -> list[int]:
    """Ask all at once; returns how many tokens each found."""
    cached = [0] * len(requests)

    async def one(index: int, request: GenerateRequest) -> None:
        events = await events_of(engine, request)
        assert tokens_of(events) == reference(Ask(tuple(request.input), request.max_tokens or 0))  # type: ignore[arg-type]
        cached[index] = end_of(events).usage.cached.total

    async with anyio.create_task_group() as tasks:
        for index, request in enumerate(requests):
            tasks.start_soon(one, index, request)
    return cached


@both
@pytest.mark.parametrize("max_step_tokens", [8, 32, 1024])
async def test_a_beginning_that_many_share_is_computed_once(
    make: Callable[[], Scheduler], max_step_tokens: int
) -> None:
    executor = toy(max_step_tokens=max_step_tokens)
    async with engine_of(make(), executor) as engine:
        cached = await ask_all(engine, [ask([*SHARED, 200 + i, i, 7], 2) for i in range(12)])
    assert executor.computed_tokens == len(SHARED) + 12 * (3 + 1)
    assert sorted(cached) == [0] + [len(SHARED)] * 11


@both
async def test_answers_of_one_request_share_its_prompt(make: Callable[[], Scheduler]) -> None:
    executor = toy()
    async with engine_of(make(), executor) as engine:
        await events_of(engine, ask([*SHARED, 7], 1, n=6))
    assert executor.computed_tokens == len(SHARED) + 6


@both
async def test_what_branches_again_and_again_is_computed_once_for_each_branch(make: Callable[[], Scheduler]) -> None:
    executor = toy()
    prompts = [[*SHARED[:40], *[200 + i // 4] * 20, *[220 + i // 2] * 20, i] for i in range(8)]
    async with engine_of(make(), executor) as engine:
        await ask_all(engine, [ask(prompt, 1) for prompt in prompts])
    assert executor.computed_tokens == 40 + 2 * 20 + 4 * 20 + 8


@both
async def test_tenants_share_nothing_and_do_not_wait_for_each_other(make: Callable[[], Scheduler]) -> None:
    executor = toy()
    async with engine_of(make(), executor) as engine:
        cached = await ask_all(engine, [ask([*SHARED, i], 1, tenant=f"t{i % 3}") for i in range(9)])
    assert executor.computed_tokens == 3 * len(SHARED) + 9
    assert sorted(cached) == [0] * 3 + [len(SHARED)] * 6


async def test_a_public_beginning_is_computed_once_for_all_tenants() -> None:
    system = Conversation(messages=(Message(role="system", content=(TextPart("x" * 60),)),))
    executor = toy()
    async with Engine(TinyRecipe(), Pool(Bucketed(), executor), public_prefixes=[system]) as engine:
        user = Message(role="user", content=(TextPart("hello"),))
        asked = system.messages[0], user
        first = GenerateRequest(input=Conversation(messages=asked), max_tokens=1)
        computed: list[int] = []

        async def one(tenant: str) -> None:
            events = await events_of(engine, GenerateRequest(input=first.input, max_tokens=1, tenant=tenant))
            computed.append(end_of(events).usage.prompt_tokens - end_of(events).usage.cached.total)

        async with anyio.create_task_group() as tasks:
            for tenant in "abcd":
                tasks.start_soon(one, tenant)
    assert max(computed[:1] + computed) >= 60
    assert sorted(computed)[2] < 30, "all but the first began behind what is public"


class Counting(SsdStore):
    """Counts the records that it loads."""

    loads = 0

    async def load(self, refs: Sequence[RecordRef], into: Sequence[memoryview]) -> Loaded:
        self.loads += len(refs)
        return await super().load(refs, into)


@both
async def test_a_beginning_in_the_store_is_loaded_once_for_all(make: Callable[[], Scheduler], tmp_path: Path) -> None:
    store = Counting(tmp_path)
    async with engine_of(make(), toy(), store) as engine:
        await events_of(engine, ask(SHARED, 1))
        assert await engine.drain(5)
    executor = toy()
    async with engine_of(make(), executor, store) as engine:
        await ask_all(engine, [ask([*SHARED, 200 + i], 1) for i in range(8)])
    assert store.loads == len(SHARED) // 2
    assert executor.computed_tokens == 8


async def test_what_was_forgotten_while_a_sequence_waited_is_loaded_and_not_computed() -> None:
    store = MemoryStore(capacity_nbytes=1 << 20)
    executor = ToyExecutor(num_blocks=80, block_size=2, max_step_tokens=32, max_seqs=1, num_slots=16)
    async with engine_of(Fcfs(), executor, store) as engine:
        await events_of(engine, ask(SHARED[:40], 1))
        await events_of(engine, ask([5] * 80, 1))
        await engine.pools[0].settle()
        executor.computed_tokens = 0
        # The first takes the memory of the second's beginning while that waits for a seat.
        cached = await ask_all(engine, [ask([7] * 79, 30), ask([*SHARED[:40], 9], 1)])
    assert cached == [0, 40]
    assert executor.computed_tokens == 79 + 29 + 1


@both
async def test_replayed_windows_give_the_text_behind_a_shared_beginning(make: Callable[[], Scheduler]) -> None:
    executor = toy(windows=(3, 3))
    async with engine_of(make(), executor) as engine:
        await ask_all_windows(engine, (3, 3))
    assert executor.computed_tokens < 4 * len(SHARED)


async def ask_all_windows(engine: Engine, windows: tuple[int, ...]) -> None:
    async def one(index: int) -> None:
        events = await events_of(engine, ask([*SHARED, index], 2))
        assert tokens_of(events) == reference(Ask((*SHARED, index), 2), windows=windows)

    async with anyio.create_task_group() as tasks:
        for index in range(6):
            tasks.start_soon(one, index)


@both
async def test_followers_go_on_when_the_first_leaves(make: Callable[[], Scheduler]) -> None:
    executor = toy(max_step_tokens=4)
    async with engine_of(make(), executor) as engine:

        async def first() -> None:
            async with engine.generate(ask([*SHARED, 1], 1)):
                while executor.computed_tokens < 40:
                    await anyio.lowlevel.checkpoint()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(first)
            await anyio.lowlevel.checkpoint()
            await ask_all(engine, [ask([*SHARED, 200 + i], 1) for i in range(6)])
    assert len(SHARED) + 6 <= executor.computed_tokens <= len(SHARED) + 6 + 4 + 1


def fan_out(draw: random.Random) -> Scenario:
    """Few blocks, prompts that branch, clients that leave, executors that fail or die."""
    root = tuple(draw.randrange(3) for _ in range(draw.randint(4, 18)))
    asks = tuple(
        Ask(
            prompt=(*root[: draw.choice((len(root), len(root), len(root) // 2))], *(draw.randrange(200),) * (i % 3), i),
            max_tokens=draw.randint(1, 6),
            n=draw.choice((1, 1, 3)),
            leave_after=draw.choice((0, 0, 1, 2)),
            tenant=draw.choice(("public", "public", "public", "other")),
        )
        for i in range(draw.randint(3, 8))
    )
    size = draw.choice((1, 2, 4))
    grid = draw.choice((1, 1, size, 2 * size))
    return Scenario(
        asks=asks,
        blocks=-(-40 // size) + draw.choice((0, 2, 40)),
        block_size=size,
        max_step_tokens=max(grid, draw.choice((1, 3, 8, 64))),
        max_seqs=draw.choice((1, 2, 4)),
        grid=grid,
        scheduler=draw.choice(("fcfs", "bucketed")),
        split=draw.random() < 0.2,
        store=draw.choice(("none", "memory", "flaky")),
        executor=draw.choice(("sound", "sound", "failing", "dying")),
        windows=draw.choice(((), (), (2, 2))),
        seed=draw.randrange(1000),
        threads=False,
    )


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 2**32), backend=st.sampled_from(["asyncio", "trio"]))
def test_any_fan_out_gives_the_reference_text(seed: int, backend: str) -> None:
    assert anyio.run(run_scenario, fan_out(random.Random(seed)), backend=backend) == []


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_soak_of_fan_outs_finds_nothing() -> None:
    for seed in range(600):
        scenario = fan_out(random.Random(seed))
        assert anyio.run(run_scenario, scenario, backend=("asyncio", "trio")[seed % 2]) == [], (seed, scenario)
