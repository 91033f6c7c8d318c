"""Forgetting in an SsdStore whose disk fails just then, or whose peer dies just then: bytes go, and only those."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from anyio.lowlevel import checkpoint

from deepinfra.core.kv import KVRecord, NamespaceFilter, Retention
from deepinfra.interfaces.given import InlineOffload
from deepinfra.kvstores import SsdStore
from deepinfra.kvstores.ssd import erasing, writer
from deepinfra.kvstores.ssd.appending import Life, append
from deepinfra.kvstores.ssd.disk import Disk, Status
from deepinfra.kvstores.ssd.format import Erased
from deepinfra.testing.clock import ManualClock
from deepinfra.testing.kvrecords import chain, content, keys_of, load

MINE, OTHERS = chain(*range(20), tenant="tenant-mine"), chain(*range(20), tenant="others")
WHICH = NamespaceFilter(tenant="tenant-mine")


class FailingDisk(Disk):
    """Fails in what is named in `failing`: `read` and `write` files of records, `tell` others, `list` the folder, …"""

    def __init__(self) -> None:
        self.failing: set[str] = set()
        self.paths: dict[int, Path] = {}

    def _fail(self, call: str) -> None:
        if call in self.failing:
            raise OSError(5, f"injected into {call}")

    def open(self, path: Path, *, create: bool = False, write: bool = False) -> int:
        if path.suffix == ".kvseg" and not write:
            self._fail("read")
        fd = super().open(path, create=create, write=write)
        self.paths[fd] = path
        return fd

    def preadv(self, fd: int, buffers: Sequence[bytearray | memoryview], offset: int) -> int:
        self._fail("preadv")
        return super().preadv(fd, buffers, offset)

    def pwritev(self, fd: int, buffers: Sequence[bytes | memoryview], offset: int) -> int:
        if self.paths[fd].name == "forgotten":
            self._fail("tell")
        if self.paths[fd].suffix == ".kvseg" and "write" in self.failing:
            os.pwritev(fd, [b"".join(buffers)[:-1]], offset)  # all but the last byte
            self._fail("write")
        return super().pwritev(fd, buffers, offset)

    def truncate(self, fd: int, nbytes: int) -> None:
        self._fail("truncate")
        super().truncate(fd, nbytes)

    def unlink(self, path: Path) -> None:
        if path.suffix == ".kvseg":
            self._fail("unlink")
        super().unlink(path)

    def files(self, path: Path) -> dict[str, Status]:
        self._fail("list")
        return super().files(path)


def make(folder: Path, clock: ManualClock, disk: Disk | None = None, **settings: object) -> SsdStore:
    store = SsdStore(folder, **{"min_free_nbytes": 0, "capacity_nbytes": 1 << 20, "fsync": "none", **settings})  # type: ignore[arg-type]
    store.disk = disk or store.disk
    store.give(clock, InlineOffload())
    return store


@asynccontextmanager
async def two(folder: Path) -> AsyncIterator[tuple[SsdStore, SsdStore, FailingDisk, ManualClock]]:
    """Two stores on a folder; the disk is that of the first."""
    clock, disk = ManualClock(), FailingDisk()
    async with make(folder, clock, disk) as one, make(folder, clock) as other:
        yield one, other, disk, clock


async def held(store: SsdStore, records: Sequence[KVRecord]) -> int:
    """Records that are matched; every one of them comes back right."""
    found = 0
    for record in records:
        match = await store.match(keys_of([record]))
        assert await load(store, match.refs) == [content(ref) for ref in match.refs]
        found += len(match.refs)
    return found


def remains(folder: Path, records: Sequence[KVRecord], *, named: bool = True) -> bool:
    """Whether any 64 bytes of records, a key or the tenant's name are in any file."""
    files = b"".join(path.read_bytes() for path in folder.iterdir())
    pieces = [content(r.ref)[i : i + 64] for r in records for i in range(0, r.ref.nbytes - 64, 64)]
    names = [records[0].tenant.encode()] if named else []
    return any(piece in files for piece in (*pieces, *keys_of(list(records)), *names))


def abandon(store: SsdStore) -> None:
    """What the kernel does when a process is killed: all its files are closed and unlocked, nothing is written."""
    folder, opened = store._folder, store._writer._open
    for fd in (*(segment.fd for segment in opened.values()), folder._process, folder._forgotten):
        if fd is not None:
            os.close(fd)
    opened.clear()
    folder._process = folder._forgotten = -1
    store._writer.end = checkpoint  # type: ignore[method-assign]


# -- a footer counts ------------------------------------------------------------------------------


