"""Opening a folder that a killed process left: what it holds, how soon, in how much memory."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from deepinfra.bench.kv import fill_and_kill
from deepinfra.bench.kvfolder import KVFolder
from deepinfra.kvstores import SsdStore

OPEN = """
import dataclasses, json, sys
from pathlib import Path
import anyio
from deepinfra.bench.kv import open_folder
from deepinfra.bench.kvfolder import KVFolder
folder = KVFolder(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
print(json.dumps(dataclasses.asdict(anyio.run(open_folder, folder))))
"""


def open_it(folder: KVFolder) -> dict[str, Any]:
    """In a process of its own, so that memory means something."""
    command = [sys.executable, "-c", OPEN, *map(str, folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    report: dict[str, Any] = json.loads(done.stdout)
    assert (report["records"], report["hits"]) == (folder.records, report["asked"])
    return report


def check_small_records(path: Path, records: int) -> None:
    folder = KVFolder(path, records, 256)
    fill_and_kill(folder)
    open_it(folder)  # this one scans the last segment and seals it
    report = open_it(folder)
    assert report["grown_nbytes"] < 100 * records + (4 << 20)
    assert report["cpu_s"] < 0.5 + 1e-6 * records, "no loop over records"


def test_many_small_records_are_found_again_in_little_memory(tmp_path: Path) -> None:
    check_small_records(tmp_path / "kv", 50_000)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_million_small_records_are_found_again_in_little_memory(tmp_path: Path) -> None:
    check_small_records(tmp_path / "kv", 1_000_000)


def break_last_file(folder: KVFolder) -> int:
    """Flip a bit in the middle record of the file that was being written; returns how many records lie before it."""
    last = max(folder.path.glob("*.kvseg"), key=lambda path: int(path.name.split("-")[2]))
    with last.open("r+b") as file:
        data = file.read()
        keys = folder.keys()
        held = [number for number in range(max(0, len(keys) - 200), len(keys)) if keys[number] in data]
        broken = held[len(held) // 2]
        at = data.index(keys[broken])
        file.seek(at)
        file.write(bytes([data[at] ^ 1]))
    return broken


@pytest.mark.parametrize("records", [300, pytest.param(14_000, marks=[pytest.mark.slow, pytest.mark.timeout(600)])])
def test_records_of_a_killed_server_are_found_again(tmp_path: Path, records: int) -> None:
    folder = KVFolder(tmp_path / "kv", records, 384 << 10)  # 16 tokens of SmolLM2; the larger folder is 5 GiB
    try:
        fill_and_kill(folder)
        assert files_nbytes(folder) >= records * folder.nbytes, "the files are no sparse ones"
        report = open_it(folder)
        assert report["disk_nbytes"] >= records * folder.nbytes
        assert report["cpu_s"] < 1.0
    finally:
        shutil.rmtree(folder.path, ignore_errors=True)


@pytest.mark.parametrize("records", [300, pytest.param(14_000, marks=[pytest.mark.slow, pytest.mark.timeout(600)])])
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_killed_servers_open_file_is_cut_at_its_first_bad_record(tmp_path: Path, records: int) -> None:
    folder = KVFolder(tmp_path / "kv", records, 384 << 10)
    try:
        fill_and_kill(folder)
        before = files_nbytes(folder)
        broken = break_last_file(folder)
        keys = folder.keys()
        async with folder.store() as store:
            assert store.stats().records == broken < records
            assert files_nbytes(folder) < before
            for start in range(0, broken, 64):
                match = await store.match(keys[start : min(broken, start + 64)])
                assert len(match.refs) == min(broken, start + 64) - start
            buffer = bytearray(folder.nbytes)
            assert (await store.load([match.refs[-1]], [memoryview(buffer)])).count == 1
            assert not (await store.match(keys[broken : broken + 1])).refs
        cap = records * folder.nbytes // 2
        async with SsdStore(folder.path, capacity_nbytes=cap, min_free_nbytes=0) as store:
            assert max(store.stats().nbytes, files_nbytes(folder)) <= cap, "the cap holds at once"
            assert store.stats().records > broken // 4
    finally:
        shutil.rmtree(folder.path, ignore_errors=True)


def files_nbytes(folder: KVFolder) -> int:
    return sum(path.stat().st_blocks * 512 for path in folder.path.glob("*.kvseg"))
