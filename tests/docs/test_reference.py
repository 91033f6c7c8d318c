"""The reference says what the code says."""

from __future__ import annotations

import dataclasses
import importlib.util
import sys
import typing
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
from pydantic import BaseModel

from deepinfra import Engine, Pool, asgi, errors
from deepinfra.api.chat.request import ChatRequest
from deepinfra.api.completions.request import CompletionRequest
from deepinfra.api.messages.request import MessagesRequest
from deepinfra.api.responses.request import ResponsesRequest
from deepinfra.api.wire import RequestFields
from deepinfra.bench.load import LoadReport
from deepinfra.bench.offline import OfflineReport
from deepinfra.bench.profile import ProfileReport
from deepinfra.cli import app
from deepinfra.cli.bench import bench
from deepinfra.config.settings import ServerSettings
from deepinfra.executors.toy import ToyExecutor
from deepinfra.interfaces import Executor, ExpertPlacer, KVStore, Recipe, Scheduler, Speculator
from deepinfra.kvstores import MemoryStore
from deepinfra.registry import KINDS, load_plugins
from deepinfra.schedulers import Fcfs
from deepinfra.testing import TinyRecipe
from deepinfra.testing.client import Client, running

REFERENCE = Path(__file__).parents[2] / "docs" / "reference"


def generated() -> Mapping[str, Callable[[], str]]:
    spec = importlib.util.spec_from_file_location("reference_generate", REFERENCE / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(REFERENCE))  # as `python docs/reference/generate.py` has it
    spec.loader.exec_module(module)
    sys.path.remove(str(REFERENCE))
    pages: Mapping[str, Callable[[], str]] = module.PAGES
    return pages


PAGES = generated()


@pytest.mark.parametrize("name", PAGES)
def test_a_generated_page_is_fresh(name: str) -> None:
    assert (REFERENCE / name).read_text() == PAGES[name](), "run `make docs`"


# The generator is code too: these look for what must be there by another way.


def test_every_setting_is_listed() -> None:
    text = (REFERENCE / "settings.md").read_text()

    def keys(model: type[BaseModel], at: str) -> Iterator[str]:
        for name, info in model.model_fields.items():
            inner = info.annotation
            if isinstance(inner, type) and issubclass(inner, BaseModel):
                yield from keys(inner, f"{at}{name}.")
            elif at or name not in ("prefill", "decode"):
                yield f"| `{at}{name}` |"

    assert [key for key in keys(ServerSettings, "") if key not in text] == []


@pytest.mark.parametrize(
    ("path", "model"),
    [
        ("chat/completions", ChatRequest),
        ("completions", CompletionRequest),
        ("responses", ResponsesRequest),
        ("messages", MessagesRequest),
    ],
)
def test_every_request_field_is_listed_as_what_it_is(path: str, model: type[RequestFields]) -> None:
    text = (REFERENCE / "http-api.md").read_text()

    def section(title: str) -> str:
        return text.partition(f"### {title} by /v1/{path}\n")[2].partition("\n#")[0]

    assert [name for name in model.model_fields if f"| `{name}` |" not in section("Honoured")] == []
    assert [name for name in model.IGNORED if f"`{name}`" not in section("Accepted and ignored")] == []
    assert [name for name in model.NEUTRAL if f"| `{name}` |" not in section("Refused")] == []


def test_every_command_is_listed() -> None:
    text = (REFERENCE / "cli.md").read_text()
    commands = [command.name or "" for command in app.registered_commands]
    commands += [f"bench {command.name}" for command in bench.registered_commands]
    assert len(commands) > 8
    assert [name for name in commands if f"## `deepinfra {name}`\n" not in text] == []


async def test_every_metric_of_a_server_is_listed() -> None:
    text = (REFERENCE / "metrics.md").read_text()
    llm = asgi(Engine(TinyRecipe(), Pool(Fcfs(), ToyExecutor(), store=MemoryStore())))
    async with running(llm), Client(llm).request("GET", "/metrics") as response:
        scraped = (await response.read()).decode()
    names = {line.split()[2] for line in scraped.splitlines() if line.startswith("# TYPE")}
    assert len(names) > 20
    assert [name for name in names if f"| `{name}` |" not in text] == []


def test_every_error_code_is_listed() -> None:
    text = (REFERENCE / "errors.md").read_text()
    codes = [getattr(errors, name).code for name in errors.__all__ if name != "DeepinfraError"]
    assert [code for code in codes if f"| `{code}` |" not in text] == []


def test_every_part_and_every_key_of_it_is_listed() -> None:
    text = (REFERENCE / "parts.md").read_text()
    registry = load_plugins()
    for kind in KINDS:
        for entry in registry.of_kind(kind).values():
            if entry.origin.distribution == "deepinfra-serve":
                section = text.partition(f"### {kind} `{entry.name}`\n")[2].partition("\n#")[0]
                assert section, entry.name
                assert [key for key in entry.options.model_fields if f"| `{key}` |" not in section] == []


@pytest.mark.parametrize("part", [Recipe, Scheduler, KVStore, Executor, Speculator, ExpertPlacer])
def test_every_abstract_method_is_named(part: type) -> None:
    text = (REFERENCE / "interfaces.md").read_text()
    methods: frozenset[str] = getattr(part, "__abstractmethods__", frozenset())
    assert [name for name in methods if f"### {part.__name__}.{name} *abstract*\n" not in text] == []


@pytest.mark.parametrize("report", [OfflineReport, LoadReport, ProfileReport])
def test_every_field_of_a_bench_is_named(report: type) -> None:
    text = (REFERENCE / "bench.md").read_text()

    def fields(record: type) -> Iterator[str]:
        hints = typing.get_type_hints(record)
        for field in dataclasses.fields(record):
            yield field.name
            for each in (hints[field.name], *typing.get_args(hints[field.name])):
                if dataclasses.is_dataclass(each):
                    yield from fields(typing.cast("type", each))

    assert [name for name in fields(report) if f"`{name}`" not in text and f".{name}`" not in text] == []
