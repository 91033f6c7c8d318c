"""How a request differs from an earlier one: by field, in words, and as it would be without that difference. Pure."""

from __future__ import annotations

import difflib
import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, NamedTuple, TypeAlias, cast

from deepinfra.core.conversation import JsonValue

__all__ = ("ADVICE", "Body", "Change", "Kind", "changes", "kind_of_text")

Body: TypeAlias = Mapping[str, JsonValue]
Step: TypeAlias = str | int

Kind: TypeAlias = Literal[
    "timestamp", "id", "number", "whitespace", "key order", "reordered", "list changed", "history cut",
    "history inserted", "option", "text"
]  # fmt: skip

ADVICE: Mapping[Kind, str] = {
    "timestamp": "a date or time changes: say it in the last message, or only as exactly as is needed",
    "id": "an id is new each time: leave it out, or say it in the last message",
    "number": "a number changes: say it behind what stays the same",
    "whitespace": "only white space differs: make the text the same way each time",
    "key order": "the same JSON with its keys in another order: sort keys",
    "reordered": "the same elements in another order: sort them",
    "list changed": "elements were added or removed: keep the list, and say in the last message what is meant",
    "history cut": "the beginning of the history was dropped: drop seldom and much rather than often and little",
    "history inserted": "something was put in before the history: put it behind it",
    "option": "an option that changes the prompt's beginning: keep it for the whole conversation",
    "text": "put what changes behind what stays the same",
}
"""What to do about each kind."""

_LISTS = ("messages", "input")
_FIRST = ("tools", "functions", "system", "instructions")
_FIELDS_TRIED = 3
_SHIFT = 64
_SHOWN_CHARS = 60
_WORDS = 4000
_CHANCE = 4
"""Fewer words in a row that two texts share within what changed are so by chance."""

_MONTH = r"(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)[a-z]*"
_DAY = r"(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun)[a-z]*"
_PATTERNS: tuple[tuple[Kind, re.Pattern[str]], ...] = (
    ("id", re.compile(r"[0-9a-fA-F]{8}-(?:[0-9a-fA-F]{4}-){3}[0-9a-fA-F]{12}")),
    (
        "timestamp",
        re.compile(
            r"\d{4}-\d\d-\d\d(?:[T ]+\d\d:\d\d(?::\d\d(?:[.,]\d+)?)?)?(?: ?(?:Z|UTC|[+-]\d\d:?\d\d))?"
            rf"|(?:{_DAY},? )?(?:\d{{1,2}} {_MONTH}|{_MONTH} \d{{1,2}})(?:st|nd|rd|th)?(?:,? \d{{4}})?"
            r"(?:,?(?: at)? \d{1,2}:\d\d(?::\d\d)?)?"
            r"|\d{1,2}:\d\d(?::\d\d(?:[.,]\d+)?)?(?: ?[AaPp][Mm]\b)?"
            r"|\d{1,4}[./]\d{1,2}[./]\d{1,4}"
            r"|\b1[4-9]\d{8}(?:\d{3}){0,2}(?:\.\d+)?\b"
            rf"|\b(?:{_DAY}|{_MONTH})\b"
        ),
    ),
    ("id", re.compile(r"(?=[\w-]*\d)(?=[\w-]*[A-Za-z])[A-Za-z0-9_-]{12,}")),
    ("number", re.compile(r"[-+]?\d+(?:[.,]\d+)*")),
)


class Change(NamedTuple):
    """One difference.

    Attributes:
        field: Where it is, as in `messages[0].content`.
        kind: What it looks like.
        held: The earlier request's text there, shortened.
        asked: The later one's.
        changed: Text of the earlier one that really differs: what no reordering could save.
        undone: The later request without this difference.
    """

    field: str
    kind: Kind
    held: str
    asked: str
    changed: str
    undone: Body


def changes(earlier: Body, later: Body) -> Iterator[Change]:
    """Differences that may change a prompt, those whose place is usually first in it first."""
    keys = [key for key in dict.fromkeys((*later, *earlier)) if key != "model"]
    for key in sorted(
        keys, key=lambda key: _FIRST.index(key) if key in _FIRST else 9 if key in (*_LISTS, "prompt") else 99
    ):
        held, asked = earlier.get(key), later.get(key)
        if _text(held) == _text(asked):
            continue
        if key in _LISTS and isinstance(held, list) and isinstance(asked, list):
            yield from _in_turns(later, key, held, asked)
        else:
            option = key not in (*_FIRST, *_LISTS, "prompt")
            yield from _in_value(later, (key,), held, asked, option=option)


