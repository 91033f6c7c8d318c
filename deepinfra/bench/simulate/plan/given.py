"""Figures that a plan is given: each has a name, a value, limits and a source, and can be varied."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from math import inf, isfinite
from typing import Any, ClassVar, NamedTuple, Protocol, TypeVar

from deepinfra.errors import ConfigError

__all__ = ("SHARE", "ZERO", "Given", "Record", "check", "givens", "replaced", "varied")

ZERO = {"least": 0.0}
"""Metadata of a field that may be 0; others are above it."""

SHARE = {"most": 1.0}
"""Metadata of a field that is at most 1."""


class Given(NamedTuple):
    """One figure that a plan is given; its name carries its unit."""

    name: str
    value: float
    source: str


class Record(Protocol):
    """A frozen dataclass of figures."""

    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]

    @property
    def source(self) -> str:
        """Where its figures come from."""
        ...

    @property
    def sources(self) -> Mapping[str, str]:
        """Where those come from that have a source of their own, by name."""
        ...


AnyRecord = TypeVar("AnyRecord", bound=Record)


def givens(record: Record, place: str) -> Iterator[Given]:
    """The record's figures, named `place.field`."""
    for field in _figures(record):
        value = getattr(record, field.name)
        yield Given(f"{place}.{field.name}", value, record.sources.get(field.name, record.source))


def check(record: Record, place: str) -> None:
    """See that every figure is within its limits.

    Raises:
        ConfigError: One is not; it is named `place.field`.
    """
    for field in _figures(record):
        value, most = getattr(record, field.name), field.metadata.get("most", inf)
        if not isfinite(value) or value > most or value < 0.0 or (value == 0.0 and "least" not in field.metadata):
            limits = f"{'at least' if 'least' in field.metadata else 'above'} 0" + (" and at most 1" * (most == 1.0))
            raise ConfigError(f"{place}.{field.name}: {value:g} must be {limits}")


def varied(record: AnyRecord, name: str, factor: float) -> AnyRecord:
    """The record with one figure multiplied; shares end at 1, counts stay whole, and of a hit rate misses are meant."""
    value, limits = getattr(record, name), record.__dataclass_fields__[name].metadata
    changed: float
    if name == "hit_rate":
        changed = max(0.0, 1.0 - (1.0 - value) * factor)
    elif isinstance(value, int):
        changed = max(1, round(value * factor))
    else:
        changed = min(value * factor, limits.get("most", inf))
    return dataclasses.replace(record, **{name: changed})


def replaced(record: AnyRecord, values: Mapping[str, Any], source: str) -> AnyRecord:
    """The record with some figures of another source."""
    sources = {**record.sources, **dict.fromkeys(values, source)}
    return dataclasses.replace(record, sources=sources, **values)


def _figures(record: Record) -> Iterator[dataclasses.Field[Any]]:
    for field in record.__dataclass_fields__.values():
        value = getattr(record, field.name)
        if isinstance(value, int | float) and not isinstance(value, bool):
            yield field
