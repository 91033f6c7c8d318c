"""A folder that is removed under its processes, and a disk that takes nothing: logged, and over when it is over."""

from __future__ import annotations

import logging
import random
import shutil
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from deepinfra.core.kv import KVRecord, NamespaceFilter
from deepinfra.interfaces.given import InlineOffload
from deepinfra.kvstores import SsdStore
from deepinfra.testing.clock import ManualClock
from deepinfra.testing.disks import FaultyDisk, since
from deepinfra.testing.kvrecords import chain, content, keys_of, load

OLD, NEW, LATER = chain(*range(8)), chain(*range(10, 18)), chain(*range(20, 28))


def make(folder: Path, clock: ManualClock, **settings: object) -> SsdStore:
    store = SsdStore(folder, **{"min_free_nbytes": 0, "capacity_nbytes": 1 << 20, "fsync": "none", **settings})  # type: ignore[arg-type]
    store.give(clock, InlineOffload())
    return store


@asynccontextmanager
async def two(folder: Path) -> AsyncIterator[tuple[SsdStore, SsdStore, ManualClock]]:
    clock = ManualClock()
    async with make(folder, clock) as one, make(folder, clock) as other:
        yield one, other, clock


async def hits(store: SsdStore, records: Sequence[KVRecord]) -> int:
    match = await store.match(keys_of(list(records)))
    assert await load(store, match.refs) == [content(ref) for ref in match.refs]
    return len(match.refs)


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


async def test_a_removed_folder_is_empty_and_made_anew_by_the_next_save_of_each_process(tmp_path: Path) -> None:
    folder, before = tmp_path / "kv", open_files()
    async with two(folder) as (one, other, clock):
        await one.save(OLD)
        await other.save(NEW)
        shutil.rmtree(folder)
        clock.advance(1.5)
        assert [await hits(store, records) for store in (one, other) for records in (OLD, NEW)] == [0, 0, 0, 0]
        assert one.stats().records == other.stats().records == one.stats().nbytes == 0
        await one.save(NEW)
        assert await hits(one, NEW) == len(NEW)
        await other.save(LATER)
        clock.advance(1.5)
        assert [await hits(store, records) for store in (one, other) for records in (NEW, LATER)] == [4, 4, 4, 4]
        assert one.stats().processes == other.stats().processes == 2
    assert open_files() <= before
    async with make(folder, clock) as store:
        assert await hits(store, NEW) == await hits(store, LATER) == 4
        assert await hits(store, OLD) == 0


async def test_what_is_loaded_or_saved_before_anybody_looked_is_a_miss_and_the_next_save_works(tmp_path: Path) -> None:
    folder = tmp_path / "kv"
    async with two(folder) as (one, other, _):
        await one.save(OLD)
        shutil.rmtree(folder)
        assert await load(one, [record.ref for record in OLD]) == []
        await one.save(NEW)
        assert one.stats().dropped == len(NEW)
        await one.save(NEW)
        await other.save(LATER)
        await other.save(LATER)
        assert await hits(one, NEW) == await hits(other, LATER) == 4


async def test_a_process_whose_own_file_was_removed_finds_what_is_there(tmp_path: Path) -> None:
    async with two(tmp_path) as (one, other, clock):
        await one.save(OLD)
        for path in tmp_path.glob("*.kvproc"):
            path.unlink()
        clock.advance(1.5)
        assert await hits(one, OLD) == 0
        await one.save(NEW)
        await other.save(LATER)
        clock.advance(1.5)
        for store in (one, other):
            assert [await hits(store, records) for records in (OLD, NEW, LATER)] == [4, 4, 4]
        assert one.stats().processes == 2


async def test_forgetting_reaches_those_who_came_back_to_a_new_folder(tmp_path: Path) -> None:
    folder, mine = tmp_path / "kv", chain(*range(30, 38), tenant="mine")
    async with two(folder) as (one, other, clock):
        await one.forget(NamespaceFilter(tenant="somebody"))
        shutil.rmtree(folder)
        clock.advance(1.5)
        await one.save(mine)
        await other.save(OLD)
        assert (await other.forget(NamespaceFilter(tenant="mine"))).records == len(mine)
        clock.advance(1.5)
        assert (await hits(one, mine), await hits(one, OLD)) == (0, 4)


async def test_a_tenant_is_forgotten_also_when_nobody_saved_since_the_folder_lost_its_processes(tmp_path: Path) -> None:
    mine = chain(*range(30, 38), tenant="mine")
    async with two(tmp_path) as (one, _, clock):
        await one.save(mine)
        for path in tmp_path.glob("*.kvproc"):
            path.unlink()
        clock.advance(1.5)
        assert (await one.forget(NamespaceFilter(tenant="mine"))).records == len(mine)
        files = b"".join(path.read_bytes() for path in tmp_path.iterdir())
        assert not any(content(record.ref)[:64] in files for record in mine)


async def test_a_folder_that_cannot_be_made_again_is_tried_again_with_every_save(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder, clock = tmp_path / "kv", ManualClock()
    caplog.set_level(logging.INFO, "deepinfra.kvstores")
    async with make(folder, clock) as store:
        shutil.rmtree(folder)
        folder.touch()  # a plain file lies where the folder was
        clock.advance(1.5)
        for _ in range(3):
            await store.save(OLD)
        assert store.stats().dropped == 3 * len(OLD)
        folder.unlink()
        await store.save(OLD)
        assert await hits(store, OLD) == len(OLD)
    first, last = caplog.messages
    assert str(folder) in first
    assert first.endswith("File exists")
    assert last == f"KV folder {folder}: saving works again"


async def test_a_full_disk_is_warned_of_once_a_minute_and_again_when_it_is_over(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    clock, disk = ManualClock(), FaultyDisk(random.Random(0))
    store = make(tmp_path, clock)
    store.disk = disk
    caplog.set_level(logging.INFO, "deepinfra.kvstores")
    async with store:
        await store.save(OLD)
        disk.strike = since("pwritev", 0, "ENOSPC")
        for _ in range(4):
            await store.save(NEW)
            clock.advance(25)
        disk.strike = None
        await store.save(NEW)
        await store.save(LATER)
        assert await hits(store, LATER) == len(LATER)
    told = [(record.name, record.levelname) for record in caplog.records]
    assert told == [("deepinfra.kvstores", level) for level in ("WARNING", "WARNING", "INFO")]
    assert all(str(tmp_path) in message for message in caplog.messages)
    assert caplog.messages[0].endswith("4 records were not saved: injected into pwritev")
    assert "12 records" in caplog.messages[1]


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"capacity_nbytes": 8_192, "segment_nbytes": 1 << 20}, "no room under its cap of 8192 bytes"),
        ({"min_free_nbytes": 1 << 60}, "no room above the floor of free space"),
    ],
    ids=["cap", "floor"],
)
async def test_a_limit_that_leaves_no_room_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, settings: dict[str, int], reason: str
) -> None:
    async with make(tmp_path, ManualClock(), **settings) as store:
        await store.save(chain(1, 2, nbytes=10_000))
        assert store.stats().dropped == 1
    (message,) = caplog.messages
    assert reason in message


async def test_what_is_too_much_for_a_tenants_quota_is_not_the_disks_fault(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with make(tmp_path, ManualClock(), quotas={"mine": 4_096}) as store:
        await store.save(chain(1, 2, tenant="mine", nbytes=10_000))
        assert store.stats().dropped == 1
    assert caplog.messages == []
