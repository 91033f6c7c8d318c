from __future__ import annotations

from collections.abc import Sequence

import anyio
import pytest

from deepinfra.core.events import Failed
from deepinfra.core.ids import BlockKey, SeqId
from deepinfra.core.kv import Match
from deepinfra.core.request import SeqSpec
from deepinfra.engine import Engine, Pool, PoolView, by_bucket, cache_aware, least_loaded
from deepinfra.errors import ConfigError, ExecutorLost, PoolFailedError
from deepinfra.executors.toy import ToyExecutor
from deepinfra.kvstores.memory import MemoryStore
from deepinfra.schedulers.fcfs import Fcfs
from deepinfra.testing.asking import ask, end_of, events_of, tokens_of
from deepinfra.testing.asking import toy_pool as pool
from deepinfra.testing.engine import Ask, reference
from deepinfra.testing.tiny import TinyRecipe


def spec(prompt: int | tuple[int, ...]) -> SeqSpec:
    tokens = (1,) * prompt if isinstance(prompt, int) else prompt
    return SeqSpec(seq=SeqId(1), tokens=tokens, prompt_len=len(tokens), max_tokens=1, seed=0)


def view(name: str = "a", waiting: int = 0, running: int = 0, **more: int) -> PoolView:
    return PoolView(name, waiting, running, **more)


def test_least_loaded_takes_the_fewest_waiting_then_running_then_the_first() -> None:
    assert least_loaded(spec(1), [view(waiting=1), view(running=5), view(running=4), view(running=4)]) == 2


def test_cache_aware_goes_where_the_least_is_to_be_computed() -> None:
    route = cache_aware(running_tokens=0.0)
    busy_but_cached = view(backlog_tokens=300, prefill_tokens=100, cached_tokens=900)
    assert route(spec(1000), [view(backlog_tokens=200), busy_but_cached]) == 1
    assert route(spec(1000), [view(), busy_but_cached._replace(prefill_tokens=700)]) == 0


def test_cache_aware_counts_running_sequences_and_prefers_fewer_waiting_of_equals() -> None:
    route = cache_aware(running_tokens=64.0)
    assert route(spec(10), [view(running=2, cached_tokens=100), view()]) == 1
    assert route(spec(10), [view(waiting=1), view()]) == 1


def test_a_heavier_weight_keeps_a_conversation_where_it_was() -> None:
    views = [view(cached_tokens=100, backlog_tokens=150), view()]
    assert cache_aware()(spec(200), views) == 1
    assert cache_aware(cached_weight=2.0)(spec(200), views) == 0


def test_buckets_have_pools_of_their_own() -> None:
    route = by_bucket([["short"], ["long", "other"]], edges=(100,))
    views = [view("long", running=1), view("other"), view("short", waiting=9)]
    assert route(spec(99), views) == 2
    assert route(spec(100), views) == 1
    assert by_bucket([["short"], ["long"]], edges=(100,))(spec(500), views) == 0


def test_a_long_conversation_goes_on_in_the_pool_for_short_ones_that_has_it_cached() -> None:
    route = by_bucket([["short", "second"], ["long"]], edges=(100,))
    assert route(spec(500), [view("long"), view("second"), view("short", running=3, cached_tokens=450)]) == 2


def test_a_bucket_without_serving_pools_spills_to_longer_ones_and_then_to_any() -> None:
    route = by_bucket([["short"], ["long"]], edges=(100,))
    assert route(spec(5), [view("long")]) == 0
    assert route(spec(500), [view("short", waiting=1), view("short")]) == 1


def test_routes_refuse_what_means_nothing() -> None:
    with pytest.raises(ConfigError, match="2 buckets"):
        by_bucket([["a"]], edges=(100,))
    with pytest.raises(ConfigError, match="name"):
        by_bucket([["a"], []], edges=(100,))
    with pytest.raises(ConfigError, match="negative"):
        cache_aware(cached_weight=-1.0)


# -- in an engine -----------------------------------------------------------------------------------


async def test_replicas_share_the_load_and_give_the_models_text() -> None:
    answers: dict[int, list[int]] = {}

    async def one(engine: Engine, index: int) -> None:
        answers[index] = tokens_of(await events_of(engine, ask([1, 2, index], 6)))

    async with Engine(TinyRecipe(), [pool(name="a"), pool(name="b")]) as engine:
        async with anyio.create_task_group() as tasks:
            for index in range(6):
                tasks.start_soon(one, engine, index)
        stats = engine.stats()
    assert answers == {index: reference(Ask((1, 2, index), 6)) for index in range(6)}
    assert all(each.steps > 0 and each.blocks_free == each.blocks_total for each in stats.pools)


