from __future__ import annotations

import contextlib
import random
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Self

import anyio
import pytest

from deepinfra.core.conversation import Conversation, Message, TextPart
from deepinfra.core.drafts import Draft, TokenView
from deepinfra.core.events import Event, Failed, Finished, TextDelta
from deepinfra.core.ids import BlockKey
from deepinfra.core.kv import Match, NamespaceFilter, Retention
from deepinfra.core.model import ExecutorLimits
from deepinfra.core.request import GenerateRequest, Prompt, TextInput
from deepinfra.core.sampling import SamplingParams
from deepinfra.core.step import Choice, StepPlan, StepView
from deepinfra.engine import Engine, Pool
from deepinfra.errors import (
    ConfigError,
    ContextLengthError,
    EngineDrainingError,
    EngineNotRunningError,
    ExecutorLost,
    Overloaded,
    PoolFailedError,
    RequestError,
    UnsupportedCombination,
    UnsupportedFieldError,
)
from deepinfra.executors.toy import ToyExecutor
from deepinfra.interfaces.executor import StepHandle
from deepinfra.interfaces.kvstore import KVStore
from deepinfra.interfaces.speculator import Speculator
from deepinfra.kvstores import SsdStore
from deepinfra.kvstores.memory import MemoryStore
from deepinfra.placers import StaticPlacer
from deepinfra.schedulers.fcfs import Fcfs
from deepinfra.testing.clock import ManualClock
from deepinfra.testing.engine import Ask, reference
from deepinfra.testing.executors import FlakyExecutor
from deepinfra.testing.tiny import TinyRecipe


def pool(store: KVStore | None = None, *, max_queue: int = 4096, name: str = "pool", **options: Any) -> Pool:
    settings = {"num_blocks": 64, "block_size": 2, "max_step_tokens": 32, "max_seqs": 8, **options}
    return Pool(Fcfs(max_queue=max_queue), ToyExecutor(**settings), store=store, name=name)


def ask(prompt: Sequence[int], max_tokens: int = 8, **fields: Any) -> GenerateRequest:
    fields.setdefault("sampling", SamplingParams(temperature=0.0, logprobs=0))
    return GenerateRequest(input=tuple(prompt), max_tokens=max_tokens, ignore_eos=True, **fields)


async def events_of(engine: Engine, request: GenerateRequest) -> list[Event]:
    async with engine.generate(request) as stream:
        return [event async for event in stream]


def tokens_of(events: Sequence[Event], choice: int = 0) -> list[int]:
    return [
        token.token
        for event in events
        if isinstance(event, TextDelta) and event.choice == choice
        for token in event.tokens
    ]


def end_of(events: Sequence[Event]) -> Finished:
    last = events[-1]
    assert isinstance(last, Finished), last
    return last


async def test_a_request_gives_the_models_text() -> None:
    async with Engine(TinyRecipe(), pool()) as engine:
        events = await events_of(engine, ask([1, 2, 3], 8))
    assert tokens_of(events) == reference(Ask((1, 2, 3), 8))
    assert end_of(events).usage.completion_tokens == 8


async def test_split_pools_give_the_same_text() -> None:
    split = Engine(TinyRecipe(), prefill=[pool(name="p")], decode=[pool(name="d1"), pool(name="d2")])
    async with split as engine:
        events = await events_of(engine, ask([1, 2, 3, 4, 5], 8))
        stats = engine.stats()
    assert tokens_of(events) == reference(Ask((1, 2, 3, 4, 5), 8))
    assert all(p.blocks_free == p.blocks_total for p in stats.pools if p.steps == 0)
    assert sum(p.steps > 0 for p in stats.pools) == 2


async def test_the_decode_pool_takes_the_prompt_from_the_handoff() -> None:
    decode = pool(name="d")
    async with Engine(TinyRecipe(), prefill=[pool(name="p")], decode=[decode]) as engine:
        await events_of(engine, ask(range(20), 4))
    assert isinstance(decode.executor, ToyExecutor)
    assert decode.executor.computed_tokens == 1 + 3 - 1


