from __future__ import annotations

import logging
import random
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, Self

import pytest
from anyio.lowlevel import checkpoint

from deepinfra.core.events import Finished
from deepinfra.core.ids import SeqId
from deepinfra.core.kv import KVGroup, KVLayout, KVRecord, KVStats, Loaded, RecordRef, Retention, root_key
from deepinfra.core.request import SeqSpec
from deepinfra.engine import Engine, Pool
from deepinfra.engine.blocks import BlockPool
from deepinfra.engine.handoff import Handoff, export
from deepinfra.engine.live import Live
from deepinfra.engine.snapshots import Snapshots
from deepinfra.engine.sources import namespace_of
from deepinfra.engine.staging import Slots
from deepinfra.engine.stats import StepTally
from deepinfra.engine.stream import Signal
from deepinfra.engine.windows import window_plan
from deepinfra.errors import ExecutorLost, UnsupportedCombination
from deepinfra.executors.toy import ToyExecutor, toy_cell, toy_next
from deepinfra.executors.toy_windows import toy_window
from deepinfra.interfaces.given import InlineOffload
from deepinfra.interfaces.kvstore import KVStore
from deepinfra.kvstores.memory import MemoryStore
from deepinfra.schedulers.fcfs import Fcfs
from deepinfra.testing.asking import ask, end_of, events_of, tokens_of
from deepinfra.testing.engine import Ask, reference
from deepinfra.testing.tiny import TinyRecipe

WINDOWS = (4, 4, 4)
"""Blocks of 2 and three windows of 4: exact replay is 4 + 2*3 = 10 rows, bounded 4."""

PROMPT = tuple(random.Random(3).randrange(200) for _ in range(41))


def pool(
    store: KVStore | None = None, *, windows: tuple[int, ...] = WINDOWS, max_step_tokens: int = 16, **settings: Any
) -> Pool:
    executor = ToyExecutor(num_blocks=64, block_size=2, max_step_tokens=max_step_tokens, max_seqs=8, windows=windows)
    return Pool(Fcfs(), executor, store=store, **settings)


def computed(of: Pool) -> int:
    assert isinstance(of.executor, ToyExecutor)
    return of.executor.computed_tokens


def expected(prompt: Sequence[int], new: int) -> list[int]:
    return reference(Ask(tuple(prompt), new), 0, WINDOWS)


