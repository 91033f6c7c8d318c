"""Where settings come from: keywords over environment over file over defaults, each value with its origin.

Not pydantic-settings: it ignores unknown top-level names of the environment, keeps no origins, and merges tables key
by key, so that `use` from one source would meet the keys another source wrote for another part.
"""

from __future__ import annotations

import difflib
import json
import os
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias, get_origin

from pydantic import BaseModel, ValidationError

from deepinfra.config.settings import ServerSettings
from deepinfra.errors import ConfigError
from deepinfra.registry import RESERVED_KEYS

__all__ = ("ENV_PREFIX", "Key", "Provenance", "Tree", "read_settings", "refusal")

ENV_PREFIX = "DEEPINFRA_"

Key: TypeAlias = tuple[str, ...]
Tree: TypeAlias = "Mapping[str, object]"


@dataclass(frozen=True, slots=True)
class Layer:
    """One source: its values, and the words for where a value stands (`places`, else `label`)."""

    label: str
    values: Tree
    places: Mapping[Key, str] = field(default_factory=dict)

    def where(self, key: Key) -> str:
        """Words for where the value of `key`, or the table or list that holds it, was written."""
        return next((self.places[part] for part in _inside_out(key) if part in self.places), self.label)


@dataclass(frozen=True, slots=True)
class Provenance:
    """Which layer each value came from."""

    layers: Mapping[Key, Layer] = field(default_factory=dict)

    def of(self, key: Key) -> str | None:
        """Words for where a value came from; `None` if it is a default."""
        for part in _inside_out(key):
            if part in self.layers:
                layer = self.layers[part]
                return None if layer is _DEFAULTS else layer.where(key)
        for leaf, layer in self.layers.items():  # a table: where it, or the first value in it, was written
            if leaf[: len(key)] == key and layer is not _DEFAULTS:
                return layer.places.get(key) or layer.where(leaf)
        return None

    def written(self, key: Key) -> str | None:
        """The same; `None` too for a value that was not written in a list's table which was."""
        for part in _inside_out(key):
            if part in self.layers and not _has(self.layers[part].values, key):
                return None
        return self.of(key)


def _has(tree: object, key: Key) -> bool:
    for part in key:
        if isinstance(tree, Mapping) and part in tree:
            tree = tree[part]
        elif isinstance(tree, list | tuple) and part.isdecimal() and int(part) < len(tree):
            tree = tree[int(part)]
        else:
            return False
    return True


def read_settings(
    path: Path | None = None,
    *,
    keywords: Tree | None = None,
    keywords_from: str = "keyword",
    defaults: Tree | None = None,
    environ: Mapping[str, str] | None = None,
) -> tuple[ServerSettings, Provenance]:
    """Read and check all sources.

    Args:
        path: The file; `None` for none.
        keywords: Strongest; nested like the file.
        keywords_from: Words for where `keywords` were written.
        defaults: Weakest but for the settings' own defaults.
        environ: Names and values; by default the process's environment.

    Raises:
        ConfigError: A source cannot be read or a value is unknown, of the wrong type or out of range; names the
            value and where it was written.
    """
    layers = [_DEFAULTS]
    if defaults:
        layers.append(Layer("default of this command", defaults))
    if path is not None:
        layers.append(_file_layer(path))
    layers.append(_environment_layer(os.environ if environ is None else environ))
    layers.append(Layer(keywords_from, keywords or {}))

    leaves: dict[Key, tuple[Layer, object]] = {}
    for layer in layers:
        _overlay(leaves, layer)
    split = any(leaves[name,][1] for name in ("prefill", "decode"))
    if split and all(layer is _DEFAULTS or layer.label.startswith("default") for layer, _ in _under(leaves, ("pool",))):
        leaves = {key: leaf for key, leaf in leaves.items() if key[0] != "pool"}

    provenance = Provenance({key: layer for key, (layer, _) in leaves.items()})
    try:
        settings = ServerSettings.model_validate(_grow({key: value for key, (_, value) in leaves.items()}))
    except ValidationError as error:
        raise refusal(error, ServerSettings, (), provenance) from None
    return settings, provenance


def refusal(error: ValidationError, model: type[BaseModel], at: Key, provenance: Provenance) -> ConfigError:
    """One sentence for a failed validation of `model`, whose values stand below `at`."""
    sentences: dict[Key, str] = {}
    for problem in error.errors(include_url=False, include_input=False):
        loc = _without_union_members(model, problem["loc"])
        name = ".".join(at + loc)
        if problem["type"] == "extra_forbidden":
            known = _fields_at(model, loc[:-1])
            near = difflib.get_close_matches(loc[-1], known, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}"
            text = f"unknown setting {name}; {hint}"
        elif loc in sentences:
            text = f"{sentences[loc]}, or {problem['msg'].removeprefix('Input should be ')}"
        elif name:
            wrong = "should be a table" if problem["type"] == "model_type" else problem["msg"]
            wrong = wrong.removeprefix("Value error, ")
            text = f"{name}: {wrong[:1].lower()}{wrong[1:]}"
        else:
            text = problem["msg"].removeprefix("Value error, ")
        sentences[loc] = text
    origins = {loc: provenance.of(at + loc) for loc in sentences}
    return ConfigError(
        "; ".join(f"{text} ({origin})" if (origin := origins[loc]) else text for loc, text in sentences.items())
    )