async def test_n_answers_have_draws_of_their_own_and_each_is_reproducible_alone() -> None:
    sampling = SamplingParams(temperature=1.0, logprobs=0)
    async with Engine(TinyRecipe(), pool()) as engine:
        events = await events_of(engine, ask([1, 2, 3], 8, n=4, seed=7, sampling=sampling))
    answers = [tokens_of(events, choice) for choice in range(4)]
    assert len({tuple(answer) for answer in answers}) == 4
    for choice, answer in enumerate(answers):
        assert answer == reference(Ask((1, 2, 3), 8, temperature=1.0, seed=7), choice)[: len(answer)]


async def test_a_second_turn_reports_the_first_as_cached() -> None:
    async with Engine(TinyRecipe(), pool()) as engine:
        first = await events_of(engine, ask(range(11), 6))
        second = await events_of(engine, ask([*range(11), *tokens_of(first), 3], 4))
    assert end_of(first).usage.cached.total == 0
    assert end_of(second).usage.cached.device == (11 + 6 - 1) // 2 * 2


async def test_a_restarted_engine_finds_the_prompt_in_its_store(tmp_path: Path) -> None:
    async with Engine(TinyRecipe(), pool(SsdStore(tmp_path))) as engine:
        first = await events_of(engine, ask(range(20), 4))
        assert await engine.drain(5)
    async with Engine(TinyRecipe(), pool(SsdStore(tmp_path))) as engine:
        second = await events_of(engine, ask(range(20), 4))
    assert tokens_of(first) == tokens_of(second)
    assert end_of(second).usage.cached.store == {"ssd": 19}


async def test_tenants_share_no_cache() -> None:
    async with Engine(TinyRecipe(), pool()) as engine:
        await events_of(engine, ask(range(20), 4, tenant="a"))
        other = await events_of(engine, ask(range(20), 4, tenant="b"))
        same = await events_of(engine, ask(range(20), 4, tenant="a"))
    assert end_of(other).usage.cached.total == 0
    assert end_of(same).usage.cached.total == 19


async def test_what_a_store_has_dropped_is_saved_again_when_it_is_computed_again() -> None:
    store = MemoryStore()
    async with Engine(TinyRecipe(), pool(store, num_blocks=16)) as engine:
        await events_of(engine, ask(range(20), 1))
        await engine.pools[0].settle()
        held = store.stats().records
        await store.forget(NamespaceFilter())
        # Nobody's KV but this one's fits on the device beside it.
        await events_of(engine, ask(range(100, 128), 4, retention=Retention(traffic="none")))
        await events_of(engine, ask(range(20), 1))
        await engine.pools[0].settle()
        assert store.stats().records == held > 0


async def test_retention_none_writes_nothing() -> None:
    store = MemoryStore()
    async with Engine(TinyRecipe(), pool(store)) as engine:
        await events_of(engine, ask(range(20), 4, retention=Retention(traffic="none")))
        await engine.drain(5)
        assert store.stats().records == 0


async def test_a_stop_string_ends_the_answer_and_the_count() -> None:
    async with Engine(TinyRecipe(), pool(seed=0)) as engine:
        whole = await events_of(engine, ask([5, 6, 7], 30))
        text = "".join(event.text for event in whole if isinstance(event, TextDelta))
        stop = text[6:8]
        cut = await events_of(engine, ask([5, 6, 7], 30, stop=(stop,)))
    shown = "".join(event.text for event in cut if isinstance(event, TextDelta))
    assert shown == text[: text.index(stop)]
    assert (end_of(cut).reason, end_of(cut).stop) == ("stop", stop)
    assert end_of(cut).usage.completion_tokens < 30


async def test_a_conversation_and_bare_text_are_rendered_by_the_recipe() -> None:
    talk = Conversation(messages=(Message(role="user", content=(TextPart("hi"),)),))
    async with Engine(TinyRecipe(), pool()) as engine:
        for given in (talk, TextInput("hi")):
            async with engine.generate(GenerateRequest(input=given, max_tokens=3)) as stream:
                assert [event async for event in stream]


