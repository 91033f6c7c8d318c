"""Several processes on one folder: two stores with a clock in common stand for two processes."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from deepinfra.core.kv import KVRecord, NamespaceFilter, Retention
from deepinfra.interfaces.given import InlineOffload
from deepinfra.kvstores import SsdStore
from deepinfra.kvstores.ssd import writer as writer_module
from deepinfra.kvstores.ssd.disk import Disk
from deepinfra.kvstores.ssd.format import tag_of
from deepinfra.kvstores.ssd.listing import list_segments
from deepinfra.testing.clock import ManualClock
from deepinfra.testing.kvrecords import chain, content, keys_of, load

ROOT = Path(__file__).parents[3]


def make(folder: Path, clock: ManualClock, **settings: object) -> SsdStore:
    store = SsdStore(folder, **{"min_free_nbytes": 0, "capacity_nbytes": 1 << 20, "fsync": "none", **settings})  # type: ignore[arg-type]
    store.give(clock, InlineOffload())
    return store


@asynccontextmanager
async def two(folder: Path, **settings: object) -> AsyncIterator[tuple[SsdStore, SsdStore, ManualClock]]:
    clock = ManualClock()
    async with make(folder, clock, **settings) as one, make(folder, clock, **settings) as other:
        yield one, other, clock


async def hits(store: SsdStore, records: Sequence[KVRecord]) -> int:
    """Leading records that are matched; what is matched comes back right."""
    match = await store.match(keys_of(list(records)))
    assert await load(store, match.refs) == [content(ref) for ref in match.refs]
    return len(match.refs)


def on_disk(folder: Path) -> int:
    return sum(path.stat().st_blocks * 512 for path in folder.iterdir())


def remains(folder: Path, records: Sequence[KVRecord]) -> bool:
    """Whether any 64 bytes of records, a key or the tenant's name are in any file."""
    files = b"".join(path.read_bytes() for path in folder.iterdir())
    pieces = [content(r.ref)[i : i + 64] for r in records for i in range(0, r.ref.nbytes - 64, 64)]
    return any(piece in files for piece in (*pieces, *keys_of(list(records)), records[0].tenant.encode()))


# -- following ------------------------------------------------------------------------------------


@pytest.mark.parametrize("segment_nbytes", [1 << 20, 10_000], ids=["open", "sealed"])
async def test_what_one_saved_the_other_finds_a_second_later(tmp_path: Path, segment_nbytes: int) -> None:
    async with two(tmp_path, segment_nbytes=segment_nbytes) as (one, other, clock):
        first, second = chain(*range(20)), chain(*range(50, 70))
        for records in (first, second):
            await one.save(records)
            assert await hits(other, records) == 0
            clock.advance(1.0)
            assert await hits(other, records) == 10
        assert (one.stats().records, other.stats().records) == (20, 20)
        assert other.stats().nbytes >= one.stats().nbytes > 0
        await other.save(first)
        assert other.stats().saved == 0, "it is held already"
        assert other.stats().processes == 2


async def test_a_record_with_a_longer_life_counts_whoever_wrote_it(tmp_path: Path) -> None:
    async with two(tmp_path) as (one, other, clock):
        await one.save(chain(1, 2))
        clock.advance(0.8 * 86_400)
        await other.save([])
        await other.touch(keys_of(chain(1, 2)), Retention())
        assert other.stats().renewed == 1
        clock.advance(0.8 * 86_400)
        assert len((await one.match(keys_of(chain(1, 2)))).refs) == 1
        await one.save([])
        assert len(list(tmp_path.glob("*.kvseg"))) == 1, "the first copy is over"
    async with make(tmp_path, clock) as third:
        assert await hits(third, chain(1, 2)) == 1


async def test_a_copy_that_both_wrote_survives_a_restart(tmp_path: Path) -> None:
    records = chain(*range(20))
    async with two(tmp_path) as (one, other, clock):
        await one.save(records)
        await other.save(records)
        clock.advance(1.0)
        assert await hits(one, records) == await hits(other, records) == 10
        assert one.stats().records == other.stats().records == 10
    async with make(tmp_path, clock) as third:
        assert third.stats().records == 10
        assert await hits(third, records) == 10


