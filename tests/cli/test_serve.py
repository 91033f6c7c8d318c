"""`deepinfra serve` as an operator meets it."""

from __future__ import annotations

import json
import os
import re
import selectors
import shlex
import signal
import socket
import subprocess
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx2
import pytest

if TYPE_CHECKING:
    from tests.cli.conftest import Home, Served

LONG = 120
"""Tokens of an answer that takes over two seconds; the greedy answer to `BODY` is longer."""

BODY = {"model": "tiny", "messages": [{"role": "user", "content": "Hello, I am 09 here."}], "temperature": 0}


def ask(served: Served, max_tokens: int = 4) -> httpx2.Response:
    return httpx2.post(f"{served.url}/v1/chat/completions", json=BODY | {"max_tokens": max_tokens}, timeout=60)


@contextmanager
def streaming(served: Served, max_tokens: int = LONG) -> Iterator[Iterator[dict[str, Any]]]:
    """A long answer of which something has arrived; all its chunks, as they come."""
    body = BODY | {"max_tokens": max_tokens, "stream": True}
    with httpx2.stream("POST", f"{served.url}/v1/chat/completions", json=body, timeout=60) as response:
        lines = (line.removeprefix("data: ") for line in response.iter_lines() if line.startswith("data: "))
        chunks = (json.loads(line) if line != "[DONE]" else {"done": True} for line in lines)
        begun = []
        while not text_of(begun):
            begun.append(next(chunks))
        yield chain(begun, chunks)


def text_of(chunks: Iterable[dict[str, Any]]) -> str:
    return "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks if chunk.get("choices"))


def test_it_answers_and_prints_a_curl_that_works(home: Home) -> None:
    with home.serving() as served:
        assert ask(served).json()["usage"]["completion_tokens"] == 4
        command = shlex.split(re.search(r"curl .*", served.head)[0])  # type: ignore[index]
        answer = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
        assert answer.stdout.rstrip().endswith("data: [DONE]")
        assert served.stop() == (0, "SIGTERM: finishing running requests, 30 s at most; again to stop at once\n")


def test_it_says_where_kv_is_kept_and_how_to_turn_it_off(home: Home) -> None:
    with home.serving() as served:
        folder = f"{home.environ['XDG_CACHE_HOME']}/deepinfra/kv"
        assert f"KV store: ssd in {folder}, at most 10.0 GiB; --no-store turns it off" in served.head


def test_no_store_keeps_nothing(home: Home) -> None:
    with home.serving("--no-store") as served:
        assert "KV store: none" in served.head


def test_sigterm_lets_streams_finish_and_refuses_new_requests(home: Home) -> None:
    with home.serving() as served, streaming(served) as chunks:
        served.process.send_signal(signal.SIGTERM)
        assert served.process.stdout.readline().startswith("SIGTERM: finishing")  # type: ignore[union-attr]
        refused = ask(served)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "engine-draining")
        *_, last, done = chunks
        assert last["choices"][0]["finish_reason"] == "length"
        assert done == {"done": True}
        assert served.process.wait(timeout=30) == 0


def test_a_terminal_that_is_closed_lets_streams_finish_too(home: Home) -> None:
    with home.serving() as served, streaming(served) as chunks:
        served.process.send_signal(signal.SIGHUP)
        assert served.process.stdout.readline().startswith("SIGHUP: finishing")  # type: ignore[union-attr]
        served.process.send_signal(signal.SIGHUP)  # as many terminals do
        *_, last, _ = chunks
        assert last["choices"][0]["finish_reason"] == "length"
        assert served.process.wait(timeout=30) == 0


def test_under_nohup_a_closed_terminal_changes_nothing(home: Home) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # which children inherit
    try:
        with home.serving() as served:
            served.process.send_signal(signal.SIGHUP)
            assert ask(served).status_code == 200
            assert served.stop()[0] == 0
    finally:
        signal.signal(signal.SIGHUP, before)


def test_nobody_needs_to_read_what_it_prints_for_streams_to_finish(home: Home) -> None:
    with home.serving() as served, streaming(served) as chunks:
        served.process.stdout.close()  # type: ignore[union-attr]
        served.process.send_signal(signal.SIGTERM)
        *_, last, _ = chunks
        assert last["choices"][0]["finish_reason"] == "length"
        assert served.process.wait(timeout=30) == 0


def test_streams_that_pass_the_deadline_end_with_an_error_and_it_still_exits_cleanly(home: Home) -> None:
    with home.serving(DEEPINFRA_DRAIN_DEADLINE_S="0.2") as served, streaming(served) as chunks:
        served.process.send_signal(signal.SIGTERM)
        assert any("error" in chunk for chunk in chunks)
        code, said = served.stop(0)
        assert code == 0
        assert "not every request was finished in time" in said


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_stops_at_once(home: Home, number: int) -> None:
    with home.serving() as served, streaming(served, 3 * LONG):
        served.process.send_signal(signal.SIGTERM)
        assert served.process.stdout.readline().startswith("SIGTERM: finishing")  # type: ignore[union-attr]
        served.process.send_signal(number)
        assert served.process.wait(timeout=3) == -number  # the answer would take over seven seconds


