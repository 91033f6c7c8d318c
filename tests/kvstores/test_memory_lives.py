"""Lives of three and seven days in virtual time."""

from __future__ import annotations

import pytest

from deepinfra.core.kv import Retention, Traffic
from deepinfra.interfaces.given import InlineOffload
from deepinfra.kvstores import MemoryStore
from deepinfra.testing.clock import ManualClock
from deepinfra.testing.kvrecords import chain, keys_of
from deepinfra.testing.traces import TraceRequest, agent_trace, replay

DAY_S = 86_400.0
DAYS: dict[Traffic, int] = {"default": 1, "agent": 3, "chat": 7}


def make(clock: ManualClock) -> MemoryStore:
    store = MemoryStore()
    store.give(clock, InlineOffload())
    return store


@pytest.mark.parametrize(("traffic", "days"), DAYS.items())
async def test_what_nobody_uses_dies_with_its_class_and_a_match_is_no_use(traffic: Traffic, days: int) -> None:
    clock = ManualClock()
    records = chain(1, 2, 3, 4, retention=Retention(traffic=traffic))
    async with make(clock) as store:
        await store.save(records)
        clock.advance(days * DAY_S - 1)
        assert len((await store.match(keys_of(records))).refs) == 2
        clock.advance(1)
        match = await store.match(keys_of(records))
        assert (match.refs, match.missed) == ((), "expired")


@pytest.mark.parametrize(("traffic", "days"), DAYS.items())
@pytest.mark.parametrize("use", ["touch", "load", "save"])
async def test_every_use_grants_a_whole_life(traffic: Traffic, days: int, use: str) -> None:
    clock = ManualClock()
    retention = Retention(traffic=traffic)
    blocks, snapshots = chain(1, 2, 3, 4, retention=retention), chain(1, 2, 3, 4, kind="snapshot", retention=retention)
    async with make(clock) as store:
        await store.save([*blocks, *snapshots])
        for _ in range(12):
            clock.advance(0.9 * days * DAY_S)
            if use == "touch":
                await store.touch(keys_of(blocks), retention)
            elif use == "save":
                await store.save([*blocks, *snapshots])
            else:
                refs = [record.ref for record in (*blocks, *snapshots)]
                assert (await store.load(refs, [memoryview(bytearray(ref.nbytes)) for ref in refs])).count == 4
        match = await store.match(keys_of(blocks))
        assert (len(match.refs), match.snapshots) == (2, (1,) if use == "touch" else (0, 1))
        assert match.tiers[0].age_s == pytest.approx(12 * 0.9 * days * DAY_S)
        clock.advance(days * DAY_S)
        await store.save([])
        assert store.stats().records == 0, "what is dead is swept without being asked for"


def expected(requests: list[TraceRequest]) -> list[int]:
    """What sliding lives by class leave of each request, without a store."""
    until: dict[int, float] = {}
    hits = []
    for request in requests:
        now = request.at_ms / 1000
        alive = (until.get(block, 0.0) > now for block in request.blocks)
        hits.append(next((i for i, lives in enumerate(alive) if not lives), len(request.blocks)))
        for block in request.blocks:
            until[block] = max(until.get(block, 0.0), now + DAYS[request.traffic] * DAY_S)
    return hits


@pytest.mark.parametrize("sessions", [25, pytest.param(400, marks=pytest.mark.slow)])
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_ten_days_of_agents_and_chats_hit_exactly_what_their_classes_promise(sessions: int) -> None:
    clock = ManualClock(wall=1_800_000_000.0)
    requests = agent_trace(5, sessions=sessions, days=10.0)
    async with make(clock) as store:
        hits = await replay(store, clock, requests, nbytes=8)
        assert store.stats().expired > 0
        assert store.stats().evicted == 0
    assert hits == expected(requests)
