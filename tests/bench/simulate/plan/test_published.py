"""No published output feeds an input: not by an import, not by its value, not by its source."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path

import pytest

import deepinfra
from deepinfra.bench.simulate.plan.compare import compared
from deepinfra.bench.simulate.plan.fleets import FLEETS
from deepinfra.bench.simulate.plan.models import MODELS
from deepinfra.bench.simulate.plan.published import PUBLISHED

ROOT = Path(deepinfra.__file__).parents[1]
PLAN = "deepinfra.bench.simulate.plan"
TARGETS = f"{PLAN}.published"

INPUTS = tuple(
    f"{PLAN}.{name}"
    for name in (
        "asked",
        "check",
        "devices",
        "fleet",
        "fleets",
        "given",
        "models",
        "replicas",
        "roofline",
        "sensitivity",
        "shape",
        "traffic",
    )
)
"""All that makes predictions."""


def path_of(module: str) -> Path | None:
    """Where one of our modules lies; `None` if it is no module of ours (or a name in one)."""
    at = ROOT.joinpath(*module.split("."))
    return next((path for path in (at.with_suffix(".py"), at / "__init__.py") if path.is_file()), None)


@cache
def imported(path: Path) -> set[str]:
    """Everything of ours that is imported, wherever in a module that is done, and the packages it lies in."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    parts = [name.split(".") for name in names if name.startswith("deepinfra")]
    return {".".join(each[:length]) for each in parts for length in range(1, len(each) + 1)}


def reached(modules: Iterable[str]) -> set[str]:
    """These modules and all of ours that they import, directly or not."""
    found: set[str] = set()
    left = list(modules)
    while left:
        module = left.pop()
        path = path_of(module)
        if module not in found and path is not None:
            found.add(module)
            left += imported(path)
    return found


def test_nothing_that_predicts_reaches_what_was_published() -> None:
    assert TARGETS not in reached(INPUTS)


def test_only_the_comparison_imports_what_was_published() -> None:
    importers = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "deepinfra").rglob("*.py")
        if "published" in path.read_text() and TARGETS in imported(path)
    }
    assert importers == {"deepinfra/bench/simulate/plan/compare.py"}


def test_every_module_of_a_plan_is_looked_at() -> None:
    """A new one belongs to `INPUTS`, unless it only shows what was planned."""
    folder = ROOT.joinpath(*PLAN.split("."))
    shown = {f"{PLAN}.{name}" for name in ("__init__", "compare", "html", "outcome", "published", "text")}
    assert {f"{PLAN}.{path.stem}" for path in folder.glob("*.py")} - shown == set(INPUTS)


def test_an_import_through_others_or_in_a_function_would_be_found(tmp_path: Path) -> None:
    assert TARGETS in reached([f"{PLAN}.text"])
    late = tmp_path / "late.py"
    late.write_text("def late():\n    from deepinfra.bench.simulate.plan import published")
    assert TARGETS in imported(late)


OTHERWISE = """
import json
from dataclasses import asdict
from deepinfra.bench.simulate.plan import published

for name, told in published.PUBLISHED.items():
    published.PUBLISHED[name] = tuple(each._replace(value=each.value * 3.7) for each in told)

from deepinfra.bench.simulate.plan.compare import compared
from deepinfra.bench.simulate.plan.fleets import FLEETS

plans = {name: fleet.plan() for name, fleet in FLEETS.items()}
print(json.dumps({
    "plans": {name: asdict(plan) for name, plan in plans.items()},
    "givens": {name: [each._asdict() for each in fleet.givens()] for name, fleet in FLEETS.items()},
    "errors": {name: [each.error for each in compared(name, FLEETS[name], plan)] for name, plan in plans.items()},
}))
"""


def test_no_prediction_moves_when_everything_published_does() -> None:
    """In a new interpreter, where the changed figures are there before anything could read the true ones."""
    run = subprocess.run([sys.executable, "-c", OTHERWISE], capture_output=True, text=True, check=True, cwd=ROOT)
    otherwise = json.loads(run.stdout)
    for name, fleet in FLEETS.items():
        plan = fleet.plan()
        assert otherwise["plans"][name] == asdict(plan)
        assert otherwise["givens"][name] == [each._asdict() for each in fleet.givens()]
        told = [each.error for each in compared(name, fleet, plan)]
        assert all(error != other for error, other in zip(told, otherwise["errors"][name], strict=True))


@pytest.mark.parametrize("name", FLEETS)
def test_no_given_figure_is_a_published_one(name: str) -> None:
    """Neither a quantity that was published, nor a published value under another name, nor out of the same sentence."""
    told = [each for others in PUBLISHED.values() for each in others]
    for given in FLEETS[name].givens():
        place, _, figure = given.name.partition(".")
        assert place
        assert figure not in {each.quantity for each in told}
        assert given.source not in {each.source for each in told}
        assert not any(given.value == each.value for each in told if each.value != 1.0)


def test_every_given_figure_has_a_source() -> None:
    for fleet in FLEETS.values():
        for given in fleet.givens():
            assert given.source.strip()
            assert given.source != "chosen" or given.value in (0, 1) or given.name == "service.chunk", given
    assert all(model.source for model in MODELS.values())


@pytest.mark.parametrize("name", FLEETS)
def test_errors_are_of_the_prediction_beside_what_was_published(name: str) -> None:
    fleet = FLEETS[name]
    plan = fleet.plan()
    rows = compared(name, fleet, plan)
    assert {row.quantity for row in rows} >= {"decode_tokens_s", "user_tokens_s", "prefill_per_decode", "devices"}
    for row in rows:
        assert row.predicted == getattr(plan, row.quantity)
        assert row.error == pytest.approx((row.predicted - row.published) / row.published)


def test_devices_that_nobody_told_follow_from_what_was_told() -> None:
    fleet = FLEETS["deepseek-2026"]
    speed, revenue = (row for row in compared("deepseek-2026", fleet, fleet.plan()) if row.implied)
    answers = 155e12 * 342.62 / (12_035.06 + 342.62) / 86_400
    assert speed.published == pytest.approx(2 * answers / 14_000)
    prompts = 155e12 - answers * 86_400
    usd = prompts * (0.96 * 0.003 + 0.04 * 0.15) / 1e6 + answers * 86_400 * 0.60 / 1e6
    assert revenue.published == pytest.approx(usd / 24 / 38)


def test_a_speed_that_was_asked_for_is_no_prediction() -> None:
    fleet = FLEETS["deepseek-2026"]
    asked = replace(fleet, service=replace(fleet.service, user_speed=100.0))
    assert "user_tokens_s" not in {row.quantity for row in compared("deepseek-2026", asked, asked.plan())}


def test_another_model_is_compared_with_nothing() -> None:
    fleet = FLEETS["deepseek-2025"]
    assert compared("deepseek-2026", fleet, fleet.plan()) == ()
