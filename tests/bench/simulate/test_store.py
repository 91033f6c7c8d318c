"""Modelled stores: what they hold, how long they take, and what a configuration makes of them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import TypeVar

import anyio
import pytest

from deepinfra.bench.simulate.clock import ModelledOffload, VirtualClock, run_virtually
from deepinfra.bench.simulate.store import ModelledStore, TierSpeed, modelled
from deepinfra.config import ServerSettings, resolve
from deepinfra.core.ids import BlockKey
from deepinfra.core.kv import KVRecord, RecordRef, Retention
from deepinfra.errors import ConfigError
from deepinfra.executors.simulated import SimulatedExecutor
from deepinfra.interfaces.kvstore import KVStore
from deepinfra.registry import load_plugins

T = TypeVar("T")

BLOCK = 10**9
RECORD = 136


def store(blocks: int, speed: TierSpeed | None = None, tier: str = "ram") -> ModelledStore:
    """Room for so many blocks of a gigabyte, and a little more."""
    return ModelledStore(
        tier,
        block_nbytes=BLOCK,
        block_tokens=64,
        record_nbytes=RECORD,
        capacity_nbytes=blocks * BLOCK + BLOCK // 2,
        speed=speed,
    )


def virtually(one: KVStore, main: Callable[[KVStore, VirtualClock], Awaitable[T]]) -> T:
    clock = VirtualClock()
    one.give(clock, ModelledOffload())

    async def run() -> T:
        async with one:
            return await main(one, clock)

    return run_virtually(run, clock)


def key(number: int) -> BlockKey:
    return BlockKey(number.to_bytes(32, "big"))


def records(*numbers: int, traffic: str = "default") -> list[KVRecord]:
    """First blocks of so many prompts."""
    return [
        KVRecord(
            ref=RecordRef(key(number), "block", RECORD),
            parent=key(0),
            namespace=key(0),
            tenant="public",
            model="simulated",
            tokens=(0,) * 64,
            retention=Retention(traffic=traffic),  # type: ignore[arg-type]
            data=memoryview(bytes(RECORD)),
        )
        for number in numbers
    ]


async def held(one: KVStore, *numbers: int) -> list[int]:
    return [number for number in numbers if (await one.match([key(number)])).refs]


def test_as_many_blocks_are_held_as_the_model_s_own_would_be() -> None:
    async def main(one: KVStore, clock: VirtualClock) -> tuple[list[int], int, int]:
        await one.save(records(*range(1, 8)))
        stats = one.stats()
        return await held(one, *range(1, 8)), stats.records, stats.nbytes

    left, count, nbytes = virtually(store(4), main)
    assert len(left) == count == 4
    assert 4 * BLOCK < nbytes < 4.1 * BLOCK


def test_what_is_moved_shares_the_tier_s_bandwidth() -> None:
    async def main(one: KVStore, clock: VirtualClock) -> list[float]:
        await one.save(records(1, 2, 3, 4))
        assert clock.now() == pytest.approx(4 * 0.5 + 0.125)
        await one.save(records(1, 2))  # known
        began, times = clock.now(), []

        async def load(*numbers: int) -> None:
            refs = [RecordRef(key(number), "block", RECORD) for number in numbers]
            loaded = await one.load(refs, [memoryview(bytearray(RECORD)) for _ in refs])
            assert loaded.count == len(refs)
            times.append(clock.now() - began)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(load, 1, 2)
            tasks.start_soon(load, 3)
        return times

    assert virtually(store(9, TierSpeed(BLOCK, 2 * BLOCK, 0.125)), main) == pytest.approx([2.125, 3.125])


def part_of(written: dict[str, object]) -> Callable[[SimulatedExecutor], KVStore]:
    settings = ServerSettings.model_validate(
        {"model": "x", "pool": {"store": written, "executor": {"use": "simulated"}, "scheduler": {"use": "fcfs"}}}
    )
    pool = resolve(settings, load_plugins()).pool
    assert pool is not None
    assert pool.store is not None
    return modelled(pool.store)


def executor() -> SimulatedExecutor:
    return SimulatedExecutor(block_nbytes=BLOCK, num_slots=4)


def test_a_configured_ssd_keeps_its_size_and_lifetimes(tmp_path: object) -> None:
    make = part_of(
        {"use": "ssd", "path": str(tmp_path), "capacity_nbytes": 4 * BLOCK + BLOCK // 2, "chat_ttl_s": 100.0}
    )

    async def main(one: KVStore, clock: VirtualClock) -> None:
        assert one.durable
        await one.save(records(1, 2, 3, traffic="chat"))
        await one.save(records(4, 5))
        assert await held(one, 1, 2, 3, 4, 5) == [2, 3, 4, 5]  # the one used longest ago went
        await anyio.sleep(101.0)
        assert await held(one, 2, 3, 4, 5) == [4, 5]
        assert [hit.tier for hit in (await one.match([key(4)])).tiers] == ["ssd"]

    virtually(make(executor()), main)


def test_configured_tiers_stay_tiers(tmp_path: object) -> None:
    tiers = [
        {"use": "memory", "capacity_nbytes": 2 * BLOCK + BLOCK // 2},
        {"use": "ssd", "path": str(tmp_path), "capacity_nbytes": 9 * BLOCK},
    ]
    make = part_of({"use": "tiered", "tiers": tiers, "queue_nbytes": 100 * BLOCK})

    async def main(one: KVStore, clock: VirtualClock) -> None:
        for number in range(1, 6):
            await one.save(records(number))
            await anyio.sleep(10.0)
        found = {number: (await one.match([key(number)])).tiers[0].tier for number in range(1, 6)}
        assert sorted(found.values()) == ["ram", "ram", "ssd", "ssd", "ssd"]
        refs = [RecordRef(key(1), "block", RECORD)]
        began = clock.now()
        assert (await one.load(refs, [memoryview(bytearray(RECORD))])).count == 1
        assert clock.now() - began == pytest.approx(BLOCK / 6.5e9 + 1e-4)
        assert all(tier.up for tier in one.stats().tiers)

    virtually(make(executor()), main)


def test_a_store_of_another_kind_is_refused() -> None:
    settings = ServerSettings.model_validate(
        {"model": "x", "pool": {"store": {"use": "memory"}, "executor": {"use": "simulated"}}}
    )
    pool = resolve(settings, load_plugins()).pool
    assert pool is not None
    assert pool.store is not None
    other = replace(pool.store, entry=replace(pool.store.entry, name="redis"))
    with pytest.raises(ConfigError, match="'redis' cannot be simulated"):
        modelled(other)
