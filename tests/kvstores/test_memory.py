"""MemoryStore: what the conformance kit does not ask of every store."""

from __future__ import annotations

import tracemalloc

import pytest

from deepinfra.core.ids import BlockKey
from deepinfra.core.kv import KVRecord, NamespaceFilter, RecordRef, Retention
from deepinfra.errors import ConfigError
from deepinfra.kvstores.leaves import RECORD_OVERHEAD_NBYTES
from deepinfra.kvstores.memory import MemoryStore

ROOT = BlockKey(b"r" * 32)
ONE = 100 + 2 * 4 + RECORD_OVERHEAD_NBYTES


def key(name: str) -> BlockKey:
    return BlockKey(name.encode().ljust(32, b"."))


def record(name: str, parent: str | None = None, kind: str = "block", nbytes: int = 100) -> KVRecord:
    return KVRecord(
        ref=RecordRef(key(name), kind, nbytes),  # type: ignore[arg-type]
        parent=ROOT if parent is None else key(parent),
        namespace=ROOT,
        tenant="public",
        model="m",
        tokens=(1, 2),
        retention=Retention(),
        data=memoryview(name.encode().ljust(nbytes, b"-")),
    )


def held(store: MemoryStore, *names: str) -> list[str]:
    return [name for name in names if key(name) in store._held]  # asking the store would be a use


async def test_a_prefix_saved_block_by_block_loses_its_tail_first() -> None:
    async with MemoryStore(capacity_nbytes=3 * ONE) as store:
        for name, parent in (("a", None), ("b", "a"), ("c", "b")):
            await store.save([record(name, parent)])
        await store.save([record("x")])
        assert held(store, "a", "b", "c", "x") == ["a", "b", "x"]


async def test_the_chain_used_last_survives() -> None:
    async with MemoryStore(capacity_nbytes=4 * ONE) as store:
        await store.save([record("a"), record("b", "a"), record("c"), record("d", "c")])
        await store.match([key("a"), key("b")])
        await store.save([record("x"), record("y", "x")])
        assert held(store, "a", "b", "c", "d", "x", "y") == ["a", "b", "x", "y"]


async def test_a_record_that_fits_only_in_place_of_its_own_prefix_is_dropped() -> None:
    async with MemoryStore(capacity_nbytes=2 * ONE) as store:
        await store.save([record("a"), record("b", "a"), record("c", "b")])
        assert held(store, "a", "b", "c") == ["a", "b"]
        assert store.stats().dropped == 1


async def test_a_snapshot_goes_before_its_block() -> None:
    async with MemoryStore(capacity_nbytes=2 * ONE) as store:
        await store.save([record("a"), record("a", None, "snapshot")])
        assert (await store.match([key("a")])).snapshots == (0,)
        await store.save([record("x")])
        match = await store.match([key("a")])
        assert len(match.refs) == 1
        assert match.snapshots == ()


async def test_an_evicted_key_is_reported_as_evicted() -> None:
    async with MemoryStore(capacity_nbytes=ONE) as store:
        await store.save([record("a")])
        await store.save([record("b")])
        assert (await store.match([key("a")])).missed == "evicted"
        assert (await store.match([key("z")])).missed == "absent"


async def test_a_record_larger_than_the_store_evicts_nothing() -> None:
    async with MemoryStore(capacity_nbytes=2 * ONE) as store:
        await store.save([record("a"), record("big", nbytes=10 * ONE)])
        assert held(store, "a", "big") == ["a"]


async def test_the_queue_of_leaves_stays_bounded_when_records_leave_by_other_doors() -> None:
    async with MemoryStore(capacity_nbytes=100 * ONE) as store:
        for i in range(2_000):
            await store.save([record(str(i))])
            await store.forget(NamespaceFilter())
        assert len(store._leaves) <= 64 + 2


def test_a_policy_that_there_is_not_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="policy = 'fifo' is not one of reuse, lru"):
        MemoryStore(policy="fifo")  # type: ignore[arg-type]


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_the_counted_overhead_covers_the_real_one() -> None:
    records = [record(str(i), str(i - 1), nbytes=0) for i in range(2_000)]
    async with MemoryStore() as store:
        tracemalloc.start()
        try:
            await store.save(records)
            grown, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert grown / len(records) <= RECORD_OVERHEAD_NBYTES
