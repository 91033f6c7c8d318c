"""SsdStore on real files: damage, restart, kill -9, forgetting, one process per folder."""

from __future__ import annotations

import fcntl
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from deepinfra.core.kv import KVRecord, NamespaceFilter, Retention
from deepinfra.errors import ConfigError, ResourceError
from deepinfra.interfaces.given import InlineOffload
from deepinfra.kvstores import SsdStore
from deepinfra.kvstores.ssd import store as store_module
from deepinfra.testing.clock import ManualClock
from deepinfra.testing.kvrecords import chain, content, keys_of, load

RECORDS = chain(*range(10), nbytes=60)


def make(folder: Path, **settings: object) -> SsdStore:
    store = SsdStore(folder, **{"min_free_nbytes": 0, "capacity_nbytes": 1 << 20, "fsync": "none", **settings})  # type: ignore[arg-type]
    store.give(ManualClock(), InlineOffload())
    return store


async def write(folder: Path, *, sealed: bool) -> Path:
    """A folder with one segment of five small records; returns the segment."""
    async with make(folder.with_suffix(".whole")) as store:
        await store.save(RECORDS)
        if not sealed:
            shutil.copytree(store.path, folder)
    if sealed:
        shutil.copytree(folder.with_suffix(".whole"), folder)
    (segment,) = folder.glob("*.kvseg")
    return segment


async def survivors(folder: Path, *, only_cut: bool = False) -> list[int]:
    """Numbers of the records that a store finds in a folder; every one of them has the right bytes."""
    async with make(folder) as store:
        assert store.stats().nbytes == sum(path.stat().st_blocks * 512 for path in folder.glob("*.kvseg"))
        delivered = [await load(store, [record.ref]) for record in RECORDS]
        assert store.stats().damaged == 0 or not only_cut, "a record that is not all there is not held"
        match = await store.match(keys_of(RECORDS))
        assert await load(store, match.refs) == [content(ref) for ref in match.refs]
        await store.save(RECORDS)
        assert await load(store, [r.ref for r in RECORDS]) == [content(r.ref) for r in RECORDS], "saved anew"
    assert all(data in ([], [content(r.ref)]) for data, r in zip(delivered, RECORDS, strict=True))
    return [i for i, data in enumerate(delivered) if data]


# -- damage ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("sealed", [True, False], ids=["sealed", "open"])
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_file_cut_at_any_byte_gives_what_lies_before_the_cut(tmp_path: Path, sealed: bool) -> None:
    folder = tmp_path / "kv"
    segment = await write(folder, sealed=sealed)
    whole = segment.read_bytes()
    size = 0
    for nbytes in range(len(whole)):
        for path in folder.glob("*.kvseg"):
            path.unlink()
        segment.write_bytes(whole[:nbytes])
        left = await survivors(folder, only_cut=True)
        assert left == list(range(len(left)))
        assert len(left) >= size
        size = len(left)
    assert size == len(RECORDS) if sealed else size == len(RECORDS) - 1


@pytest.mark.parametrize("sealed", [True, False], ids=["sealed", "open"])
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_bit_flipped_anywhere_costs_at_most_what_it_touches(tmp_path: Path, sealed: bool) -> None:
    folder = tmp_path / "kv"
    segment = await write(folder, sealed=sealed)
    whole = segment.read_bytes()
    rng = random.Random(1)
    lost = 0
    for at in range(len(whole)):
        for path in folder.glob("*.kvseg"):
            path.unlink()
        segment.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << rng.randrange(8)]) + whole[at + 1 :])
        left = await survivors(folder)
        lost += len(left) < len(RECORDS)
        assert len(left) >= len(RECORDS) - 1 if sealed else left[:1] == [0] or at < len(whole) / len(RECORDS)
    assert lost >= len(RECORDS) * 200


@pytest.mark.parametrize("sealed", [True, False], ids=["sealed", "open"])
async def test_records_in_another_order_are_never_taken_for_each_other(tmp_path: Path, sealed: bool) -> None:
    segment = await write(tmp_path / "kv", sealed=sealed)
    whole = segment.read_bytes()
    size = len((await write(tmp_path / "open", sealed=False)).read_bytes()) // len(RECORDS)
    parts = [whole[i * size : (i + 1) * size] for i in range(len(RECORDS))]
    segment.write_bytes(b"".join(reversed(parts)) + whole[len(RECORDS) * size :])
    left = await survivors(tmp_path / "kv")
    assert left == ([2] if sealed else [0, 1, 2, 3, 4]), (
        "a footer knows places, a scan finds the records where they are"
    )