async def test_a_file_found_sealed_holds_what_its_footer_lists(tmp_path: Path) -> None:
    clock, disk = ManualClock(), FailingDisk()
    async with make(tmp_path, clock) as other:
        async with make(tmp_path, clock, disk) as one:
            await one.save(OTHERS)
            clock.advance(1.0)
            assert await held(other, OTHERS[:3]) == 3
            disk.failing = {"preadv"}
            assert await load(one, [OTHERS[1].ref]) == []  # damaged, as far as it knows: its footer lists the rest
            disk.failing = set()
            await one.save(chain(40, 41))
        clock.advance(1.0)
        seen = await held(other, OTHERS + chain(40, 41))
    async with make(tmp_path, clock) as third:
        assert await held(third, OTHERS + chain(40, 41)) == seen == 10


async def test_a_file_that_could_not_be_read_at_first_holds_what_its_footer_lists(tmp_path: Path) -> None:
    async with two(tmp_path) as (one, other, disk, clock):
        await other.save(MINE + OTHERS)
        disk.failing = {"read"}
        clock.advance(1.0)
        assert await held(one, OTHERS) == 0
        disk.failing = set()
        other._index.lose(*_where(other, OTHERS[1]))
        await other._writer.end()
        clock.advance(1.0)
        assert await held(one, MINE + OTHERS) == 19


def _where(store: SsdStore, record: KVRecord) -> tuple[object, bytes, object]:
    place = store._index.seek(record.ref.key, store.clock.wall())
    assert place is not None
    return place[0], record.ref.key, place[1]


# -- bytes go -------------------------------------------------------------------------------------


async def test_what_could_not_be_listed_is_overwritten_later(tmp_path: Path) -> None:
    async with two(tmp_path) as (one, other, disk, clock):
        await other.save(MINE + OTHERS)
        disk.failing = {"list"}
        await one.forget(WHICH)
        disk.failing = set()
        assert remains(tmp_path, MINE)
        clock.advance(1.0)
        await one.save(chain(40, 41))
        assert not remains(tmp_path, MINE)
        assert await held(one, OTHERS) == await held(other, OTHERS) == 10


async def test_a_file_that_cannot_be_read_is_overwritten_nevertheless(tmp_path: Path) -> None:
    async with two(tmp_path) as (one, other, disk, clock):
        await other.save(MINE + OTHERS)
        disk.failing = {"read"}
        await one.forget(WHICH)
        disk.failing = set()
        assert not remains(tmp_path, MINE)
        clock.advance(1.0)
        assert await held(one, OTHERS) == 10
        assert await held(one, MINE) == 0


async def test_what_another_began_to_forget_is_not_left_to_it(tmp_path: Path) -> None:
    async with two(tmp_path) as (one, other, _, clock):
        await one.save(MINE + OTHERS)
        other._folder.announce(Erased.of(WHICH), other._follower.heard, False)  # and is stopped
        clock.advance(1.0)
        assert await held(one, MINE) == 0
        assert remains(tmp_path, MINE)
        await one.forget(WHICH)
        assert not remains(tmp_path, MINE)
        assert await held(one, OTHERS) == 10


async def test_a_file_gets_no_footer_before_what_is_forgotten_in_it_is_overwritten(tmp_path: Path) -> None:
    clock = ManualClock()
    async with make(tmp_path, clock) as other:
        async with make(tmp_path, clock) as one:
            await one.save(MINE + OTHERS)
            other._folder.announce(Erased.of(WHICH), 0, False)
            clock.advance(1.0)
            assert await held(one, MINE) == 0
        await other.forget(WHICH)  # it never saw that file: its records tell whose they are
        assert not remains(tmp_path, MINE)
        assert await held(other, OTHERS) == 10


async def test_half_a_record_that_could_not_be_cut_off_is_forgotten_too(tmp_path: Path) -> None:
    async with two(tmp_path) as (one, _, disk, clock):
        await one.save(OTHERS)
        disk.failing = {"write", "truncate"}
        await one.save(MINE)
        disk.failing = {"truncate"}
        assert remains(tmp_path, MINE)
        clock.advance(1.0)
        await one.forget(WHICH)
        assert not remains(tmp_path, MINE)


async def test_what_expired_before_it_was_seen_is_forgotten_too(tmp_path: Path) -> None:
    dead = chain(*range(20), tenant="tenant-mine", retention=Retention(ttl_s=0.5))
    async with two(tmp_path) as (one, other, _, clock):
        await other.save(chain(50, 51, retention=Retention(ttl_s=5.0)))
        clock.advance(1.0)
        await one.match([])
        await other.save(dead)
        clock.advance(1.0)
        await one.forget(WHICH)
        assert not remains(tmp_path, dead)


async def test_a_record_being_written_while_its_owner_is_forgotten_is_forgotten_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "PATIENCE_S", 0.0)
    monkeypatch.setattr(erasing, "FORGET_PATIENCE_S", 0.0)
    async with two(tmp_path) as (one, other, _, clock):
        await other.save(OTHERS)
        other._folder._share(other._follower.heard)  # it is about to append
        await one.forget(WHICH)
        (segment,) = other._writer._open.values()
        lives = [Life(record, clock.wall(), clock.wall() + 9e4, 9e4) for record in MINE]
        append(other.disk, other.path / segment.name, segment.fd, segment.size, lives, False)
        other.disk.release(other._folder._forgotten)
        assert remains(tmp_path, MINE)
        clock.advance(1.0)
        await one.save(chain(40, 41))
        assert not remains(tmp_path, MINE)


