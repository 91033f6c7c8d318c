"""SsdStore and its tools on files that somebody else made, with checksums that hold."""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import xxhash

from deepinfra.core.kv import NamespaceFilter
from deepinfra.errors import ResourceError
from deepinfra.interfaces.given import InlineOffload
from deepinfra.kvstores import SsdStore
from deepinfra.kvstores.ssd import erasing, writer
from deepinfra.kvstores.ssd import format as form
from deepinfra.kvstores.ssd.census import take_census
from deepinfra.kvstores.ssd.checking import check_file
from deepinfra.kvstores.ssd.disk import Disk
from deepinfra.kvstores.ssd.listing import list_records, list_segments, read_listed
from deepinfra.testing.clock import ManualClock
from deepinfra.testing.kvrecords import chain, content, keys_of

OURS = chain(*range(12), tenant="a", nbytes=900)
MORE = chain(*range(50, 58), tenant="a", nbytes=900)
STRANGER = "default-999999999-00000001-aaaaaaaaaaaa.kvseg"


def make(folder: Path, **options: float) -> SsdStore:
    store = SsdStore(folder, capacity_nbytes=2_000_000, segment_nbytes=8_000, min_free_nbytes=0, **options)
    store.give(ManualClock(), InlineOffload())
    return store


@pytest.fixture
async def folder(tmp_path: Path) -> Path:
    """A sealed file of a tenant's records."""
    async with make(tmp_path / "kv") as store:
        await store.save(OURS)
    return tmp_path / "kv"


def first(folder: Path) -> Path:
    return min(folder.glob("*.kvseg"))


def footed(folder: Path, column: str, value: float) -> None:
    """Give every row of a footer another value."""
    data = bytearray(first(folder).read_bytes())
    offset = form.read_trailer(data[-form.TRAILER_NBYTES :], len(data)) or 0
    rows, owners = form.unpack_footer(data[offset:]) or (bytearray(), [])
    np.frombuffer(rows, form.ROW_DTYPE)[column] = value
    first(folder).write_bytes(data[:offset] + form.pack_footer(offset, rows, owners))


def patched(folder: Path, back: int, layout: str, value: float) -> None:
    """Overwrite something of a footer, `back` bytes before its checksum."""
    data = bytearray(first(folder).read_bytes())
    offset = form.read_trailer(data[-form.TRAILER_NBYTES :], len(data)) or 0
    struct.pack_into(layout, data, len(data) - 16 - back, value)
    data[-16:] = xxhash.xxh3_128_digest(bytes(data[offset:-16]))
    first(folder).write_bytes(data)


def headed(folder: Path, at: int, layout: str, value: float) -> None:
    """Overwrite something of the first header of a file without a footer."""
    data = bytearray(first(folder).read_bytes())
    end = (form.unpack_fixed(data) or (0, 0))[0] - 8
    struct.pack_into(layout, data, at, value)
    struct.pack_into("<Q", data, end, xxhash.xxh3_64_intdigest(bytes(data[:end])))
    first(folder).write_bytes(data[: -form.TRAILER_NBYTES])


def sparse(folder: Path) -> None:
    """Two files that take nothing on disk: of a footer, and of a header, that claim all of it."""
    with (folder / STRANGER).open("wb") as file:
        file.truncate(1 << 41)
        file.seek(-form.TRAILER_NBYTES, os.SEEK_END)
        file.write(struct.pack("<8sIIQQ16x", b"DIkvFOOT", 2, 0, 0, 0))
    with (folder / STRANGER.replace("00000001", "00000002")).open("wb") as file:
        file.truncate(1 << 41)
        file.seek(0)
        file.write(struct.pack("<4sBBBxHHIQ", b"DIkv", 2, 1, 0, 1, 1, (1 << 29) - 1, 100))


CASES: dict[str, Callable[[Path], object]] = {
    "an offset behind all files": lambda folder: footed(folder, "offset", (1 << 64) - 1),
    "no header": lambda folder: footed(folder, "header_nbytes", 0),
    "headers of 4 GiB": lambda folder: footed(folder, "header_nbytes", (1 << 32) - 1),
    "an owner there is not": lambda folder: footed(folder, "tag", 77 << 2 | 1),
    "dead rows": lambda folder: footed(folder, "tag", 0),
    "rows saved never": lambda folder: footed(folder, "created", math.nan),
    "rows of ages": lambda folder: footed(folder, "life_s", 1e38),
    "rows without end": lambda folder: footed(folder, "expires", math.inf),
    "an owner's name that is no text": lambda folder: patched(folder, 33, "<B", 0xFF),
    "more owners than fit": lambda folder: patched(folder, 24, "<I", 3),
    "no rows": lambda folder: patched(folder, 16, "<Q", 0),
    "a tenant that is no text": lambda folder: headed(folder, form.FIXED_NBYTES, "<B", 0xFF),
    "a record saved never": lambda folder: headed(folder, form.FIXED_NBYTES - 40, "<d", math.nan),
    "a record of ages": lambda folder: headed(folder, form.FIXED_NBYTES - 40, "<d", 1e300),
    "sparse files": sparse,
    "the largest number": lambda folder: first(folder).rename(
        folder / "default-999999999-999999999999999999-aaaaaaaaaaaa.kvseg"
    ),
    "a pipe for a process": lambda folder: os.mkfifo(folder / "aaaaaaaaaaaa.kvproc"),
    "a pipe for records": lambda folder: os.mkfifo(folder / STRANGER),
    "a link to itself": lambda folder: (folder / "aaaaaaaaaaaa.kvproc").symlink_to("aaaaaaaaaaaa.kvproc"),
    "folders": lambda folder: ((folder / "aaaaaaaaaaaa.kvproc").mkdir(), (folder / STRANGER).mkdir()),
}


