"""From a file to text, with the executor in this process and in a child."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import deepinfra
from deepinfra.core.events import TextDelta
from deepinfra.core.request import GenerateRequest
from deepinfra.core.sampling import SamplingParams
from deepinfra.errors import ConfigError
from deepinfra.executors.process import ProcessExecutor

PLUGIN = """
from pydantic import BaseModel, ConfigDict
from deepinfra.registry import hookimpl
from deepinfra.testing.tiny import TinyRecipe

class NoOptions(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

@hookimpl
def deepinfra_register(registry):
    registry.recipe("from-toml-tiny", lambda options: TinyRecipe(), options=NoOptions)
"""

POOL = """
recipe.use = "from-toml-tiny"
[pool.executor]
use = "toy"
seed = 5
process = {process}
[pool.store]
use = "memory"
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    info = tmp_path / "fromtoml-1.0.dist-info"
    info.mkdir()
    (tmp_path / "fromtoml.py").write_text(PLUGIN)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: fromtoml\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[deepinfra]\nfromtoml = fromtoml\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


async def text_of(engine: deepinfra.Engine) -> str:
    hello = deepinfra.Message(role="user", content=(deepinfra.TextPart("Hello, I am 09 here."),))
    request = GenerateRequest(
        input=deepinfra.Conversation(messages=(hello,)), sampling=SamplingParams(temperature=0), max_tokens=12
    )
    async with engine, engine.generate(request) as stream:
        return "".join([event.text async for event in stream if isinstance(event, TextDelta)])


async def test_an_executor_in_a_child_gives_the_text_it_gives_here(folder: Path) -> None:
    texts = []
    for process in ("false", "true"):
        (folder / "deepinfra.toml").write_text(POOL.format(process=process))
        engine = deepinfra.from_toml()
        assert isinstance(engine.pools[0].executor, ProcessExecutor) == (process == "true")
        texts.append(await text_of(engine))
    assert len(texts[0]) >= 6
    assert texts[0] == texts[1]


async def test_prefill_and_decode_in_two_pools_give_the_text_of_one(folder: Path) -> None:
    pools = 'recipe.use = "from-toml-tiny"\n'
    for name in ("prefill", "decode"):
        pools += f'[[{name}]]\nexecutor = {{ use = "toy", seed = 5 }}\nscheduler.use = "fcfs"\n'
    (folder / "split.toml").write_text(pools)
    (folder / "one.toml").write_text(POOL.format(process="false"))
    one, split = deepinfra.from_toml("one.toml"), deepinfra.from_toml(folder / "split.toml")
    assert await text_of(one) == await text_of(split)


def test_the_file_must_exist(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"there is no configuration file deepinfra\.toml"):
        deepinfra.from_toml()


def test_the_environment_overrides_the_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "deepinfra.toml").write_text(POOL.format(process="true"))
    monkeypatch.setenv("DEEPINFRA_POOL__EXECUTOR__PROCESS", "false")
    assert not isinstance(deepinfra.from_toml().pools[0].executor, ProcessExecutor)


def test_a_child_that_cannot_find_its_executor_says_so() -> None:
    command = [sys.executable, "-m", "deepinfra.config.child", "nobody", "{}", "0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("deepinfra: the executor's process cannot start: no executor is named 'nobody'")
