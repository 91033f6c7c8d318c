"""What cannot be served is said in one sentence, with exit code 1; what can go on without a disk goes on."""

from __future__ import annotations

import re
import shutil
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.acceptance.conftest import Server, Start
    from tests.conftest import Outside

    Refused = Callable[..., subprocess.CompletedProcess[str]]

pytestmark = pytest.mark.timeout(300)


def sentence(done: subprocess.CompletedProcess[str]) -> str:
    """The one line that a refusal is."""
    assert done.returncode == 1, done
    assert re.fullmatch(r"deepinfra: [^\n]+\n", done.stderr), done.stderr
    return done.stderr


def test_a_model_that_cannot_fit_is_refused_with_the_sum_before_weights_are_read(
    refused: Refused, outside: Outside, smollm2_path: Path
) -> None:
    shutil.copy(smollm2_path, outside.folder / "large.gguf")
    outside.environ["XDG_CACHE_HOME"] = str(outside.folder / "empty")
    settings = 'model = "./large.gguf"\n[pool.executor]\nuse = "torch"\ndtype = "float32"\nnum_blocks = 100000000\n'
    said = sentence(refused(outside, settings))
    assert re.search(r"does not fit into memory: weights \d+ MiB \+ KV [\d.]+ GiB \(100000000 blocks", said)
    # Whoever reads weights begins with their fingerprint, which is remembered here.
    assert not list((outside.folder / "empty").rglob("fingerprints/*"))


def test_a_truncated_gguf_is_one_sentence(refused: Refused, outside: Outside, smollm2_path: Path) -> None:
    whole = smollm2_path.stat().st_size
    for kept in (100, 1_000_000, whole - 1):
        with smollm2_path.open("rb") as source:
            (outside.folder / "cut.gguf").write_bytes(source.read(kept))
        assert "cut.gguf" in sentence(refused(outside, 'model = "./cut.gguf"\n'))


def test_a_gguf_that_is_something_else_is_one_sentence(refused: Refused, outside: Outside) -> None:
    (outside.folder / "other.gguf").write_bytes(b"\x7fELF" * 1000)
    assert "other.gguf" in sentence(refused(outside, 'model = "./other.gguf"\n'))
    (outside.folder / "folder.gguf").mkdir()
    assert "folder.gguf" in sentence(refused(outside, 'model = "./folder.gguf"\n'))


def test_a_port_in_use_is_one_sentence(refused: Refused, outside: Outside) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert f"port {port}: Address already in use" in sentence(refused(outside, "", "--port", str(port)))


def test_a_setting_that_is_not_known_is_one_sentence(refused: Refused, outside: Outside) -> None:
    assert "pool.executor.bocks" in sentence(refused(outside, '[pool.executor]\nuse = "torch"\nbocks = 3\n'))


def test_a_folder_for_kv_that_cannot_be_one_is_one_sentence(refused: Refused, outside: Outside) -> None:
    (outside.folder / "kv").write_text("a file")
    assert "kv" in sentence(refused(outside, '[pool.store]\nuse = "ssd"\npath = "./kv"\n'))


# -- a full disk ------------------------------------------------------------------------------------

SMALL = """\
# In a mount namespace of its own, so that nothing is left however this ends: a disk of 3 MB, where KV goes.
set -e
mkdir -p "$XDG_CACHE_HOME/deepinfra/kv"
mount -t tmpfs -o size=3m small "$XDG_CACHE_HOME/deepinfra/kv"
exec deepinfra serve --config deepinfra.toml --port 0
"""
UNSHARE = ("unshare", "--map-root-user", "--mount", "sh", "-c")


def a_full_disk() -> dict[str, Any]:
    """How to start on a disk of 3 MB; where no namespace may be made, on one that is to be left alone."""
    try:
        subprocess.run([*UNSHARE, "mount -t tmpfs -o size=3m small /tmp"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        return left_alone()
    return {"command": (*UNSHARE, SMALL), "more": '[pool.store]\nuse = "ssd"\nmin_free_nbytes = 0\n'}


def left_alone() -> dict[str, Any]:
    """How to start where the disk has less free than is to be left."""
    return {"more": f'[pool.store]\nuse = "ssd"\nmin_free_nbytes = {1 << 60}\n'}


@pytest.mark.parametrize("disk", [a_full_disk, pytest.param(left_alone, marks=pytest.mark.slow)])
def test_with_a_full_disk_it_serves_on_without_the_disk(
    start: Start, outside: Outside, server: Server, disk: Callable[[], dict[str, Any]]
) -> None:
    questions = [f"What is {n} and {n}? Think about it step by step, and then say the number." for n in range(3, 6)]
    with start(outside, **disk()) as full:
        for question in [*questions, questions[0]]:
            assert full.text(question, max_tokens=8) == server.text(question, max_tokens=8)
        full.free()
        assert full.metric("store_events_total", event="dropped") > 0
        assert full.metric("store_bytes", what="used") <= 3 << 20
        assert full.stop() == 0
