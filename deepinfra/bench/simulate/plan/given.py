"""Figures that a plan is given: each has a name, a value and a source, and can be varied."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, ClassVar, NamedTuple, Protocol, TypeVar

__all__ = ("Given", "Record", "givens", "varied")


class Given(NamedTuple):
    """One figure that a plan is given; its name carries its unit."""

    name: str
    value: float
    source: str


class Record(Protocol):
    """A frozen dataclass of figures, with a `source` for all of them and `sources` for those that have their own."""

    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]

    @property
    def source(self) -> str:
        """Where its figures come from."""
        ...


AnyRecord = TypeVar("AnyRecord", bound=Record)


def givens(record: Record) -> Iterator[Given]:
    """The record's figures, named `Class.field`."""
    own = getattr(record, "sources", {})
    for field in dataclasses.fields(record):
        value = getattr(record, field.name)
        if isinstance(value, int | float) and not isinstance(value, bool):
            yield Given(f"{type(record).__name__}.{field.name}", value, own.get(field.name, record.source))


def varied(record: AnyRecord, name: str, factor: float) -> AnyRecord:
    """The record with one figure multiplied; counts stay whole numbers, but never below 1."""
    value = getattr(record, name)
    changed = max(1, round(value * factor)) if isinstance(value, int) else value * factor
    return dataclasses.replace(record, **{name: changed})