async def test_a_file_under_another_files_name_delivers_only_its_own_records(tmp_path: Path) -> None:
    segment = await write(tmp_path / "kv", sealed=True)
    segment.rename(segment.with_name("chat-999999-00000042.kvseg"))
    assert await survivors(tmp_path / "kv") == [0, 1, 2, 3, 4]


async def test_foreign_files_are_left_alone_and_nonsense_of_ours_is_removed(tmp_path: Path) -> None:
    await write(tmp_path / "kv", sealed=True)
    (tmp_path / "kv" / "notes.txt").write_text("mine")
    (tmp_path / "kv" / "agent-999999-00000007.kvseg").write_bytes(b"nonsense" * 1000)
    assert await survivors(tmp_path / "kv") == [0, 1, 2, 3, 4]
    left = sorted(path.name for path in (tmp_path / "kv").iterdir() if path.suffix != ".kvseg")
    assert left == ["forgotten", "lock", "notes.txt"]
    assert len(list((tmp_path / "kv").glob("*.kvseg"))) == 1


async def test_a_damaged_record_is_counted_and_reported_and_can_be_saved_again(tmp_path: Path) -> None:
    segment = await write(tmp_path / "kv", sealed=True)
    data = bytearray(segment.read_bytes())
    data[data.index(content(RECORDS[1].ref))] ^= 1
    segment.write_bytes(data)
    async with make(tmp_path / "kv") as store:
        assert len((await store.match(keys_of(RECORDS))).refs) == 5, "payloads are not read at opening"
        assert len(await load(store, [record.ref for record in RECORDS])) == 1
        match = await store.match(keys_of(RECORDS))
        assert (len(match.refs), match.missed) == (1, "damaged")
        assert store.stats().damaged == 1
        await store.save(RECORDS)
        assert len(await load(store, [record.ref for record in RECORDS])) == 5


async def test_a_torn_tail_is_cut_off_the_disk(tmp_path: Path) -> None:
    segment = await write(tmp_path / "kv", sealed=False)
    with segment.open("ab") as file:
        file.write(b"torn" * 25_000)
    async with make(tmp_path / "kv") as store:
        assert segment.stat().st_size < 10_000
        assert store.stats().nbytes == segment.stat().st_blocks * 512


async def test_a_record_saved_again_outlives_the_file_of_its_damaged_copy(tmp_path: Path) -> None:
    short, long = (chain(1, 2, retention=Retention(ttl_s=ttl_s)) for ttl_s in (5_000.0, 50_000.0))
    async with make(tmp_path) as store:
        await store.save(short)
    (segment,) = tmp_path.glob("*.kvseg")
    whole = segment.read_bytes()
    segment.write_bytes(whole.replace(content(short[0].ref), bytes(short[0].ref.nbytes)))
    async with make(tmp_path) as store:
        assert await load(store, [short[0].ref]) == []
        await store.save(long)
    segment.write_bytes(whole)
    clock = ManualClock()
    store = make(tmp_path)
    store.give(clock, InlineOffload())
    async with store:
        assert store.stats().records == 1
        clock.advance(10_000.0)
        await store.save(RECORDS)
        assert not segment.exists()
        assert await load(store, [long[0].ref]) == [content(long[0].ref)]


@pytest.mark.parametrize("sealed", [True, False], ids=["sealed", "open"])
async def test_records_that_died_while_closed_are_not_counted(tmp_path: Path, sealed: bool) -> None:
    folder = tmp_path / "kv"
    async with make(folder.with_suffix(".whole")) as store:
        await store.save(chain(1, 2, retention=Retention(ttl_s=10.0)) + chain(3, 4, retention=Retention(ttl_s=20.0)))
        if not sealed:
            shutil.copytree(store.path, folder)
    if sealed:
        shutil.copytree(folder.with_suffix(".whole"), folder)
    clock = ManualClock()
    clock.advance(15.0)
    store = make(folder)
    store.give(clock, InlineOffload())
    async with store:
        assert store.stats().records == 1


