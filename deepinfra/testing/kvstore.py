"""Conformance of KV stores: subclass `KVStoreConformance`, say how yours is made, and run pytest.

    class TestMine(KVStoreConformance):
        persistent = True

        def make(self, tmp_path: Path) -> KVStore:
            return MyStore(tmp_path / "kv", capacity_nbytes=self.capacity_nbytes)

Every law is an ordinary method, so a single one can be run by name, or called with a broken store to see it fail.
"""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import anyio
import pytest
from anyio.lowlevel import checkpoint

from deepinfra.core.kv import KVRecord, NamespaceFilter, RecordRef, Retention
from deepinfra.interfaces.given import ThreadOffload
from deepinfra.interfaces.kvstore import KVStore
from deepinfra.testing.clock import ManualClock
from deepinfra.testing.kvrecords import NBYTES, chain, content, keys_of, load
from deepinfra.testing.kvstore_machine import run_kvstore_machine

__all__ = ("GatedOffload", "KVStoreConformance")

T = TypeVar("T")


class GatedOffload:
    """An `Offload` that can be shut: then functions wait, and run when it opens even if nobody waits for them."""

    def __init__(self) -> None:
        self._shut = False
        self._queue: list[Callable[[], None]] = []

    async def __call__(self, function: Callable[..., T], /, *args: object) -> T:
        """See `Offload`."""
        results: list[T] = []
        done = anyio.Event()

        def run() -> None:
            results.append(function(*args))
            done.set()

        if self._shut:
            self._queue.append(run)
        else:
            run()
        await done.wait()
        return results[0]

    def shut(self) -> None:
        """Let functions wait."""
        self._shut = True

    def open(self) -> None:
        """Run what waits, and everything from now on at once."""
        self._shut = False
        while self._queue:
            self._queue.pop(0)()


def _open_files() -> int:
    return len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0


