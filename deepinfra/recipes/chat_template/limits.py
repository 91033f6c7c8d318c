"""What a chat template may do with values, so that no single expression takes long or fills the memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from typing import Any

from jinja2.exceptions import SecurityError
from jinja2.utils import Namespace

__all__ = (
    "MAX_CHARS",
    "TEXT_METHODS",
    "UNBOUNDED",
    "check_method",
    "compares",
    "limited",
    "metered",
    "product",
    "size_of",
)

MAX_CHARS = 1 << 25
"""Longest text that a template may make at once."""

_MAX_BITS = 4096
"""Of a number: longer ones take long to divide, and no template counts that far."""

_CONTAINER = 64
"""Characters that a list or object counts for."""

_MAX_WIDTH = 10_000
_TAKES_WIDTH = frozenset({"batch", "center", "indent", "round", "slice", "tojson", "truncate"})

UNBOUNDED = ("filesizeformat", "pprint", "random", "striptags", "urlencode", "urlize", "wordwrap", "xmlattr")
"""Filters that are not for prompts: they take long, or differ from one rendering to the next."""

TEXT_METHODS = frozenset(
    {"capitalize", "casefold", "count", "endswith", "find", "format", "format_map", "index", "isalnum", "isalpha"}
    | {"isascii", "isdecimal", "isdigit", "islower", "isnumeric", "isspace", "istitle", "isupper", "join", "lower"}
    | {"lstrip", "partition", "removeprefix", "removesuffix", "replace", "rfind", "rindex", "rpartition", "rsplit"}
    | {"rstrip", "split", "splitlines", "startswith", "strip", "swapcase", "title", "upper"}
)
"""Methods of a text that make nothing much longer than what they are given, checked by `check_method` if need be."""

_LOOKS_AT_ONE = frozenset({"abs", "attr", "count", "d", "default", "first", "float", "last", "length"})
_LOOKS_AT_ALL = frozenset(
    {"batch", "items", "list", "map", "reject", "rejectattr", "reverse", "select", "selectattr", "slice"}
)
"""Filters whose work is one step, or one for each item; that of the others grows with everything inside the value."""
_COMPARES = frozenset(
    {
        "==",
        "!=",
        "<",
        "<=",
        ">",
        ">=",
        "eq",
        "equalto",
        "ge",
        "greaterthan",
        "gt",
        "in",
        "le",
        "lessthan",
        "lower",
        "lt",
    }
    | {"ne", "upper"}
)
"""Tests whose work grows so."""
_SHORT = 1024
"""Text up to this length is not worth counting."""


def size_of(value: Any) -> int:
    """Characters of a value and all that is inside it, more for each container; counting ends above `MAX_CHARS`.

    A value that is inside several others is counted each time: it would be written as often.
    """
    if isinstance(value, str):
        return len(value)
    size, waiting = 0, [value]
    while waiting and size <= MAX_CHARS:
        each = waiting.pop()
        if isinstance(each, Namespace):
            each = each._Namespace__attrs
        if isinstance(each, str):
            size += 1 + len(each)
        elif isinstance(each, (list, tuple, dict)):
            size += _CONTAINER + len(each)
            if size <= MAX_CHARS:
                waiting += (*each.keys(), *each.values()) if isinstance(each, dict) else each
        else:
            size += 1
    return size


def limited(size: int) -> int:
    """A size that is not too large.

    If it is, jinja2's `SecurityError` is raised.
    """
    if size > MAX_CHARS:
        raise SecurityError("the template makes something too large")
    return size


def product(operator: str, left: Any, right: Any) -> int:
    """Size of what an arithmetic operator makes: characters or items; of numbers nothing, if they are not too long.

    If they are, jinja2's `SecurityError` is raised.
    """
    if isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length() * abs(right) if operator == "**" else left.bit_length() + right.bit_length()
        if bits > _MAX_BITS:
            raise SecurityError("the template makes a number that is too large")
        return 0
    if operator == "+":
        return len(left) + len(right) if isinstance(left, (str, list)) and isinstance(right, (str, list)) else 0
    if operator != "*":
        return 0
    sequence, times = (left, right) if isinstance(left, (str, list, tuple)) else (right, left)
    if not isinstance(sequence, (str, list, tuple)) or not isinstance(times, int):
        return 0
    return size_of(sequence) * max(0, times)


def check_method(text: str, name: str, args: Sequence[Any]) -> int:
    """Steps that a method of a text takes.

    If what it makes would be too large, jinja2's `SecurityError` is raised.
    """
    size = len(text)
    if name == "replace" and len(args) > 1 and isinstance(args[0], str) and isinstance(args[1], str):
        size += text.count(args[0]) * max(0, len(args[1]) - len(args[0]))
    elif name == "join" and args and isinstance(args[0], (list, tuple)):
        size = size_of(args[0]) + len(text) * len(args[0])
    elif name in ("split", "rsplit", "splitlines"):
        pieces = text.count(args[0]) if args and isinstance(args[0], str) and args[0] else len(text) // 4
        return limited(size) // 256 + pieces
    return limited(size) // 256


def metered(
    name: str, function: Any, spend: Callable[[int], None], counted: Callable[[Iterable[Any]], Any]
) -> Callable[..., Any]:
    """A filter or test that pays for its work and makes nothing huge; iterators pay as they go."""
    if name in _LOOKS_AT_ONE:
        return function  # type: ignore[no-any-return]
    at = 1 if hasattr(function, "jinja_pass_arg") else 0

    @wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        value = args[at]
        if len(args) > at + 1 or kwargs:
            more = (*args[at + 1 :], *kwargs.values())
            _check_numbers(name, more)
        elif isinstance(value, str) and len(value) <= _SHORT:
            return function(*args)
        else:
            more = ()
        if hasattr(value, "__next__"):
            return function(*args[:at], counted(value), *args[at + 1 :], **kwargs)
        if name in _LOOKS_AT_ALL:
            spend(1 + (len(value) // 4 if isinstance(value, (str, list, tuple, dict)) else 0))
        elif name == "int" and isinstance(value, str) and len(value) > _SHORT:
            raise SecurityError("a number is too long")
        else:
            spend(1 + limited(_made(name, value, more)) // 256)
        return function(*args, **kwargs)

    return checked


def compares(name: str) -> bool:
    """Whether a test looks at more than what kind of value it is given."""
    return name in _COMPARES


def _check_numbers(name: str, more: Sequence[Any]) -> None:
    if name in _TAKES_WIDTH and any(isinstance(each, int) and each > _MAX_WIDTH for each in more):
        raise SecurityError("a filter has a number that is too large")
    if name == "sum" and any(isinstance(each, (list, tuple)) for each in more):
        raise SecurityError("a template cannot sum up lists")


def _made(name: str, value: Any, more: Sequence[Any]) -> int:
    """Size of what a filter makes of everything inside a value."""
    size = size_of(value) + sum(size_of(each) for each in more)
    widest = max(
        (each if isinstance(each, int) else len(each) for each in more if isinstance(each, (int, str))), default=0
    )
    if name == "replace" and len(more) > 1 and isinstance(value, str) and isinstance(more[0], str):
        return size + value.count(more[0]) * size_of(more[1])
    if name == "join" and isinstance(value, (list, tuple, dict, str)):
        return size + len(value) * widest
    if name == "indent" and isinstance(value, str):
        return size + (1 + value.count("\n")) * widest
    return size * max(1, widest) if name == "tojson" else size
