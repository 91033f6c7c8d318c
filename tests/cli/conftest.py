"""The command line as users run it: a process, a folder with deepinfra.toml, and an installed plug-in."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from safetensors.torch import save_file

from deepinfra.executors.torch.config import decoder_config
from deepinfra.models import open_model

PLUGIN = '''
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
from pydantic import BaseModel, ConfigDict

from deepinfra.executors.options import ToyOptions
from deepinfra.registry import hookimpl


class NoOptions(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


def tiny(options):
    from deepinfra.testing.tiny import TinyRecipe

    return TinyRecipe()


def slow(options):
    """A toy that needs 20 ms a step, so that a test can act in the middle of an answer."""
    from deepinfra.executors.toy import ToyExecutor

    class Handle:
        def __init__(self, inner):
            self._inner = inner
            self.masks = inner.masks

        async def result(self):
            await anyio.sleep(0.02)
            return await self._inner.result()

    class SlowToy(ToyExecutor):
        def submit(self, plan):
            return Handle(super().submit(plan))

    return SlowToy(**dict(options))


def forgetful(options):
    """Breaks the first law of a scheduler: it never plans anything."""
    from deepinfra.core.step import Choice
    from deepinfra.schedulers import Fcfs

    class Forgetful(Fcfs):
        def plan(self, view):
            return Choice()

    return Forgetful()


def careless(options):
    """Delivers what it has and raises for what it has not."""
    from deepinfra.kvstores import MemoryStore

    class Careless(MemoryStore):
        async def load(self, refs, into):
            for ref in refs:
                if not (await self.match([ref.key])).refs:
                    raise KeyError("not here")
            return await super().load(refs, into)

    return Careless()


def half(options):
    """Lacks most methods."""
    from deepinfra.interfaces import KVStore

    class Half(KVStore):
        async def match(self, keys): ...

    return Half()


@hookimpl
def deepinfra_register(registry):
    registry.recipe("tiny", tiny, options=NoOptions)
    registry.executor("slow-toy", slow, options=ToyOptions, process=False)
    registry.scheduler("forgetful", forgetful, options=NoOptions)
    registry.kvstore("careless", careless, options=NoOptions)
    registry.kvstore("no-store", lambda options: "a store", options=NoOptions)
    registry.kvstore("half", half, options=NoOptions)


async def hello(scope, receive, send):
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"hello from a plug-in"})


@hookimpl
def deepinfra_routes(engine):
    return {"/hello": hello}


@hookimpl
def deepinfra_observers():
    return [lambda stats: Path("observed").write_text(f"{stats.state} {stats.generated_tokens}")]
'''

SETTINGS = """
name = "tiny"
recipe.use = "tiny"

[pool.executor]
use = "slow-toy"
num_blocks = 256
"""


class Home(NamedTuple):
    """A user's folder and environment."""

    folder: Path
    environ: dict[str, str]

    def run(self, *args: str, typed: str = "", **environ: str) -> subprocess.CompletedProcess[str]:
        """`deepinfra ARGS`, to its end."""
        command = [sys.executable, "-m", "deepinfra", *args]
        return subprocess.run(
            command,
            cwd=self.folder,
            env=self.environ | environ,
            input=typed,
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )

    @contextmanager
    def serving(self, *args: str, **environ: str) -> Iterator[Served]:
        """`deepinfra serve --port 0 ARGS`, ready; killed in the end if it still runs."""
        command = [sys.executable, "-m", "deepinfra", "serve", "--port", "0", *args]
        process = subprocess.Popen(
            command,
            cwd=self.folder,
            env=self.environ | environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        with process:
            try:
                assert process.stdout is not None
                head = ""
                while not ("curl" in head and head.endswith("\n\n")):
                    line = process.stdout.readline()
                    assert line, f"the server ended before it served:\n{head}"
                    head += line
                url = re.search(r"http://\S+:\d+", head)
                assert url is not None
                yield Served(process, url[0], head)
            finally:
                if process.poll() is None:
                    process.kill()


class Served(NamedTuple):
    """A running server: its process, address, and what it printed before it was ready."""

    process: subprocess.Popen[str]
    url: str
    head: str

    def stop(self, number: int = signal.SIGTERM) -> tuple[int, str]:
        """Send a signal and wait; exit code and what was printed since."""
        self.process.send_signal(number)
        out, _ = self.process.communicate(timeout=60)
        return self.process.returncode, out


@pytest.fixture
def home(tmp_path: Path) -> Home:
    site, folder = tmp_path / "site", tmp_path / "home"
    info = site / "tinyplug-2.0.dist-info"
    info.mkdir(parents=True)
    folder.mkdir()
    (site / "tinyplug.py").write_text(PLUGIN)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: tinyplug\nVersion: 2.0\n")
    (info / "entry_points.txt").write_text("[deepinfra]\ntinyplug = tinyplug\n")
    (folder / "deepinfra.toml").write_text(SETTINGS)
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("DEEPINFRA_")}
    environ = inherited | {
        "PYTHONPATH": str(site),
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
        "PYTHONUNBUFFERED": "1",
        "COLUMNS": "120",
    }
    return Home(folder, environ)


@pytest.fixture(scope="session")
def dense(smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with SmolLM2's tokenizer, as safetensors in bfloat16: not in blocks of integers."""
    path = tmp_path_factory.mktemp("dense")
    model = open_model(str(smollm2_path))
    model.tokenizer().save(str(path / "tokenizer.json"))
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "bos_token": "<|im_start|>"}
    (path / "tokenizer_config.json").write_text(json.dumps({**about, "chat_template": model.chat_template()}))
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = {**model.config, **sizes, "num_key_value_heads": 1, "head_dim": 32, "max_position_embeddings": 256}
    (path / "config.json").write_text(json.dumps(config))
    torch.manual_seed(3)
    shapes = decoder_config(config).shapes()
    weights = {name: torch.randn(shape).mul_(0.1).add_(len(shape) == 1).bfloat16() for name, shape in shapes.items()}
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    return path