@pytest.mark.anyio
class KVStoreConformance:
    """The laws of a KV store.

    Attributes:
        persistent: Whether what was saved is there after the store is left and made again.
        lossy: Whether random histories must expect that it loses records without counting them.
        capacity_nbytes: Cap that `make` gives a store which has one; about 80 of the kit's records.
    """

    persistent = False
    lossy = False
    capacity_nbytes = 256 << 10

    @pytest.fixture(params=["asyncio", "trio"])
    def anyio_backend(self, request: pytest.FixtureRequest) -> str:
        """Every law holds on both backends."""
        backend: str = request.param
        return backend

    def make(self, tmp_path: Path) -> KVStore:
        """A new store, not entered; called again with the same path it finds what the last one left, if persistent."""
        raise NotImplementedError

    @asynccontextmanager
    async def entered(self, tmp_path: Path) -> AsyncGenerator[tuple[KVStore, ManualClock]]:
        """A store with a clock of its own."""
        store, clock = self.make(tmp_path), ManualClock()
        store.give(clock, ThreadOffload())
        async with store:
            yield store, clock

    # -- bytes by key -----------------------------------------------------------------------------

    async def test_what_was_saved_is_matched_and_loaded(self, tmp_path: Path) -> None:
        async with self.entered(tmp_path) as (store, _):
            records = chain(1, 2, 3, 4, 5, 6)
            await store.save(records)
            match = await store.match(keys_of(records))
            assert list(match.refs) == [record.ref for record in records]
            assert match.missed == ""
            assert sum(tier.count for tier in match.tiers) == len(records)
            assert await load(store, match.refs) == [content(ref) for ref in match.refs]

    async def test_what_was_not_saved_is_a_miss(self, tmp_path: Path) -> None:
        async with self.entered(tmp_path) as (store, _):
            await store.save(chain(1, 2))
            stranger = chain(7, 8)
            match = await store.match(keys_of(stranger))
            assert (match.refs, match.missed) == ((), "absent")
            assert await load(store, [stranger[0].ref]) == []
            assert (await store.match([])).refs == ()

    async def test_a_match_ends_before_the_first_gap(self, tmp_path: Path) -> None:
        async with self.entered(tmp_path) as (store, _):
            records = chain(1, 2, 3, 4, 5, 6, 7, 8)
            await store.save([records[0], records[1], records[3]])
            match = await store.match(keys_of(records))
            assert [ref.key for ref in match.refs] == keys_of(records[:2])
            assert match.missed == "absent"

    async def test_any_slice_of_a_match_can_be_loaded(self, tmp_path: Path) -> None:
        async with self.entered(tmp_path) as (store, _):
            await store.save(chain(*range(12)))
            refs = (await store.match(keys_of(chain(*range(12))))).refs
            for part in (refs[2:5], refs[5:], refs[3:4], refs[:0], refs):
                assert await load(store, part) == [content(ref) for ref in part]

    async def test_a_load_stops_before_what_is_missing(self, tmp_path: Path) -> None:
        async with self.entered(tmp_path) as (store, _):
            records = chain(*range(8))
            await store.save([records[0], records[1], records[3]])
            assert await load(store, [record.ref for record in records]) == [content(r.ref) for r in records[:2]]

    async def test_data_may_be_reused_when_save_returns(self, tmp_path: Path) -> None:
        async with self.entered(tmp_path) as (store, _):
            (record,) = chain(1, 2)
            slot = bytearray(content(record.ref))
            await store.save([replace(record, data=memoryview(slot))])
            slot[:] = bytes(len(slot))
            assert await load(store, [record.ref]) == [content(record.ref)]

    async def test_a_record_already_held_is_not_replaced(self, tmp_path: Path) -> None:
        async with self.entered(tmp_path) as (store, _):
            (record,) = chain(1, 2)
            await store.save([record])
            await store.save([replace(record, data=memoryview(bytes(record.ref.nbytes)))])
            assert await load(store, [record.ref]) == [content(record.ref)]
            assert store.stats().records == 1

    async def test_kinds_do_not_mix(self, tmp_path: Path) -> None:
        async with self.entered(tmp_path) as (store, _):
            blocks, snapshots = chain(1, 2, 3, 4), chain(1, 2, 3, 4, kind="snapshot")
            await store.save([blocks[0], blocks[1], snapshots[1]])
            match = await store.match(keys_of(blocks))
            assert [ref.kind for ref in match.refs] == ["block", "block"]
            assert match.snapshots == (1,)
            assert await load(store, [snapshots[1].ref, blocks[1].ref]) == [
                content(snapshots[1].ref),
                content(blocks[1].ref),
            ]
            assert await load(store, [snapshots[0].ref]) == []

    async def test_a_ref_of_another_size_is_a_miss(self, tmp_path: Path) -> None:
        async with self.entered(tmp_path) as (store, _):
            (record,) = chain(1, 2)
            await store.save([record])
            assert await load(store, [record.ref._replace(nbytes=record.ref.nbytes - 1)]) == []

    async def test_records_of_many_sizes_come_back(self, tmp_path: Path) -> None:
        async with self.entered(tmp_path) as (store, _):
            records = [chain(i, i, nbytes=nbytes)[0] for i, nbytes in enumerate((1, 511, 4096, 4097, 20_000))]
            await store.save(records)
            for record in records:
                assert await load(store, [record.ref]) == [content(record.ref)]

    # -- room and time ----------------------------------------------------------------------------

    async def test_the_cap_holds_and_the_newest_is_held(self, tmp_path: Path) -> None:
        async with self.entered(tmp_path) as (store, _):
            for i in range(200):
                records = chain(i, i, i, i)
                await store.save(records)
                stats = store.stats()
                assert stats.nbytes <= stats.capacity_nbytes or not stats.capacity_nbytes
                assert len((await store.match(keys_of(records))).refs) == 2

    async def test_a_record_larger_than_the_store_is_dropped_and_harms_nothing(self, tmp_path: Path) -> None:
        async with self.entered(tmp_path) as (store, _):
            (small,) = chain(1, 2)
            (large,) = chain(3, 4, nbytes=self.capacity_nbytes + 1)
            await store.save([small, large])
            stats = store.stats()
            assert await load(store, [small.ref]) == [content(small.ref)]
            if stats.capacity_nbytes:
                assert stats.nbytes <= stats.capacity_nbytes
                assert stats.dropped >= 1
                assert (await store.match([large.ref.key])).refs == ()

    async def test_retention_none_is_never_kept(self, tmp_path: Path) -> None:
        async with self.entered(tmp_path) as (store, _):
            records = chain(1, 2, retention=Retention(traffic="none"))
            await store.save(records)
            assert (await store.match(keys_of(records))).refs == ()
            assert store.stats().records == 0

    async def test_without_disk_a_record_stays_in_ram(self, tmp_path: Path) -> None:
        async with self.entered(tmp_path) as (store, _):
            records = chain(1, 2, 3, 4, retention=Retention(disk=False))
            await store.save(records)
            assert len((await store.match(keys_of(records))).refs) == (0 if store.durable else 2)

    async def test_a_record_dies_when_its_life_is_over(self, tmp_path: Path) -> None:
        async with self.entered(tmp_path) as (store, clock):
            first = chain(1, 2, retention=Retention(ttl_s=100.0))
            second = chain(3, 4, retention=Retention(traffic="chat", ttl_s=200.0))
            await store.save(first + second)
            clock.advance(99.0)
            assert len((await store.match(keys_of(first))).refs) == 1
            clock.advance(101.0)
            match = await store.match(keys_of(second))
            assert match.refs == ()
            assert match.missed in ("expired", "absent")
            assert await load(store, [second[0].ref]) == []
            await store.save(second)
            assert await load(store, [second[0].ref]) == [content(second[0].ref)]

    async def test_touching_hurts_nothing(self, tmp_path: Path) -> None:
        async with self.entered(tmp_path) as (store, _):
            records = chain(1, 2, 3, 4)
            await store.save(records)
            keys = keys_of(records) + keys_of(chain(8, 9))
            wanted = await store.touch(keys, Retention())
            assert wanted is not None, "touch returns the keys that it wants to be given, or ()"
            assert list(wanted) == [key for key in keys if key in wanted]
            assert await load(store, [record.ref for record in records]) == [content(r.ref) for r in records]

    # -- forgetting -------------------------------------------------------------------------------

    @pytest.mark.parametrize(
        "which",
        [
            NamespaceFilter(tenant="a"),
            NamespaceFilter(model="x"),
            NamespaceFilter(tenant="a", model="x"),
            NamespaceFilter(),
        ],
        ids=["tenant", "model", "both", "all"],
    )
    async def test_forgotten_records_are_gone_and_others_are_not(self, tmp_path: Path, which: NamespaceFilter) -> None:
        async with self.entered(tmp_path) as (store, _):
            everything = [r for t in "ab" for m in "xy" for r in chain(1, 2, 3, 4, tenant=t, model=m)]
            await store.save(everything)
            gone = [r for r in everything if which.matches(r.tenant, r.model, r.namespace)]
            forgotten = await store.forget(which)
            assert forgotten.records == len(gone)
            assert forgotten.nbytes >= sum(record.ref.nbytes for record in gone)
            await self._check_held(store, everything, gone)
            assert (await store.forget(which)).records == 0
        if self.persistent:
            async with self.entered(tmp_path) as (store, _):
                await self._check_held(store, everything, gone)

    async def test_a_namespace_is_forgotten_and_no_other_of_its_tenant(self, tmp_path: Path) -> None:
        salted = [chain(1, 2, 3, 4, salt=salt) for salt in ("", "a", "b")]
        everything, namespace = [record for records in salted for record in records], salted[1][0].namespace
        async with self.entered(tmp_path) as (store, _):
            await store.save(everything)
            assert (await store.forget(NamespaceFilter(tenant="other", namespace=namespace))).records == 0
            assert (await store.forget(NamespaceFilter(model="other", namespace=namespace))).records == 0
            await self._check_held(store, everything, [])
            assert (await store.forget(NamespaceFilter(namespace=namespace))).records == len(salted[1])
            await self._check_held(store, everything, salted[1])
            which = NamespaceFilter(tenant="public", model="m", namespace=salted[2][0].namespace)
            assert (await store.forget(which)).records == len(salted[2])
            await self._check_held(store, everything, salted[1] + salted[2])
        if self.persistent:
            async with self.entered(tmp_path) as (store, _):
                await self._check_held(store, everything, salted[1] + salted[2])

    async def _check_held(self, store: KVStore, everything: list[KVRecord], gone: list[KVRecord]) -> None:
        assert store.stats().records == len(everything) - len(gone)
        for record in everything:
            delivered = [] if record in gone else [content(record.ref)]
            assert len((await store.match([record.ref.key])).refs) == len(delivered)
            assert await load(store, [record.ref]) == delivered

    async def test_what_was_forgotten_can_be_saved_again(self, tmp_path: Path) -> None:
        async with self.entered(tmp_path) as (store, _):
            records = chain(1, 2, 3, 4)
            for _ in range(3):
                await store.save(records)
                await store.forget(NamespaceFilter(tenant="public"))
            await store.save(records)
            assert await load(store, [record.ref for record in records]) == [content(r.ref) for r in records]

    # -- concurrency ------------------------------------------------------------------------------

    async def test_concurrent_calls_give_everybody_the_right_bytes(self, tmp_path: Path) -> None:
        async with self.entered(tmp_path) as (store, _):
            records = chain(*range(20))
            refs = [record.ref for record in records]
            delivered: list[list[bytes]] = []

            async def reader(part: Sequence[RecordRef]) -> None:
                delivered.append(await load(store, part))

            await store.save(records[:6])
            async with anyio.create_task_group() as tasks:
                for _ in range(4):
                    tasks.start_soon(reader, refs)
                    tasks.start_soon(reader, refs[2:5])
                    tasks.start_soon(store.save, records)
            assert all(len(data) >= 3 for data in delivered)
            for data in delivered:
                assert data in ([content(ref) for ref in refs[: len(data)]], [content(ref) for ref in refs[2:5]])
            assert store.stats().records == len(records)

    async def test_cancelled_calls_leak_nothing(self, tmp_path: Path) -> None:
        before = _open_files()
        async with self.entered(tmp_path) as (store, _):
            records = chain(*range(20))
            refs = [record.ref for record in records]
            for turns in range(12):
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(store.save, chain(turns, *range(9)))
                    tasks.start_soon(load, store, refs)
                    tasks.start_soon(store.match, keys_of(records))
                    tasks.start_soon(store.save, records)
                    for _ in range(turns):
                        await checkpoint()
                    tasks.cancel_scope.cancel()
            await store.save(records)
            assert await load(store, refs) == [content(ref) for ref in refs]
            await store.forget(NamespaceFilter())
            assert store.stats().records == 0
        assert _open_files() <= before

    async def test_a_cancelled_load_writes_nothing_after_it_returned(self, tmp_path: Path) -> None:
        store, gate = self.make(tmp_path), GatedOffload()
        store.give(ManualClock(), gate)
        records = chain(1, 2, 3, 4)
        buffers = [bytearray(NBYTES) for _ in records]
        scope, returned = anyio.CancelScope(), anyio.Event()

        async def reader() -> None:
            with scope:
                await store.load([record.ref for record in records], [memoryview(buffer) for buffer in buffers])
            for buffer in buffers:
                buffer[:] = b"\xee" * NBYTES
            returned.set()

        async with store:
            await store.save(records)
            gate.shut()
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(reader)
                for _ in range(10):
                    await checkpoint()
                scope.cancel()
                for _ in range(10):
                    await checkpoint()
                gate.open()
                await returned.wait()
            assert all(bytes(buffer) == b"\xee" * NBYTES for buffer in buffers)

    # -- leaving and coming back ------------------------------------------------------------------

    async def test_a_store_can_be_entered_again(self, tmp_path: Path) -> None:
        async with self.entered(tmp_path) as (store, _):
            await store.save(chain(1, 2))
        async with store:
            await store.save(chain(3, 4))
            assert await load(store, [chain(3, 4)[0].ref]) == [content(chain(3, 4)[0].ref)]
            assert len((await store.match(keys_of(chain(1, 2)))).refs) == self.persistent

    async def test_what_was_saved_survives_reopening_iff_persistent(self, tmp_path: Path) -> None:
        records = chain(*range(40)) + chain(*range(4), kind="snapshot")
        async with self.entered(tmp_path) as (store, _):
            await store.save(records)
            before = store.stats()
        async with self.entered(tmp_path) as (store, _):
            after = store.stats()
            match = await store.match(keys_of(chain(*range(40))))
            if not self.persistent:
                assert (after.records, after.nbytes, match.refs) == (0, 0, ())
                return
            assert (after.records, after.nbytes) == (before.records, before.nbytes)
            assert len(match.refs) == 20
            assert match.snapshots == (0, 1)
            assert await load(store, [r.ref for r in records]) == [content(r.ref) for r in records]
            await store.save(records)
            assert store.stats().records == before.records

    async def test_lives_go_on_while_the_store_is_closed(self, tmp_path: Path) -> None:
        short, long = chain(1, 2, retention=Retention(ttl_s=100.0)), chain(3, 4, retention=Retention(ttl_s=200.0))
        async with self.entered(tmp_path) as (store, _):
            await store.save(short + long)
        store, clock = self.make(tmp_path), ManualClock()
        clock.advance(150.0)
        store.give(clock, ThreadOffload())
        async with store:
            assert (await store.match(keys_of(short))).refs == ()
            assert len((await store.match(keys_of(long))).refs) == self.persistent
            assert store.stats().records == self.persistent

    # -- any history ------------------------------------------------------------------------------

    def test_any_history_keeps_the_laws(self, tmp_path: Path, anyio_backend: str) -> None:
        """See `deepinfra.testing.kvstore_machine`."""
        run_kvstore_machine(self.make, tmp_path, persistent=self.persistent, lossy=self.lossy, backend=anyio_backend)
