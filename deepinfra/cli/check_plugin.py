"""`deepinfra check-plugin`: a registered part against the laws of its kind."""

from __future__ import annotations

import importlib.util
import json
import re
import tempfile
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from deepinfra.errors import ConfigError, DeepinfraError, PluginError, UnknownComponentError
from deepinfra.interfaces import Component, Executor, ExpertPlacer, KVStore, Recipe, Scheduler, Speculator

if TYPE_CHECKING:
    import pytest
    from pydantic import BaseModel

    from deepinfra.registry import Entry, Kind, Registry

__all__ = ("check_plugin",)

_KITS = {
    "recipe": "RecipeConformance",
    "scheduler": "SchedulerConformance",
    "kvstore": "KVStoreConformance",
    "executor": "ExecutorConformance",
    "speculator": "SpeculatorConformance",
    "placer": "ExpertPlacerConformance",
}

_INTERFACES: dict[str, type[Component]] = {
    "recipe": Recipe,
    "scheduler": Scheduler,
    "kvstore": KVStore,
    "executor": Executor,
    "speculator": Speculator,
    "placer": ExpertPlacer,
}

_RAISED = re.compile(r"[A-Za-z_][\w.]*(Error|Exception|ExceptionGroup|Cancelled|Timeout)(:|$)")

_FRAME = re.compile(r'File "(.+)", line (\d+), in (.+)')

_ADVICE = ("Use -v", "...Full output truncated")
"""How pytest begins what it says about options that are not here."""

_MOST_WORDS = 25
"""Lines shown of what was raised: a history of calls that breaks a law is one line a call."""

_TEST_FILE = """
import hashlib
import json

import anyio
import pytest

from deepinfra.core.kv import NamespaceFilter
from deepinfra.registry import load_plugins
from deepinfra.testing import {kit}

entry = load_plugins().find({kind!r}, {name!r})
given = json.loads({options!r})


def build(**defaults):
    known = entry.options.model_fields
    fitting = {{name: value for name, value in defaults.items() if name in known}}
    return entry.build(entry.options.model_validate(fitting | given))


class TestPart({kit}):
    {body}
"""

_MAKE = """
    def make(self):
        return build()
"""

_MAKE_STORE = """
    persistent = {durable}

    def make(self, tmp_path):
        self.folders[str(tmp_path)] = None
        return self.at(str(tmp_path))

    def at(self, folder):
        prefix = "check-" + hashlib.sha256(folder.encode()).hexdigest()[:16]
        return build(path=folder + "/kv", prefix=prefix, capacity_nbytes=self.capacity_nbytes)

    @pytest.fixture(autouse=True)
    def leave_nothing(self):
        self.folders = {{}}
        yield
        if self.persistent and "path" not in entry.options.model_fields:
            for folder in self.folders:
                anyio.run(self.forget, folder)

    async def forget(self, folder):
        async with self.at(folder) as store:
            await store.forget(NamespaceFilter())
"""


def check_plugin(
    part: Annotated[str, typer.Argument(metavar="PART", help="NAME, or KIND:NAME; `deepinfra plugins` lists them.")],
    option: Annotated[
        list[str] | None, typer.Option(metavar="KEY=VALUE", help="An option of the part; may be repeated.")
    ] = None,
    law: Annotated[str, typer.Option(metavar="WORDS", help="Only laws whose name has these words in it.")] = "",
) -> None:
    """Check that a registered part keeps the laws of its kind; needs the extra `testing`.

    A store works in a fresh folder (its option `path`) or under a fresh beginning of its keys (`prefix`) each time,
    never where the server's is, and with a small `capacity_nbytes`. Exits 1 if a law is broken.
    """
    from deepinfra.config import checked
    from deepinfra.registry import load_plugins

    if importlib.util.find_spec("pytest") is None or importlib.util.find_spec("hypothesis") is None:
        raise ConfigError("check-plugin needs pytest and hypothesis: install deepinfra-serve[testing]")
    options = dict(_pair(text) for text in option or ())
    broken = 0
    for entry in _entries(load_plugins(), part):
        if entry.nested:
            raise ConfigError(
                f"{entry.kind} {entry.name!r} is made of others: check those, or subclass {_KITS[entry.kind]}"
            )
        filled = {"path": "/by/the/kit"} if "path" in entry.options.model_fields else {}
        made = _made(entry, checked(entry, filled | options))  # once, instead of in every law
        broken += _check(entry, options, law, durable=isinstance(made, KVStore) and made.durable)
    if broken:
        raise typer.Exit(1)


def _made(entry: Entry[Component], options: BaseModel) -> Component:
    """A part to look at."""
    try:
        made: object = entry.build(options)
    except DeepinfraError:
        raise
    except Exception as error:  # one of the three doors: somebody else's code
        where = traceback.extract_tb(error.__traceback__)[-1]
        raise PluginError(
            f"{entry.kind} {entry.name!r} of {entry.origin} cannot be made: {type(error).__name__}: {error}"
            f" ({where.filename}:{where.lineno})"
        ) from error
    wanted = _INTERFACES[entry.kind]
    if not isinstance(made, wanted):
        raise PluginError(
            f"{entry.kind} {entry.name!r} of {entry.origin}: its factory returned a {type(made).__name__}, which is no"
            f" {wanted.__name__}; subclass deepinfra.interfaces.{wanted.__name__}"
        )
    return made


def _pair(text: str) -> tuple[str, str]:
    key, separator, value = text.partition("=")
    if not separator:
        raise typer.BadParameter(f"{text!r} is not KEY=VALUE")
    return key, value


