"""Listing a folder without entering a store."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from deepinfra.core.kv import KVRecord, NamespaceFilter, Retention
from deepinfra.interfaces.given import InlineOffload
from deepinfra.kvstores import SsdStore
from deepinfra.kvstores.ssd.listing import list_records, list_segments, read_listed
from deepinfra.testing.clock import ManualClock
from deepinfra.testing.kvrecords import chain, content


def make(folder: Path) -> SsdStore:
    store = SsdStore(folder, min_free_nbytes=0, capacity_nbytes=1 << 20, fsync="none")
    store.give(ManualClock(), InlineOffload())
    return store


RECORDS = [
    *chain(*range(8), tenant="a", nbytes=300),
    *chain(*range(8), tenant="b", retention=Retention(traffic="agent"), nbytes=20_000),
    *chain(*range(4), tenant="b", kind="snapshot", nbytes=50),
]


@pytest.fixture(params=["sealed", "open"])
async def folder(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    async with make(tmp_path / "kv") as store:
        await store.save(RECORDS)
        shutil.copytree(tmp_path / "kv", tmp_path / "open")
    return tmp_path / ("kv" if request.param == "sealed" else "open")


async def test_every_record_is_listed_with_all_that_was_said_of_it(folder: Path) -> None:
    wanted = {(r.ref, r.parent, r.namespace, r.tenant, r.model, r.tokens, r.retention.traffic) for r in RECORDS}
    listed = list(list_records(folder))
    assert {(r.ref, r.parent, *r.owner, r.tokens, r.traffic) for r in listed} == wanted
    assert len(listed) == len(RECORDS)
    assert {segment.sealed for segment in list_segments(folder)} == {folder.name == "kv"}
    for record in listed:
        read = read_listed(folder, record)
        assert isinstance(read, KVRecord)
        assert bytes(read.data) == content(record.ref)
        assert read.retention == Retention(traffic=record.traffic, ttl_s=record.expires - record.created)


async def test_behind_damage_the_footer_tells_of_the_rest(folder: Path) -> None:
    before = len(list(list_records(folder)))
    (agents,) = folder.glob("agent-*.kvseg")
    data = bytearray(agents.read_bytes())
    data[1] ^= 1  # the first header
    agents.write_bytes(data)
    assert len(list(list_records(folder))) == before - (1 if folder.name == "kv" else 4)


async def test_a_damaged_payload_is_listed_and_cannot_be_read(folder: Path) -> None:
    for path in folder.glob("*.kvseg"):
        data = path.read_bytes()
        path.write_bytes(data.replace(content(RECORDS[0].ref), bytes(300)))
    damaged = [record.ref for record in list_records(folder) if read_listed(folder, record) is None]
    assert damaged == [RECORDS[0].ref]


async def test_what_was_forgotten_is_not_listed(tmp_path: Path) -> None:
    async with make(tmp_path) as store:
        await store.save(RECORDS)
        await store.forget(NamespaceFilter(tenant="b"))
        assert {record.owner.tenant for record in list_records(tmp_path)} == {"a"}


def test_a_folder_that_is_not_there_holds_nothing(tmp_path: Path) -> None:
    assert list(list_records(tmp_path / "none")) == []


async def test_successors_are_the_blocks_that_continue_a_key(tmp_path: Path) -> None:
    clock = ManualClock()
    store = make(tmp_path)
    store.give(clock, InlineOffload())
    async with store:
        short = chain(1, 2, 7, 8, retention=Retention(ttl_s=10.0))
        await store.save([*chain(1, 2, 3, 4), *chain(1, 2, 5, 6), *short, *chain(1, 2, 9, 9, tenant="b")])
        (first, _) = chain(1, 2, 3, 4)
        assert set(await store.successors(first.parent)) == {(1, 2)}
        assert set(await store.successors(first.ref.key)) == {(3, 4), (5, 6), (7, 8)}
        assert len(await store.successors(first.ref.key, 2)) == 2
        clock.advance(10.0)
        assert set(await store.successors(first.ref.key)) == {(3, 4), (5, 6)}, "one is over"
        assert await store.successors(chain(8, 8)[0].ref.key) == []
