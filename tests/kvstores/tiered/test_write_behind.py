"""The queue before a slower tier: bounded, in order, emptied at the end; and what is let into it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import anyio
import pytest
from anyio.lowlevel import checkpoint

from deepinfra.core.kv import KVRecord, NamespaceFilter, Retention
from deepinfra.interfaces.given import InlineOffload
from deepinfra.kvstores import MemoryStore, SsdStore, TieredStore
from deepinfra.testing.clock import ManualClock
from deepinfra.testing.faults import BrokenStore
from deepinfra.testing.kvrecords import NBYTES, chain, keys_of


async def saved_below(s: Any, records: list[KVRecord]) -> int:
    await s.store.save(records)
    await s.store.flush()
    held: int = await s.held_below(records)
    return held


async def test_save_does_not_wait_for_a_slower_tier(stack: Any) -> None:
    async with stack(timeout_s=60.0, drain_s=0.0) as s:
        s.below.mode = "hangs"
        records = chain(*range(8))
        with anyio.fail_after(30):
            await s.store.save(records)
        assert len((await s.ram.match(keys_of(records))).refs) == 4
        assert s.store.stats().tiers[1].waiting == 4


async def test_the_data_of_a_save_may_be_reused_at_once(stack: Any) -> None:
    async with stack() as s:
        (record,) = chain(1, 2)
        buffer = bytearray(record.data)
        await s.store.save(
            [KVRecord(**{f: getattr(record, f) for f in record.__slots__} | {"data": memoryview(buffer)})]
        )
        buffer[:] = bytes(NBYTES)
        await s.store.flush()
        into = bytearray(NBYTES)
        await s.below.inner.load([record.ref], [memoryview(into)])
        assert into == record.data


async def test_what_died_below_is_written_again_when_it_is_saved_again(stack: Any) -> None:
    async with stack() as s:
        records = chain(*range(8), retention=Retention(ttl_s=1_000.0))
        assert await saved_below(s, records) == 4
        s.clock.advance(1_100.0)
        assert await s.held_below(records) == 0
        assert await saved_below(s, records) == 4


@pytest.mark.parametrize("meanwhile", [True, False])
async def test_what_is_saved_again_after_it_died_while_it_was_written_gets_a_new_life(
    stack: Any, meanwhile: bool
) -> None:
    async with stack() as s:
        records = chain(1, 2, retention=Retention(ttl_s=1_000.0))
        save, begun, go = s.below.save, anyio.Event(), anyio.Event()

        async def slow(given: list[KVRecord]) -> None:
            s.below.save = save
            await save(given)
            begun.set()
            await go.wait()

        s.below.save = slow
        await s.store.save(records)
        await begun.wait()
        s.clock.advance(1_100.0)
        if meanwhile:
            await s.store.save(records)
        go.set()
        await s.store.flush()
        assert await saved_below(s, records) == 1


@pytest.mark.parametrize("cancelled", [False, True])
async def test_what_waits_is_written_on_leaving_even_if_everything_is_cancelled(stack: Any, cancelled: bool) -> None:
    written: list[KVRecord] = []

    async def slow(records: list[KVRecord]) -> None:
        for _ in range(50):
            await checkpoint()
        written.extend(records)

    with anyio.CancelScope() as scope:
        async with stack() as s:
            s.below.save = slow
            await s.store.save(chain(*range(8)))
            assert written == []
            if cancelled:
                scope.cancel()
                await checkpoint()
    assert len(written) == 4


async def test_leaving_waits_no_longer_than_its_deadline(stack: Any) -> None:
    with anyio.fail_after(30):
        async with stack(timeout_s=60.0, drain_s=0.0) as s:
            s.below.mode = "hangs"
            await s.store.save(chain(*range(8)))


async def test_a_full_queue_drops_tails_and_never_a_parent_before_its_child(stack: Any) -> None:
    async with stack(queue_nbytes=3 * NBYTES) as s:
        records = chain(*range(16))
        await s.store.save(records)
        assert s.store.stats().tiers[1].dropped == 5
        await s.store.flush()
        assert await s.held_below(records) == 3
        await s.store.save(records[4:])  # room now, but their parent was dropped
        await s.store.flush()
        assert (await s.held_below(records), s.below.inner.stats().records) == (3, 3)
        await s.store.save(records[3:6])  # from the one that was dropped on, they are taken
        await s.store.flush()
        assert await s.held_below(records) == 6


async def test_a_batch_that_fails_takes_what_continues_it_along(stack: Any) -> None:
    async with stack() as s:
        s.below.mode = "raises"
        records = chain(*range(1_200))
        await s.store.save(records)
        with anyio.fail_after(30):
            while s.store.stats().tiers[1].waiting:
                await checkpoint()
        assert s.store.stats().tiers[1].dropped == 600
        assert s.below.calls["save"] == 1


@pytest.mark.parametrize(
    ("write", "first", "second"),
    [
        ("all", 4, 4),
        ("second-touch", 0, 4),
        ("prefix-depth:3", 3, 3),
        ({"agent": "second-touch"}, 4, 4),
        ({"default": "second-touch"}, 0, 4),
    ],
)
async def test_a_filter_lets_in_what_it_says(stack: Any, write: Any, first: int, second: int) -> None:
    async with stack(write=write) as s:
        records = chain(*range(8))
        assert await saved_below(s, records) == first
        assert s.store.stats().tiers[1].filtered == 4 - first
        assert await saved_below(s, records) == second


async def test_a_filter_goes_by_class(stack: Any) -> None:
    async with stack(write={"default": "second-touch", "chat": "prefix-depth:1"}) as s:
        assert await saved_below(s, chain(1, 2, 3, 4, retention=Retention(traffic="agent"))) == 2
        assert await saved_below(s, chain(5, 6, 7, 8, retention=Retention(traffic="chat"))) == 1
        assert await saved_below(s, chain(8, 7, 6, 5)) == 0


async def test_what_continues_a_filtered_block_is_filtered(stack: Any) -> None:
    async with stack(write="second-touch") as s:
        records = chain(*range(8))
        await s.store.save(records[2:])
        await s.store.save(records)
        await s.store.flush()
        assert s.below.inner.stats().records == 0
        assert await saved_below(s, records) == 4


async def test_what_waits_is_not_written_once_another_process_had_it_forgotten(tmp_path: Path) -> None:
    """Nor is the rest of what waits: the store tells that something was forgotten, not what."""
    clock = ManualClock()

    def disk() -> SsdStore:
        return SsdStore(tmp_path, capacity_nbytes=1 << 20, min_free_nbytes=0, fsync="none")

    broken = BrokenStore(disk())
    gone, late = chain(*range(8), tenant="gone"), chain(*range(8), tenant="gone", model="late")
    store, other = TieredStore([MemoryStore(), broken], drain_s=0.0), disk()
    for each in (store, other):
        each.give(clock, InlineOffload())
    async with store, other:
        save, go = broken.save, anyio.Event()

        async def slow(given: Sequence[KVRecord]) -> None:
            broken.save = save  # type: ignore[method-assign]
            await go.wait()
            await save(given)

        broken.save = slow  # type: ignore[method-assign]
        await store.save(chain(50, 51))
        await anyio.wait_all_tasks_blocked()
        await store.save(gone)
        await other.forget(NamespaceFilter(tenant="gone"))
        clock.advance(2.0)
        await broken.inner.match(keys_of(gone))  # it hears
        go.set()
        await store.flush()
        clock.advance(2.0)
        assert len((await other.match(keys_of(gone))).refs) == 0
        assert store.stats().tiers[1].dropped == len(gone)
        await store.save(late)
        await store.flush()
        clock.advance(2.0)
        assert len((await other.match(keys_of(late))).refs) == len(late), "what came later is written"


async def test_what_waits_outlives_the_forgetting_of_others_by_this_store(stack: Any) -> None:
    async with stack(timeout_s=60.0) as s:
        go, save = anyio.Event(), s.below.save

        async def slow(given: list[KVRecord]) -> None:
            s.below.save = save
            await go.wait()
            await save(given)

        s.below.save = slow
        kept, gone = chain(*range(8), tenant="kept"), chain(*range(8), tenant="gone")
        await s.store.save(chain(1, 2, tenant="first"))
        await anyio.wait_all_tasks_blocked()
        await s.store.save([*kept, *gone])
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(s.store.forget, NamespaceFilter(tenant="gone"))
            await anyio.wait_all_tasks_blocked()
            go.set()
        await s.store.flush()
        assert await s.held_below(kept) == len(kept)
        assert await s.held_below(gone) == 0
