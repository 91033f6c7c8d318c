"""Templates of real models with tokenizers trained on the spot."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from deepinfra.recipes import ChatTemplate
from deepinfra.testing.textmodel import TrainedTextModel

TEMPLATES = Path(__file__).parents[1] / "data" / "templates"
_MARKER = re.compile(
    r"<\|[^|<>\s'\"{}+]+\|>|<｜[^｜<>\s'\"]+｜>|\[/?[A-Z_]{3,}\]|<\|?[a-z_]+\|?>"
    r"|</?(?:think|tool_call|tool_response|tool_calls|seed:[a-z_]+|tool_sep|arg_key|arg_value|minimax:tool_call)>"
)


@cache
def model_of(name: str, kind: str = "byte-level") -> TrainedTextModel:
    """A model with that template and every marker its source shows, without the `special` flag, as many have it."""
    source = (TEMPLATES / f"{name}.jinja").read_text()
    found = {*_MARKER.findall(source), "<|system|>", "<|user|>", "<|assistant|>"} - {"<s>", "</s>"}
    return TrainedTextModel(source, ("<s>", "</s>", *sorted(found)), kind=kind, special=False, name=name)  # type: ignore[arg-type]


@cache
def recipe_of(name: str, kind: str = "byte-level") -> ChatTemplate:
    """A recipe for it."""
    return ChatTemplate(model_of(name, kind), date="2025-01-15")


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
