"""Reading over tiers, and what reaches which."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from deepinfra.core.kv import NamespaceFilter, Retention
from deepinfra.errors import ConfigError
from deepinfra.kvstores import MemoryStore, SsdStore, Tier, TieredStore
from deepinfra.testing.kvrecords import NBYTES, chain, content, keys_of, load


async def test_a_run_goes_to_the_next_tier_with_ages_of_each(stack: Any) -> None:
    async with stack() as s:
        records = chain(*range(8))
        await s.below.save(records)
        s.clock.advance(50.0)
        await s.ram.save(records[:1])
        s.clock.advance(7.0)
        match = await s.store.match(keys_of(records))
        assert [(hit.count, hit.age_s) for hit in match.tiers] == [(1, 7.0), (3, 57.0)]
        assert await load(s.store, match.refs) == [content(ref) for ref in match.refs]


async def test_a_run_goes_back_to_a_faster_tier(stack: Any) -> None:
    async with stack() as s:
        records = chain(*range(8))
        short = chain(*range(8), retention=Retention(ttl_s=5.0))
        await s.ram.save([records[0], short[1], *records[2:]])
        await s.below.save(records[:3])
        s.clock.advance(6.0)
        match = await s.store.match(keys_of(records))
        assert [hit.count for hit in match.tiers] == [1, 2, 1]
        assert await load(s.store, match.refs) == [content(ref) for ref in match.refs]


async def test_what_a_faster_tier_lost_since_the_match_comes_from_the_next(stack: Any) -> None:
    async with stack() as s:
        records = chain(*range(8))
        await s.store.save(records)
        await s.store.flush()
        match = await s.store.match(keys_of(records))
        await s.ram.forget(NamespaceFilter())
        assert await load(s.store, match.refs) == [content(ref) for ref in match.refs]


async def test_a_snapshot_below_a_block_in_ram_is_found(stack: Any) -> None:
    async with stack() as s:
        blocks, snapshots = chain(*range(8)), chain(*range(8), kind="snapshot")
        await s.store.save([*blocks, *snapshots[2:3]])
        await s.store.flush()
        await s.ram.forget(NamespaceFilter())
        await s.ram.save(blocks)
        match = await s.store.match(keys_of(blocks))
        assert (len(match.refs), match.snapshots, len(match.tiers)) == (4, (2,), 1)


async def test_a_match_names_the_reason_of_the_slowest_tier_that_has_one(stack: Any) -> None:
    async with stack() as s:
        (record,) = chain(1, 2, retention=Retention(ttl_s=5.0))
        await s.below.save([record])
        s.clock.advance(6.0)
        assert (await s.store.match([record.ref.key])).missed == "expired"


async def test_what_must_not_be_on_a_disk_is_given_to_no_durable_tier(stack: Any) -> None:
    async with stack() as s:
        records = chain(1, 2, 3, 4, retention=Retention(disk=False))
        await s.store.save(records)
        await s.store.flush()
        assert (s.below.calls["save"], len((await s.store.match(keys_of(records))).refs)) == (0, 2)


async def test_a_tier_in_ram_is_given_what_must_not_be_on_a_disk(stack: Any) -> None:
    async with stack(durable=False) as s:
        records = chain(1, 2, 3, 4, retention=Retention(disk=False))
        await s.store.save(records)
        await s.store.flush()
        assert await s.held_below(records) == 2


async def test_what_a_slower_tier_delivered_is_not_written_to_it_again(stack: Any) -> None:
    async with stack() as s:
        records = chain(*range(8))
        await s.below.inner.save(records)
        await load(s.store, [record.ref for record in records])
        await s.store.save(records)
        await s.store.flush()
        assert (s.below.calls["save"], s.ram.stats().records) == (0, 4)


async def test_use_in_ram_lets_a_record_below_live_on(stack: Any) -> None:
    async with stack() as s:
        records = chain(*range(8), retention=Retention(ttl_s=100.0))
        await s.store.save(records)
        await s.store.flush()
        for _ in range(5):
            s.clock.advance(60.0)
            await load(s.store, [record.ref for record in records])
            await s.store.flush()
        await s.ram.forget(NamespaceFilter())
        assert len((await s.store.match(keys_of(records))).refs) == 4


async def test_use_on_the_device_lets_records_live_on_in_every_tier(stack: Any) -> None:
    async with stack() as s:
        records = chain(*range(8), retention=Retention(ttl_s=100.0))
        await s.store.save(records)
        await s.store.flush()
        s.clock.advance(60.0)
        await s.store.touch(keys_of(records), Retention(ttl_s=100.0))
        await s.store.flush()
        s.clock.advance(60.0)
        assert await s.held_below(records) == len((await s.ram.match(keys_of(records))).refs) == 4


async def test_time_spent_waiting_is_taken_off_a_life(stack: Any) -> None:
    async with stack() as s:
        s.below.mode = "raises"
        await s.store.match(keys_of(chain(9, 9)))
        records = chain(*range(8), retention=Retention(ttl_s=100.0))
        await s.store.save(records)
        s.clock.advance(60.0)
        s.below.mode = "works"
        await s.store.flush()
        assert await s.held_below(records) == 4
        s.clock.advance(41.0)
        assert await s.held_below(records) == 0


async def test_forget_reaches_every_tier_and_what_waits(stack: Any) -> None:
    async with stack() as s:
        mine, others = chain(*range(8), tenant="a"), chain(*range(8), tenant="b")
        await s.store.save([*mine, *others])
        forgotten = await s.store.forget(NamespaceFilter(tenant="a"))
        assert (forgotten.records, forgotten.nbytes >= 4 * NBYTES) == (4, True)
        await s.store.flush()
        assert (await s.held_below(mine), await s.held_below(others)) == (0, 4)


async def test_no_byte_of_a_forgotten_tenant_is_on_any_disk_of_the_tiers(tmp_path: Path) -> None:
    mine, others = chain(*range(20), tenant="tenant-mine"), chain(*range(20), tenant="others")
    late = chain(*range(50, 60), tenant="tenant-mine")
    disks = [SsdStore(tmp_path / name, min_free_nbytes=0) for name in ("fast", "slow")]
    async with TieredStore([MemoryStore(), *disks]) as store:
        await store.save([record for pair in zip(mine, others, strict=True) for record in pair])
        await store.flush()
        await store.save(late)  # waits for both disks, or is on its way
        await store.forget(NamespaceFilter(tenant="tenant-mine"))
        await store.flush()
        assert await load(store, [mine[0].ref]) == await load(store, [late[0].ref]) == []
        assert await load(store, [r.ref for r in others]) == [content(r.ref) for r in others]
        for name in ("fast", "slow"):
            files = b"".join(path.read_bytes() for path in (tmp_path / name).iterdir())
            assert content(others[0].ref) in files
            assert b"tenant-mine" not in files
            for record in mine + late:
                data = content(record.ref)
                assert not any(data[at : at + 32] in files for at in range(0, len(data) - 31, 32)), "64 bytes are left"


async def test_accounts_tell_of_each_tier(stack: Any) -> None:
    async with stack(ram_nbytes=9_000) as s:
        records = chain(*range(8))
        await s.store.save(records)
        await s.store.flush()
        stats = s.store.stats()
        assert [(tier.name, tier.held.records, tier.up) for tier in stats.tiers] == [
            ("ram", 2, True),
            ("ram-2", 4, True),
        ]
        assert (stats.records, stats.nbytes) == (4, sum(tier.held.nbytes for tier in stats.tiers))
        assert stats.by_tier == {tier.name: tier.held.nbytes for tier in stats.tiers}


@pytest.mark.parametrize(
    ("tiers", "message"),
    [
        (lambda one: [], "one or more"),
        (lambda one: [one, one], "each of them once"),
        (lambda one: [Tier(one, "second-touch"), MemoryStore()], "tiers.0.write: the first tier takes every record"),
        (lambda one: [one, Tier(MemoryStore(), {"chat": "depth:3"})], "tiers.1.write: 'depth:3' is none of"),
    ],
)
def test_tiers_that_make_no_sense_are_refused(tiers: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TieredStore(tiers(MemoryStore()))


async def test_what_leaves_the_store_is_what_was_raised_inside() -> None:
    with pytest.raises(KeyError):
        async with TieredStore([MemoryStore(), MemoryStore()]):
            raise KeyError