class Kept(MemoryStore):
    """A store that is there again when it is entered again, and notes what it is given."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.given: list[tuple[RecordRef, Retention]] = []
        self.loaded: list[RecordRef] = []

    @asynccontextmanager
    async def __asynccontextmanager__(self) -> AsyncGenerator[Self]:
        yield self

    async def save(self, records: Sequence[KVRecord]) -> None:
        self.given += [(record.ref, record.retention) for record in records]
        await super().save(records)

    async def load(self, refs: Sequence[RecordRef], into: Sequence[memoryview]) -> Loaded:
        self.loaded += refs
        return await super().load(refs, into)

    def snapshots(self) -> list[Retention]:
        return [retention for ref, retention in self.given if ref.kind == "snapshot"]


async def turn(one: Pool, prompt: Sequence[int], new: int = 6, **fields: Any) -> tuple[list[int], int]:
    """Ask a fresh engine around a pool, and say how many rows that took."""
    before = computed(one)
    async with Engine(TinyRecipe(), one) as engine:
        events = await events_of(engine, ask(prompt, new, **fields))
        await one.settle()
    return tokens_of(events), computed(one) - before


@pytest.mark.parametrize("hit", [2, 4, 6, 10, 12, 14, 40])
async def test_exact_replay_gives_the_text_whatever_the_hit(hit: int) -> None:
    one = pool()
    async with Engine(TinyRecipe(), one) as engine:
        await events_of(engine, ask(PROMPT[:hit], 1))
        for end in (hit, hit + 1, 41):
            events = await events_of(engine, ask(PROMPT[:end], 6))
            assert tokens_of(events) == expected(PROMPT[:end], 6)


async def test_behind_blocks_without_a_snapshot_only_the_replayed_rows_are_computed() -> None:
    one = pool()
    async with Engine(TinyRecipe(), one) as engine:
        await events_of(engine, ask(PROMPT, 1))
        before = computed(one)
        events = await events_of(engine, ask(PROMPT, 1))
        stats = one.stats()
    assert computed(one) - before == 10 + 1
    assert end_of(events).usage.cached.device == 40 - 10
    assert stats.rows_replayed == 10
    assert stats.hits_too_short == 0


async def test_a_hit_that_replay_eats_up_is_counted_and_keeps_its_blocks() -> None:
    one = pool()
    async with Engine(TinyRecipe(), one) as engine:
        await events_of(engine, ask(PROMPT[:10], 1))
        events = await events_of(engine, ask(PROMPT, 1))
        stats = one.stats()
    assert tokens_of(events) == expected(PROMPT, 1)
    assert end_of(events).usage.cached.total == 0
    assert stats.hits_too_short == 1
    assert stats.blocks_cached == 20  # the first five were not computed into others


async def test_the_next_turn_begins_behind_the_snapshot_of_the_last_output() -> None:
    store = Kept()
    first, _ = await turn(pool(store), PROMPT, 8)
    other = pool(store)
    text, rows = await turn(other, (*PROMPT, *first, 7, 8))
    assert text == expected((*PROMPT, *first, 7, 8), 6)
    # 41 + 8 tokens, the last of which had no KV: 48 positions; three tokens are new, five more are generated.
    assert rows == 3 + 5
    assert other.stats().snapshots_restored == 1


async def test_the_same_prompt_again_begins_behind_the_snapshot_of_its_end() -> None:
    store = Kept()
    await turn(pool(store), PROMPT[:40], 1)
    other = pool(store)
    text, rows = await turn(other, PROMPT[:40], 1)
    assert text == expected(PROMPT[:40], 1)
    assert rows == 2  # the prompt's last block: a snapshot at its very end would leave no row to sample from


async def test_without_snapshots_a_restarted_engine_replays() -> None:
    store = Kept()
    await turn(pool(store, snapshots="off"), PROMPT, 1)
    other = pool(store, snapshots="off")
    text, rows = await turn(other, PROMPT, 1)
    assert text == expected(PROMPT, 1)
    assert rows == 10 + 1
    assert not store.snapshots()
    assert other.stats().snapshots_taken == 0


async def test_snapshots_in_ram_are_not_for_disks_and_others_are_as_their_blocks() -> None:
    for mode, disk in (("ram", False), ("disk", True)):
        store = Kept()
        await turn(pool(store, snapshots=mode), PROMPT, 8)
        assert store.snapshots() == [Retention(disk=disk)] * 2
        assert {retention.disk for ref, retention in store.given if ref.kind == "block"} == {True}


async def test_a_sequence_that_is_kept_nowhere_leaves_no_snapshot() -> None:
    store = Kept()
    await turn(pool(store), PROMPT, 8, retention=Retention(traffic="none"))
    assert store.given == []


async def test_a_snapshot_is_saved_behind_its_block() -> None:
    store = Kept()
    await turn(pool(store), PROMPT, 8)
    order = [ref for ref, _ in store.given]
    for ref in order:
        if ref.kind == "snapshot":
            assert any(other.key == ref.key for other in order[: order.index(ref)])


async def test_a_damaged_snapshot_costs_rows_and_no_token() -> None:
    store = Kept()
    await turn(pool(store), PROMPT, 1)
    for held in store._held.values():
        if held.id.endswith(b"snapshot"):
            held.data = held.data[:-1] + bytes((held.data[-1] ^ 1,))
    other = pool(store)
    async with Engine(TinyRecipe(), other) as engine:
        events = await events_of(engine, ask(PROMPT, 6))
        stats = other.stats()
    assert tokens_of(events) == expected(PROMPT, 6)
    assert (stats.records_damaged, stats.snapshots_restored, stats.rows_replayed) == (1, 0, 10)


async def test_a_damaged_snapshot_is_taken_again_at_once() -> None:
    store = Kept()
    await turn(pool(store), PROMPT, 1)
    damaged = [held for held in store._held.values() if held.id.endswith(b"snapshot")]
    for held in damaged:
        held.data = held.data[:-1] + bytes((held.data[-1] ^ 1,))
    taken = len(store.snapshots())
    await turn(pool(store), PROMPT, 1)
    assert len(store.snapshots()) == taken + len(damaged) > taken


async def test_only_what_is_worth_it_is_loaded() -> None:
    store = Kept()
    await turn(pool(store, snapshots="off"), PROMPT[:10], 1)
    await turn(pool(store), PROMPT[:10], 1)
    assert store.loaded == []


async def test_a_request_that_leaves_within_its_replay_leaves_no_snapshot() -> None:
    store = Kept()
    await turn(pool(store, snapshots="off"), PROMPT, 1)
    one = pool(store, max_step_tokens=4)
    async with Engine(TinyRecipe(), one) as engine:
        async with engine.generate(ask(PROMPT, 6)):
            while computed(one) < 4:
                await checkpoint()
        await one.settle()
        assert 4 <= computed(one) < 10
        assert store.snapshots() == []


async def test_a_request_that_leaves_in_its_prompt_leaves_a_snapshot_of_what_is_computed() -> None:
    store = Kept()
    one = pool(store, max_step_tokens=4)
    async with Engine(TinyRecipe(), one) as engine:
        async with engine.generate(ask(PROMPT, 6)):
            while computed(one) < 20:
                await checkpoint()
        await one.settle()
        left = computed(one)
        events = await events_of(engine, ask(PROMPT, 6))
        assert one.stats().snapshots_restored == 1
    assert tokens_of(events) == expected(PROMPT, 6)
    assert computed(one) - left <= 41 - 16 + 5


# -- bounded ----------------------------------------------------------------------------------------


def bounded(prompt: Sequence[int], hit: int, new: int) -> list[int]:
    """The mask form of bounded replay: every row is computed, and sees nothing of windows below the replay's start."""
    start = window_plan(ToyExecutor(block_size=2, windows=WINDOWS).layout, "bounded").first_row(hit, len(prompt))
    line = list(prompt)
    for _ in range(new):
        seen = [toy_window(line[: i + 1], WINDOWS, floor=start if i >= hit else 0) for i in range(len(line))]
        cells = [toy_cell(line[: i + 1], window=window) for i, window in enumerate(seen)]
        last = toy_window(line, WINDOWS, floor=start)
        line.append(toy_next(b"".join((*cells, last)), 0.0, 260))
    return line[len(prompt) :]