def _without_union_members(model: type[BaseModel], loc: Sequence[str | int]) -> Key:
    """The path of a value, without which member of its union was tried, as pydantic adds."""
    path: list[str] = []
    table: type[BaseModel] | None = model
    named = False  # whether the next part names one of many tables, as `team` in `tenants.team.weight`
    for part in loc:
        if isinstance(part, int):
            path.append(str(part))
        elif named:
            path.append(part)
            named = False
        elif table is not None and part != "[key]":
            path.append(part)
            info = table.model_fields.get(part)
            named = info is not None and get_origin(info.annotation) is Mapping
            table = _table(table, part)
    return tuple(path)


def _fields_at(model: type[BaseModel], loc: Sequence[str]) -> list[str]:
    """Names that a nested table knows."""
    for part in loc:
        model = _table(model, part) or model  # or an index into a list
    return list(model.model_fields)


def _table(model: type[BaseModel], name: str) -> type[BaseModel] | None:
    """The model of the field `name` if that is a table or a list of tables."""
    info = model.model_fields.get(name)
    candidates = () if info is None else (info.annotation, *getattr(info.annotation, "__args__", ()))
    return next((c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel)), None)


# -- layers ---------------------------------------------------------------------------------------


def _leaves(tree: Tree, at: Key = ()) -> Iterator[tuple[Key, object]]:
    for name, value in tree.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, (*at, name))
        else:
            yield (*at, name), value


def _under(leaves: Mapping[Key, tuple[Layer, object]], at: Key) -> list[tuple[Layer, object]]:
    return [leaf for key, leaf in leaves.items() if key[: len(at)] == at]


def _overlay(leaves: dict[Key, tuple[Layer, object]], layer: Layer) -> None:
    """Put a stronger layer's values over what is there; another `use` drops the keys written for the old part."""
    fresh = dict(_leaves(layer.values))
    for key, value in fresh.items():
        if key[-1] == "use" and key in leaves and leaves[key][1] != value:
            for old in [old for old in leaves if old[: len(key) - 1] == key[:-1] and old[-1] not in RESERVED_KEYS]:
                del leaves[old]
    for key, value in fresh.items():
        for old in [old for old in leaves if old[: len(key)] == key or key[: len(old)] == old]:
            del leaves[old]  # a table where a value was, or the other way round
        leaves[key] = (layer, value)


def _grow(leaves: Mapping[Key, object]) -> dict[str, object]:
    tree: dict[str, object] = {}
    for key, value in leaves.items():
        node = tree
        for part in key[:-1]:
            child = node.setdefault(part, {})
            assert isinstance(child, dict)
            node = child
        node[key[-1]] = value
    return tree


def _inside_out(key: Key) -> Iterator[Key]:
    return (key[:length] for length in range(len(key), 0, -1))


_DEFAULTS = Layer("default", ServerSettings().model_dump())


def _environment_layer(environ: Mapping[str, str]) -> Layer:
    """`DEEPINFRA_POOL__SCHEDULER__USE=fcfs`; a value that begins like a JSON list or object is one."""
    leaves: dict[Key, object] = {}
    places: dict[Key, str] = {}
    for name, text in sorted(environ.items()):
        if not name.startswith(ENV_PREFIX):
            continue
        key = tuple(name.removeprefix(ENV_PREFIX).lower().split("__"))
        label = f"environment {name}"
        value: object = text
        if text.lstrip().startswith(("[", "{")):
            try:
                value = json.loads(text)
            except ValueError as error:
                raise ConfigError(f"{label} is not JSON: {error}") from None
        clash = next((old for old in leaves if old[: len(key)] == key or key[: len(old)] == old), None)
        if clash is not None:
            raise ConfigError(f"{label} contradicts {places[clash]}")
        leaves[key], places[key] = value, label
    return Layer("environment", _grow(leaves), places)


def _file_layer(path: Path) -> Layer:
    try:
        text = path.read_text("utf-8")
        values = tomllib.loads(text)
    except FileNotFoundError:
        raise ConfigError(f"there is no configuration file {path}") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None
    places = {key: f"{path}:{line}" for key, line in _lines(text)}
    return Layer(str(path), values, places)


_HEADER = re.compile(r"\s*(\[\[?)\s*([\w.*\s\"'-]+?)\s*\]\]?\s*(#.*)?$")
_ASSIGNMENT = re.compile(r"\s*([\w.*\s\"'-]+?)\s*=")


def _lines(text: str) -> Iterator[tuple[Key, int]]:
    """Lines of tables and keys, which tomllib does not tell. For messages only: text in strings fools it."""
    table: Key = ()
    counts: dict[Key, int] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if header := _HEADER.match(line):
            table = _dotted(header[2])
            if header[1] == "[[":
                counts[table] = counts.get(table, -1) + 1
            for prefix in list(_inside_out(table)):
                if prefix in counts:
                    table = (*prefix, str(counts[prefix]), *table[len(prefix) :])
            yield table, number
        elif key := _ASSIGNMENT.match(line):
            yield table + _dotted(key[1]), number


def _dotted(text: str) -> Key:
    return tuple(part.strip().strip("\"'") for part in text.split("."))