def test_a_finished_requests_kv_is_there_after_a_restart(home: Home) -> None:
    with home.serving() as served:
        first = ask(served).json()["usage"]["prompt_tokens_details"]["cached_tokens"]
        served.stop()
    with home.serving() as served:
        second = ask(served).json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert (first, second) == (0, 20)


def test_an_executors_child_that_is_killed_costs_no_answer(home: Home) -> None:
    with home.serving() as served:
        expected = ask(served, LONG).json()["choices"][0]["message"]["content"]
    with home.serving(DEEPINFRA_POOL__EXECUTOR__PROCESS="true") as served, streaming(served) as chunks:
        pid = served.process.pid
        (child,) = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        os.kill(int(child), signal.SIGKILL)
        assert text_of(chunks) == expected
        assert ask(served).status_code == 200
        assert served.stop()[0] == 0


def test_a_server_that_is_killed_takes_its_child_along(home: Home) -> None:
    with home.serving(DEEPINFRA_POOL__EXECUTOR__PROCESS="true") as served:
        pid = served.process.pid
        (child,) = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        with os.fdopen(os.pidfd_open(int(child))) as gone, selectors.DefaultSelector() as selector:
            selector.register(gone, selectors.EVENT_READ)
            served.process.kill()
            assert selector.select(timeout=20)


def test_a_port_in_use_is_one_sentence(home: Home) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = home.run("serve", "--port", str(port))
    expected = (
        f"deepinfra: cannot listen on 127.0.0.1 port {port}: Address already in use; choose another with --port\n"
    )
    assert (done.returncode, done.stderr) == (1, expected)


def test_a_missing_model_is_one_sentence(home: Home) -> None:
    (home.folder / "deepinfra.toml").unlink()
    done = home.run("serve", "--model", "./nowhere", "--port", "0")
    assert done.returncode == 1
    assert done.stderr.startswith("deepinfra: no model './nowhere'")
    assert done.stderr.count("\n") == 1


def test_an_unreadable_gguf_is_one_sentence(home: Home) -> None:
    (home.folder / "deepinfra.toml").unlink()
    (home.folder / "broken.gguf").write_bytes(b"GGUF" + b"\xff" * 100)
    done = home.run("serve", "--model", "broken.gguf", "--port", "0")
    assert done.returncode == 1
    assert re.fullmatch(r"deepinfra: broken\.gguf .*\n", done.stderr)


def test_a_server_beside_another_finds_what_that_one_keeps(home: Home) -> None:
    with home.serving() as first:
        computed = ask(first).json()["usage"]["prompt_tokens"]
        with home.serving() as second:
            assert 0 < ask(second).json()["deepinfra"]["cached_tokens"]["ssd"] < computed


def test_it_says_how_long_public_prefixes_are(home: Home) -> None:
    (home.folder / "shop.txt").write_text("You keep the books of a small shop.")
    with home.serving(DEEPINFRA_PUBLIC_PREFIXES='["shop.txt"]') as served:
        assert re.search(r"public prefix 0 has [1-9][0-9]* tokens", served.head)


def test_listening_for_other_machines_is_warned_about(home: Home) -> None:
    with home.serving("--host", "0.0.0.0") as served:
        assert "WARNING: 0.0.0.0 can be reached from other machines and this server has no API keys" in served.head


def test_with_keys_nobody_without_one_is_served_and_the_curl_it_prints_has_one(home: Home) -> None:
    key = "sk-0123456789abcdef"
    with home.serving("--host", "0.0.0.0", "--log-requests", DEEPINFRA_API_KEYS=f"team:{key}") as served:
        assert "WARNING" not in served.head
        assert ask(served).status_code == 401
        assert httpx2.get(f"{served.url}/hello/", timeout=30).status_code == 401
        assert httpx2.get(f"{served.url}/health", timeout=30).status_code == 200
        command = re.search(r"curl .*", served.head)[0]  # type: ignore[index]
        answer = subprocess.run(
            command, shell=True, env={**os.environ, "KEY": key}, capture_output=True, text=True, timeout=60, check=True
        )
        assert answer.stdout.rstrip().endswith("data: [DONE]")
        _, said = served.stop()
    assert "key=team-1" in said
    assert key not in said + served.head


def test_requests_are_logged_on_demand_without_their_text(home: Home) -> None:
    with home.serving("--log-requests") as served:
        ask(served)
        _, said = served.stop()
    assert "deepinfra.access: " in said
    assert "/v1/chat/completions" in said
    assert "Hello" not in said


def test_a_plugins_routes_are_served(home: Home) -> None:
    with home.serving() as served:
        assert httpx2.get(f"{served.url}/hello/", timeout=30).text == "hello from a plug-in"


def test_a_plugins_observer_sees_the_last_token(home: Home) -> None:
    with home.serving() as served:
        ask(served)
        served.stop()
    assert (home.folder / "observed").read_text() == "stopped 4"