async def test_a_file_that_another_removed_is_a_miss_and_then_evicted(tmp_path: Path) -> None:
    async with two(tmp_path, segment_nbytes=5_000) as (one, other, clock):
        await one.save(chain(*range(20)))
        clock.advance(1.0)
        assert await hits(other, chain(*range(20))) == 10
        for segment in list_segments(tmp_path)[:1]:
            (tmp_path / segment.name).unlink()
        assert await load(other, [record.ref for record in chain(*range(20))]) == []
        assert (other.stats().damaged, other.stats().evicted) == (0, 1)
        match = await other.match(keys_of(chain(*range(20))))
        assert (len(match.refs), match.missed) == (0, "evicted")


async def test_a_store_that_is_left_leaves_nothing_that_tells_of_it(tmp_path: Path) -> None:
    async with two(tmp_path) as (one, _, _):
        await one.save(chain(1, 2))
        assert len(list(tmp_path.glob("*.kvproc"))) == 2
    assert list(tmp_path.glob("*.kvproc")) == []
    assert all(segment.sealed for segment in list_segments(tmp_path))


# -- room -------------------------------------------------------------------------------------------


async def test_the_cap_holds_for_all_together(tmp_path: Path) -> None:
    cap = 200_000
    async with two(tmp_path, capacity_nbytes=cap) as (one, other, clock):
        for i in range(60):
            await (one, other)[i % 2].save(chain(*range(100 * i, 100 * i + 12)))
            clock.advance(0.3)
            assert on_disk(tmp_path) <= cap
            assert len(list(tmp_path.glob("*.kvseg"))) >= min(3, i // 8)
        assert one.stats().evicted > 0
        assert other.stats().evicted > 0
        assert on_disk(tmp_path) > 0.6 * cap


async def test_what_the_other_uses_is_not_what_goes(tmp_path: Path) -> None:
    async with two(tmp_path, capacity_nbytes=200_000) as (one, other, clock):
        hot = chain(*range(16))
        await one.save(hot)
        await one.save([record for i in range(20, 26) for record in chain(i, i)])  # seals the file of `hot`
        for i in range(100, 170):
            clock.advance(1.0)
            assert await hits(other, hot) == 8
            clock.advance(1.0)
            await one.save(chain(i, i, i, i))


async def test_what_a_killed_process_had_claimed_is_free_at_once(tmp_path: Path) -> None:
    cap = 200_000
    code = """
import sys, anyio
from deepinfra.kvstores import SsdStore
from deepinfra.testing.kvrecords import chain
async def main():
    async with SsdStore(sys.argv[1], capacity_nbytes=200_000, min_free_nbytes=0) as store:
        for traffic in range(4):
            await store.save(chain(traffic, 7, tenant=str(traffic), nbytes=18_000))
        print(flush=True)
        await anyio.sleep_forever()
anyio.run(main)
"""
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, cwd=ROOT) as child:
        assert child.stdout is not None
        child.stdout.readline()
        async with SsdStore(tmp_path, capacity_nbytes=cap, min_free_nbytes=0) as store:
            assert store.stats().records == 4
            assert store.stats().processes == 2
            sealed = [segment.sealed for segment in list_segments(tmp_path)]
            assert not all(sealed)
            child.kill()
            child.wait()
            await store.forget(NamespaceFilter(tenant="nobody"))  # looks at once
            assert all(segment.sealed for segment in list_segments(tmp_path)), "somebody else sealed it"
            assert store.stats().processes == 1
            for i in range(100, 130):
                await store.save(chain(i, i, nbytes=18_000))
            assert store.stats().dropped == 0
            assert await hits(store, chain(0, 7, tenant="0", nbytes=18_000)) == 0, "room was made of it"
            assert on_disk(tmp_path) <= cap


async def test_records_are_dropped_while_another_process_holds_the_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer_module, "PATIENCE_S", 0.005)
    async with make(tmp_path, ManualClock()) as store:
        with (tmp_path / "lock").open() as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            store._writer._patience_s = 0.005
            await store.save(chain(1, 2))
            assert store.stats().dropped == 1
        await store.save(chain(1, 2))
        assert await hits(store, chain(1, 2)) == 1