def _entries(registry: Registry, part: str) -> list[Entry[Component]]:
    from deepinfra.registry import KINDS

    prefix, separator, name = part.rpartition(":")
    kinds: list[Kind] = [kind for kind in KINDS if not separator or kind == prefix]
    if not kinds:
        raise ConfigError(f"{prefix!r} is no kind of part; kinds: {', '.join(KINDS)}")
    found = [registry.of_kind(kind)[name] for kind in kinds if name in registry.of_kind(kind)]
    if not found:
        known = [name for kind in kinds for name in registry.of_kind(kind)]
        raise UnknownComponentError(kinds[0] if len(kinds) == 1 else "part", name, known)
    return found


def _check(entry: Entry[Component], options: dict[str, str], only: str, *, durable: bool) -> int:
    """Run one part's kit; returns how many laws are broken."""
    import pytest

    typer.echo(f"{entry.kind} {entry.name} of {entry.origin}")
    laws = _Laws(only)
    with tempfile.TemporaryDirectory(prefix="deepinfra-check-") as folder:
        source = _TEST_FILE.format(
            kit=_KITS[entry.kind],
            kind=entry.kind,
            name=entry.name,
            options=json.dumps(options),
            body=(_MAKE_STORE.format(durable=durable) if entry.kind == "kvstore" else _MAKE).strip(),
        )
        (Path(folder) / "test_part.py").write_text(source)
        (Path(folder) / "pytest.ini").write_text("[pytest]\nanyio_mode = auto\n")
        arguments = ["-c", f"{folder}/pytest.ini", "--rootdir", folder, "-p", "no:cacheprovider", "-p", "no:terminal"]
        status = pytest.main([*arguments, "--import-mode=importlib", folder], plugins=[laws])
    for line in laws.lines():
        typer.echo(f"  {line}" if line else "")
    broken = len(laws.broken)
    typer.echo(f"  {len(laws.kept)} kept, {broken} broken")
    if broken:
        words = next(iter(laws.broken)).replace('"', "")
        typer.echo(f'  laws are methods of deepinfra.testing.{_KITS[entry.kind]}; one alone: --law "{words}"')
    if status not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED) or not (laws.kept or broken):
        raise ConfigError(f"the kit could not run: pytest ended with {pytest.ExitCode(status).name}; {laws.trouble}")
    return broken


class _Broken(NamedTuple):
    """How a law broke: what was raised, in which variant, and where, from the kit's line to the last."""

    words: tuple[str, ...]
    variant: str
    places: tuple[str, ...]


class _Laws:
    """A pytest plug-in that notes how each law fared; a law that runs in several variants is broken by any."""

    def __init__(self, only: str) -> None:
        self.kept: dict[str, None] = {}
        self.broken: dict[str, _Broken] = {}
        self.trouble = f"no law has the words {only!r}" if only else "it found no laws"
        self._only = only

    def pytest_configure(self, config: pytest.Config) -> None:
        import pytest

        config.option.tbstyle = "short"  # the option itself is the terminal's, which is switched off
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a plug-in may have imported some of it already
            pytest.register_assert_rewrite("deepinfra.testing")

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = [item for item in items if self._only.lower() in _law(item.nodeid)]

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.trouble = report.longreprtext.strip().rpartition("\n")[2]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        law = _law(report.nodeid)
        if report.failed:
            self.kept.pop(law, None)
            self.broken.setdefault(law, _broken(report))
        elif report.when == "call" and report.passed and law not in self.broken:
            self.kept[law] = None

    def lines(self) -> Iterator[str]:
        """One line for each law that is kept; then what broke, laws that broke in one way together."""
        for law in self.kept:
            yield f"kept    {law}"
        alike: dict[tuple[tuple[str, ...], str], list[str]] = {}
        for law, how in self.broken.items():
            alike.setdefault((how.words, how.places[-1] if how.places else ""), []).append(law)
        for (words, _), laws in alike.items():
            yield f"BROKEN  {laws[0]}: {words[0]}"
            how = self.broken[laws[0]]
            yield from (f"          {line}" for line in (*words[1:], *how.places))
            if how.variant:
                yield f"          (variant {how.variant})"
            yield from (f"BROKEN  {law}: in the same way" for law in laws[1:])


def _law(nodeid: str) -> str:
    return nodeid.rpartition("::")[2].partition("[")[0].removeprefix("test_").replace("_", " ")


def _ours(path: str) -> bool:
    """Whether a file is the kit's or the plug-in's, as far as its path tells: an editable plug-in is in no library."""
    return "/deepinfra/" in path or not ("site-packages" in path or "/lib/python" in path)


def _broken(report: pytest.TestReport) -> _Broken:
    lines = report.longreprtext.splitlines()
    words = [line[1:].strip() for line in lines if line.startswith("E ")]
    places: list[str] = []
    if not words or "Exception Group" in words[0]:  # several tasks failed: what the innermost say
        bare = [line.strip("E |+-") for line in lines]
        words = [line for line in bare if _RAISED.match(line) and not line.startswith("ExceptionGroup")]
        places = [f"{m[1]}:{m[2]}: in {m[3]}" for line in bare if (m := _FRAME.match(line)) and _ours(m[1])]
    words = [word for word in words if word and not word.startswith(_ADVICE)] or ["failed without a word"]
    traced = getattr(report.longrepr, "reprtraceback", None)
    for entry in getattr(traced, "reprentries", ()):
        file = getattr(entry, "reprfileloc", None)
        if file is None or not _ours(file.path):
            continue
        code = next((line.strip() for line in entry.lines if not line.startswith("E ")), "")
        places.append(f"{file.path}:{file.lineno}: {code}")
    variant = report.nodeid.partition("[")[2].rstrip("]")
    return _Broken(tuple(words[:_MOST_WORDS]), variant, (*places[:1], *places[1:][-2:]))