@pytest.mark.parametrize("hit", [2, 4, 6, 12, 40])
async def test_bounded_replay_is_what_a_mask_over_all_rows_gives(hit: int) -> None:
    one = pool(replay="bounded")
    async with Engine(TinyRecipe(), one) as engine:
        await events_of(engine, ask(PROMPT[:hit], 1))
        events = await events_of(engine, ask(PROMPT, 6))
    assert tokens_of(events) == bounded(PROMPT, hit, 6)
    assert (tokens_of(events) == expected(PROMPT, 6)) == (hit <= 4)


async def test_bounded_replay_is_labelled_and_has_a_cache_of_its_own() -> None:
    store = Kept()
    await turn(pool(store), PROMPT, 1)
    one = pool(store, replay="bounded")
    async with Engine(TinyRecipe(), one) as engine:
        first = end_of(await events_of(engine, ask(PROMPT, 1))).usage.cached
        second = end_of(await events_of(engine, ask(PROMPT, 1))).usage.cached
    assert (first.total, first.approximate) == (0, False)
    assert (second.total, second.approximate) == (40 - 4, True)


async def test_an_answer_is_labelled_if_any_choice_of_it_is_an_approximation() -> None:
    async with Engine(TinyRecipe(), pool(replay="bounded")) as engine:
        async with engine.generate(ask(PROMPT, 6, n=2)) as stream:
            ends = [event async for event in stream if isinstance(event, Finished)]
    assert [end.usage.cached.approximate for end in ends if end.choice == 0] == [False]
    assert [end.usage.cached.approximate for end in ends if end.choice == 1] == [True]
    assert stream.usage.cached.approximate


async def test_what_goes_on_behind_bounded_replay_once_it_was_preempted_is_labelled() -> None:
    executor = ToyExecutor(num_blocks=32, block_size=2, max_step_tokens=16, max_seqs=8, windows=WINDOWS)
    prompts = [tuple(random.Random(seed).randrange(200) for _ in range(20)) for seed in range(2)]
    one = Pool(Fcfs(), executor, replay="bounded")
    async with (
        Engine(TinyRecipe(), one) as engine,
        engine.generate(ask(prompts[0], 16)) as older,
        engine.generate(ask(prompts[1], 40)) as younger,
    ):
        exact, approximate = [event async for event in older], [event async for event in younger]
    assert one.stats().preemptions > 0
    assert tokens_of(exact) == expected(prompts[0], 16)
    assert not end_of(exact).usage.cached.approximate
    assert tokens_of(approximate) != expected(prompts[1], 40), "it went on behind blocks that it found again"
    assert end_of(approximate).usage.cached.approximate


