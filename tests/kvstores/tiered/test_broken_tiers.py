"""A tier that raises, hangs or comes back costs its own hits, and nothing else."""

from __future__ import annotations

import logging
from typing import Any

import anyio
import pytest

from deepinfra.core.kv import NamespaceFilter
from deepinfra.kvstores.tiered import guard
from deepinfra.testing.kvrecords import chain, content, keys_of, load


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "MATCH_S", 0.05)


@pytest.mark.parametrize("mode", ["raises", "hangs"])
async def test_a_broken_tier_is_a_miss_that_says_so(stack: Any, mode: str) -> None:
    async with stack(timeout_s=0.05) as s:
        records = chain(*range(8))
        await s.ram.save(records[:2])
        await s.below.inner.save(records)
        s.below.mode = mode
        match = await s.store.match(keys_of(records))
        assert (len(match.refs), match.missed) == (2, "tier-down")
        assert await load(s.store, [record.ref for record in records]) == [content(r.ref) for r in records[:2]]
        assert (s.store.stats().tiers[1].up, s.store.stats().tiers[1].failures) == (False, 1)


async def test_a_broken_tier_is_passed_by_and_asked_again_after_a_pause(stack: Any) -> None:
    async with stack() as s:
        records = chain(*range(8))
        await s.below.inner.save(records)
        s.below.mode = "raises"
        for _ in range(10):
            await s.store.match(keys_of(records))
        assert s.below.calls["match"] == 1
        s.clock.advance(1.1)
        await s.store.match(keys_of(records))
        s.clock.advance(1.1)  # the second pause is longer
        await s.store.match(keys_of(records))
        assert s.below.calls["match"] == 2
        s.below.mode = "works"
        s.clock.advance(1.0)
        assert len((await s.store.match(keys_of(records))).refs) == 4
        assert s.store.stats().tiers[1].up


async def test_one_call_at_a_time_tries_a_tier_that_was_down(stack: Any) -> None:
    async with stack() as s:
        s.below.mode = "raises"
        await s.store.match(keys_of(chain(1, 2)))
        s.clock.advance(2.0)
        s.below.mode = "hangs"
        async with anyio.create_task_group() as tasks:
            for _ in range(5):
                tasks.start_soon(s.store.match, keys_of(chain(1, 2)))
        assert s.below.calls["match"] == 2


async def test_a_first_tier_that_is_broken_leaves_the_others(stack: Any) -> None:
    async with stack() as s:
        records = chain(*range(8))
        await s.store.save(records)
        await s.store.flush()
        s.ram.match = s.ram.load = s.ram.save = None  # every call raises TypeError
        match = await s.store.match(keys_of(records))
        assert await load(s.store, match.refs) == [content(record.ref) for record in records]
        more = chain(*range(100, 108))
        await s.store.save(more)
        await s.store.flush()
        assert await s.held_below(more) == 4


async def test_what_was_to_be_forgotten_while_a_tier_was_down_is_forgotten_first(
    stack: Any, caplog: pytest.LogCaptureFixture
) -> None:
    async with stack() as s:
        records = chain(*range(8))
        await s.store.save(records)
        await s.store.flush()
        s.below.mode = "raises"
        with caplog.at_level(logging.WARNING):
            await s.store.forget(NamespaceFilter())
        assert "is forgotten when it is back" in caplog.text
        s.below.mode = "works"
        s.clock.advance(2.0)
        assert (await s.store.match(keys_of(records))).refs == ()
        assert s.below.inner.stats().records == 0


async def test_it_is_forgotten_although_nobody_asks(stack: Any) -> None:
    async with stack() as s:
        await s.store.save(chain(*range(8)))
        await s.store.flush()
        s.below.mode = "raises"
        await s.store.forget(NamespaceFilter())
        s.below.mode = "works"
        s.clock.advance(2.0)
        with anyio.fail_after(30):
            while s.below.inner.stats().records:
                await anyio.sleep(0.01)


async def test_what_waits_for_a_tier_that_is_down_is_written_when_it_is_back(stack: Any) -> None:
    async with stack() as s:
        s.below.mode = "raises"
        await s.store.match(keys_of(chain(1, 2)))
        records = chain(*range(8))
        await s.store.save(records)
        s.below.mode = "works"
        s.clock.advance(2.0)
        with anyio.fail_after(30):
            await s.store.flush()
        assert await s.held_below(records) == 4


async def test_leaving_does_not_wait_for_a_tier_that_is_down(stack: Any) -> None:
    with anyio.fail_after(20):
        async with stack(drain_s=600.0) as s:
            s.below.mode = "raises"
            await s.store.match(keys_of(chain(1, 2)))
            await s.store.save(chain(*range(8)))