# -- leaving ------------------------------------------------------------------------------------------


async def test_200_clients_that_vanish_leave_everything_free() -> None:
    rng = random.Random(1)
    served = pool(MemoryStore(), num_blocks=40)
    async with Engine(TinyRecipe(), served) as engine:

        async def client(number: int) -> None:
            moment = rng.randrange(12)
            with anyio.move_on_after(0.02 * rng.random() if number % 3 == 0 else 30):
                async with engine.generate(ask([number % 5, *range(rng.randrange(1, 20))], 12)) as stream:
                    async for _ in stream:
                        moment -= 1
                        if moment <= 0:
                            return

        async with anyio.create_task_group() as tasks:
            for number in range(200):
                tasks.start_soon(client, number)
        with anyio.fail_after(5):
            await served.settle()
        stats = served.stats()
        assert (stats.blocks_free, stats.slots_free) == (stats.blocks_total, stats.slots_total)
        assert (stats.waiting, stats.running) == (0, 0)
        assert tokens_of(await events_of(engine, ask([1, 2], 5))) == reference(Ask((1, 2), 5))


async def test_an_exception_in_the_readers_block_leaves_as_itself() -> None:
    async with Engine(TinyRecipe(), pool()) as engine:
        with pytest.raises(ZeroDivisionError):
            async with engine.generate(ask([1], 5)):
                raise ZeroDivisionError


async def test_drain_finishes_what_runs_and_refuses_what_comes() -> None:
    got: list[Event] = []
    async with Engine(TinyRecipe(), pool()) as engine, anyio.create_task_group() as tasks:

        async def client(*, task_status: anyio.abc.TaskStatus[None]) -> None:
            async with engine.generate(ask([1, 2], 20)) as stream:
                task_status.started()
                got.extend([event async for event in stream])

        await tasks.start(client)
        tasks.start_soon(engine.drain, 5)
        await anyio.lowlevel.checkpoint()
        await anyio.lowlevel.checkpoint()
        with pytest.raises(EngineDrainingError):
            await events_of(engine, ask([1], 1))
    assert tokens_of(got) == reference(Ask((1, 2), 20))


async def test_a_deadline_ends_an_answer_with_an_error() -> None:
    class Slow(Fcfs):
        def plan(self, view):  # type: ignore[no-untyped-def]
            return super().plan(view)._replace(run=())

    stuck = Pool(Slow(), ToyExecutor())
    async with Engine(TinyRecipe(), stuck) as engine:
        with anyio.fail_after(5):
            events = await events_of(engine, ask([1, 2], 5, deadline_s=0.05))
    assert [(type(event), getattr(event, "code", "")) for event in events] == [(Failed, "deadline-exceeded")]


async def test_a_reader_that_is_silent_for_too_long_is_over() -> None:
    clock = ManualClock()
    engine = Engine(TinyRecipe(), pool(num_blocks=2000, max_context=4000), clock=clock, client_timeout_s=10)
    async with engine:
        async with engine.generate(ask([1, 2], 3000)) as stream:
            await stream.__anext__()
            await anyio.sleep(0.05)
            clock.advance(11)
            await anyio.sleep(0.05)
            assert engine.stats().requests == {"client-timeout": 1}


# -- refusals -----------------------------------------------------------------------------------------


async def test_an_engine_that_nobody_entered_says_what_to_write() -> None:
    with pytest.raises(EngineNotRunningError, match="lifespan"):
        await events_of(Engine(TinyRecipe(), pool()), ask([1]))


