"""`deepinfra top` beside a server that runs."""

from __future__ import annotations

import functools
import os
import pty
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from math import inf

import pytest
from openai import OpenAI
from typer.testing import CliRunner

from deepinfra.bench.scrape import Between, Scrape, read
from deepinfra.cli import app
from deepinfra.cli.failures import sentence_for
from deepinfra.core.identity import ApiKey
from deepinfra.engine import Engine, Pool
from deepinfra.errors import ConfigError, EngineError
from deepinfra.executors.toy import ToyExecutor
from deepinfra.schedulers import Bucketed
from deepinfra.testing.served import Served
from deepinfra.testing.tiny import TinyRecipe

KEY = "sk-team-0123456789"


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    """A server that has answered three requests, two of them alike."""
    engine = Engine(TinyRecipe(), Pool(Bucketed(edges=(64,)), ToyExecutor(num_blocks=256)), name="toy")
    key = ApiKey.of(KEY, name="team")
    with Served(engine, keys=[key], tenant_metrics=True) as served:
        with OpenAI(base_url=f"{served.url}/v1", api_key=KEY, max_retries=0) as client:
            for text in ("x" * 100, "x" * 100, "hello"):
                client.chat.completions.create(
                    model="toy", messages=[{"role": "user", "content": text}], max_tokens=8, seed=1
                )
        yield served


def shown(*args: str) -> str:
    result = CliRunner().invoke(app, ["top", *args, "--every", "0.1"], obj={}, catch_exceptions=False)
    assert result.exit_code == 0
    return result.stdout


def test_one_picture_says_what_the_server_did(served: Served) -> None:
    lines = {line.split("  ")[0].strip(): line.split() for line in shown(served.url).splitlines() if line.strip()}
    assert f"toy at {served.url}: ready" in lines
    assert lines["TTFT"][-1] == "ms"
    assert "cached: device" in next(name for name in lines if name.startswith("cached:"))
    assert (lines["0"][1], lines["64"][1]) == ("0", "0")
    assert lines["team"][1:5] == ["0", "0", "0", "3"]


def test_the_address_may_be_that_of_the_api(served: Served) -> None:
    assert "ready" in shown(f"{served.url}/v1", "--once")


def test_a_terminal_shows_it_live_until_ctrl_c(served: Served) -> None:
    leader, follower = pty.openpty()
    command = [sys.executable, "-m", "deepinfra", "top", served.url, "--every", "0.1"]
    # Whoever runs the tests in the background ignores the signal, and what it starts would, too.
    usual = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    with subprocess.Popen(command, stdin=follower, stdout=follower, stderr=follower, preexec_fn=usual) as process:
        os.close(follower)
        seen = b""
        try:
            while seen.count(b"TTFT") < 3:
                assert select.select([leader], [], [], 30)[0], seen
                seen += os.read(leader, 65536)
            process.send_signal(signal.SIGINT)
            assert process.wait(timeout=30) == 130
        finally:
            process.kill()
    os.close(leader)


def test_nobody_there_is_one_sentence() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    with pytest.raises(OSError, match="is a server running there") as caught:
        read(url, 0.0)
    assert sentence_for(caught.value) == f"Connection refused: {url}; is a server running there?"


@pytest.mark.parametrize("path", ["/nothing", "/v2"])
def test_an_address_without_metrics_says_what_it_answered(served: Served, path: str) -> None:
    with pytest.raises(EngineError, match="/metrics: status 401"):
        read(served.url + path, 0.0)


@pytest.mark.parametrize("url", ["localhost:8000", "file:///etc/passwd", ""])
def test_what_is_no_address_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="not an address"):
        read(url, 0.0)


# -- two looks ------------------------------------------------------------------------------------


def look(at: float, **values: float) -> Scrape:
    return Scrape(at, {(name, frozenset()): value for name, value in values.items()})


def histogram(at: float, *below: float) -> Scrape:
    bounds = ("0.1", "0.2", "+Inf")
    return Scrape(at, {("h_bucket", frozenset({("le", le)})): n for le, n in zip(bounds, below, strict=True)})


def test_rates_are_what_grew_in_the_time_between() -> None:
    between = Between(look(1.0, steps_total=10, n_total=5), look(3.0, steps_total=20, n_total=9))
    assert between.per_s("n_total") == 2.0
    assert Between(None, look(3.0, n_total=9)).per_s("n_total") is None


def test_a_server_started_again_counts_from_its_beginning() -> None:
    between = Between(look(1.0, steps_total=10, n_total=50), look(3.0, steps_total=2, n_total=9))
    assert between.grown("n_total") == 9


def test_quantiles_are_those_of_the_time_between() -> None:
    between = Between(histogram(0.0, 100, 100, 100), histogram(1.0, 100, 110, 112))
    assert between.quantiles("h", (0.5, 0.99)) == [pytest.approx(0.16), inf]


def test_quantiles_without_anything_between_are_those_of_all() -> None:
    between = Between(histogram(0.0, 100, 100, 100), histogram(1.0, 100, 100, 100))
    assert between.quantiles("h", (0.5,)) == [pytest.approx(0.05)]
    assert Between(None, histogram(0.0, 0, 0, 0)).quantiles("h", (0.5,)) == [None]
