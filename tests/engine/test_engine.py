from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import anyio
import pytest
from anyio.lowlevel import checkpoint

from deepinfra.core.conversation import Conversation, Message, TextPart
from deepinfra.core.events import Event, Failed, TextDelta
from deepinfra.core.ids import BlockKey
from deepinfra.core.kv import KVRecord, Match, NamespaceFilter, Retention
from deepinfra.core.request import GenerateRequest, TextInput
from deepinfra.core.sampling import SamplingParams
from deepinfra.engine import Engine, Pool
from deepinfra.engine.stepper import Stepper
from deepinfra.errors import (
    ConfigError,
    ContextLengthError,
    DeadlineExceededError,
    EngineDrainingError,
    EngineNotRunningError,
    Overloaded,
    RequestError,
    UnsupportedCombination,
    UnsupportedFieldError,
)
from deepinfra.executors.toy import ToyExecutor
from deepinfra.kvstores import SsdStore
from deepinfra.kvstores.memory import MemoryStore
from deepinfra.placers import StaticPlacer
from deepinfra.schedulers.fcfs import Fcfs
from deepinfra.testing.asking import ask, end_of, events_of, tokens_of
from deepinfra.testing.asking import toy_pool as pool
from deepinfra.testing.clock import ManualClock
from deepinfra.testing.engine import Ask, reference
from deepinfra.testing.tiny import TinyRecipe


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


async def test_a_sequence_waits_for_a_load_that_begins_late(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load = Stepper._load

    async def late(self: Stepper, *of: Any) -> None:
        for _ in range(20):
            self._roster.wake.set()
            await checkpoint()
        await load(self, *of)

    monkeypatch.setattr(Stepper, "_load", late)
    async with Engine(TinyRecipe(), pool(SsdStore(tmp_path))) as engine:
        await events_of(engine, ask(range(20), 4))
        assert await engine.drain(5)
    async with Engine(TinyRecipe(), pool(SsdStore(tmp_path))) as engine:
        events = await events_of(engine, ask(range(20), 4))
    assert end_of(events).usage.cached.store == {"ssd": 19}


@pytest.mark.parametrize("num_blocks", [22, 24, 26, 28])
async def test_a_load_does_not_take_the_memory_of_the_beginning_that_is_on_the_device(num_blocks: int) -> None:
    async with Engine(TinyRecipe(), pool(MemoryStore(), num_blocks=num_blocks, block_size=4)) as engine:
        for prompt in (range(59), range(100, 156), range(59)):  # the second leaves some of the first one's blocks
            events = await events_of(engine, ask(prompt, 8))
            await engine.pools[0].settle()
    cached = end_of(events).usage.cached
    assert cached.total == 56
    assert 0 < cached.device < 56


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


class Given(SsdStore):
    """Counts records that it was given, held already or not."""

    given = 0

    async def save(self, records: Sequence[KVRecord]) -> None:
        self.given += len(records)
        await super().save(records)


@pytest.mark.parametrize("first", [Retention(traffic="none"), Retention(disk=False)])
async def test_what_was_computed_for_nobody_else_is_saved_when_somebody_hits_it(
    tmp_path: Path, first: Retention
) -> None:
    store = Given(tmp_path)
    one = pool(store)
    async with Engine(TinyRecipe(), one) as engine:
        await events_of(engine, ask(range(20), 1, retention=first))
        await one.settle()
        before = store.given
        assert store.stats().records == 0
        for retention in (Retention(), Retention(), first):
            await events_of(engine, ask(range(20), 1, retention=retention))
            await one.settle()
            assert store.stats().records == store.given - before == 10


async def test_saves_behind_the_end_of_a_sequence_leave_the_tail_of_its_blocks_to_go_first() -> None:
    one = pool(MemoryStore())  # three blocks a batch
    async with Engine(TinyRecipe(), one) as engine:
        await events_of(engine, ask(range(60), 1))
        await one.settle()
        await events_of(engine, ask(range(100, 180), 1, retention=Retention(traffic="none")))
        await one.store.forget(NamespaceFilter())  # type: ignore[union-attr]
        again = await events_of(engine, ask(range(60), 1))
    assert end_of(again).usage.cached.device == (64 - 40) * 2


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


async def test_a_deadline_that_passes_while_the_store_is_asked_is_said_to_have_passed() -> None:
    class Slow(MemoryStore):
        async def match(self, keys: Sequence[BlockKey]) -> Match:
            await anyio.sleep_forever()
            return await super().match(keys)

    async with Engine(TinyRecipe(), pool(store=Slow(capacity_nbytes=1 << 20))) as engine:
        with anyio.fail_after(5), pytest.raises(DeadlineExceededError):
            await events_of(engine, ask(list(range(1, 30)), 5, deadline_s=0.01))
        assert engine.stats().requests == {"deadline-exceeded": 1}


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
