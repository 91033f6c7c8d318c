"""MemoryStore and its tenants: quotas, write rates, and what continues a key."""

from __future__ import annotations

import random

from deepinfra.core.kv import KVRecord, NamespaceFilter
from deepinfra.interfaces.given import InlineOffload
from deepinfra.kvstores import MemoryStore
from deepinfra.kvstores.leaves import cost
from deepinfra.testing.clock import ManualClock
from deepinfra.testing.kvrecords import chain, keys_of

ONE = cost(100, 2)


def blocks(*tokens: int, tenant: str) -> list[KVRecord]:
    return chain(*tokens, tenant=tenant, nbytes=100)


async def found(store: MemoryStore, records: list[KVRecord]) -> int:
    return len((await store.match(keys_of(records))).refs)


async def test_over_its_quota_a_tenant_loses_its_own_least_and_others_nothing() -> None:
    async with MemoryStore(quotas={"a": 3 * ONE}) as store:
        others = blocks(*range(20), tenant="b")
        first, second = blocks(1, 1, 2, 2, tenant="a"), blocks(3, 3, 4, 4, tenant="a")
        await store.save(others)
        await store.save(first)
        await store.save(second)
        assert await found(store, first) == 1, "the tail went"
        assert await found(store, second) == 2
        assert await found(store, others) == 10
        assert store.stats().evicted == 1


async def test_a_tenant_at_its_quota_keeps_its_prefix_and_drops_the_tail() -> None:
    async with MemoryStore(tenant_quota_nbytes=3 * ONE) as store:
        long = blocks(*range(10), tenant="a")
        await store.save(long)
        assert await found(store, long) == 3
        assert store.stats().dropped == 2


async def test_a_record_larger_than_its_quota_costs_the_tenant_nothing() -> None:
    async with MemoryStore(tenant_quota_nbytes=3 * ONE) as store:
        small = blocks(1, 2, tenant="a")
        await store.save([*small, *chain(3, 4, tenant="a", nbytes=4 * ONE)])
        assert await found(store, small) == 1
        assert store.stats().evicted == 0


async def test_the_cap_takes_from_whoever_ranks_lowest_quota_or_not() -> None:
    async with MemoryStore(capacity_nbytes=3 * ONE, quotas={"a": 2 * ONE}, policy="lru") as store:
        limited, free = blocks(1, 2, tenant="a"), blocks(3, 4, tenant="b")
        await store.save(limited)
        await store.save(free)
        await store.save(blocks(5, 6, 7, 8, tenant="b"))
        assert (await found(store, limited), await found(store, free)) == (0, 1)


async def test_whatever_tenants_save_no_quota_is_passed_and_the_accounts_agree() -> None:
    rng = random.Random(4)
    quotas = {"a": 5 * ONE, "b": 9 * ONE, "free": 0}
    async with MemoryStore(capacity_nbytes=30 * ONE, quotas=quotas, tenant_quota_nbytes=3 * ONE) as store:
        for _ in range(600):
            tenant = rng.choice(["a", "b", "c", "d", "free"])
            await store.save(blocks(*(rng.randrange(3) for _ in range(2 * rng.randint(1, 6))), tenant=tenant))
            if rng.random() < 0.02:
                await store.forget(NamespaceFilter(tenant=tenant))
            held: dict[str, int] = {}
            for record in store._held.values():
                held[record.tenant] = held.get(record.tenant, 0) + record.nbytes
            assert all(not quotas.get(t, 3 * ONE) or n <= quotas.get(t, 3 * ONE) for t, n in held.items())
            assert sum(held.values()) == store.stats().nbytes <= 30 * ONE
            assert held == store._nbytes_of


async def test_a_tenant_that_writes_too_fast_is_cut_off_at_a_prefix_and_may_write_again() -> None:
    clock = ManualClock()
    store = MemoryStore(tenant_write_nbytes_per_s=100)
    store.give(clock, InlineOffload())
    async with store:
        flood = blocks(*range(40), tenant="a")
        await store.save(flood)
        assert await found(store, flood) == 10, "ten seconds of it at once"
        assert store.stats().dropped == 10
        assert store.stats().saved_nbytes == 1_000
        calm = blocks(1, 2, tenant="b")
        await store.save(calm)
        assert await found(store, calm) == 1
        clock.advance(5)
        await store.save(flood)
        assert await found(store, flood) == 15


async def test_successors_are_the_blocks_that_continue_a_key() -> None:
    async with MemoryStore() as store:
        left, right = blocks(1, 2, 3, 4, tenant="a"), blocks(1, 2, 5, 6, tenant="a")
        await store.save([*left, *right, *chain(1, 2, kind="snapshot", tenant="a", nbytes=100)])
        await store.save(blocks(9, 9, tenant="b"))
        assert list(await store.successors(left[0].parent)) == [(1, 2)]
        assert sorted(await store.successors(left[0].ref.key)) == [(3, 4), (5, 6)]
        assert len(await store.successors(left[0].ref.key, most=1)) == 1
        assert list(await store.successors(left[1].ref.key)) == []