@pytest.mark.parametrize("index", [2, -1])
async def test_a_route_to_a_pool_that_is_not_there_is_named(index: int) -> None:
    async with Engine(TinyRecipe(), [pool(name="a"), pool(name="b")], route=lambda spec, views: index) as engine:
        with pytest.raises(ConfigError, match=rf"the route chose pool {index}; there are 2"):
            await events_of(engine, ask([1, 2, 3], 2))


async def test_sequences_on_their_way_to_a_replica_count_as_waiting_there() -> None:
    answered = anyio.Event()
    seen: list[list[int]] = []

    class Slow(MemoryStore):
        async def match(self, keys: Sequence[BlockKey]) -> Match:
            await answered.wait()
            return await super().match(keys)

    def route(of: SeqSpec, views: Sequence[PoolView]) -> int:
        seen.append([each.waiting for each in views])
        if len(seen) == 4:
            answered.set()
        return least_loaded(of, views)

    pools = [pool(Slow(capacity_nbytes=1 << 20), name=name) for name in "ab"]
    async with Engine(TinyRecipe(), pools, route=route) as engine:
        async with anyio.create_task_group() as tasks:
            for index in range(4):
                tasks.start_soon(events_of, engine, ask([1, 2, index], 2))
        assert [each.view().waiting for each in pools] == [0, 0]
    assert seen == [[0, 0], [1, 0], [1, 1], [2, 1]]


async def test_a_conversation_comes_back_to_the_replica_that_has_it() -> None:
    pools = [pool(name="a"), pool(name="b"), pool(name="c")]
    turn = tuple(range(20))
    async with Engine(TinyRecipe(), pools, route=cache_aware()) as engine:
        async with engine.generate(ask([9] * 9, 30)) as busy:
            await busy.__anext__()
            await events_of(engine, ask(turn, 2))
        events = await events_of(engine, ask((*turn, 5), 2))
        steps = [each.stats().steps > 0 for each in pools]
    assert end_of(events).usage.cached.device == 20
    assert steps == [True, True, False]


async def test_a_view_says_what_waits_what_is_prefilled_and_what_is_cached() -> None:
    one = Pool(Fcfs(), ToyExecutor(num_blocks=64, block_size=2, max_step_tokens=4, max_seqs=1), name="a")
    async with Engine(TinyRecipe(), one) as engine:
        await events_of(engine, ask(range(8), 2))
        await one.settle()
        keys = one.kin.chain(spec(tuple(range(9)))).keys
        found = one.view(keys)
        async with engine.generate(ask([7] * 30, 2)), engine.generate(ask([5] * 10, 2)):
            await anyio.lowlevel.checkpoint()
            busy = one.view(keys)
    assert (found.name, found.waiting, found.running, found.cached_tokens, found.blocks_total) == ("a", 0, 0, 8, 64)
    assert found.blocks_free == 64
    assert busy.waiting + busy.running == 2
    assert busy.backlog_tokens + busy.prefill_tokens >= 10


async def test_a_failed_replica_gets_nothing_and_the_others_serve() -> None:
    class Dead(ToyExecutor):
        def submit(self, plan):  # type: ignore[no-untyped-def]
            raise RuntimeError("broken")

    pools = [Pool(Fcfs(), Dead(), name="dead"), pool(name="b"), pool(name="c")]
    async with Engine(TinyRecipe(), pools) as engine:
        [last] = await events_of(engine, ask([1, 2], 2))
        assert isinstance(last, Failed)
        assert pools[0].state == "failed"
        assert engine.state == "ready"
        later = [tokens_of(await events_of(engine, ask([1, 2], 2))) for _ in range(4)]
    assert later == [reference(Ask((1, 2), 2))] * 4


async def test_an_engine_whose_replicas_all_failed_says_why() -> None:
    class Dead(ToyExecutor):
        def submit(self, plan):  # type: ignore[no-untyped-def]
            raise ExecutorLost("gone")

    async with Engine(TinyRecipe(), [Pool(Fcfs(), Dead(), name=name) for name in "ab"]) as engine:
        for _ in range(2 * 2):  # two losses with it end a sequence, three in a row a pool
            assert engine.state != "failed"
            await events_of(engine, ask([1, 2], 2))
        assert engine.state == "failed"
        with pytest.raises(PoolFailedError):
            await events_of(engine, ask([1, 2], 2))


def test_pools_of_one_name_are_refused() -> None:
    with pytest.raises(ConfigError, match="two pools are named 'pool'"):
        Engine(TinyRecipe(), [pool(), pool()])
    with pytest.raises(ConfigError, match="either pools that do everything"):
        Engine(TinyRecipe())