def test_the_replay_mode_is_in_the_namespace_where_there_are_windows() -> None:
    with_windows, without = ToyExecutor(windows=WINDOWS), ToyExecutor()
    assert namespace_of(with_windows, "r", "t", replay="bounded").numerics == "ordinary+bounded"
    assert namespace_of(with_windows, "r", "t").numerics == "ordinary"
    assert namespace_of(without, "r", "t", replay="bounded") == namespace_of(without, "r", "t")


# -- around -----------------------------------------------------------------------------------------


async def test_a_handoff_brings_windows_along() -> None:
    decode = pool()
    async with Engine(TinyRecipe(), prefill=[pool(name="prefill")], decode=[decode]) as engine:
        events = await events_of(engine, ask(PROMPT, 6))
    assert tokens_of(events) == expected(PROMPT, 6)
    assert computed(decode) == 1 + 1 + 4  # the prompt's last token, outside its blocks, and what was generated
    assert decode.stats().snapshots_restored == 1


async def test_a_handoff_that_lost_its_windows_is_replayed() -> None:
    class Losing(Pool):
        async def export(self, live: Live) -> Handoff:
            handoff = await super().export(live)
            return replace(handoff, snapshot=bytes(len(handoff.snapshot)))

    prefill = Losing(Fcfs(), ToyExecutor(block_size=2, max_step_tokens=16, windows=WINDOWS), name="prefill")
    decode = pool()
    async with Engine(TinyRecipe(), prefill=[prefill], decode=[decode]) as engine:
        events = await events_of(engine, ask(PROMPT, 6))
    assert tokens_of(events) == expected(PROMPT, 6)
    assert decode.stats().rows_replayed == 10


async def test_what_came_from_a_slower_tier_is_offered_to_the_store_again() -> None:
    class Tiers(Kept):
        promotes = True

        def stats(self) -> KVStats:
            return replace(super().stats(), by_tier={"fast": 0, "ram": 0})

    store = Tiers()
    await turn(pool(store, windows=()), PROMPT[:9], 1)
    store.given.clear()
    await turn(pool(store, windows=()), PROMPT[:9], 1)
    assert [ref.kind for ref, _ in store.given] == ["block"] * 4


async def test_what_came_from_the_fastest_tier_is_not_offered_again() -> None:
    store = Kept()
    store.promotes = True
    await turn(pool(store, windows=()), PROMPT[:9], 1)
    store.given.clear()
    await turn(pool(store, windows=()), PROMPT[:9], 1)
    assert store.given == []


async def test_the_smallest_reusable_prefix_is_logged_and_exported(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "deepinfra.engine")
    async with Engine(TinyRecipe(), one := pool()):
        assert one.stats().least_prefix == 12
    assert "the smallest reusable prefix has 12 tokens" in caplog.text


def test_state_groups_are_refused_by_name() -> None:
    class WithStates(ToyExecutor):
        @property
        def layout(self) -> KVLayout:
            state = KVGroup(name="mamba", kind="state", layers=(1,), nbytes_per_token=8)
            return replace(super().layout, groups=(*super().layout.groups, state))

    with pytest.raises(UnsupportedCombination, match="mamba"):
        Pool(Fcfs(), WithStates())


@pytest.mark.parametrize(
    ("windows", "mode", "rows", "least"),
    [
        ((), "exact", 0, 2),
        ((1,), "exact", 1, 2),
        ((4,), "exact", 4, 6),
        ((4, 7), "exact", 13, 14),
        ((4, 7), "bounded", 7, 8),
    ],
)
def test_rows_to_replay(windows: tuple[int, ...], mode: Any, rows: int, least: int) -> None:
    plan = window_plan(ToyExecutor(block_size=2, windows=windows).layout, mode)
    assert (plan.rows, plan.least_prefix) == (rows, least)


async def test_a_handoff_does_not_wait_for_slots_that_went_with_their_executor() -> None:
    executor = ToyExecutor(block_size=2, windows=WINDOWS)
    blocks, slots, signal = BlockPool(8, 2), Slots(1), Signal()
    snapshots = Snapshots(window_plan(executor.layout), slots, None, StepTally(), signal)
    live = Live(
        spec=SeqSpec(seq=SeqId(1), tokens=(1, 2, 3), prompt_len=3, max_tokens=1, seed=0),
        root=root_key(namespace_of(executor, "r", "t")),
        tokens=[1, 2, 3],
        table=blocks.take(1) or [],
        published=1,
    )
    blocks.publish(live.table[0], live.extend_keys(2)[0])
    slots.take(1)
    async with executor:
        snapshots.end()
        with pytest.raises(ExecutorLost):
            await export(live, blocks, slots, executor.memory, executor.layout, signal, snapshots, InlineOffload())
