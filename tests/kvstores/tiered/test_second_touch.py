"""What is asked for twice reaches a tier that wants it so, wherever the second request finds it."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import anyio
import pytest
from anyio.lowlevel import checkpoint

from deepinfra.core.ids import BlockKey
from deepinfra.core.kv import KVRecord, Retention
from deepinfra.engine import Engine, Pool
from deepinfra.executors.toy import ToyExecutor
from deepinfra.interfaces.kvstore import KVStore
from deepinfra.kvstores import MemoryStore, SsdStore, Tier, TieredStore
from deepinfra.schedulers.fcfs import Fcfs
from deepinfra.testing.asking import ask, end_of, events_of, toy_pool
from deepinfra.testing.executors import FlakyExecutor
from deepinfra.testing.kvrecords import NBYTES, chain, keys_of, load
from deepinfra.testing.tiny import TinyRecipe

PROMPT = list(range(20))
ELSE = Retention(traffic="none")


class GivenRam(MemoryStore):
    """Remembers what it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.given: list[KVRecord] = []

    async def save(self, records: Sequence[KVRecord]) -> None:
        self.given += records
        await super().save(records)


class GivenDisk(SsdStore):
    """Remembers what it was given."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, min_free_nbytes=0)
        self.given: list[KVRecord] = []

    async def save(self, records: Sequence[KVRecord]) -> None:
        self.given += records
        await super().save(records)


def text(records: Sequence[KVRecord]) -> list[int]:
    """Tokens of records, one after the other."""
    return [token for record in records for token in record.tokens]


async def asked(below: GivenRam | GivenDisk, *prompts: Sequence[int], ram: KVStore | None = None) -> list[int]:
    """The text that the slower tier has after these prompts, one by one; what it was given is what it holds."""
    store = TieredStore([ram or MemoryStore(), Tier(below, "second-touch")])
    pool = toy_pool(store)
    async with Engine(TinyRecipe(), pool) as engine:
        for prompt in prompts:
            await events_of(engine, ask(prompt, 1))
            await pool.settle()
            await store.flush()
        assert below.stats().records == len(below.given)
    return text(below.given)


@pytest.fixture(params=["memory", "ssd"])
def below(request: pytest.FixtureRequest, tmp_path: Path) -> GivenRam | GivenDisk:
    """A slower tier."""
    return GivenRam() if request.param == "memory" else GivenDisk(tmp_path)


async def test_a_prompt_asked_once_is_not_below(below: Any) -> None:
    assert await asked(below, PROMPT) == []


async def test_a_prompt_that_is_found_on_the_device_is_below_as_a_whole_and_in_order(below: Any) -> None:
    assert await asked(below, PROMPT, PROMPT) == PROMPT


async def test_of_prompts_asked_once_what_they_share_is_below(below: Any) -> None:
    tails = [[head, *range(30, 37)] for head in (50, 51, 52)]
    assert await asked(below, *(PROMPT[:12] + tail for tail in tails)) == PROMPT[:12]


async def test_what_a_third_request_shares_with_one_before_follows(below: Any) -> None:
    prompts = [PROMPT[:12] + tail for tail in ([50, 51, 52, 53], [60, 61, 62, 63], [60, 61, 70, 71])]
    assert await asked(below, *prompts) == [*PROMPT[:12], 60, 61]


async def test_a_prompt_that_is_found_in_ram_is_below(below: Any) -> None:
    store = TieredStore([MemoryStore(), Tier(below, "second-touch")])
    pool = toy_pool(store, num_blocks=16)
    async with Engine(TinyRecipe(), pool) as engine:
        for prompt, retention in ((PROMPT, Retention()), (range(100, 128), ELSE)):
            await events_of(engine, ask(prompt, 1 if prompt is PROMPT else 4, retention=retention))
            await pool.settle()
        again = await events_of(engine, ask(PROMPT, 1))
        await pool.settle()
        await store.flush()
    assert end_of(again).usage.cached.store["ram"] > 0
    assert text(below.given) == PROMPT


async def test_a_sequence_that_was_preempted_does_not_count_as_two() -> None:
    below = GivenRam()
    store = TieredStore([MemoryStore(), Tier(below, "second-touch")])
    pool = toy_pool(store, num_blocks=12)
    async with Engine(TinyRecipe(), pool) as engine:
        async with anyio.create_task_group() as tasks:
            for first in (0, 100):
                tasks.start_soon(events_of, engine, ask(range(first, first + 10), 10))
        await pool.settle()
        await store.flush()
        assert pool.stats().preemptions > 0
    assert below.given == []


@pytest.mark.parametrize(("write", "given"), [("all", 10), ("second-touch", 20)])
async def test_blocks_are_offered_again_once_if_at_all(write: str, given: int) -> None:
    ram, below = GivenRam(), GivenRam()
    store = TieredStore([ram, Tier(below, write)])
    pool = toy_pool(store)
    async with Engine(TinyRecipe(), pool) as engine:
        for _ in range(4):
            await events_of(engine, ask(PROMPT, 1))
            await pool.settle()
            await store.flush()
    assert (len(ram.given), len(below.given)) == (given, 10)


# -- what a store may ask of the engine -----------------------------------------------------------------


class Greedy(GivenRam):
    """Wants everything that is used, the tail first, and things that nobody has."""

    async def touch(self, keys: Sequence[BlockKey], retention: Retention) -> Sequence[BlockKey]:
        return [BlockKey(bytes(32)), *reversed(keys), *keys]


class Forgetful(GivenRam):
    """Returns nothing where it should say what it wants."""

    async def touch(self, keys: Sequence[BlockKey], retention: Retention) -> None:  # type: ignore[override]
        await super().touch(keys, retention)


async def given_by(store: GivenRam, count: int) -> list[int]:
    """What a store is given when a prompt is asked that often."""
    pool = toy_pool(store)
    async with Engine(TinyRecipe(), pool) as engine:
        for _ in range(count):
            await events_of(engine, ask(PROMPT, 1))
            await pool.settle()
    return text(store.given)


async def test_what_a_store_asks_for_it_is_given_from_the_device_in_order_and_not_twice() -> None:
    assert await given_by(Greedy(), 3) == PROMPT * 3


async def test_uses_that_come_together_are_one_offer() -> None:
    class Late(Greedy):
        async def touch(self, keys: Sequence[BlockKey], retention: Retention) -> Sequence[BlockKey]:
            for _ in range(200):
                await checkpoint()
            return await super().touch(keys, retention)

    store = Late()
    pool = toy_pool(store)
    async with Engine(TinyRecipe(), pool) as engine:
        await events_of(engine, ask(PROMPT, 1))
        await pool.settle()
        await events_of(engine, ask(PROMPT, 1, n=4))
        await pool.settle()
    assert text(store.given) == PROMPT * 2


async def test_what_a_failed_step_was_to_load_is_not_offered() -> None:
    class Told(random.Random):
        strikes = False

        def random(self) -> float:
            return 0.0 if self.strikes else 1.0

    class Lazy(GivenRam):
        """Asks for everything once it is told to."""

        async def touch(self, keys: Sequence[BlockKey], retention: Retention) -> Sequence[BlockKey]:
            return keys if told.strikes else ()

    told, store = Told(), Lazy()
    toy = ToyExecutor(num_blocks=16, block_size=2, max_step_tokens=32, max_seqs=8)
    flaky = FlakyExecutor(toy, told, rate=0.5, kinds=("fail",), most=1)
    pool = Pool(Fcfs(), flaky, store=store)
    async with Engine(TinyRecipe(), pool) as engine:
        await events_of(engine, ask(PROMPT, 1))
        await pool.settle()
        await events_of(engine, ask(range(100, 128), 4, retention=ELSE))
        before, told.strikes = text(store.given), True
        await events_of(engine, ask(PROMPT, 1))
        await pool.settle()
    assert (flaky.injected["fail"], before, text(store.given)) == (1, PROMPT, PROMPT)


async def test_a_store_that_forgets_to_say_what_it_wants_is_harmless(caplog: pytest.LogCaptureFixture) -> None:
    assert await given_by(Forgetful(), 3) == PROMPT
    assert await asked(GivenRam(), PROMPT, PROMPT, ram=Forgetful()) == PROMPT
    assert caplog.records == []


# -- what a tier wants ----------------------------------------------------------------------------------


MakeStack = Callable[..., Any]


async def test_use_asks_for_what_a_filter_left_out_parents_first(stack: MakeStack) -> None:
    async with stack(write="second-touch") as s:
        records = chain(*range(8))
        await s.store.save(records)
        assert await s.store.touch(keys_of(records), Retention()) == keys_of(records)
        await s.store.save(records[:2])
        await s.store.flush()
        assert await s.held_below(records) == 2
        assert await s.store.touch(keys_of(records), Retention()) == keys_of(records[2:])


async def test_use_of_what_was_never_offered_counts_as_the_first_time(stack: MakeStack) -> None:
    async with stack(write="second-touch") as s:
        records = chain(*range(8))
        assert await s.store.touch(keys_of(records), Retention()) == []
        assert await s.store.touch(keys_of(records), Retention()) == keys_of(records)


async def test_use_asks_for_no_more_than_waits_in_the_queue(stack: MakeStack) -> None:
    async with stack(write="second-touch", queue_nbytes=3 * NBYTES) as s:
        records = chain(*range(16))
        await s.store.save(records)
        assert await s.store.touch(keys_of(records), Retention()) == keys_of(records[:3])


@pytest.mark.parametrize(
    ("write", "wanted"), [("all", 0), ("prefix-depth:2", 0), ({"agent": "second-touch"}, 0), ("second-touch", 4)]
)
async def test_use_asks_for_what_would_be_let_in(stack: MakeStack, write: Any, wanted: int) -> None:
    async with stack(write=write) as s:
        records = chain(*range(8))
        await s.store.save(records)
        assert len(await s.store.touch(keys_of(records), Retention())) == wanted


async def test_use_without_disk_asks_for_nothing_that_a_disk_lacks(stack: MakeStack) -> None:
    async with stack(write="second-touch") as s:
        records = chain(*range(8))
        await s.store.save(records)
        assert await s.store.touch(keys_of(records), Retention(disk=False)) == []
        assert len(await s.store.touch(keys_of(records), Retention())) == 4


async def test_what_a_tier_missed_while_it_was_down_is_asked_for_when_it_is_back(stack: MakeStack) -> None:
    async with stack() as s:
        records = chain(*range(8))
        s.below.mode = "raises"
        await s.store.save(records)
        with anyio.fail_after(30):
            while s.store.stats().tiers[1].waiting:
                await checkpoint()
        assert await s.store.touch(keys_of(records), Retention()) == []
        s.below.mode = "works"
        s.clock.advance(100.0)
        await s.store.flush()
        assert await s.store.touch(keys_of(records), Retention()) == keys_of(records)


async def test_what_another_process_wrote_is_not_asked_for(stack: MakeStack) -> None:
    async with stack(write="second-touch") as s:
        records = chain(*range(8))
        await s.store.save(records[2:])
        await s.store.touch(keys_of(records[:2]), Retention())
        await s.below.inner.save(records[:2])
        assert len(await load(s.store, [record.ref for record in records[:2]])) == 2
        assert await s.store.touch(keys_of(records), Retention()) == keys_of(records[2:])
