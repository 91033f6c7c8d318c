"""A server as operators run it: the `deepinfra` command, SmolLM2, a KV folder of its own, and the official client."""

from __future__ import annotations

import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx2
import pytest
from openai import OpenAI
from prometheus_client.parser import text_string_to_metric_families

if TYPE_CHECKING:
    from tests.conftest import Outside

SETTINGS = """
[pool.executor]
use = "torch"
dtype = "float32"
threads = 1
num_blocks = 512
process = true
weights = "dense"
"""
"""float32, because in bfloat16 near ties may fall either way as a batch changes; few blocks, so that leaks show.

In a process of its own, so that executors can be killed.
"""

START_S = 120.0
PATIENCE_S = 60.0

Start = Callable[..., AbstractContextManager["Server"]]


def until(condition: Callable[[], object], what: str, timeout_s: float = PATIENCE_S) -> None:
    """Ask another process again and again, which is all that can be done with one."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s:g} s: {what}"
        time.sleep(0.02)


@dataclass(slots=True)
class Server:
    """A running server.

    Attributes:
        process: The command.
        url: Where it listens.
        log: What it wrote to standard output and error.
        model: The name that requests ask for unless they say another.
    """

    process: subprocess.Popen[bytes]
    url: str
    log: Path
    model: str = "smollm2"
    client: OpenAI = field(init=False)

    def __post_init__(self) -> None:
        self.client = OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=100)

    def chat(self, messages: str | Sequence[dict[str, str]], **fields: Any) -> Any:
        """Ask with the official client; greedy and 16 tokens unless said otherwise. Returns its answer or stream."""
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        asked = {"model": self.model, "max_tokens": 16, "temperature": 0, **fields}
        return self.client.chat.completions.create(messages=messages, **asked)  # type: ignore[call-overload]

    def text(self, messages: str | Sequence[dict[str, str]], **fields: Any) -> str:
        """Ask and return the first answer's text."""
        text: str = self.chat(messages, **fields).choices[0].message.content
        return text

    def metric(self, name: str, **labels: str) -> float:
        """The sum of a metric's samples that carry certain labels."""
        body = httpx2.get(f"{self.url}/metrics", timeout=PATIENCE_S).text
        samples = [sample for family in text_string_to_metric_families(body) for sample in family.samples]
        found = [s.value for s in samples if s.name == f"deepinfra_{name}" and labels.items() <= s.labels.items()]
        assert f"# TYPE deepinfra_{name} " in body, f"no metric is named {name}"
        return sum(found)

    def held(self) -> dict[str, float]:
        """What it holds for anybody, by kind; nothing where nobody asks."""
        return {
            "sequences": self.metric("sequences"),
            "blocks": self.metric("blocks", state="total") - self.metric("blocks", state="free"),
            "slots": self.metric("staging_slots") - self.metric("staging_slots_free"),
            "saves": self.metric("saves_waiting"),
        }

    def free(self) -> None:
        """Wait until everything taken is given back."""
        until(lambda: not any(self.held().values()), f"everything given back, still held: {self.held()}")

    def children(self) -> list[int]:
        """Its child processes: one per executor."""
        pid = self.process.pid
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Send a signal and wait; returns the exit code."""
        self.process.send_signal(number)
        return self.process.wait(PATIENCE_S)


@pytest.fixture(scope="session")
def start() -> Start:
    """`start(outside, settings)`: a context with a server that is ready; killed at its end if it still runs."""

    @contextmanager
    def start(
        outside: Outside,
        settings: str = SETTINGS,
        *,
        command: Sequence[str] = ("deepinfra", "serve", "--config", "deepinfra.toml", "--port", "0"),
        model: str = "smollm2",
        more: str = "",
    ) -> Iterator[Server]:
        (outside.folder / "deepinfra.toml").write_text(settings + more)
        log = outside.folder / "log"
        with log.open("wb") as out:
            process = subprocess.Popen(
                command,
                cwd=outside.folder,
                env=environ(outside),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
            )
        with process:
            try:
                ready: list[str] = []

                def listening() -> bool:
                    assert process.poll() is None, log.read_text()
                    ready[:] = re.findall(r"(?:Serving \S+|running) on (http://[\w.]+:\d+)", log.read_text())
                    return bool(ready)

                until(listening, "a server that serves", START_S)
                server = Server(process, ready[0], log, model)
                with server.client:
                    yield server
                assert "Traceback" not in log.read_text(), log.read_text()
            finally:
                if process.poll() is None:
                    process.kill()

    return start


def environ(outside: Outside) -> dict[str, str]:
    """One thread for torch, none that spins: the two cores of a small machine are shared by client and servers."""
    return outside.environ | {"OMP_NUM_THREADS": "1", "GOMP_SPINCOUNT": "1000", "PYTHONUNBUFFERED": "1"}


@pytest.fixture(scope="session")
def server(
    start: Start, make_outside: Callable[[Path], Outside], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """The plain server that most tests share; what others answer must be what it answers."""
    with start(make_outside(tmp_path_factory.mktemp("acceptance"))) as server:
        yield server


@pytest.fixture(scope="session")
def refused() -> Callable[..., subprocess.CompletedProcess[str]]:
    """`refused(outside, settings, *arguments)`: `deepinfra serve`, which must end by itself."""

    def refused(outside: Outside, settings: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        (outside.folder / "deepinfra.toml").write_text(settings)
        return subprocess.run(
            ["deepinfra", "serve", "--config", "deepinfra.toml", "--port", "0", *arguments],
            cwd=outside.folder,
            env=environ(outside),
            capture_output=True,
            text=True,
            timeout=START_S,
            check=False,
        )

    return refused