HOLDS = """
import os, signal, sys, anyio
from deepinfra.kvstores import SsdStore
from deepinfra.kvstores.ssd.disk import Disk
from deepinfra.testing.kvrecords import chain
class Killing(Disk):
    calls = -1
    def __getattribute__(self, name):
        if name in ("unlink", "pwritev", "free_nbytes", "stamp") and Killing.calls >= 0:
            Killing.calls += 1
            if Killing.calls > int(sys.argv[2]):
                os.kill(os.getpid(), signal.SIGKILL)
        return super().__getattribute__(name)
async def main():
    store = SsdStore(sys.argv[1], capacity_nbytes=100_000, min_free_nbytes=1)
    store.disk = Killing()
    async with store:
        for i in range(40):
            await store.save(chain(i, i, i, i))
            Killing.calls = max(Killing.calls, 0) if i > 10 else -1
anyio.run(main)
"""


@pytest.mark.parametrize("calls", range(0, 24, 3))
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_killed_while_it_makes_room_it_leaves_the_folder_to_others(tmp_path: Path, calls: int) -> None:
    done = subprocess.run([sys.executable, "-c", HOLDS, str(tmp_path), str(calls)], cwd=ROOT)
    assert done.returncode == -9
    async with SsdStore(tmp_path, capacity_nbytes=100_000, min_free_nbytes=0) as store:
        for i in range(40):
            assert await hits(store, chain(i, i, i, i)) in (0, 1, 2)
        await store.save(chain(90, 91))
        assert await hits(store, chain(90, 91)) == 1
        assert on_disk(tmp_path) <= 100_000


# -- quotas -----------------------------------------------------------------------------------------


async def test_over_quota_a_tenants_own_oldest_goes(tmp_path: Path) -> None:
    quotas = {"big": 0, "small": 60_000}
    async with two(tmp_path, quotas=quotas, tenant_quota_nbytes=100_000) as (one, other, clock):
        await one.save(chain(*range(40), tenant="big"))
        for i in range(100, 140):
            await (one, other)[i % 2].save(chain(i, i, tenant="small"))
            await (other, one)[i % 2].save(chain(i, i, tenant="else"))
            clock.advance(1.0)
            for tenant, quota in (("small", 60_000), ("else", 100_000)):
                files = [p for p in tmp_path.glob("*.kvseg") if tag_of(tenant) in p.name]
                assert sum(path.stat().st_blocks * 512 for path in files) <= quota
        assert await hits(one, chain(*range(40), tenant="big")) == 20
        for tenant in ("small", "else"):
            held = [await hits(other, chain(i, i, tenant=tenant)) for i in range(100, 140)]
            assert held[0] == 0
            assert held[-4:] == [1, 1, 1, 1]
        dropped = one.stats().dropped + other.stats().dropped
        assert dropped == 0