# -- and only those -------------------------------------------------------------------------------


@pytest.mark.parametrize("failing", ["tell", "list"])
async def test_what_is_saved_after_a_forgetting_that_could_not_be_finished_stays(tmp_path: Path, failing: str) -> None:
    async with two(tmp_path) as (one, other, disk, clock):
        await one.save(chain(60, 61, tenant="others") + MINE)
        disk.failing = {failing}
        await one.forget(WHICH)
        assert not remains(tmp_path, MINE)
        disk.failing = set()
        await one.save(MINE)
        assert await held(one, MINE) == 10
        for _ in range(3):
            clock.advance(1.0)
            await one.save(chain(40, 41))
            assert await held(one, MINE) == 10
            clock.advance(1.0)
            await other.match([])  # hears of it, and then reads the files anew
            assert await held(other, MINE) == 10
    async with make(tmp_path, clock) as third:
        assert await held(third, MINE) == 10


async def test_what_another_saves_while_only_the_end_of_a_forgetting_is_untold_stays(tmp_path: Path) -> None:
    async with two(tmp_path) as (one, other, _, clock):
        await other.save(MINE)
        announce, told = one._folder.announce, list[bool]()

        def once(which: Erased, heard: int, done: bool) -> object:
            told.append(done)
            if told == [False, True]:
                raise OSError(5, "injected")
            return announce(which, heard, done)

        one._folder.announce = once  # type: ignore[method-assign, assignment]
        await one.forget(WHICH)
        clock.advance(1.0)
        await other.match([])
        await other.save(MINE)
        clock.advance(1.0)
        await one.save(chain(40, 41))
        assert told == [False, True, True]
        clock.advance(1.0)
        assert await held(other, MINE) == await held(one, MINE) == 10


# -- also across crashes --------------------------------------------------------------------------


async def test_who_enters_after_a_crash_finishes_what_was_begun(tmp_path: Path) -> None:
    clock, disk = ManualClock(), FailingDisk()
    async with make(tmp_path, clock) as other:
        async with make(tmp_path, clock, disk) as one:
            await other.save(MINE + OTHERS)
            disk.failing = {"list"}
            await one.forget(WHICH)
            abandon(one)
        abandon(other)
    assert remains(tmp_path, MINE)
    async with make(tmp_path, clock) as third:
        assert not remains(tmp_path, MINE)
        assert await held(third, MINE) == 0
        assert await held(third, OTHERS) == 10
        await third.save(MINE)
        clock.advance(1.0)
    async with make(tmp_path, clock) as fourth:
        assert await held(fourth, MINE) == 10, "it was done once"


async def test_what_is_left_to_be_forgotten_is_done_before_leaving(tmp_path: Path) -> None:
    clock, disk = ManualClock(), FailingDisk()
    async with make(tmp_path, clock) as other:
        async with make(tmp_path, clock, disk) as one:
            await other.save(MINE + OTHERS)
            disk.failing = {"list"}
            await one.forget(WHICH)
            disk.failing = set()
            await one.save(chain(*range(80, 90), tenant="tenant-mine"))
        assert not remains(tmp_path, MINE, named=False)
        clock.advance(1.0)
        await other.match([])
        assert await held(other, chain(*range(80, 90), tenant="tenant-mine")) == 5


async def test_a_file_that_resists_forgetting_is_forgotten_by_who_enters_next(tmp_path: Path) -> None:
    clock, disk = ManualClock(), FailingDisk()
    async with make(tmp_path, clock, disk) as one:
        await one.save(MINE + OTHERS)
    async with make(tmp_path, clock, disk) as one:
        disk.failing = {"truncate", "unlink"}
        await one.forget(WHICH)
        assert await held(one, MINE) == 0
    assert remains(tmp_path, MINE)
    async with make(tmp_path, clock) as next_one:
        assert await held(next_one, MINE) == 0
        assert not remains(tmp_path, MINE)


async def test_a_shorter_footer_is_counted_as_what_it_takes(tmp_path: Path) -> None:
    clock, many = ManualClock(), chain(*range(300), nbytes=16, tenant="tenant-mine")
    async with make(tmp_path, clock) as store:
        await store.save([*many, *chain(1, 2, tenant="others")])
    async with make(tmp_path, clock) as store:
        before = store.stats().nbytes
        await store.forget(WHICH)
        taken = sum(path.stat().st_blocks * 512 for path in tmp_path.glob("*.kvseg"))
        assert store.stats().nbytes == taken < before
