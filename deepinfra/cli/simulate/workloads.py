"""Requests to simulate: a file, or a generator by name with its parameters."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path

from deepinfra.bench.simulate.traces import (
    CHATS_AND_DOCUMENTS,
    Arrival,
    LengthClass,
    agents,
    bursts,
    generated,
    giant_then_short,
    read_workload,
)
from deepinfra.errors import ConfigError

__all__ = ("GENERATORS", "workload_for")


def mix(
    *,
    requests: int = 1000,
    per_s: float = 2.0,
    burstiness: float = 1.0,
    prompt: int = 0,
    output: int = 0,
    scatter: float = 0.5,
    seed: int = 0,
) -> list[Arrival]:
    """Chats, documents and long documents; or, with `prompt` and `output`, requests of about these lengths."""
    if not per_s:
        raise ConfigError("mix:per_s=0: no request would ever come")
    return generated(requests, per_s, _classes(prompt, output, scatter), burstiness=burstiness, seed=seed)


def waves(
    *,
    count: int = 20,
    size: int = 50,
    every_s: float = 30.0,
    prompt: int = 0,
    output: int = 0,
    scatter: float = 0.5,
    seed: int = 0,
) -> list[Arrival]:
    """The same, many at once."""
    return bursts(count, size, every_s, _classes(prompt, output, scatter), seed=seed)


def giant(
    *, prompt: int = 100_000, short: int = 101, shorts: int = 20, after_s: float = 1.0, every_s: float = 1.0
) -> list[Arrival]:
    """One long prompt, and short ones that come while it is computed."""
    return giant_then_short(prompt, short, after_s=after_s, shorts=shorts, every_s=every_s)


def sessions(*, sessions: int = 40, days: float = 1.0, share: float = 0.7, seed: int = 0) -> list[Arrival]:
    """Days of agents and chats whose contexts grow turn by turn."""
    return agents(seed, sessions=sessions, days=days, share=share)


GENERATORS: dict[str, Callable[..., list[Arrival]]] = {"mix": mix, "bursts": waves, "giant": giant, "agents": sessions}
"""By the name they have on the command line; their keyword arguments are its parameters, integers or numbers."""


def workload_for(text: str) -> list[Arrival]:
    """Requests of a file, or of a generator: `mix`, `mix:requests=500,per_s=4`.

    Raises:
        ConfigError: The file is no trace, or there is no such generator or parameter.
        OSError: The file cannot be read.
    """
    name, _, rest = text.partition(":")
    if Path(text).exists() or name not in GENERATORS:
        if not Path(text).suffix:
            raise ConfigError(f"{text!r} is neither a file nor one of {', '.join(GENERATORS)}")
        return read_workload(Path(text))
    known = inspect.signature(GENERATORS[name]).parameters
    values: dict[str, int | float] = {}
    for each in filter(None, rest.split(",")):
        key, _, value = each.partition("=")
        if key not in known:
            raise ConfigError(f"{name} has no parameter {key!r}; known: {', '.join(known)}")
        values[key] = _number(f"{name}:{key}", value, whole=isinstance(known[key].default, int))
    return GENERATORS[name](**values)


def _number(name: str, value: str, *, whole: bool) -> int | float:
    try:
        found = int(value.replace("_", "")) if whole else float(value)
    except ValueError:
        raise ConfigError(f"{name} takes a {'whole ' if whole else ''}number, not {value!r}") from None
    if not 0 <= found < 1e12:
        raise ConfigError(f"{name} takes a number from 0 up, not {value}")
    return found


def _classes(prompt: int, output: int, scatter: float) -> tuple[LengthClass, ...]:
    if not prompt and not output:
        return CHATS_AND_DOCUMENTS
    return (LengthClass(1.0, prompt or 1000, output or 200, scatter),)
