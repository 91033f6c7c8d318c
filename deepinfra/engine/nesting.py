"""How deep the constraint library recurses into a schema or grammar: on the stack, whose end is the process's end."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from deepinfra.core.schemas import LISTS, MAPS, SCHEMAS

__all__ = ("MAX_LEVELS", "bare_grammar", "grammar_levels", "inner_schemas", "schema_levels")

MAX_LEVELS = 600
"""Levels of nesting, references followed. Measured with a stack of 8 MB: 1,100 levels of any kind are compiled, and of
some kinds 1,200 end the process."""

_TEXT = re.compile(r'(?://|#)[^\n]*|"(?:\\.|[^"\\])*"|/(?:\\.|[^/\\])+/')
"""As the library's own lexer has them: strings and expressions go on over the ends of lines."""

_RULE = re.compile(r"^[ \t]*[?!]?(\w+)[^\n:]*:", re.MULTILINE)
_WORD = re.compile(r"\w+")


def bare_grammar(source: str) -> str:
    """A Lark grammar without its comments, strings and expressions: what is left names rules and tokens."""
    return _TEXT.sub("", source)


def grammar_levels(source: str) -> int:
    """Levels of a Lark grammar without schemas: a rule is one, and every bracket open in it."""
    bare = bare_grammar(source)
    starts = list(_RULE.finditer(bare))
    if len(starts) != bare.count(":"):  # written in a way that is not seen through here: as if all were one chain
        return bare.count(":") + sum(map(bare.count, "([{"))
    ends = [found.start() for found in starts[1:]] + [len(bare)]
    weights = dict.fromkeys((found[1] for found in starts), 0)
    uses: dict[str, set[str]] = {name: set() for name in weights}
    for found, end in zip(starts, ends, strict=True):  # a grammar inside another may use its names again
        body = bare[found.end() : end]
        weights[found[1]] += 1 + _brackets(body)
        uses[found[1]].update(word for word in _WORD.findall(body) if word in weights)
    return _deepest(weights, uses)


def schema_levels(schema: Any) -> int:
    """Levels of a JSON Schema: each schema inside another is one, `$ref` followed."""
    found = {"#": schema}
    depths: dict[str, int] = {}
    uses: dict[str, set[str]] = {}
    waiting = ["#"]
    while waiting:
        name = waiting.pop()
        uses[name] = set()
        depths[name] = _depth(found[name], uses[name])
        for reference in uses[name]:
            if reference not in found:
                found[reference] = _target(schema, reference)
                waiting.append(reference)
    return _deepest(depths, uses)


def _brackets(body: str) -> int:
    depth = most = 0
    for char in body:
        if char in "([{":
            depth += 1
            most = max(most, depth)
        elif char in ")]}":
            depth -= 1
    return most


def _depth(schema: Any, references: set[str]) -> int:
    """Levels without following references, which are noted."""
    deepest, waiting = 0, [(schema, 1)]
    while waiting:
        each, depth = waiting.pop()
        deepest = max(deepest, depth)
        if isinstance(each, Mapping):
            if isinstance(reference := each.get("$ref"), str):
                references.add(reference)
            waiting += ((inner, depth + 1) for inner in inner_schemas(each))
    return deepest


def inner_schemas(schema: Mapping[str, Any]) -> Iterator[Any]:
    """The schemas right inside a schema, and now and then a value that is none."""
    for key, value in schema.items():
        if key in MAPS and isinstance(value, Mapping):
            yield from value.values()
        elif key in LISTS and isinstance(value, list):
            yield from value
        elif key in SCHEMAS:
            yield value


def _target(schema: Any, reference: str) -> Any:
    for part in reference.removeprefix("#").split("/")[1:]:
        key = part.replace("~1", "/").replace("~0", "~")
        if isinstance(schema, list):
            schema = schema[int(key)] if key.isdecimal() and len(key) < 9 and int(key) < len(schema) else None
        else:
            schema = schema.get(key) if isinstance(schema, Mapping) else None
    return schema


def _deepest(weights: Mapping[str, int], uses: Mapping[str, set[str]]) -> int:
    """Weight of the heaviest way from one to the next that it uses; those that use each other all count."""
    users: dict[str, list[str]] = {}
    for name, used in uses.items():
        for each in used:
            users.setdefault(each, []).append(name)
    left = {name: len(used) for name, used in uses.items()}
    ready = [name for name, count in left.items() if not count]
    total: dict[str, int] = {}
    while ready:
        name = ready.pop()
        total[name] = weights[name] + max((total[each] for each in uses[name]), default=0)
        for user in users.get(name, ()):
            left[user] -= 1
            if not left[user]:
                ready.append(user)
    circle = sum(weight for name, weight in weights.items() if name not in total)
    return circle + max(total.values(), default=0)
