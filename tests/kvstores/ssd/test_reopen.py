"""Opening a folder that a killed process left: what it holds, how soon, in how much memory."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from deepinfra.bench.kv import fill_and_kill
from deepinfra.bench.kvfolder import KVFolder

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


@pytest.mark.parametrize("records", [300, pytest.param(14_000, marks=[pytest.mark.slow, pytest.mark.timeout(600)])])
def test_records_of_a_killed_server_are_found_again(tmp_path: Path, records: int) -> None:
    folder = KVFolder(tmp_path / "kv", records, 384 << 10)  # 16 tokens of SmolLM2; the larger folder is 5 GiB
    fill_and_kill(folder)
    report = open_it(folder)
    assert report["disk_nbytes"] >= records * folder.nbytes
    assert report["cpu_s"] < 1.0
