"""`deepinfra check-plugin`: a registered part against the laws of its kind."""

from __future__ import annotations

import importlib.util
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from deepinfra.errors import ConfigError, UnknownComponentError

if TYPE_CHECKING:
    import pytest

    from deepinfra.interfaces import Component
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

_TEST_FILE = """
import json

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
    persistent = "path" in entry.options.model_fields

    def make(self, tmp_path):
        return build(path=str(tmp_path / "kv"), capacity_nbytes=self.capacity_nbytes)
"""


def check_plugin(
    part: Annotated[str, typer.Argument(metavar="PART", help="NAME, or KIND:NAME; `deepinfra plugins` lists them.")],
    option: Annotated[
        list[str] | None, typer.Option(metavar="KEY=VALUE", help="An option of the part; may be repeated.")
    ] = None,
) -> None:
    """Check that a registered part keeps the laws of its kind; needs the extra `testing`.

    A store works in a fresh folder each time, never in the server's. Exits 1 if a law is broken.
    """
    from deepinfra.config import checked
    from deepinfra.registry import load_plugins

    if importlib.util.find_spec("pytest") is None or importlib.util.find_spec("hypothesis") is None:
        raise ConfigError("check-plugin needs pytest and hypothesis: install deepinfra-serve[testing]")
    options = dict(_pair(text) for text in option or ())
    broken = 0
    for entry in _entries(load_plugins(), part):
        filled = {"path": "/by/the/kit"} if "path" in entry.options.model_fields else {}
        checked(entry, filled | options)  # once, instead of in every law
        broken += _check(entry, options)
    if broken:
        raise typer.Exit(1)


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


def _check(entry: Entry[Component], options: dict[str, str]) -> int:
    """Run one part's kit; returns how many laws are broken."""
    import pytest

    typer.echo(f"{entry.kind} {entry.name} of {entry.origin}")
    laws = _Laws()
    with tempfile.TemporaryDirectory(prefix="deepinfra-check-") as folder:
        source = _TEST_FILE.format(
            kit=_KITS[entry.kind],
            kind=entry.kind,
            name=entry.name,
            options=json.dumps(options),
            body=(_MAKE_STORE if entry.kind == "kvstore" else _MAKE).strip(),
        )
        (Path(folder) / "test_part.py").write_text(source)
        (Path(folder) / "pytest.ini").write_text("[pytest]\nanyio_mode = auto\n")
        arguments = ["-c", f"{folder}/pytest.ini", "--rootdir", folder, "-p", "no:cacheprovider", "-p", "no:terminal"]
        status = pytest.main([*arguments, "--import-mode=importlib", folder], plugins=[laws])
    for line in laws.lines():
        typer.echo(f"  {line}")
    broken = len(laws.broken)
    typer.echo(f"  {len(laws.kept)} kept, {broken} broken")
    if status not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED) or not (laws.kept or broken):
        raise ConfigError(f"the kit could not run: pytest ended with {pytest.ExitCode(status).name}; {laws.trouble}")
    return broken


class _Laws:
    """A pytest plug-in that notes how each law fared; a law that runs in several variants is broken by any."""

    def __init__(self) -> None:
        self.seen: dict[str, str] = {}
        self.trouble = "it found no laws"

    @property
    def kept(self) -> list[str]:
        """Laws that hold."""
        return [law for law, why in self.seen.items() if not why]

    @property
    def broken(self) -> dict[str, str]:
        """Laws that do not hold, and how that showed."""
        return {law: why for law, why in self.seen.items() if why}

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.trouble = report.longreprtext.strip().rpartition("\n")[2]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        law = report.nodeid.rpartition("::")[2].partition("[")[0].removeprefix("test_").replace("_", " ")
        if report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            words = crash.message if crash is not None else report.longreprtext
            self.seen[law] = self.seen.get(law) or words.strip().partition("\n")[0] or "failed without a word"
        elif report.when == "call" and report.passed:
            self.seen.setdefault(law, "")

    def lines(self) -> Iterator[str]:
        """One line for each law, broken ones last."""
        for law in self.kept:
            yield f"kept    {law}"
        for law, why in self.broken.items():
            yield f"BROKEN  {law}: {why}"
