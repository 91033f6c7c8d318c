"""Templates of real models with tokenizers trained on the spot."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from deepinfra.recipes import ChatTemplate
from deepinfra.testing.textmodel import TrainedTextModel

TEMPLATES = Path(__file__).parents[1] / "data" / "templates"


@cache
def listed() -> dict[str, dict[str, list[str]]]:
    """What was found when the templates were read; see the folder's README."""
    read: dict[str, dict[str, list[str]]] = json.loads((TEMPLATES / "markers.json").read_text())
    return read


@cache
def model_of(name: str, kind: str = "byte-level") -> TrainedTextModel:
    """A model with that template; its markers are tokens without the `special` flag, as many real ones are."""
    known = listed()[name]
    markers = dict.fromkeys((known["bos"], known["eos"], *known["markers"]))
    source = (TEMPLATES / f"{name}.jinja").read_text()
    return TrainedTextModel(source, tuple(markers), kind=kind, special=False, name=name)  # type: ignore[arg-type]


@cache
def recipe_of(name: str, kind: str = "byte-level") -> ChatTemplate:
    """A recipe for it."""
    return ChatTemplate(model_of(name, kind), date="2025-01-15")


@pytest.fixture
def markers() -> dict[str, dict[str, list[str]]]:
    return listed()


@pytest.fixture
def model() -> Callable[..., TrainedTextModel]:
    return model_of


@pytest.fixture
def recipe() -> Callable[..., ChatTemplate]:
    return recipe_of


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test that takes `name` runs for every template."""
    if "name" in metafunc.fixturenames:
        metafunc.parametrize("name", sorted(path.stem for path in TEMPLATES.glob("*.jinja")))