async def test_a_file_that_expires_while_open_is_closed(tmp_path: Path) -> None:
    clock = ManualClock()
    store = make(tmp_path)
    store.give(clock, InlineOffload())
    async with store:
        await store.save(RECORDS)
        before = len(list(Path("/proc/self/fd").iterdir()))
        for _ in range(20):
            clock.advance(100_000.0)
            await store.save(RECORDS)
        assert len(list(Path("/proc/self/fd").iterdir())) <= before


async def test_a_file_that_vanishes_is_a_miss(tmp_path: Path) -> None:
    async with make(tmp_path) as store:
        await store.save(RECORDS)
        for path in tmp_path.glob("*.kvseg"):
            path.unlink()
        assert await load(store, [record.ref for record in RECORDS]) == []


# -- killed -----------------------------------------------------------------------------------------

CHILD = """
import sys, anyio
from deepinfra.kvstores import SsdStore
from deepinfra.testing.kvrecords import chain
async def main():
    async with SsdStore(sys.argv[1], segment_nbytes=100_000, min_free_nbytes=0) as store:
        for i in range(int(sys.argv[2]), 1 << 30):
            await store.save(chain(i, i, i, i, nbytes=5_000))
            print(i, flush=True)
anyio.run(main)
"""


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_killed_process_loses_nothing_it_had_saved(tmp_path: Path) -> None:
    rng = random.Random(3)
    done = -1
    for _ in range(10):
        command = [sys.executable, "-c", CHILD, str(tmp_path), str(done + 1)]
        root = Path(__file__).parents[3]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=root) as child:
            assert child.stdout is not None
            for _ in range(rng.randrange(1, 120)):
                done = int(child.stdout.readline())
            child.kill()
            done = max([done, *(int(line) for line in child.stdout.read().split("\n")[:-1])])
        store = SsdStore(tmp_path, segment_nbytes=100_000, min_free_nbytes=0)
        async with store:
            assert store.stats().records >= 2 * (done + 1)
            for i in range(done + 1):
                records = chain(i, i, i, i, nbytes=5_000)
                assert await load(store, [r.ref for r in records]) == [content(r.ref) for r in records]
            done = max(done, store.stats().records // 2 - 1)


# -- forgetting -----------------------------------------------------------------------------------


@pytest.mark.parametrize("sealed", [True, False], ids=["sealed", "open"])
async def test_no_byte_of_a_forgotten_tenant_is_left_on_disk(tmp_path: Path, sealed: bool) -> None:
    mine, others = chain(*range(1_000, 1_020), tenant="tenant-mine"), chain(*range(20), tenant="others")
    records = [record for pair in zip(mine, others, strict=True) for record in pair]
    alone = chain(*range(2_000, 2_004), tenant="tenant-mine", retention=Retention(traffic="chat"))
    dead = chain(*range(3_000, 3_004), tenant="tenant-mine", retention=Retention(ttl_s=1.0))
    dying = chain(*range(4_000, 4_004), tenant="others", retention=Retention(ttl_s=2.0))
    async with make(tmp_path) as store:
        await store.save(records + alone + dead + dying)
    async with make(tmp_path) as store:
        if not sealed:
            await store.save(chain(5, 6, tenant="tenant-mine") + chain(5, 6, tenant="others"))
        assert (await store.forget(NamespaceFilter(tenant="tenant-mine"))).records == len(mine) + 2 + 2 + (not sealed)
        files = b"".join(path.read_bytes() for path in tmp_path.glob("*.kvseg"))
        for record in mine + alone + dead:
            data = content(record.ref)
            assert not any(data[i : i + 64] in files for i in range(0, len(data) - 64, 64))
            assert record.ref.key not in files
            assert record.tokens[0].to_bytes(4, "little") + record.tokens[1].to_bytes(4, "little") not in files
        assert b"tenant-mine" not in files
        assert await load(store, [r.ref for r in others]) == [content(r.ref) for r in others]
    for path in tmp_path.glob("*.kvseg"):  # without footers, too
        data = path.read_bytes()
        path.write_bytes(data[:-20])
    async with make(tmp_path) as store:
        assert await load(store, [r.ref for r in others]) == [content(r.ref) for r in others]
        assert await load(store, [mine[0].ref]) == []


async def test_after_one_tenant_all_others_can_be_forgotten(tmp_path: Path) -> None:
    mine, others = chain(*range(8), tenant="mine"), chain(*range(8), tenant="others")
    async with make(tmp_path) as store:
        await store.save(mine + others)
        assert (await store.forget(NamespaceFilter(tenant="mine"))).records == 4
        assert (await store.forget(NamespaceFilter(tenant="mine"))).records == 0
        assert (await store.forget(NamespaceFilter())).records == 4
        assert (await store.forget(NamespaceFilter())).records == 0
    assert list(tmp_path.glob("*.kvseg")) == []


# -- the rest -------------------------------------------------------------------------------------


async def test_of_the_snapshots_of_a_long_chat_only_the_last_one_lives_on(tmp_path: Path) -> None:
    blocks, snapshots = chain(*range(8)), chain(*range(8), kind="snapshot")
    store = make(tmp_path)
    async with store:
        await store.save(blocks + snapshots[:3])
        store.clock.advance(0.8 * 86_400)
        await store.touch(keys_of(blocks), Retention())
        store.clock.advance(0.8 * 86_400)
        match = await store.match(keys_of(blocks))
        assert (len(match.refs), match.snapshots) == (4, (2,))


async def test_a_folder_that_stays_locked_is_refused_in_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "ENTER_S", 0.01)
    with (tmp_path / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(ResourceError, match=f"{tmp_path} is locked by a process that does not answer"):
            async with make(tmp_path):
                pass
    async with make(tmp_path) as store:
        await store.save(RECORDS)


async def test_a_path_that_cannot_be_a_folder_is_refused_in_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ResourceError, match=r"cannot be used: .*irectory"):
        async with make(tmp_path / "file" / "kv"):
            pass


