"""Lives of days in virtual time: what is used stays, across restarts, at a bounded price in writing."""

from __future__ import annotations

from pathlib import Path

import pytest

from deepinfra.core.kv import KVRecord, NamespaceFilter, Retention
from deepinfra.interfaces.given import InlineOffload
from deepinfra.kvstores import SsdStore
from deepinfra.testing.clock import ManualClock
from deepinfra.testing.kvrecords import chain, content, keys_of, load
from deepinfra.testing.traces import agent_trace, replay

DAY_S = 86_400.0
HOUR_S = 3_600.0
DAYS = {"default": 1, "agent": 3, "chat": 7}


def make(folder: Path, clock: ManualClock, **settings: object) -> SsdStore:
    store = SsdStore(folder, **{"min_free_nbytes": 0, "capacity_nbytes": 1 << 26, "fsync": "none", **settings})  # type: ignore[arg-type]
    store.give(clock, InlineOffload())
    return store


async def held(store: SsdStore, records: list[KVRecord]) -> int:
    """How many leading records are matched and come back right; looking is no use."""
    return len((await store.match(keys_of(records))).refs)


@pytest.mark.parametrize(("traffic", "days"), DAYS.items())
async def test_what_nobody_uses_dies_with_its_class(tmp_path: Path, traffic: str, days: int) -> None:
    clock = ManualClock()
    records = chain(1, 2, 3, 4, retention=Retention(traffic=traffic))  # type: ignore[arg-type]
    async with make(tmp_path, clock) as store:
        await store.save(records)
        clock.advance(days * DAY_S - 1)
        assert await held(store, records) == 2, "a match is no use"
        clock.advance(1)
        assert await held(store, records) == 0


@pytest.mark.parametrize(("traffic", "days"), DAYS.items())
@pytest.mark.parametrize("use", ["touch", "load", "save"])
async def test_what_is_used_in_its_last_quarter_lives_on_across_restarts(
    tmp_path: Path, traffic: str, days: int, use: str
) -> None:
    clock = ManualClock()
    retention = Retention(traffic=traffic)  # type: ignore[arg-type]
    records = chain(*range(8), retention=retention)
    async with make(tmp_path, clock) as store:
        await store.save(records)
    for round_ in range(1, 4):
        clock.advance(0.8 * days * DAY_S)
        async with make(tmp_path, clock) as store:
            if use == "touch":
                await store.touch(keys_of(records), retention)
            elif use == "load":
                assert len(await load(store, [record.ref for record in records])) == 4
                await store.save([])
            else:
                await store.save(records)
            assert (store.stats().renewed, store.stats().saved) == (4, 0)
            assert store.stats().records == 4
        async with make(tmp_path, clock) as store:
            age_s = (await store.match(keys_of(records))).tiers[0].age_s
            assert age_s == pytest.approx(0.8 * days * DAY_S * round_), "age is kept"
            assert await load(store, [r.ref for r in records]) == [content(r.ref) for r in records]
    clock.advance(days * DAY_S)
    async with make(tmp_path, clock) as store:
        assert store.stats().records == 0
        assert list(tmp_path.glob("*.kvseg")) == []


async def test_a_use_before_the_last_quarter_writes_nothing(tmp_path: Path) -> None:
    clock = ManualClock()
    records = chain(*range(8), retention=Retention(traffic="agent"))
    async with make(tmp_path, clock) as store:
        await store.save(records)
        written = store.stats().written_nbytes
        for _ in range(8):
            clock.advance(0.09 * 3 * DAY_S)
            await store.touch(keys_of(records), Retention(traffic="agent"))
        assert (store.stats().renewed, store.stats().written_nbytes) == (0, written)


async def test_a_touch_lengthens_a_life_by_the_class_of_who_touches(tmp_path: Path) -> None:
    clock = ManualClock()
    records = chain(1, 2, retention=Retention(traffic="agent"))
    async with make(tmp_path, clock) as store:
        await store.save(records)
        clock.advance(2 * DAY_S)
        await store.touch(keys_of(records), Retention(traffic="none"))
        await store.touch(keys_of(records), Retention(ttl_s=60.0))
        assert store.stats().renewed == 0
        await store.touch(keys_of(records), Retention(traffic="chat"))
        clock.advance(7 * DAY_S - 1)
        assert await held(store, records) == 1
        assert [path.name[:4] for path in tmp_path.glob("*.kvseg")].count("chat") == 1