@pytest.mark.parametrize(
    ("request_", "error", "param"),
    [
        (ask([]), RequestError, "prompt"),
        (ask([999]), RequestError, "prompt"),
        (ask([1], 0), RequestError, "max_tokens"),
        (ask([1], n=0), RequestError, "n"),
        (ask([1], sampling=SamplingParams(top_k=5)), UnsupportedFieldError, "top_k"),
        (ask([1], sampling=SamplingParams(logit_bias=((999, 1.0),))), RequestError, "logit_bias.999"),
        (ask([1], sampling=SamplingParams(top_k=-1)), RequestError, "top_k"),
        (ask([1], sampling=SamplingParams(logprobs=2**64)), RequestError, "logprobs"),
    ],
)
async def test_a_wrong_request_names_its_field(
    request_: GenerateRequest, error: type[RequestError], param: str
) -> None:
    async with Engine(TinyRecipe(), pool()) as engine:
        with pytest.raises(error) as caught:
            await events_of(engine, request_)
        assert caught.value.param == param
        assert engine.stats().running == 0


async def test_what_can_never_fit_is_refused_at_the_door() -> None:
    async with Engine(TinyRecipe(), pool(num_blocks=4)) as engine:
        with pytest.raises(ContextLengthError):
            await events_of(engine, ask([1, 2, 3], 6))
        assert end_of(await events_of(engine, ask([1, 2, 3], 5))).reason == "length"


async def test_a_full_queue_is_overloaded_and_keeps_nothing() -> None:
    narrow = pool(max_queue=1, max_seqs=1)
    async with Engine(TinyRecipe(), narrow) as engine:
        with pytest.raises(Overloaded):
            await events_of(engine, ask([1, 2], 3, n=8))
        with anyio.fail_after(5):
            await narrow.settle()
        assert narrow.stats().waiting == 0


def test_an_engine_needs_one_pool_or_both_kinds() -> None:
    with pytest.raises(ConfigError):
        Engine(TinyRecipe())
    with pytest.raises(ConfigError):
        Engine(TinyRecipe(), pool(), prefill=[pool()])
    with pytest.raises(ConfigError):
        Engine(TinyRecipe(), prefill=[pool()])


def test_a_placer_needs_an_executor_that_places() -> None:
    with pytest.raises(UnsupportedCombination):
        Pool(Fcfs(), ToyExecutor(), placer=StaticPlacer())


# -- failures -----------------------------------------------------------------------------------------


async def test_a_lost_executor_is_entered_again_and_the_text_goes_on() -> None:
    flaky = FlakyExecutor(ToyExecutor(), random.Random(0), rate=0.2, kinds=("lose",), most=1)
    async with Engine(TinyRecipe(), Pool(Fcfs(), flaky)) as engine:
        events = await events_of(engine, ask([1, 2, 3], 30))
        assert flaky.injected == {"lose": 1}
        assert engine.state == "ready"
    assert tokens_of(events) == reference(Ask((1, 2, 3), 30))[: len(tokens_of(events))]
    assert end_of(events).reason == "length"


async def test_a_pool_gives_up_after_three_losses() -> None:
    flaky = FlakyExecutor(ToyExecutor(), random.Random(0), rate=1.0, kinds=("lose",), most=99)
    async with Engine(TinyRecipe(), Pool(Fcfs(), flaky)) as engine:
        with anyio.fail_after(5):
            assert isinstance((await events_of(engine, ask([1, 2, 3], 5)))[-1], Failed)
            while engine.state != "failed":
                with contextlib.suppress(PoolFailedError):
                    await events_of(engine, ask([1, 2, 3], 5))
        with pytest.raises(PoolFailedError):
            await events_of(engine, ask([1, 2, 3], 5))
        assert engine.state == "failed"


class Leaving(ToyExecutor):
    """Loses itself at each step of its first `losses` lives, and has no limits outside them, as a process has none."""

    def __init__(self, losses: int) -> None:
        super().__init__()
        self.losses = losses
        self.entering = anyio.Event()
        self.enter = anyio.Event()
        self.enter.set()
        self.inside = False

    @property
    def limits(self) -> ExecutorLimits:
        assert self.inside
        return super().limits

    @asynccontextmanager
    async def __asynccontextmanager__(self) -> AsyncGenerator[Self]:
        self.entering.set()
        await self.enter.wait()
        async with super().__asynccontextmanager__():
            self.inside = True
            yield self
        self.inside = False

    def submit(self, plan: StepPlan) -> StepHandle:
        if self.losses:
            self.losses -= 1
            self.entering, self.enter = anyio.Event(), anyio.Event()
            raise ExecutorLost("gone")
        return super().submit(plan)


