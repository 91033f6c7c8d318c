"""JSON as the format writes it: spaced, with numbers as they came, and arguments of calls as parameters."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

__all__ = ("Parameter", "parameters", "read_json", "spaced")

_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


class _Number(str):
    """A number's digits as they were written: no float can hold all of them."""

    __slots__ = ()


class Parameter(NamedTuple):
    """One argument of a call as the format writes it: text as it is, anything else as JSON."""

    name: str
    value: str
    is_text: bool


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def read_json(text: str) -> Any:
    """A JSON value for `spaced`.

    Raises:
        ValueError: It is none, is nested too deeply, or spells half a character.
    """
    try:
        value = json.loads(text, parse_int=_Number, parse_float=_Number, parse_constant=_no_constant)
        if _SURROGATE.search(text):
            json.dumps(value, ensure_ascii=False).encode()
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    return value


def spaced(value: Any) -> str:
    """JSON on one line with a space after each comma and colon, keys in their order, every character as it is.

    Raises:
        ValueError: It is nested too deeply.
    """
    try:
        return _spaced(value)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def _spaced(value: Any) -> str:
    if isinstance(value, _Number):
        return str.__str__(value)
    if isinstance(value, Mapping):
        items = (f"{json.dumps(key, ensure_ascii=False)}: {_spaced(item)}" for key, item in value.items())
        return "{" + ", ".join(items) + "}"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return "[" + ", ".join(map(_spaced, value)) + "]"
    return json.dumps(value, ensure_ascii=False)


def parameters(arguments: str) -> list[Parameter]:
    """The arguments of a call; text that is no JSON object becomes one parameter named `arguments`."""
    try:
        value = read_json(arguments)
        if isinstance(value, dict):
            return [_parameter(name, item) for name, item in value.items()]
    except ValueError:
        pass
    return [Parameter("arguments", arguments, True)]


def _parameter(name: str, value: Any) -> Parameter:
    is_text = isinstance(value, str) and not isinstance(value, _Number)
    return Parameter(name, value if is_text else spaced(value), is_text)
