"""Pulls from a hub in this process, named by `HF_ENDPOINT` to a child (the hub package reads that at import)."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

import deepinfra

ROOT = Path(deepinfra.__file__).parent.parent
NOWHERE = "http://127.0.0.1:9"
COMMIT = "0123456789abcdef0123456789abcdef01234567"

CHILD = """
import json, sys
from pathlib import Path
from deepinfra.errors import DeepinfraError
from deepinfra.models import open_model

seen = []
class Progress:
    def start(self, what, total): seen.append([what, total, 0])
    def advance(self, nbytes): seen[-1][2] += nbytes
    def done(self): pass

for name in sys.argv[2:]:
    name, _, offline = name.partition(" ")
    seen.clear()
    try:
        model = open_model(name, cache_dir=Path(sys.argv[1]), progress=Progress(), offline=bool(offline))
        answer = {
            "path": str(model.path), "names": list(model.tensors.names()), "template": model.chat_template(),
            "eos": sorted(model.special_tokens().eos_ids), "seen": seen,
        }
    except DeepinfraError as error:
        answer = {"error": type(error).__name__, "message": str(error)}
    print(json.dumps(answer))
"""


class Hub:
    """Serves the files of folders as hub models, and notes what was asked for."""

    def __init__(self) -> None:
        self.folders: dict[str, Path] = {}
        self.status: dict[str, int] = {}
        self.requests: list[tuple[str, str, str | None]] = []
        self.stall: str | None = None
        self.stalled = threading.Event()
        self.release = threading.Event()
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                hub.answer(self)

            do_HEAD = do_GET

            def log_message(self, *args: object) -> None: ...

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        path = request.path.partition("?")[0]
        self.requests.append((request.command, path, request.headers.get("Range")))
        parts = path.strip("/").split("/")
        repo = "/".join(parts[2:4] if parts[:2] == ["api", "models"] else parts[:2])
        folder = self.folders.get(repo)
        if status := self.status.get(repo, 0 if folder else 404):
            self.send(request, status, b'{"error": "no"}')
        elif folder and parts[:2] == ["api", "models"]:
            files = [{"rfilename": file.name} for file in sorted(folder.iterdir())]
            self.send(request, 200, json.dumps({"id": repo, "sha": COMMIT, "siblings": files}).encode())
        elif folder and parts[2] == "resolve" and (folder / parts[4]).is_file():
            self.send_file(request, folder / parts[4])
        else:
            self.send(request, 404, b"", {"X-Error-Code": "EntryNotFound"})

    def send(
        self, request: BaseHTTPRequestHandler, status: int, body: bytes, headers: dict[str, str] | None = None
    ) -> None:
        request.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            request.send_header(name, value)
        request.end_headers()
        if request.command != "HEAD":
            request.wfile.write(body)

    def send_file(self, request: BaseHTTPRequestHandler, path: Path) -> None:
        whole = path.read_bytes()
        begin = int((request.headers.get("Range") or "bytes=0-").removeprefix("bytes=").partition("-")[0])
        headers = {"X-Repo-Commit": COMMIT, "ETag": f'"{hashlib.sha256(whole).hexdigest()}"', "Accept-Ranges": "bytes"}
        if begin:
            headers["Content-Range"] = f"bytes {begin}-{len(whole) - 1}/{len(whole)}"
        if request.command == "GET" and self.stall == path.name:
            self.stall = None
            request.send_response(200)
            for name, value in {"Content-Length": str(len(whole)), **headers}.items():
                request.send_header(name, value)
            request.end_headers()
            request.wfile.write(whole[: len(whole) // 2])
            request.wfile.flush()
            self.stalled.set()
            self.release.wait(60)
            request.close_connection = True
            return
        self.send(request, 206 if begin else 200, whole[begin:], headers)


@pytest.fixture
def hub() -> Iterator[Hub]:
    hub = Hub()
    thread = threading.Thread(target=hub.server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield hub
    finally:
        hub.release.set()
        hub.server.shutdown()
        hub.server.server_close()
        thread.join()


@contextmanager
def child(url: str, cache_dir: Path, *names: str) -> Iterator[subprocess.Popen[str]]:
    environment = {
        **{key: value for key, value in os.environ.items() if not key.startswith(("HF_", "HUGGING"))},
        "HF_ENDPOINT": url,
        "HF_HOME": str(cache_dir / "home"),
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "no_proxy": "127.0.0.1",
    }
    command = [sys.executable, "-c", CHILD, str(cache_dir), *names]
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=ROOT, env=environment, **pipes) as process:
        yield process


def open_in_child(url: str, cache_dir: Path, *names: str) -> list[dict[str, Any]]:
    """Opens models one after the other; "org/name offline" opens without asking the hub."""
    with child(url, cache_dir, *names) as process:
        out, err = process.communicate()
    assert process.returncode == 0, err
    answers = [json.loads(line) for line in out.splitlines()]
    assert len(answers) == len(names)
    assert all("\n" not in answer.get("message", "") for answer in answers)
    return answers


def test_a_sharded_model_is_fetched_opened_and_then_found_without_the_hub(tiny: Any, hub: Hub, cache_dir: Path) -> None:
    folder = tiny.hf_folder(shards=2)
    (folder / "pytorch_model.bin").write_bytes(b"never fetched")
    (folder / "README.md").write_text("never fetched")
    hub.folders["org/tiny"] = folder
    (answer,) = open_in_child(hub.url, cache_dir, "org/tiny")
    assert (len(answer["names"]), answer["eos"], answer["template"]) == (4, [257, 258, 259], "{{ bos_token }}")
    assert Path(answer["path"]).is_relative_to(cache_dir / "hub")
    fetched = {what for what, _, _ in answer["seen"]}
    assert fetched == {path.name for path in folder.iterdir()} - {"pytorch_model.bin", "README.md"}
    assert all(total == nbytes == (folder / what).stat().st_size for what, total, nbytes in answer["seen"])

    offline, unplugged = open_in_child(NOWHERE, cache_dir, "org/tiny offline", "org/tiny")
    assert offline["names"] == unplugged["names"] == answer["names"]


def test_a_killed_download_goes_on_where_it_stopped(tiny: Any, hub: Hub, cache_dir: Path) -> None:
    folder = tiny.hf_folder()
    big = bytes(range(256)) * 200_000  # larger than the chunks that the hub package writes
    tiny.safetensors(folder / "model.safetensors", {"w": ("U8", (len(big),), big)})
    hub.folders["org/tiny"] = folder
    hub.stall = "model.safetensors"
    with child(hub.url, cache_dir, "org/tiny") as process:
        assert hub.stalled.wait(60)
        parts: list[Path] = []
        while not any(part.stat().st_size for part in parts):
            parts = list(cache_dir.rglob("*.incomplete"))
        process.kill()
    (answer,) = open_in_child(hub.url, cache_dir, "org/tiny")
    assert answer["names"] == ["w"]
    ranges = [span for command, path, span in hub.requests if command == "GET" and path.endswith("model.safetensors")]
    assert ranges[0] is None
    assert str(ranges[-1]).startswith("bytes=")
    assert not str(ranges[-1]).startswith("bytes=0-")
    assert list(cache_dir.rglob("*.incomplete")) == []
    (found,) = cache_dir.rglob("model.safetensors")
    assert found.read_bytes() == (folder / "model.safetensors").read_bytes()


def test_a_partial_file_that_is_not_the_beginning_is_found_out(tiny: Any, hub: Hub, cache_dir: Path) -> None:
    folder = tiny.hf_folder()
    hub.folders["org/tiny"] = folder
    digest = hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
    blobs = cache_dir / "hub" / "models--org--tiny" / "blobs"
    blobs.mkdir(parents=True)
    (blobs / f"{digest}.deepinfra.incomplete").write_bytes(b"something else")
    first, second = open_in_child(hub.url, cache_dir, "org/tiny", "org/tiny")
    assert (first["error"], "SHA-256" in first["message"]) == ("ModelDownloadError", True)
    assert len(second["names"]) == 4


def test_every_answer_of_the_hub_becomes_one_sentence(tiny: Any, hub: Hub, cache_dir: Path) -> None:
    expected = {
        404: ("ModelNotFoundError", "check the spelling"),
        401: ("ModelDownloadError", "log in"),
        403: ("ModelDownloadError", "log in"),
        501: ("ModelDownloadError", "status 501"),
    }
    for status in expected:
        hub.folders[f"org/s{status}"] = tiny.folder
        hub.status[f"org/s{status}"] = status
    answers = open_in_child(hub.url, cache_dir, *hub.folders)
    for answer, (error, words) in zip(answers, expected.values(), strict=True):
        assert answer["error"] == error
        assert words in answer["message"]


def test_no_network_and_offline_say_what_to_do(cache_dir: Path) -> None:
    unplugged, offline = open_in_child(NOWHERE, cache_dir, "org/tiny", "org/tiny offline")
    assert unplugged["error"] == offline["error"] == "ModelDownloadError"
    assert "check the network" in unplugged["message"]
    assert "deepinfra pull org/tiny" in offline["message"]


def test_pickles_and_remote_code_are_refused_before_weights_are_fetched(tiny: Any, hub: Hub, cache_dir: Path) -> None:
    folder = tiny.hf_folder("pickled")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    hub.folders |= {
        "org/pickled": folder,
        "org/code": tiny.hf_folder("code", config={"auto_map": {"AutoModel": "x.Y"}}),
    }
    pickled, code = open_in_child(hub.url, cache_dir, "org/pickled", "org/code")
    assert (pickled["error"], "pytorch_model.bin" in pickled["message"]) == ("UnsupportedModelError", True)
    assert (code["error"], "auto_map" in code["message"]) == ("UnsupportedModelError", True)
    assert not any(path.endswith((".bin", ".safetensors")) for _, path, _ in hub.requests)


def test_a_gguf_file_is_opened_by_its_model_or_by_itself_and_never_guessed(
    tiny: Any, hub: Hub, cache_dir: Path
) -> None:
    several = tiny.folder / "several"
    several.mkdir()
    for name in ("a.gguf", "b.gguf"):
        (several / name).write_bytes(b"GGUF")
    one = tiny.folder / "one"
    one.mkdir()
    tiny.gguf(name="one/tiny.gguf")
    hub.folders |= {"org/one": one, "org/several": several}
    first, second, third = open_in_child(hub.url, cache_dir, "org/one", "org/one/tiny.gguf", "org/several")
    assert first["path"] == second["path"]
    assert first["path"].endswith("tiny.gguf")
    assert (third["error"], "org/several/a.gguf" in third["message"]) == ("ModelNotFoundError", True)
