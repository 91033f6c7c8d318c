"""SsdStore on a disk of which every system call fails in every way, once and from then on."""

from __future__ import annotations

import random
import shutil
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import pytest

from deepinfra.core.kv import KVRecord, NamespaceFilter, RecordRef, Retention
from deepinfra.errors import ResourceError
from deepinfra.interfaces.given import InlineOffload, ThreadOffload
from deepinfra.kvstores import SsdStore
from deepinfra.testing.clock import ManualClock
from deepinfra.testing.disks import CALLS, FAULTS, FaultyDisk, Strike, at_random, once, since
from deepinfra.testing.kvrecords import chain, content, keys_of

OLD = chain(*range(12), tenant="old", nbytes=900)
NEW = chain(*range(12), tenant="new", nbytes=900)
GONE = chain(*range(12), tenant="gone", nbytes=900)
FRESH = chain(*range(50, 58), nbytes=900)
THEIRS = chain(*range(60, 68), tenant="theirs", nbytes=900)
LATER = chain(*range(70, 78), tenant="theirs", nbytes=900)

MOVING = ("preadv", "pwritev")


def make(folder: Path, disk: FaultyDisk, clock: ManualClock, *, threads: bool = False) -> SsdStore:
    store = SsdStore(folder, capacity_nbytes=200_000, segment_nbytes=8_000, min_free_nbytes=1, fsync="always")
    store.disk = disk
    store.give(clock, ThreadOffload() if threads else InlineOffload())
    return store


async def delivered(store: SsdStore, refs: Sequence[RecordRef]) -> int:
    """How many records a store delivers, every one of them right; it keeps none of the buffers."""
    buffers = [bytearray(ref.nbytes) for ref in refs]
    views = [memoryview(buffer) for buffer in buffers]
    loaded = await store.load(refs, views)
    for view in views:
        view.release()
    for ref, buffer in zip(refs[: loaded.count], buffers, strict=False):
        assert buffer == content(ref), "wrong bytes"
    for buffer in buffers:
        buffer.clear()  # BufferError if anybody still holds a view of it
    return loaded.count


async def alive(store: SsdStore, records: Sequence[KVRecord]) -> int:
    return sum([await delivered(store, [record.ref]) for record in records])


def remains(folder: Path, records: Sequence[KVRecord]) -> bool:
    """Whether 64 bytes of records are in any file: wherever they begin, a whole piece of 32 is among them."""
    files = b"".join(path.read_bytes() for path in folder.iterdir())
    return any(content(r.ref)[at : at + 32] in files for r in records for at in range(0, r.ref.nbytes - 31, 32))


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.fixture
async def written(tmp_path: Path) -> Path:
    """A folder with a sealed file, and with one that a killed process left open."""
    folder, clock = tmp_path / "written", ManualClock()
    async with make(folder, FaultyDisk(random.Random(0)), clock) as store:
        await store.save(OLD + GONE)
        shutil.copytree(folder, tmp_path / "killed")
    return tmp_path / "killed"


@asynccontextmanager
async def entered(store: SsdStore) -> AsyncGenerator[bool]:
    """Enter a store, if its disk lets it: a folder that cannot be locked or listed is refused by name."""
    try:
        await store.__aenter__()
    except ResourceError:
        yield False
        return
    try:
        yield True
    finally:
        await store.__aexit__(None, None, None)