def _rank(key: str) -> int:
    return _FIRST.index(key) if key in _FIRST else 9 if key in (*_LISTS, "prompt") else 99


def _in_turns(later: Body, key: str, held: list[JsonValue], asked: list[JsonValue]) -> Iterator[Change]:
    """Turns are compared one by one as far as both go; what was put in or taken away before them is seen first."""
    both = min(len(held), len(asked))
    differing = [index for index in range(both) if _text(held[index]) != _text(asked[index])]
    if not differing:
        return
    first = differing[0]
    for shift in range(1, _SHIFT):
        if first + shift < len(held) and _text(held[first + shift]) == _text(asked[first]):
            gone = held[first : first + shift]
            whole = [*asked[:first], *gone, *asked[first:]]
            yield _whole(later, key, f"{key}[{first}]", "history cut", gone, [], whole)
            break
        if first + shift < len(asked) and _text(asked[first + shift]) == _text(held[first]):
            new = asked[first : first + shift]
            whole = [*asked[:first], *asked[first + shift :]]
            yield _whole(later, key, f"{key}[{first}]", "history inserted", [], new, whole)
            break
    for index in differing[:_FIELDS_TRIED]:
        yield from _in_value(later, (key, index), held[index], asked[index])


def _whole(
    later: Body,
    key: str,
    field: str,
    kind: Kind,
    held: Sequence[JsonValue],
    asked: Sequence[JsonValue],
    value: JsonValue,
) -> Change:
    gone, new = (_text(list(part)) if part else "" for part in (held, asked))
    return Change(field, kind, _short(gone), _short(new), gone, {**later, key: value})


def _in_value(
    later: Body, path: tuple[Step, ...], held: JsonValue, asked: JsonValue, *, option: bool = False
) -> Iterator[Change]:
    if _text(held) == _text(asked):
        return
    if isinstance(held, str) and isinstance(asked, str):
        kind, before, after, changed = kind_of_text(held, asked)
        yield Change(_name(path), "option" if option else kind, before, after, changed, _with(later, path, held))
    elif _canonical(held) == _canonical(asked):
        inside = _paired(held, asked)
        if inside is None:
            yield _of(later, path, "key order", held, asked, "")
        for step, one, other in inside or ():
            yield from _in_value(later, (*path, step), one, other, option=option)
    elif isinstance(held, dict) and isinstance(asked, dict):
        for key in dict.fromkeys((*asked, *held)):
            yield from _in_value(later, (*path, key), held.get(key), asked.get(key), option=option)
    elif isinstance(held, list) and isinstance(asked, list):
        yield from _in_list(later, path, held, asked, option)
    else:
        kind = "option" if option else "text"
        yield _of(later, path, kind, held, asked, "" if option or held is None else _text(held))


def _paired(held: JsonValue, asked: JsonValue) -> list[tuple[Step, JsonValue, JsonValue]] | None:
    """The elements of two values of the same JSON, if these stand in the same order."""
    if isinstance(held, dict) and isinstance(asked, dict) and [*held] == [*asked]:
        return [(key, held[key], asked[key]) for key in held]
    if isinstance(held, list) and isinstance(asked, list):
        return [(index, one, other) for index, (one, other) in enumerate(zip(held, asked, strict=True))]
    return None


def _in_list(
    later: Body, path: tuple[Step, ...], held: list[JsonValue], asked: list[JsonValue], option: bool
) -> Iterator[Change]:
    before, after = Counter(map(_canonical, held)), Counter(map(_canonical, asked))
    if before == after:
        yield _of(later, path, "reordered", [_title(item) for item in held], [_title(item) for item in asked], "", held)
    elif len(held) == len(asked):
        for index, (one, other) in enumerate(zip(held, asked, strict=True)):
            yield from _in_value(later, (*path, index), one, other, option=option)
    else:
        gone, new = before - after, after - before
        names = [[_title(json.loads(item)) for item in side.elements()] for side in (gone, new)]
        yield _of(later, path, "list changed", names[0], names[1], "".join(gone.elements()), held)


def _of(
    later: Body,
    path: tuple[Step, ...],
    kind: Kind,
    held: JsonValue,
    asked: JsonValue,
    changed: str,
    value: JsonValue | None = None,
) -> Change:
    undone = _with(later, path, held if value is None else value)
    return Change(_name(path), kind, _short(_text(held)), _short(_text(asked)), changed, undone)