async def test_a_dead_process_file_gets_no_footer_that_takes_its_tenant_over_the_quota(tmp_path: Path) -> None:
    def taken(folder: Path) -> int:
        return sum(-(-path.stat().st_size // 4096) * 4096 for path in folder.glob("*.kvseg"))

    records = chain(*range(36), tenant="small")  # so many that the footer begins a block
    async with make(tmp_path / "alive", ManualClock(), quotas={"small": 500_000}) as store:
        await store.save(records)
        for copy in ("roomy", "tight"):
            shutil.copytree(tmp_path / "alive", tmp_path / copy, ignore=shutil.ignore_patterns("*.kvproc"))
    quota = taken(tmp_path / "tight")
    for copy, small in (("roomy", 500_000), ("tight", quota)):
        async with make(tmp_path / copy, ManualClock(), quotas={"small": small}) as store:
            assert await hits(store, records) == 18
    assert taken(tmp_path / "roomy") > quota
    assert taken(tmp_path / "tight") == quota


async def test_a_quota_too_small_for_one_record_drops_it_and_nothing_else(tmp_path: Path) -> None:
    async with two(tmp_path, quotas={"tiny": 2_000}) as (one, _, _):
        await one.save(chain(1, 2, tenant="others") + chain(1, 2, tenant="tiny"))
        assert (one.stats().saved, one.stats().dropped) == (1, 1)


async def test_a_tenant_that_writes_too_fast_is_slowed_and_others_are_not(tmp_path: Path) -> None:
    clock = ManualClock()
    async with make(tmp_path, clock, tenant_write_nbytes_per_s=3_000) as store:
        records = chain(*range(60), tenant="fast")
        await store.save(records)
        assert 9 <= await hits(store, records) <= 11, "ten seconds of writing at once"
        await store.save(chain(*range(10), tenant="slow"))
        assert await hits(store, chain(*range(10), tenant="slow")) == 5
        clock.advance(20.0)
        await store.save(records)
        assert 18 <= await hits(store, records) <= 22


# -- forgetting -------------------------------------------------------------------------------------


async def test_forgetting_holds_for_what_the_other_has_open(tmp_path: Path) -> None:
    mine, others = chain(*range(20), tenant="tenant-mine"), chain(*range(20), tenant="others")
    late = chain(*range(50, 60), tenant="tenant-mine")
    async with two(tmp_path) as (one, other, clock):
        await one.save([record for pair in zip(mine, others, strict=True) for record in pair])
        clock.advance(1.0)
        assert await hits(other, mine) == 10
        await one.save(late)  # not seen by `other` yet
        assert (await other.forget(NamespaceFilter(tenant="tenant-mine"))).records == 15
        assert not remains(tmp_path, mine + late)
        assert await hits(other, mine) == 0
        assert await load(one, [mine[0].ref]) == [], "at once, though it has not heard yet"
        clock.advance(1.0)
        assert await hits(one, late) == 0
        assert await hits(one, others) == 10
        await one.save(chain(70, 71, tenant="others"))
    assert not remains(tmp_path, mine + late), "the footers name nobody who was forgotten"
    async with make(tmp_path, ManualClock()) as third:
        assert await hits(third, mine) == await hits(third, late) == 0
        assert await hits(third, others) == 10
        assert third.stats().records == 11


async def test_who_has_not_heard_yet_writes_nothing_of_what_was_forgotten(tmp_path: Path) -> None:
    mine, later = chain(*range(20), tenant="tenant-mine"), chain(*range(30, 40), tenant="tenant-mine")
    async with two(tmp_path) as (one, other, clock):
        await one.save(chain(1, 2, tenant="others"))
        await other.forget(NamespaceFilter(tenant="tenant-mine"))
        await one.save(mine)  # asked before it heard: taken for older than the forgetting
        assert not remains(tmp_path, mine)
        assert one.stats().dropped == 10
        clock.advance(1.0)
        await one.save(later)
        assert await hits(one, later) == 5
        clock.advance(1.0)
        assert await hits(other, later) == 5, "what came after stays"


async def test_forgetting_and_saving_again_is_no_loss(tmp_path: Path) -> None:
    records = chain(*range(20), tenant="tenant-mine")
    async with two(tmp_path) as (one, other, clock):
        for _ in range(3):
            await one.save(records)
            clock.advance(1.0)
            assert await hits(other, records) == 10
            assert (await one.forget(NamespaceFilter(tenant="tenant-mine"))).records == 10
            clock.advance(1.0)
            assert await hits(one, records) == await hits(other, records) == 0


async def test_a_file_that_resists_forgetting_is_never_read_again(tmp_path: Path) -> None:
    class Stubborn(Disk):
        stuck = False

        def unlink(self, path: Path) -> None:
            if self.stuck and path.suffix == ".kvseg":
                raise OSError(5, "injected")
            super().unlink(path)

        def truncate(self, fd: int, nbytes: int) -> None:
            if self.stuck:
                raise OSError(5, "injected")
            super().truncate(fd, nbytes)

    clock, disk = ManualClock(), Stubborn()
    store = make(tmp_path, clock)
    store.disk = disk
    mine = chain(*range(20), tenant="mine")
    async with store:
        await store.save(mine + chain(1, 2))
        disk.stuck = True
        assert (await store.forget(NamespaceFilter(tenant="mine"))).records == 10
        for _ in range(3):
            clock.advance(2.0)
            assert await hits(store, mine) == 0
            assert store.stats().nbytes >= on_disk(tmp_path) - 3 * 4_096
        disk.stuck = False
        clock.advance(2.0)
        await store.save(chain(3, 4))
        assert not remains(tmp_path, mine)


# -- older folders ----------------------------------------------------------------------------------


async def test_files_named_before_there_were_several_processes_are_read(tmp_path: Path) -> None:
    records = chain(*range(20))
    clock = ManualClock()
    async with make(tmp_path, clock) as store:
        await store.save(records)
    (segment,) = tmp_path.glob("*.kvseg")
    os.rename(segment, segment.with_name("-".join(segment.name.split("-")[:3]) + ".kvseg"))
    async with make(tmp_path, clock) as store:
        assert await hits(store, records) == 10
