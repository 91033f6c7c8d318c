"""Built-in parts: what a configuration says is what the class takes, with the same defaults."""

from __future__ import annotations

import inspect

import pytest
from pydantic_core import PydanticUndefined

from deepinfra.executors.simulated import SimulatedExecutor
from deepinfra.executors.torch import TorchExecutor
from deepinfra.executors.toy import ToyExecutor
from deepinfra.interfaces import Component
from deepinfra.kvstores import MemoryStore, SsdStore, TieredStore
from deepinfra.placers import Eplb, StaticPlacer
from deepinfra.recipes import ChatTemplate, DeepSeek, Harmony, Mistral
from deepinfra.registry import KINDS, load_plugins
from deepinfra.schedulers import Bucketed, Fcfs
from deepinfra.speculators import Ngram

PARTS: dict[tuple[str, str], type[Component]] = {
    ("recipe", "chat-template"): ChatTemplate,
    ("recipe", "deepseek"): DeepSeek,
    ("recipe", "harmony"): Harmony,
    ("recipe", "mistral"): Mistral,
    ("scheduler", "fcfs"): Fcfs,
    ("scheduler", "bucketed"): Bucketed,
    ("kvstore", "memory"): MemoryStore,
    ("kvstore", "ssd"): SsdStore,
    ("kvstore", "tiered"): TieredStore,
    ("executor", "torch"): TorchExecutor,
    ("executor", "toy"): ToyExecutor,
    ("executor", "simulated"): SimulatedExecutor,
    ("speculator", "ngram"): Ngram,
    ("placer", "static"): StaticPlacer,
    ("placer", "eplb"): Eplb,
}

REGISTRY = load_plugins()

FILLED_BY_THE_SERVER = ("model", "path", "tiers")


def test_these_are_all_the_built_in_parts() -> None:
    entries = [entry for kind in KINDS for entry in REGISTRY.of_kind(kind).values()]
    assert {(e.kind, e.name) for e in entries if e.origin.distribution == "deepinfra-serve"} == set(PARTS)


@pytest.mark.parametrize(("part", "made"), PARTS.items(), ids=map("-".join, PARTS))
def test_options_are_the_parameters_of_the_class_with_their_defaults(
    part: tuple[str, str], made: type[Component]
) -> None:
    entry = REGISTRY.of_kind(part[0])[part[1]]  # type: ignore[index]
    parameters = inspect.signature(made).parameters
    differing = {
        name: (field.default, parameters[name].default)
        for name, field in entry.options.model_fields.items()
        if name not in FILLED_BY_THE_SERVER
        and field.default is not PydanticUndefined
        and field.default != parameters[name].default
    }
    assert differing == {}
    assert set(parameters) == set(entry.options.model_fields)


@pytest.mark.parametrize(
    "part",
    [part for part in PARTS if part[0] != "recipe" and part != ("executor", "torch")],  # they open a model
    ids="-".join,
)
def test_a_part_is_built_from_its_default_options(part: tuple[str, str]) -> None:
    entry = REGISTRY.of_kind(part[0])[part[1]]  # type: ignore[index]
    needed = {"path": "/nowhere"} if "path" in entry.options.model_fields else {}
    inside = [MemoryStore(), MemoryStore()] if entry.nested else []
    assert isinstance(entry.build(entry.options.model_validate(needed), inside), PARTS[part])


@pytest.mark.parametrize("part", PARTS, ids="-".join)
def test_every_option_is_described_and_there_are_few(part: tuple[str, str]) -> None:
    fields = REGISTRY.of_kind(part[0])[part[1]].options.model_fields  # type: ignore[index]
    assert len(fields) <= 12
    assert all(field.description for field in fields.values())
