"""SsdStore on disks that count, fail, lie, measure, or are killed: one double of `Disk` for each."""

from __future__ import annotations

import errno
import random
import shutil
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import anyio
import pytest
from anyio.lowlevel import checkpoint

from deepinfra.core.kv import KVRecord, NamespaceFilter, Retention
from deepinfra.interfaces.given import InlineOffload
from deepinfra.kvstores import SsdStore
from deepinfra.kvstores.ssd.disk import Disk
from deepinfra.testing.clock import ManualClock
from deepinfra.testing.kvrecords import chain, content, keys_of, load
from deepinfra.testing.kvstore import GatedOffload


class CountingDisk(Disk):
    """Counts calls; `room` is the free space it claims, if set."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.room: int | None = None

    def before(self, call: str) -> None:
        self.calls[call] += 1

    def after(self, call: str) -> None:
        pass

    def open(self, path: Path, *, create: bool = False, write: bool = False) -> int:
        self.before("open")
        return super().open(path, create=create, write=write)

    def pwritev(self, fd: int, buffers: Sequence[bytes | memoryview], offset: int) -> int:
        self.before("pwritev")
        written = super().pwritev(fd, buffers, offset)
        self.after("pwritev")
        return written

    def preadv(self, fd: int, buffers: Sequence[bytearray | memoryview], offset: int) -> int:
        self.before("preadv")
        return super().preadv(fd, buffers, offset)

    def truncate(self, fd: int, nbytes: int) -> None:
        self.before("truncate")
        super().truncate(fd, nbytes)
        self.after("truncate")

    def sync(self, fd: int) -> None:
        self.before("sync")
        super().sync(fd)

    def unlink(self, path: Path) -> None:
        self.before("unlink")
        super().unlink(path)
        self.after("unlink")

    def free_nbytes(self, path: Path) -> int:
        self.before("free_nbytes")
        return super().free_nbytes(path) if self.room is None else self.room


class FaultyDisk(CountingDisk):
    """Every call fails with probability `rate`; reads and writes may also do less than asked, or flip a bit."""

    def __init__(self, rng: random.Random, rate: float) -> None:
        super().__init__()
        self.rng, self.rate = rng, rate
        self.faults: Counter[str] = Counter()

    def strikes(self, fault: str) -> bool:
        if self.rng.random() >= self.rate:
            return False
        self.faults[fault] += 1
        return True

    def before(self, call: str) -> None:
        super().before(call)
        if self.strikes(call):
            raise OSError(self.rng.choice([errno.EIO, errno.ENOSPC, errno.EDQUOT]), f"injected into {call}")

    def pwritev(self, fd: int, buffers: Sequence[bytes | memoryview], offset: int) -> int:
        if self.strikes("short write"):
            first = memoryview(buffers[0]).cast("B")
            return super().pwritev(fd, [first[: self.rng.randint(1, first.nbytes)]], offset)
        return super().pwritev(fd, buffers, offset)

    def preadv(self, fd: int, buffers: Sequence[bytearray | memoryview], offset: int) -> int:
        if self.strikes("short read"):
            first = memoryview(buffers[0])
            return super().preadv(fd, [first[: self.rng.randint(1, first.nbytes)]], offset)
        got = super().preadv(fd, buffers, offset)
        if got and self.strikes("flip"):
            first = memoryview(buffers[self.rng.randrange(len(buffers))])
            first[self.rng.randrange(first.nbytes)] ^= 1 << self.rng.randrange(8)
        return got


class MeasuringDisk(CountingDisk):
    """Keeps the most bytes that the store's files ever took."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder, self.most = folder, 0

    def after(self, call: str) -> None:
        taken = sum(path.stat().st_blocks * 512 for path in self.folder.glob("*.kvseg"))
        self.most = max(self.most, taken)