# -- texts ----------------------------------------------------------------------------------------


def kind_of_text(held: str, asked: str) -> tuple[Kind, str, str, str]:
    """What a difference between two texts looks like: its kind, the first piece that differs in each, and all of them.

    The last is the earlier text's words that are not in the later one's place.
    """
    if held.split() == asked.split():
        at = _first_difference(held, asked)
        return "whitespace", _around(held, at), _around(asked, at), ""
    if (one := _json(held)) is not None and one == _json(asked):
        return "key order", _short(held), _short(asked), ""
    changed = _changed_words(held, asked)
    at = _first_difference(held, asked)
    for kind, pattern in _PATTERNS:
        spans = [_covering(pattern, text, at) for text in (held, asked)]
        if all(spans):
            return kind, spans[0] or "", spans[1] or "", changed
    return "text", _around(held, at), _around(asked, at), changed


def _json(text: str) -> str | None:
    """Canonical JSON of a text that is an object or an array."""
    if not text.lstrip().startswith(("{", "[")):
        return None
    try:
        return _canonical(json.loads(text))
    except ValueError:
        return None


def _first_difference(one: str, other: str) -> int:
    most = min(len(one), len(other))
    step, at = 4096, 0
    while at < most and one[at : at + step] == other[at : at + step]:
        at += step
    return next((i for i in range(min(at, most), most) if one[i] != other[i]), most)


def _covering(pattern: re.Pattern[str], text: str, at: int) -> str | None:
    """The match around a place, if there is one."""
    start = max(0, at - 64)
    for match in pattern.finditer(text, start, min(len(text), at + 64)):
        if match.start() <= at <= match.end():
            return match[0]
    return None


def _around(text: str, at: int) -> str:
    """The piece of a text from the word in which `at` is."""
    start = max(text.rfind(" ", max(0, at - 24), at), text.rfind("\n", max(0, at - 24), at)) + 1
    return _short(text[start or max(0, at - 24) :])


def _changed_words(held: str, asked: str) -> str:
    """Words of `held` that have no counterpart in `asked`; those at both ends have one."""
    one, other = (re.findall(r"\s*\S+", text) for text in (held, asked))
    head = _common(one, other)
    tail = _common(one[head:][::-1], other[head:][::-1])
    one, other = one[head : len(one) - tail], other[head : len(other) - tail]
    if len(one) + len(other) > _WORDS:
        return "".join(one)
    changed, at = [], 0
    for start, _, length in difflib.SequenceMatcher(None, one, other, autojunk=False).get_matching_blocks():
        if length >= _CHANCE or not length:  # the last one is empty and stands at the end
            changed += one[at:start]
            at = start + length
    return "".join(changed)


def _common(one: Sequence[str], other: Sequence[str]) -> int:
    both = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in both if a != b), min(len(one), len(other)))


# -- values ---------------------------------------------------------------------------------------


def _text(value: JsonValue) -> str:
    return json.dumps(value, ensure_ascii=False)


def _canonical(value: JsonValue) -> str:
    return json.dumps(value, ensure_ascii=False, sort_keys=True)


def _short(text: str) -> str:
    return text if len(text) <= _SHOWN_CHARS else text[: _SHOWN_CHARS - 1] + "…"


def _title(value: JsonValue) -> str:
    """What an element of a list is called."""
    if isinstance(value, dict):
        function = value.get("function")
        inner = function if isinstance(function, dict) else value
        for key in ("name", "type", "role"):
            if isinstance(inner.get(key), str):
                return cast("str", inner[key])
    return _short(_text(value))


def _name(path: Sequence[Step]) -> str:
    return "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path).removeprefix(".")


def _with(body: Body, path: Sequence[Step], value: JsonValue) -> Body:
    """A copy with another value at a path; `None` takes a key away."""

    def put(inside: JsonValue, steps: Sequence[Step]) -> JsonValue:
        if not steps:
            return value
        step, *rest = steps
        if isinstance(step, int):
            assert isinstance(inside, list)
            return [*inside[:step], put(inside[step], rest), *inside[step + 1 :]]
        assert isinstance(inside, Mapping)
        copy = {**inside, step: put(inside.get(step), rest)}
        return {key: item for key, item in copy.items() if key != step or item is not None}

    return cast("Body", put(body, path))
