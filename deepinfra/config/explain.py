"""Every value of a blueprint, where it came from, and what "auto" became."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from pydantic import BaseModel

from deepinfra.config.resolve import Blueprint, Part, PoolBlueprint
from deepinfra.config.settings import ExecutorChoice, PartChoice, PoolSettings
from deepinfra.config.sources import Key
from deepinfra.interfaces import Component, Executor

if TYPE_CHECKING:
    from deepinfra.engine.windows import ReplayMode

__all__ = ("Value", "explain")


@dataclass(frozen=True, slots=True)
class Value:
    """One setting as it is in effect.

    Attributes:
        name: Its dotted path, as in the file.
        value: As JSON; secrets are masked.
        origin: Where it was written, or whose default it is.
        about: What it means.
        became: What the part made of a value that was left to it; empty if nothing was, or it was not asked.
    """

    name: str
    value: object
    origin: str
    about: str = ""
    became: str = ""


def explain(blueprint: Blueprint, *, ask_parts: bool = False) -> tuple[Value, ...]:
    """All values, in the order of the settings.

    Args:
        blueprint: What is to be explained.
        ask_parts: Build the parts to learn what they make of values that were left to them; reads (and fetches)
            models' headers.

    Raises:
        ModelError: `ask_parts`, and a model is not there or cannot be used.
    """
    values = list(_scalars(blueprint, blueprint.settings, ()))
    values += _part(blueprint, blueprint.recipe, "what turns requests into tokens and back")
    for pool in blueprint.pools:
        values += _pool(blueprint, pool)
    if not ask_parts:
        return tuple(values)
    became: dict[str, str] = {}
    parts: list[Part[Component]] = [blueprint.recipe, *(part for pool in blueprint.pools for part in pool.parts)]
    for part in parts:
        for each in part.flat():
            built = each.build()
            became |= {".".join((*each.at, name)): words for name, words in built.explain().items()}
            if isinstance(built, Executor):
                pool = next(pool for pool in blueprint.pools if pool.executor is each)
                became[".".join((*each.at[:-1], "replay"))] = _windows(built, pool.replay)
    explained = [replace(value, became=became.pop(value.name, "")) for value in values]
    extra = [Value(name, words, "computed") for name, words in became.items()]
    return (*explained, *extra)


def _windows(executor: Executor, replay: ReplayMode) -> str:
    """What a cached prefix is worth to a model with sliding windows."""
    from deepinfra.engine.windows import window_plan

    plan = window_plan(executor.layout, replay)
    if not plan.rows:
        return ""
    kind = "an approximation, its cache is its own" if replay == "bounded" else "exact"
    return f"{plan.rows} rows computed again ({kind}); without a snapshot no prefix below {plan.least_prefix} tokens"


def _scalars(blueprint: Blueprint, model: BaseModel, at: Key) -> Iterator[Value]:
    dumped = model.model_dump(mode="json")
    for name, info in type(model).model_fields.items():
        value, key = getattr(model, name), (*at, name)
        if isinstance(value, PartChoice) or key in (("pool",), ("prefill",), ("decode",)):
            continue
        if isinstance(value, BaseModel):
            yield from _scalars(blueprint, value, key)
        elif key == ("name",) and value is None:
            yield Value("name", blueprint.name, "from model", info.description or "")
        else:
            yield Value(".".join(key), dumped[name], _origin(blueprint, key, "default"), info.description or "")


def _pool(blueprint: Blueprint, pool: PoolBlueprint) -> Iterator[Value]:
    at = pool.executor.at[:-1]
    for kind in ("scheduler", "executor", "store", "speculator", "placer"):
        part: Part[Component] | None = getattr(pool, kind)
        if part is not None:
            yield from _part(blueprint, part, "")
        else:
            key = (*at, kind, "use")
            yield Value(".".join(key), "none", _origin(blueprint, key, "default"), f"no {kind}")
        if kind == "executor":
            key = (*at, kind, "process")
            origin = _origin(blueprint, key, f"default of {pool.executor.entry.name}")
            process = "auto" if pool.process is None else pool.process
            about = ExecutorChoice.model_fields["process"].description or ""
            yield Value(".".join(key), process, origin, about)
    for name in ("replay", "snapshots"):
        about = PoolSettings.model_fields[name].description or ""
        yield Value(".".join((*at, name)), getattr(pool, name), _origin(blueprint, (*at, name), "default"), about)


def _part(blueprint: Blueprint, part: Part[Component], about: str, whose: str = "default") -> Iterator[Value]:
    key = (*part.at, "use")
    yield Value(".".join(key), part.entry.name, _origin(blueprint, key, whose), about or f"by {part.entry.origin}")
    dumped = part.options.model_dump(mode="json")
    for name, info in type(part.options).model_fields.items():
        key = (*part.at, name)
        if name == part.entry.nested:
            for inner, listed in zip(part.nested, getattr(part.options, name), strict=True):
                yield from _part(blueprint, inner, "", f"default of {part.entry.name}")
                yield from _beside(blueprint, part, inner, listed)
            continue
        default = f"default of {part.entry.name}"
        value = getattr(part.options, name)
        if isinstance(value, Mapping) and any(isinstance(table, BaseModel) for table in value.values()):
            for table, inner in value.items():
                yield from _table(blueprint, inner, (*key, table), default)
            continue
        if name == "model":
            default = "from model"
        elif (part.entry.kind, name) in (("kvstore", "path"), ("scheduler", "timings")):
            default = "default"
        origin = _origin(blueprint, key, default)
        yield Value(".".join(key), dumped[name], origin, info.description or "")


def _table(blueprint: Blueprint, model: BaseModel, at: Key, otherwise: str) -> Iterator[Value]:
    """Keys of one of a part's named tables."""
    dumped = model.model_dump(mode="json")
    for name, info in type(model).model_fields.items():
        key = (*at, name)
        yield Value(".".join(key), dumped[name], _origin(blueprint, key, otherwise), info.description or "")


def _beside(blueprint: Blueprint, part: Part[Component], inner: Part[Component], listed: BaseModel) -> Iterator[Value]:
    """Keys that a part has in the tables of the parts inside it."""
    dumped = listed.model_dump(mode="json")
    for name, info in type(listed).model_fields.items():
        if name != "use":
            key = (*inner.at, name)
            origin = _origin(blueprint, key, f"default of {part.entry.name}")
            yield Value(".".join(key), dumped[name], origin, info.description or "")


def _origin(blueprint: Blueprint, key: Key, otherwise: str) -> str:
    return blueprint.provenance.written(key) or otherwise