async def history(store: SsdStore, peer: SsdStore, clock: ManualClock) -> None:
    """Something of everything a store does beside another process, with right bytes or misses only."""
    await peer.save(THEIRS)
    clock.advance(1.5)
    await store.match(keys_of(OLD))
    await delivered(store, [record.ref for record in OLD])
    await store.save(NEW[:3])
    await store.save(NEW)
    await delivered(store, [record.ref for record in NEW])
    await delivered(store, [record.ref for record in THEIRS])
    await peer.save(LATER)
    clock.advance(1.5)
    await delivered(store, [record.ref for record in LATER])
    await store.forget(NamespaceFilter(tenant="gone"))
    await peer.forget(NamespaceFilter(tenant="theirs"))
    clock.advance(1.5)
    await store.match([])
    assert await alive(store, THEIRS + LATER) == 0, "what another forgot is gone, whatever the disk does"
    if not store.disk.faults:  # type: ignore[attr-defined]
        assert not remains(store.path, GONE + THEIRS + LATER), "no 64 bytes of what was forgotten are left"
    clock.advance(0.8 * 86_400)
    await store.touch(keys_of(NEW), Retention())  # written again
    for i in range(4):
        await store.save(chain(20 + i, *range(12), nbytes=5_000))  # more than there is room for
    clock.advance(0.5 * 86_400)
    await store.save(chain(*range(30, 36), nbytes=900))  # what was not used expires
    assert store.stats().nbytes <= 200_000


async def check(folder: Path, strike: Strike | None, *, threads: bool = False) -> FaultyDisk:
    """Run the history on a copy of a folder, then let the disk be well, restart, and look at everything."""
    disk, clock = FaultyDisk(random.Random(1), strike), ManualClock()
    before = open_files()
    with anyio.fail_after(60):
        store = make(folder, disk, clock, threads=threads)
        peer = make(folder, FaultyDisk(random.Random(2)), clock)
        async with peer, entered(store) as usable:
            if usable:
                await history(store, peer, clock)
                disk.strike = None
                await store.save(FRESH)
                await store.save(FRESH)
                assert await alive(store, FRESH) == len(FRESH), "writes go on when the disk is well again"
                assert not remains(folder, GONE + THEIRS + LATER), "no piece of what was forgotten is left"
                clock.advance(1.5)
                await peer.match([])
                if not disk.faults["pwritev flip"]:  # a file is read up to what is damaged in it
                    assert await alive(peer, FRESH) == len(FRESH), "what one saves the other finds"
            disk.strike = None
        assert open_files() <= before, "no handle is left open"
        everything = [*OLD, *NEW, *GONE, *FRESH]
        async with make(folder, disk, clock, threads=threads) as store:  # so the lock is free
            stats = store.stats()
            assert stats.nbytes == sum(path.stat().st_blocks * 512 for path in folder.glob("*.kvseg"))
            held = await alive(store, everything)
            assert held >= len(FRESH) or not usable
            assert stats.records >= held
            await store.save(OLD + NEW)
            assert await alive(store, OLD + NEW) == len(OLD + NEW)
        assert open_files() <= before
    return disk


def places(calls: int, most: int) -> list[int]:
    """Up to `most` numbers of calls: the first, the last and some between."""
    return sorted({round(i * (calls - 1) / max(1, most - 1)) for i in range(most)}) if calls else []


async def check_all(tmp_path: Path, written: Path, most: int) -> None:
    well = await check(shutil.copytree(written, tmp_path / "well"), None)
    assert set(well.calls) == set(CALLS)
    struck = 0
    for call in CALLS:
        for fault in FAULTS if call in MOVING else FAULTS[:2]:
            for number in places(well.calls[call], most):
                for how in (once, since):
                    folder = shutil.copytree(written, tmp_path / "kv")
                    disk = await check(folder, how(call, number, fault))
                    struck += sum(disk.faults.values())
                    shutil.rmtree(folder)
    assert struck > 100


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_any_call_that_fails_gives_misses_and_leaves_nothing_behind(tmp_path: Path, written: Path) -> None:
    await check_all(tmp_path, written, most=2)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_many_a_call_that_fails_gives_misses_and_leaves_nothing_behind(tmp_path: Path, written: Path) -> None:
    await check_all(tmp_path, written, most=25)


@pytest.mark.parametrize("seed", [*range(4), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(4, 100))])
async def test_calls_that_fail_at_random_give_misses_in_threads_too(tmp_path: Path, written: Path, seed: int) -> None:
    rng = random.Random(seed)
    disk = await check(written, at_random(rng, rng.choice([0.02, 0.1, 0.3])), threads=True)
    assert disk.calls["preadv"] > 0