def test_an_unknown_sync_policy_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="sometimes"):
        SsdStore(tmp_path, fsync="sometimes")  # type: ignore[arg-type]


def test_the_home_folder_is_expanded() -> None:
    assert not str(SsdStore("~/kv").path).startswith("~")


async def test_files_are_readable_by_their_owner_only(tmp_path: Path) -> None:
    async with make(tmp_path / "new" / "kv") as store:
        await store.save(RECORDS)
        assert (tmp_path / "new" / "kv").stat().st_mode & 0o077 == 0
        assert all(path.stat().st_mode & 0o077 == 0 for path in (tmp_path / "new" / "kv").iterdir())


async def test_an_evicted_key_is_reported_as_evicted(tmp_path: Path) -> None:
    async with make(tmp_path, capacity_nbytes=40_000) as store:
        for i in range(40):
            await store.save(chain(i, i))
        assert (await store.match(keys_of(chain(0, 0)))).missed == "evicted"
        assert store.stats().evicted > 20


async def test_what_is_used_stays_and_what_is_not_goes(tmp_path: Path) -> None:
    async with make(tmp_path, capacity_nbytes=100_000) as store:
        hot = chain(*range(8))
        await store.save(hot)
        for i in range(60):
            await store.save(chain(i, i))
            assert len((await store.match(keys_of(hot))).refs) == 4


async def test_outside_its_context_it_holds_nothing_and_takes_nothing(tmp_path: Path) -> None:
    store = make(tmp_path)
    await store.save(RECORDS)
    assert (await store.match(keys_of(RECORDS))).refs == ()
    assert (await store.forget(NamespaceFilter())).records == 0
    assert list(tmp_path.iterdir()) == []


def with_owner(record: KVRecord, tenant: str) -> KVRecord:
    return KVRecord(**{name: getattr(record, name) for name in record.__dataclass_fields__} | {"tenant": tenant})


async def test_a_record_that_cannot_be_written_down_is_dropped(tmp_path: Path) -> None:
    async with make(tmp_path) as store:
        await store.save([with_owner(RECORDS[0], "x" * 70_000), RECORDS[1]])
        assert (store.stats().dropped, store.stats().saved) == (1, 1)