class CrashingDisk(CountingDisk):
    """Keeps a copy of the folder before and after every call that changes it: what a kill at that moment leaves."""

    def __init__(self, folder: Path, copies: Path) -> None:
        super().__init__()
        self.folder, self.copies = folder, copies
        self.promised: list[frozenset[bytes]] = []
        self.acknowledged: frozenset[bytes] = frozenset()

    def before(self, call: str) -> None:
        super().before(call)
        if call in ("pwritev", "truncate", "unlink"):
            self._copy()

    def after(self, call: str) -> None:
        self._copy()

    def _copy(self) -> None:
        shutil.copytree(self.folder, self.copies / str(len(self.promised)))
        self.promised.append(self.acknowledged)

    def pwritev(self, fd: int, buffers: Sequence[bytes | memoryview], offset: int) -> int:
        half = memoryview(b"".join(buffers))[: max(1, sum(map(len, buffers)) // 2)]
        return super().pwritev(fd, [half], offset)  # the caller goes on with the rest: kills fall inside records too


def make(folder: Path, disk: Disk | None = None, *, clock: ManualClock | None = None, **settings: object) -> SsdStore:
    store = SsdStore(folder, **{"min_free_nbytes": 0, "capacity_nbytes": 1 << 20, "fsync": "none", **settings})  # type: ignore[arg-type]
    store.disk = disk or store.disk
    store.give(clock or ManualClock(), InlineOffload())
    return store


async def check_bytes(store: SsdStore, records: list[KVRecord]) -> int:
    """Every record is right or a miss; returns how many are right."""
    right = 0
    for record in records:
        for data in await load(store, [record.ref]):
            assert data == content(record.ref), "wrong bytes"
            right += 1
    return right


# -- counting -------------------------------------------------------------------------------------


async def test_neighbours_are_read_in_one_call(tmp_path: Path) -> None:
    disk = CountingDisk()
    async with make(tmp_path, disk) as store:
        records = chain(*range(40))
        await store.save(records)
        disk.calls.clear()
        assert len(await load(store, [record.ref for record in records])) == 20
        assert disk.calls["preadv"] == 1


async def test_records_wanted_twice_at_once_are_read_once(tmp_path: Path) -> None:
    disk, gate = CountingDisk(), GatedOffload()
    store = make(tmp_path, disk)
    store.give(ManualClock(), gate)
    delivered: list[list[bytes]] = []

    async def reader(records: list[KVRecord]) -> None:
        delivered.append(await load(store, [record.ref for record in records]))

    async with store:
        records = chain(*range(20))
        await store.save(records)
        disk.calls.clear()
        gate.shut()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(reader, records)
            for _ in range(5):
                await checkpoint()
            tasks.start_soon(reader, records)
            tasks.start_soon(reader, records[3:6])
            for _ in range(5):
                await checkpoint()
            gate.open()
        assert disk.calls["preadv"] == 1
    whole = [content(record.ref) for record in records]
    assert sorted(delivered, key=len) == [whole[3:6], whole, whole]


async def test_a_waiter_survives_the_cancellation_of_the_reader(tmp_path: Path) -> None:
    gate = GatedOffload()
    store = make(tmp_path)
    store.give(ManualClock(), gate)
    records = chain(*range(20))
    delivered: list[bytes] = []

    async def waiter() -> None:
        delivered.extend(await load(store, [record.ref for record in records]))

    async def reader(scope: anyio.CancelScope) -> None:
        with scope:
            await load(store, [record.ref for record in records])

    async with store:
        await store.save(records)
        gate.shut()
        async with anyio.create_task_group() as tasks:
            scope = anyio.CancelScope()
            tasks.start_soon(reader, scope)
            for _ in range(5):
                await checkpoint()
            tasks.start_soon(waiter)
            for _ in range(5):
                await checkpoint()
            scope.cancel()
            gate.open()
    assert delivered == [content(record.ref) for record in records]


async def test_a_cancelled_waiter_gets_no_bytes_after_it_returned(tmp_path: Path) -> None:
    gate = GatedOffload()
    store = make(tmp_path)
    store.give(ManualClock(), gate)
    (record,) = chain(1, 2)
    buffer = bytearray(record.ref.nbytes)

    async def waiter(scope: anyio.CancelScope) -> None:
        with scope:
            await store.load([record.ref], [memoryview(buffer)])

    async with store:
        await store.save([record])
        gate.shut()
        async with anyio.create_task_group() as tasks:
            scope = anyio.CancelScope()
            tasks.start_soon(load, store, [record.ref])
            for _ in range(5):
                await checkpoint()
            tasks.start_soon(waiter, scope)
            for _ in range(5):
                await checkpoint()
            scope.cancel()
            for _ in range(5):
                await checkpoint()
            gate.open()
    assert scope.cancelled_caught
    assert not any(buffer)


@pytest.mark.parametrize(("fsync", "syncs"), [("none", 0), ("interval", 1), ("always", 10)])
async def test_files_are_synced_as_often_as_the_policy_says(tmp_path: Path, fsync: str, syncs: int) -> None:
    disk = CountingDisk()
    clock = ManualClock()
    async with make(tmp_path, disk, clock=clock, fsync=fsync) as store:
        for i in range(10):
            await store.save(chain(i, i))
            clock.advance(0.6)  # 10 saves in less than 5 + 5 s
        assert disk.calls["sync"] == syncs


async def test_free_space_is_left_to_others(tmp_path: Path) -> None:
    disk = CountingDisk()
    async with make(tmp_path, disk, min_free_nbytes=100_000) as store:
        disk.room = 1 << 30
        for i in range(20):
            await store.save(chain(i, i, nbytes=30_000))
        before = store.stats()
        disk.room = 90_000
        await store.save(chain(90, 90, nbytes=30_000))
        after = store.stats()
        assert after.nbytes <= before.nbytes - 10_000
        assert after.dropped == 0
        assert len((await store.match(keys_of(chain(90, 90)))).refs) == 1
        disk.room = -(1 << 30)
        await store.save(chain(91, 91))
        assert store.stats().dropped == 1
        assert store.stats().records == after.records, "nothing is evicted where that cannot help"


async def test_files_go_when_their_hour_is_over(tmp_path: Path) -> None:
    disk, clock = CountingDisk(), ManualClock()
    async with make(tmp_path, disk, clock=clock) as store:
        for traffic in ("default", "agent", "chat"):
            await store.save(chain(1, 2, tenant=traffic, retention=Retention(traffic=traffic)))  # type: ignore[arg-type]
        left = []
        for _ in range(8):
            clock.advance(86_400.0 + 3_600.0)
            await store.save(chain(9, 9, retention=Retention(ttl_s=1.0)))
            left.append(len(list(tmp_path.glob("*.kvseg"))) - 1)
        assert left == [2, 2, 1, 1, 1, 1, 0, 0]
        assert store.stats().expired == 3 + 7


# -- measuring ------------------------------------------------------------------------------------


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_bytes_on_disk_never_exceed_the_cap(tmp_path: Path) -> None:
    rng = random.Random(7)
    clock = ManualClock()
    disk = MeasuringDisk(tmp_path)
    cap = 200_000
    for _ in range(3):
        async with make(tmp_path, disk, capacity_nbytes=cap, clock=clock) as store:
            for _ in range(80):
                retention = Retention(traffic=rng.choice(["default", "agent", "chat"]))
                tokens = [rng.randrange(3) for _ in range(rng.randrange(2, 30))]
                records = chain(*tokens, tenant=rng.choice("ab"), nbytes=rng.randrange(1, 9_000), retention=retention)
                await store.save(records)
                clock.advance(rng.choice([0.0, 1_000.0]))
                assert store.stats().nbytes <= cap
                if rng.random() < 0.1:
                    await store.forget(NamespaceFilter(tenant=rng.choice("ab")))
        assert sum(path.stat().st_blocks * 512 for path in tmp_path.glob("*.kvseg")) <= cap
    assert cap * 0.8 < disk.most <= cap


async def test_the_accounts_equal_what_is_on_disk(tmp_path: Path) -> None:
    async with make(tmp_path) as store:
        await store.save([record for i in range(30) for record in chain(i, i, i, i)])
        await store.forget(NamespaceFilter(tenant="nobody"))
    async with make(tmp_path) as store:
        assert store.stats().nbytes == sum(path.stat().st_blocks * 512 for path in tmp_path.glob("*.kvseg"))
        assert store.stats().records == 60


async def test_a_lowered_cap_holds_at_once(tmp_path: Path) -> None:
    async with make(tmp_path) as store:
        await store.save([record for i in range(60) for record in chain(i, i)])
        assert store.stats().nbytes > 150_000
    async with make(tmp_path, capacity_nbytes=100_000, segment_nbytes=8_192) as store:
        assert store.stats().nbytes <= 100_000
        assert sum(path.stat().st_blocks * 512 for path in tmp_path.glob("*.kvseg")) <= 100_000


# -- failing --------------------------------------------------------------------------------------


@pytest.mark.parametrize("rate", [0.02, 0.2])
@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_failing_disk_gives_misses_and_nothing_else(tmp_path: Path, seed: int, rate: float) -> None:
    rng = random.Random(seed)
    disk = FaultyDisk(rng, rate)
    clock = ManualClock()
    everything: dict[bytes, KVRecord] = {}
    for _ in range(3):
        disk.rate = 0.0
        async with make(tmp_path / "kv", disk, clock=clock, capacity_nbytes=300_000, fsync="always") as store:
            disk.rate = rate
            for _ in range(60):
                tokens = [rng.randrange(3) for _ in range(rng.randrange(2, 16))]
                records = chain(*tokens, tenant=rng.choice("ab"), nbytes=rng.randrange(1, 9_000))
                everything.update({r.ref.key + b"%d" % r.ref.nbytes: r for r in records})
                await store.save(records)
                await store.touch(keys_of(records), Retention(ttl_s=rng.choice([1_000.0, 400_000.0])))
                match = await store.match(keys_of(records))
                for data, ref in zip(await load(store, match.refs), match.refs, strict=False):
                    assert data == content(ref)
                if rng.random() < 0.1:
                    await store.forget(NamespaceFilter(tenant=rng.choice("ab")))
                clock.advance(rng.choice([0.0, 10.0, 2_000.0]))
                assert store.stats().nbytes <= 300_000
            disk.rate = 0.0
            await check_bytes(store, list(everything.values()))
            fresh = chain(*range(100, 104))
            await store.save(fresh)
            assert await check_bytes(store, fresh) == 2, "writes go on when the disk is well again"
            before = await check_bytes(store, list(everything.values()))
        async with make(tmp_path / "kv", disk, clock=clock, capacity_nbytes=300_000) as store:
            again = await check_bytes(store, list(everything.values()))
            assert again >= before, "only what a passing fault hid comes back"
            assert store.stats().nbytes >= sum(f.stat().st_blocks * 512 for f in (tmp_path / "kv").glob("*.kvseg"))
    assert sum(disk.faults.values()) > 20


async def test_a_write_that_fails_half_way_leaves_no_bytes_behind(tmp_path: Path) -> None:
    class FullDisk(Disk):
        full = False

        def pwritev(self, fd: int, buffers: Sequence[bytes | memoryview], offset: int) -> int:
            if self.full and len(buffers) == 1:
                raise OSError(errno.ENOSPC, "no space left")
            return super().pwritev(fd, buffers[:1] if self.full else buffers, offset)

    disk = FullDisk()
    async with make(tmp_path, disk) as store:
        first, second = chain(1, 2), chain(3, 4)
        await store.save(first)
        (segment,) = tmp_path.glob("*.kvseg")
        size = segment.stat().st_size
        disk.full = True
        await store.save(second)
        assert segment.stat().st_size == size
        assert store.stats().dropped == 1
        disk.full = False
        await store.save(second)
        assert await check_bytes(store, first + second) == 2


# -- killed at every call ---------------------------------------------------------------------------


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_killed_at_any_call_no_saved_record_is_lost_and_no_byte_is_wrong(tmp_path: Path) -> None:
    folder, copies = tmp_path / "kv", tmp_path / "copies"
    disk = CrashingDisk(folder, copies)
    records = [r for i in range(12) for r in chain(i, i, i + 1, i, nbytes=700 + i)]
    async with make(folder, disk, segment_nbytes=4_000) as store:
        for start in range(0, len(records), 3):
            await store.save(records[start : start + 3])
            disk.acknowledged |= set(keys_of(records[start : start + 3]))
    assert len(disk.promised) > 30
    for number, promised in enumerate(disk.promised):
        async with make(copies / str(number)) as store:
            for record in records:
                delivered = await load(store, [record.ref])
                assert delivered == [content(record.ref)] or (not delivered and record.ref.key not in promised)
            await store.save(records)
            assert await check_bytes(store, records) == len(records)


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_killed_while_forgetting_all_of_it_is_forgotten_or_nothing(tmp_path: Path) -> None:
    folder, copies = tmp_path / "kv", tmp_path / "copies"
    disk = CrashingDisk(folder, copies)
    mine, others = chain(*range(12), tenant="mine"), chain(*range(12), tenant="others")
    async with make(folder, disk) as store:
        await store.save([record for pair in zip(mine, others, strict=True) for record in pair])
        shutil.rmtree(copies)
        disk.promised.clear()
        await store.forget(NamespaceFilter(tenant="mine"))
        assert await check_bytes(store, others) == len(others)
    assert len(disk.promised) > 10
    for number in range(len(disk.promised)):
        async with make(copies / str(number)) as store:
            held = await check_bytes(store, mine)
            assert held in (0, len(mine)), "what was begun is finished"
            await check_bytes(store, others)
        if not held:
            files = b"".join(path.read_bytes() for path in (copies / str(number)).iterdir())
            assert not any(piece in files for r in mine for piece in (r.ref.key, content(r.ref)))


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_killed_while_renewing_no_record_is_lost(tmp_path: Path) -> None:
    folder, copies = tmp_path / "kv", tmp_path / "copies"
    disk, clock = CrashingDisk(folder, copies), ManualClock()
    records = chain(*range(24), nbytes=700)
    async with make(folder, disk, clock=clock, segment_nbytes=4_000) as store:
        await store.save(records)
        clock.advance(0.8 * 86_400)
        shutil.rmtree(copies)
        disk.promised.clear()
        await store.touch(keys_of(records), Retention())
        assert store.stats().renewed == len(records)
    assert len(disk.promised) > 10
    for number in range(len(disk.promised)):
        async with make(copies / str(number), clock=clock) as store:
            assert await check_bytes(store, records) == len(records)