@pytest.mark.parametrize("case", CASES)
async def test_a_file_that_makes_no_sense_costs_its_records_only(folder: Path, case: str) -> None:
    CASES[case](folder)
    async with make(folder) as store:
        match = await store.match(keys_of(OURS))
        buffers = [bytearray(ref.nbytes) for ref in match.refs]
        loaded = await store.load(match.refs, [memoryview(buffer) for buffer in buffers])
        for ref, buffer in list(zip(match.refs, buffers, strict=True))[: loaded.count]:
            assert buffer == content(ref)
        await store.successors(OURS[0].parent)
        await store.save(MORE)
        assert len((await store.match(keys_of(MORE))).refs) == len(MORE)
        assert all(form.parse_name(path.name) for path in folder.glob("*.kvseg"))
        await store.forget(NamespaceFilter(tenant="a"))
        assert not (await store.match(keys_of(OURS))).refs
    assert content(OURS[0].ref) not in b"".join(
        path.read_bytes() for path in folder.glob("*.kvseg") if path.is_file() and path.stat().st_size < 1 << 30
    )


@pytest.mark.parametrize("case", CASES)
async def test_tools_take_a_file_that_makes_no_sense_for_damaged(folder: Path, case: str) -> None:
    CASES[case](folder)
    assert len(take_census(folder, 0.0).files) >= 1
    for record in list_records(folder):
        read_listed(folder, record)
    for segment in list_segments(folder):
        check_file(folder, segment.name, living=False)


async def test_a_link_in_the_folder_is_not_followed(folder: Path, tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("mine")
    (folder / "forgotten").unlink()
    (folder / "forgotten").symlink_to(precious)
    with pytest.raises(ResourceError, match="cannot be used"):
        async with make(folder):
            pass
    assert precious.read_text() == "mine"


@pytest.mark.parametrize("life_s", [math.inf, 1e300])
async def test_a_life_without_end_is_a_long_one(tmp_path: Path, life_s: float) -> None:
    async with make(tmp_path, default_ttl_s=life_s) as store:
        await store.save(OURS)
        assert len((await store.match(keys_of(OURS))).refs) == len(OURS)
    assert [form.parse_name(path.name) is None for path in tmp_path.glob("*.kvseg")] == [False]


def test_opening_a_pipe_does_not_wait_for_who_writes_to_it(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    disk = Disk()
    disk.close(disk.open(tmp_path / "pipe"))


class Locked(Disk):
    """A disk on which somebody who is stopped holds the folder's lock from some time on."""

    calls = -1

    def lock(self, path: Path) -> int:
        if self.calls < 0 or path.name != "lock":
            return super().lock(path)
        self.calls += 1
        raise BlockingIOError


async def test_forgetting_waits_for_a_lock_once_not_for_every_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(erasing, "FORGET_PATIENCE_S", 0.05)
    monkeypatch.setattr(writer, "PATIENCE_S", 0.0)
    store = make(tmp_path)
    store.disk = disk = Locked()
    async with store:
        for first in range(100, 1300, 100):
            await store.save(chain(first, first, tenant="a", nbytes=3_000) + chain(first, first, nbytes=3_000))
        files = len(list(tmp_path.glob("*.kvseg")))
        assert files > 10
        store._writer._patience_s = 0.0
        disk.calls = 0
        assert (await store.forget(NamespaceFilter(tenant="a"))).records == 12
        assert disk.calls < 2 * files + 10, "one wait is half a dozen calls"
        disk.calls = -1
    assert not any(
        content(chain(1200, 1200, tenant="a", nbytes=3_000)[0].ref) in p.read_bytes() for p in tmp_path.iterdir()
    )


async def test_tenants_with_quotas_that_take_turns_begin_no_file_at_every_save(tmp_path: Path) -> None:
    async with make(tmp_path, tenant_quota_nbytes=100_000) as store:
        for turn in range(2):
            for tenant in range(40):
                await store.save(chain(2 * turn, 2 * turn + 1, tenant=f"t{tenant}", nbytes=900))
        assert store.stats().records == 80
        assert len(list(tmp_path.glob("*.kvseg"))) == 40
