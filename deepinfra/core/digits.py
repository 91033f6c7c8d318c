"""Numbers of JSON as they were written: a float knows `12.50` as 12.5 and `1e-5` as 1e-05.

A model that wrote `12.50` finds other tokens in its own history when the number comes back as 12.5, and nothing behind
them is found in the cache.
"""

from __future__ import annotations

import json
from typing import Any

__all__ = ("Digits", "json_text", "read_float")


class Digits(float):
    """A number with its text; a float in every other respect."""

    __slots__ = ("text",)
    text: str

    def __new__(cls, text: str) -> Digits:
        """What `text` says."""
        number = super().__new__(cls, text)
        number.text = text
        return number

    def __reduce__(self) -> tuple[type[Digits], tuple[str]]:
        """So that copies are written alike."""
        return Digits, (self.text,)

    def __repr__(self) -> str:
        """As it was written."""
        return self.text

    __str__ = __repr__


def read_float(text: str) -> float:
    """For `json.loads(parse_float=…)`: a plain float wherever that is written as `text` is."""
    number = float(text)
    return number if repr(number) == text else Digits(text)


def json_text(
    value: Any,
    *,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """What `json.dumps` writes, but `Digits` as they were written."""
    if not _has_digits(value):
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    comma, colon = separators or (", " if indent is None else ",", ": ")

    def written(value: Any, level: int) -> str:
        if isinstance(value, Digits):
            return value.text
        if isinstance(value, dict) and value:
            items = sorted(value.items()) if sort_keys else value.items()
            return "{" + lines([f"{key(name)}{colon}{written(each, level + 1)}" for name, each in items], level) + "}"
        if isinstance(value, list | tuple) and value:
            return "[" + lines([written(each, level + 1) for each in value], level) + "]"
        return json.dumps(value, ensure_ascii=ensure_ascii)

    def key(name: Any) -> str:
        return json.dumps({name: 0}, ensure_ascii=ensure_ascii)[1 : -len(": 0}")]

    def lines(parts: list[str], level: int) -> str:
        if indent is None:
            return comma.join(parts)
        line = "\n" + " " * indent * (level + 1)
        return line + (comma + line).join(parts) + "\n" + " " * indent * level

    return written(value, 0)


def _has_digits(value: Any) -> bool:
    if isinstance(value, dict):
        return any(map(_has_digits, value.values()))
    if isinstance(value, list | tuple):
        return any(map(_has_digits, value))
    return isinstance(value, Digits)