async def test_what_comes_while_a_lost_executor_is_replaced_waits_for_it() -> None:
    executor = Leaving(1)
    got: list[list[Event]] = []
    async with Engine(TinyRecipe(), Pool(Fcfs(), executor)) as engine, anyio.create_task_group() as tasks:

        async def client() -> None:
            got.append(await events_of(engine, ask([1, 2, 3], 5)))

        entering = executor.entering
        tasks.start_soon(client)
        while executor.entering is entering:
            await anyio.lowlevel.checkpoint()
        await executor.entering.wait()
        assert engine.state == "starting"
        tasks.start_soon(client)
        while engine.stats().waiting < 2:
            await anyio.lowlevel.checkpoint()
        executor.enter.set()
    assert [tokens_of(events) for events in got] == [reference(Ask((1, 2, 3), 5))] * 2


async def test_a_failed_pool_refuses_what_arrives_while_it_fails() -> None:
    looking, failed = anyio.Event(), anyio.Event()

    class Slow(MemoryStore):
        async def match(self, keys: Sequence[BlockKey]) -> Match:
            looking.set()
            await failed.wait()
            return await super().match(keys)

    class Broken(Fcfs):
        def plan(self, view: StepView) -> Choice:
            if looking.is_set():
                raise RuntimeError("broken policy")
            return super().plan(view)

    async with Engine(TinyRecipe(), Pool(Broken(), ToyExecutor(), store=Slow())) as engine:
        async with anyio.create_task_group() as tasks:

            async def fails() -> None:
                await looking.wait()
                with anyio.fail_after(5):
                    async with engine.generate(ask([1], 3)) as stream:  # too short to be looked for
                        assert isinstance([event async for event in stream][-1], Failed)
                failed.set()

            tasks.start_soon(fails)
            with anyio.fail_after(5), pytest.raises(PoolFailedError):
                await events_of(engine, ask(range(8), 3))


async def test_a_failed_step_ends_its_sequences_only() -> None:
    flaky = FlakyExecutor(ToyExecutor(), random.Random(3), rate=1.0, kinds=("fail",), most=1)
    async with Engine(TinyRecipe(), Pool(Fcfs(), flaky)) as engine:
        bad = await events_of(engine, ask([1, 2, 3], 5))
        good = await events_of(engine, ask([1, 2, 3], 5))
    assert isinstance(bad[-1], Failed)
    assert bad[-1].code == "step-failed"
    assert tokens_of(good) == reference(Ask((1, 2, 3), 5))


async def test_a_broken_scheduler_fails_the_pool_and_not_the_process() -> None:
    class Broken(Fcfs):
        def plan(self, view):  # type: ignore[no-untyped-def]
            if self._queue.entries:
                raise RuntimeError("broken policy")
            return super().plan(view)

    async with Engine(TinyRecipe(), Pool(Broken(), ToyExecutor())) as engine:
        with anyio.fail_after(5):
            events = await events_of(engine, ask([1, 2], 3))
    assert isinstance(events[-1], Failed)
    assert "RuntimeError" in events[-1].message


@pytest.mark.parametrize("stray", [-1, 260, 2**70])
async def test_a_draft_that_is_no_token_of_the_model_is_not_verified(stray: int) -> None:
    class Stray(Speculator):
        max_drafts = 3

        def propose(self, views: Sequence[TokenView]) -> Sequence[Draft]:
            return [Draft(view.seq, (7, stray, 8), (1.0, 1.0, 1.0)) for view in views]

    async with Engine(TinyRecipe(), Pool(Fcfs(), ToyExecutor(), speculator=Stray())) as engine:
        events = await events_of(engine, ask([1, 2, 3], 8))
        assert engine.stats().pools[0].drafts_verified > 0
    assert tokens_of(events) == reference(Ask((1, 2, 3), 8))


