"""Every example runs as its first line says, on the real model."""

from __future__ import annotations

import importlib.util
import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI

from deepinfra.interfaces import Scheduler
from deepinfra.testing import SchedulerConformance

EXAMPLES = Path(__file__).parents[2] / "examples"
SERVERS = {"minimal_server.py": "/v1", "mount_fastapi.py": "/llm/v1", "mount_starlette.py": "/llm/v1"}
SCRIPTS = {
    "choose_route.py": r"any replica: .* chats, .*\none for long: .*\nchosen: one for long\n",
    "custom_scheduler.py": r"(?=.*The capital of France is' Paris)(?=.*Once upon a time',).*",
    "typed_markers.py": r".*assistant turns: 1 here, 2 when the same text is tokenised naively\n",
    "sliding_windows.py": r".*\n708 .* 704 on disk; so far 1 windows restored, 0 .*\n430 .* 156 rows .* again\n",
    "split_pools.py": r".*Red.*\nprefill: 1 steps\ndecode: \d+ steps\n",
}


@contextmanager
def uvicorn(outside: Any, app: str) -> Iterator[str]:
    """The URL of a served example; stopped by SIGTERM, which must end it well."""
    process = subprocess.Popen(
        ["uvicorn", app, "--port", "0", "--app-dir", str(EXAMPLES)],
        cwd=outside.folder,
        env=outside.environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    with process:
        try:
            assert process.stdout is not None
            log = ""
            while not (running := re.search(r"running on (http://\S+)", log)):
                line = process.stdout.readline()
                assert line, log
                log += line
            yield running[1]
            process.terminate()
            rest, _ = process.communicate(timeout=60)
            assert "Application shutdown complete" in rest, rest
        finally:
            if process.poll() is None:
                process.kill()


def test_every_example_is_tested_here() -> None:
    assert {path.name for path in EXAMPLES.glob("*.py")} == SERVERS.keys() | SCRIPTS.keys()


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_runs_and_prints_what_it_promises(outside: Any, name: str) -> None:
    done = outside.run("python", str(EXAMPLES / name))
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(SCRIPTS[name], done.stdout, re.DOTALL), done.stdout


@pytest.mark.parametrize("name", SERVERS)
def test_a_server_streams_to_the_official_client_and_stops_well(outside: Any, name: str) -> None:
    with uvicorn(outside, f"{name.removesuffix('.py')}:app") as url:
        with OpenAI(base_url=url + SERVERS[name], api_key="none", max_retries=0) as client:
            assert [model.id for model in client.models.list()] == ["smollm2"]
            chunks = client.chat.completions.create(
                model="smollm2",
                messages=[{"role": "user", "content": "What is the capital of France?"}],
                max_tokens=12,
                temperature=0,
                stream=True,
            )
            pieces = [chunk.choices[0].delta.content or "" for chunk in chunks]
        assert "Paris" in "".join(pieces)
        assert len([piece for piece in pieces if piece]) > 3
    if name == "minimal_server.py":
        assert list((Path(outside.environ["HOME"]) / ".cache" / "deepinfra" / "kv").glob("*.kvseg"))


# -- what the docs say about the scheduler of 12 lines ----------------------------------------------


@pytest.fixture
def newest_first() -> type[Scheduler]:
    spec = importlib.util.spec_from_file_location("custom_scheduler", EXAMPLES / "custom_scheduler.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    kind: type[Scheduler] = module.NewestFirst
    return kind


def test_the_custom_scheduler_has_12_lines() -> None:
    source = (EXAMPLES / "custom_scheduler.py").read_text().partition("class NewestFirst")[2].partition("\n\n\n")[0]
    assert len([line for line in source.splitlines() if line.strip()]) == 12


def test_the_laws_refuse_it_because_newcomers_starve_the_oldest(newest_first: type[Scheduler]) -> None:
    class Kit(SchedulerConformance):
        def make(self) -> Scheduler:
            return newest_first()

    with pytest.raises(AssertionError):
        Kit().test_a_giant_gets_through_while_short_ones_keep_coming()
