"""Which configurations and fleets one command compares."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from deepinfra.bench.simulate.compare import MOST_COMPARED
from deepinfra.bench.simulate.configured import Fleet
from deepinfra.cli.setup import blueprint_for
from deepinfra.config import Blueprint
from deepinfra.errors import ConfigError
from deepinfra.registry import Registry, load_plugins

__all__ = ("Variant", "fleets_for", "variants_for")


class Variant(NamedTuple):
    """One simulation: its name in the report, the configuration, and how many pools, if that is not left to it."""

    name: str
    blueprint: Blueprint
    fleet: Fleet | None


def variants_for(config: Path | None, against: Sequence[str], fleets: Sequence[Fleet]) -> list[Variant]:
    """Every configuration with every fleet; what is compared with comes first, the user's own configuration last.

    Args:
        config: The configuration file.
        against: Others: a file, the name of a scheduler, or `KEY=VALUE`, which is the configuration with that changed.
        fleets: None leaves it to the configuration.

    Raises:
        ConfigError: A configuration is wrong, or there would be more simulations than one report can show.
    """
    registry = load_plugins()
    named = [(text, _other(config, text, registry)) for text in against]
    own = blueprint_for(config, {}, registry=registry)
    named.append((_own_name(own, config, [blueprint for _, blueprint in named]), own))
    variants = [
        Variant(
            " ".join(filter(None, (name if len(named) > 1 or not fleet else "", str(fleet or "")))), blueprint, fleet
        )
        for name, blueprint in named
        for fleet in (fleets or (None,))
    ]
    if len(variants) > MOST_COMPARED:
        raise ConfigError(f"{len(variants)} simulations are too many to compare; at most {MOST_COMPARED}")
    if twice := next((one.name for i, one in enumerate(variants) if one.name in {v.name for v in variants[:i]}), None):
        raise ConfigError(f"{twice!r} would be compared with itself")
    return variants


def fleets_for(replicas: str | None, split: str | None) -> list[Fleet]:
    """`--replicas 2,4` and `--split 3:5,4:4` as fleets.

    Raises:
        ConfigError: They are something else, or both are given.
    """
    if replicas and split:
        raise ConfigError("--replicas and --split exclude each other")
    fleets: list[Fleet] = []
    for each in (replicas or "").split(",") if replicas else ():
        if not each.strip().isdecimal() or int(each) < 1:
            raise ConfigError(f"--replicas takes numbers like 4 or 2,4,8; {replicas!r} is something else")
        fleets.append(Fleet(pools=int(each)))
    for each in (split or "").split(",") if split else ():
        prefill, _, decode = each.partition(":")
        counts = [int(part) if part.strip().isdecimal() else 0 for part in (prefill, decode)]
        if min(counts) < 1:
            raise ConfigError(f"--split takes prefill:decode like 3:5 or 2:6,4:4; {split!r} is something else")
        fleets.append(Fleet(prefill=counts[0], decode=counts[1]))
    return fleets


def _own_name(own: Blueprint, config: Path | None, others: Sequence[Blueprint]) -> str:
    """By its scheduler if that tells it from the others, else by its file."""
    names = {_schedulers(other) for other in others}
    if _schedulers(own) not in names:
        return _schedulers(own)
    return str(config or "deepinfra.toml") if config or Path("deepinfra.toml").exists() else "default"


def _schedulers(blueprint: Blueprint) -> str:
    return "+".join(dict.fromkeys(pool.scheduler.entry.name for pool in blueprint.pools))


def _other(config: Path | None, text: str, registry: Registry) -> Blueprint:
    key, equals, value = text.partition("=")
    if equals:
        return blueprint_for(config, _tree(key.strip(), _value(value.strip())), registry=registry)
    if text in registry.schedulers:
        return blueprint_for(config, _tree("pool.scheduler.use", text), registry=registry)
    if not Path(text).suffix:
        known = ", ".join(registry.schedulers)
        raise ConfigError(f"--against takes a file, KEY=VALUE or a scheduler ({known}); {text!r} is something else")
    return blueprint_for(Path(text), {}, registry=registry)


def _value(text: str) -> object:
    """A TOML value; a bare word is a string."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _tree(key: str, value: object) -> dict[str, object]:
    """`a.b` as nested tables."""
    for part in reversed(key.split(".")):
        value = {part: value}
    assert isinstance(value, dict)
    return value