async def test_snapshots_live_as_long_as_their_blocks(tmp_path: Path) -> None:
    clock = ManualClock()
    blocks, snapshots = chain(1, 2, 3, 4), chain(1, 2, 3, 4, kind="snapshot")
    async with make(tmp_path, clock) as store:
        await store.save(blocks + snapshots[1:])
        clock.advance(0.8 * DAY_S)
        await store.touch(keys_of(blocks), Retention())
        clock.advance(0.8 * DAY_S)
        assert (await store.match(keys_of(blocks))).snapshots == (1,)


async def test_a_damaged_record_is_not_given_a_new_life(tmp_path: Path) -> None:
    clock = ManualClock()
    records = chain(*range(8))
    async with make(tmp_path, clock) as store:
        await store.save(records)
    (segment,) = tmp_path.glob("*.kvseg")
    data = bytearray(segment.read_bytes())
    data[data.index(content(records[1].ref))] ^= 1
    segment.write_bytes(data)
    async with make(tmp_path, clock) as store:
        clock.advance(0.8 * DAY_S)
        await store.touch(keys_of(records), Retention())
        assert (store.stats().renewed, store.stats().damaged, store.stats().dropped) == (3, 1, 0)
        assert await held(store, records) == 1


async def test_what_was_renewed_can_be_forgotten_with_its_old_copy(tmp_path: Path) -> None:
    clock = ManualClock()
    mine, others = chain(*range(8), tenant="tenant-mine"), chain(*range(8), tenant="others")
    async with make(tmp_path, clock) as store:
        await store.save(mine + others)
        clock.advance(0.8 * DAY_S)
        await store.touch(keys_of(mine), Retention())
        assert (await store.forget(NamespaceFilter(tenant="tenant-mine"))).records == 4
        files = b"".join(path.read_bytes() for path in tmp_path.glob("*.kvseg"))
        assert not any(content(r.ref)[i : i + 64] in files for r in mine for i in range(0, r.ref.nbytes - 64, 64))
        assert b"tenant-mine" not in files
        assert await held(store, others) == 4


async def test_renewing_keeps_to_the_cap(tmp_path: Path) -> None:
    clock = ManualClock()
    cap = 300_000
    hot = chain(*range(60))
    async with make(tmp_path, clock, capacity_nbytes=cap) as store:
        await store.save(hot)
        for i in range(200):
            clock.advance(0.02 * DAY_S)
            await store.touch(keys_of(hot), Retention())
            await store.save(chain(i, i, i, i))
            assert sum(path.stat().st_blocks * 512 for path in tmp_path.glob("*.kvseg")) <= store.stats().nbytes <= cap
        assert await held(store, hot) == len(hot)
        assert store.stats().renewed >= 3 * len(hot)
        assert store.stats().write_amplification == store.stats().written_nbytes / store.stats().saved_nbytes > 1.0


# -- a trace of days --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("seed", "sessions"), [(1, 6), *(pytest.param(seed, 100, marks=pytest.mark.slow) for seed in (1, 2, 3))]
)
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_days_of_agents_and_chats_are_written_little_more_than_once(
    tmp_path: Path, seed: int, sessions: int
) -> None:
    clock = ManualClock()
    requests = agent_trace(seed, sessions=sessions)
    async with make(tmp_path, clock, capacity_nbytes=1 << 34) as store:
        hits = await replay(store, clock, requests, nbytes=32)
        stats = store.stats()
    assert stats.renewed > 0
    assert stats.write_amplification <= 1.3
    used: dict[int, float] = {}  # until when a block is there for sure
    forgotten = asked = 0
    for request, hit in zip(requests, hits, strict=True):
        at = request.at_ms / 1000
        sure = next((i for i, block in enumerate(request.blocks) if used.get(block, 0.0) <= at), len(request.blocks))
        assert hit >= sure, "a use was at most a quarter of a life back: the record is there, whatever its age"
        asked += sum(block in used for block in request.blocks)
        forgotten += sum(block in used for block in request.blocks[hit:])
        used.update(dict.fromkeys(request.blocks, at + DAYS[request.traffic] * DAY_S / 4))
    assert forgotten < 0.1 * asked