async def test_a_store_that_raises_is_a_miss() -> None:
    class Broken(MemoryStore):
        async def save(self, records):  # type: ignore[no-untyped-def]
            raise OSError("disk on fire")

        async def match(self, keys):  # type: ignore[no-untyped-def]
            raise OSError("disk on fire")

    async with Engine(TinyRecipe(), pool(Broken())) as engine:
        events = await events_of(engine, ask([1, 2, 3, 4], 5))
    assert tokens_of(events) == reference(Ask((1, 2, 3, 4), 5))


def test_an_engine_that_nobody_entered_has_numbers() -> None:
    stats = Engine(TinyRecipe(), pool()).stats()
    assert stats.state == "stopped"
    assert stats.blocks_total == stats.running == 0


def test_importing_deepinfra_loads_no_torch_and_no_starlette(tmp_path: Path) -> None:
    import subprocess
    import sys

    code = "import sys, deepinfra, deepinfra.engine; print([m for m in ('torch', 'starlette') if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert out.stdout.strip() == "[]"


async def test_losses_that_are_far_apart_do_not_fail_a_pool() -> None:
    clock = ManualClock()
    flaky = FlakyExecutor(ToyExecutor(), random.Random(0), rate=1.0, kinds=("lose",), most=5)
    async with Engine(TinyRecipe(), Pool(Fcfs(), flaky), clock=clock) as engine:
        for _ in range(5):
            clock.advance(61)
            await events_of(engine, ask([1, 2], 1))
        assert flaky.injected == {"lose": 5}
        assert engine.state == "ready"
        assert engine.stats().pools[0].executor_losses == 5


async def test_a_failed_pool_says_why_to_every_request() -> None:
    flaky = FlakyExecutor(ToyExecutor(), random.Random(0), rate=1.0, kinds=("lose",), most=99)
    async with Engine(TinyRecipe(), Pool(Fcfs(), flaky)) as engine:
        while engine.state != "failed":
            with contextlib.suppress(PoolFailedError):
                await events_of(engine, ask([1], 2))
        with pytest.raises(PoolFailedError, match="lost 3 times in a row, last: the device fell off the bus"):
            await events_of(engine, ask([1], 2))


async def test_text_that_cannot_fit_is_refused_before_it_is_tokenised() -> None:
    class Counting(TinyRecipe):
        rendered = 0

        def text(self, text: TextInput) -> Prompt:
            self.rendered += 1
            return super().text(text)

    recipe = Counting()
    async with Engine(recipe, pool()) as engine:
        with pytest.raises(ContextLengthError):
            await events_of(engine, GenerateRequest(input=TextInput("a" * 100_000)))
        assert recipe.rendered == 0


async def test_a_store_that_never_answers_is_late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deepinfra.engine.pool._MATCH_TIMEOUT_S", 0.05)
    monkeypatch.setattr("deepinfra.engine.pool._LOAD_TIMEOUT_S", 0.05)

    class Mute(MemoryStore):
        async def match(self, keys):  # type: ignore[no-untyped-def]
            await anyio.sleep_forever()

    class Stuck(MemoryStore):
        async def load(self, refs, into):  # type: ignore[no-untyped-def]
            await anyio.sleep_forever()

    for store in (Mute(), Stuck()):
        served = pool(store, num_blocks=16)
        with anyio.fail_after(10):
            async with Engine(TinyRecipe(), served) as engine:
                for prompt in ([1] * 12, [2] * 20, [1] * 12):
                    assert tokens_of(await events_of(engine, ask(prompt, 4))) == reference(Ask(tuple(prompt), 4))
                await served.settle()
                assert served.stats().slots_free == served.stats().slots_total


def test_a_pool_cannot_be_prefill_and_decode_at_once() -> None:
    both = pool()
    with pytest.raises(ConfigError, match="twice"):
        Engine(TinyRecipe(), prefill=[both], decode=[both])
