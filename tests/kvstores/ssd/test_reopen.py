"""Opening a folder that a killed process left: what it holds, how soon, in how much memory."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]

CHILD = """
import json, sys
from pathlib import Path
import anyio
from deepinfra.bench import kv
folder = kv.KVFolder(Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
if sys.argv[1] == "fill":
    anyio.run(kv.fill, folder, lambda: print("saved", flush=True))
print(json.dumps(anyio.run(kv.open_folder, folder)._asdict()))
"""


def command(what: str, folder: Path, records: int, nbytes: int) -> list[str]:
    return [sys.executable, "-c", CHILD, what, str(folder), str(records), str(nbytes)]


def fill_and_kill(folder: Path, records: int, nbytes: int) -> None:
    with subprocess.Popen(
        command("fill", folder, records, nbytes), stdout=subprocess.PIPE, text=True, cwd=ROOT
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "saved\n"
        child.kill()


def open_it(folder: Path, records: int, nbytes: int) -> dict[str, Any]:
    done = subprocess.run(
        command("open_folder", folder, records, nbytes), cwd=ROOT, capture_output=True, text=True, check=True
    )
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def check_small_records(folder: Path, records: int) -> None:
    fill_and_kill(folder, records, 256)
    open_it(folder, records, 256)  # this one scans the last segment and seals it
    report = open_it(folder, records, 256)
    assert report["records"] == records
    assert report["hits"] == report["asked"]
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
    nbytes = 384 << 10  # 16 tokens of SmolLM2; the larger folder is 5 GiB
    fill_and_kill(tmp_path / "kv", records, nbytes)
    report = open_it(tmp_path / "kv", records, nbytes)
    assert report["records"] == records
    assert report["hits"] == report["asked"]
    assert report["disk_nbytes"] >= records * nbytes
    assert report["cpu_s"] < 1.0
