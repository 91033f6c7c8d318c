"""The plug-in template, installed and tested from outside, through public names only."""

from __future__ import annotations

import ast
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

TEMPLATE = Path(__file__).parents[2] / "plugins" / "deepinfra-plugin-template"
PUBLIC = ("deepinfra.core", "deepinfra.interfaces", "deepinfra.errors", "deepinfra.registry", "deepinfra.testing")

SAME_TEXT = """
import anyio
from deepinfra import Engine, GenerateRequest, Pool, SamplingParams, TextInput
from deepinfra.executors.toy import ToyExecutor
from deepinfra.schedulers import Fcfs
from deepinfra.testing import TinyRecipe
from deepinfra_plugin_template.repeat import Repeat

async def text(speculator):
    greedy = SamplingParams(temperature=0)
    request = GenerateRequest(input=TextInput("abab" * 8), sampling=greedy, max_tokens=40, ignore_eos=True)
    engine = Engine(TinyRecipe(), Pool(Fcfs(), ToyExecutor(), speculator=speculator))
    async with engine, engine.generate(request) as stream:
        pieces = [getattr(event, "text", "") async for event in stream]
        return "".join(pieces), engine.stats().pools[0].drafts_verified

plain, none = anyio.run(text, None)
guessed, verified = anyio.run(text, Repeat())
assert plain == guessed and none == 0
print(verified)
"""


@pytest.fixture
def installed(outside: Any) -> Any:
    project = outside.folder / "my-plugin"
    shutil.copytree(TEMPLATE, project, ignore=shutil.ignore_patterns("__pycache__", ".*"))
    outside.install(project)
    return outside


@pytest.mark.parametrize("plugin", sorted(TEMPLATE.parent.glob("*/deepinfra_*")), ids=lambda path: path.name)
def test_plug_ins_import_public_names_only(plugin: Path) -> None:
    files = [*plugin.rglob("*.py"), *(TEMPLATE / "tests").rglob("*.py")]
    assert len(files) > 1
    for path in files:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                modules = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                modules = [node.module or ""]
            else:
                continue
            ours = [name for name in modules if name.partition(".")[0] == "deepinfra"]
            assert all(any(name == each or name.startswith(f"{each}.") for each in PUBLIC) for name in ours), path


def test_it_is_listed_with_its_origin(installed: Any) -> None:
    done = installed.run("deepinfra", "plugins", "--json")
    assert done.returncode == 0, done.stderr
    expected = {
        "kind": "speculator",
        "name": "repeat",
        "plugin": "template",
        "distribution": "deepinfra-plugin-template",
        "version": "0.1.0",
    }
    assert expected in json.loads(done.stdout)


def test_it_keeps_the_laws(installed: Any) -> None:
    done = installed.run("deepinfra", "check-plugin", "speculator:repeat")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "BROKEN" not in done.stdout
    assert done.stdout.count("  kept  ") >= 3


def test_its_own_tests_pass(installed: Any) -> None:
    done = installed.run("python", "-m", "pytest", "-q", "-p", "no:cacheprovider", "my-plugin")
    assert done.returncode == 0, done.stdout
    assert " passed" in done.stdout


def test_its_options_are_checked(installed: Any) -> None:
    (installed.folder / "deepinfra.toml").write_text('[pool.speculator]\nuse = "repeat"\nmax_drafts = 99\n')
    done = installed.run("deepinfra", "explain")
    assert done.returncode == 1
    assert "pool.speculator.max_drafts" in done.stderr
    assert "deepinfra.toml:3" in done.stderr


def test_it_changes_no_text(installed: Any) -> None:
    done = installed.run("python", "-c", SAME_TEXT)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 0
