"""Text that knows who wrote each of its characters: the template (trusted) or anybody else.

Trust is kept by the operations below and lost by every other one, so a forgotten operation can turn a control token
into text, which the self-test notices, but never text into a control token.

Source: the provenance strings of llama.cpp's Jinja engine (common/jinja, which tags parts of a string as input);
here per character, and kept until the ids are made instead of being flattened after rendering.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Self, SupportsIndex

__all__ = ("Marked", "MarkedHtml", "concat", "safe", "trust_of", "trusted")

_PERCENT = re.compile(r"%[%s]")


class Marked(str):
    """A string with one trust byte per character; untrusted unless told otherwise. Equal to and hashed as its text."""

    __slots__ = ("_trust",)
    _trust: bytes

    def __new__(cls, text: str = "", trust: bytes | None = None) -> Self:
        """Mark `text`; `trust` has one byte, 0 or 1, per character, none of them set by default."""
        self = str.__new__(cls, text)
        self._trust = bytes(len(text)) if trust is None else trust
        return self

    @property
    def _all_trusted(self) -> bool:
        return 0 not in self._trust

    def _cut(self, start: int, end: int) -> Marked:
        return Marked(str.__getitem__(self, slice(start, end)), self._trust[start:end])

    def _same_length(self, text: str) -> Marked:
        """The result of a case change: characters only ever grow in one, so equal length means one to one."""
        return Marked(text, self._trust if len(text) == len(self) else None)

    def __str__(self) -> Marked:
        return self

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        return str, (str.__str__(self),)

    def __getitem__(self, key: SupportsIndex | slice) -> Marked:
        if isinstance(key, slice):
            return Marked(str.__getitem__(self, key), self._trust[key])
        char = str.__getitem__(self, key)
        return Marked(char, bytes((self._trust[key],)))

    def __iter__(self) -> Iterator[Marked]:
        return (Marked(char, bytes((trust,))) for char, trust in zip(str.__iter__(self), self._trust, strict=True))

    def __add__(self, other: object) -> Marked:
        if not isinstance(other, str) or hasattr(other, "__html__"):
            return NotImplemented
        return concat((self, other))

    def __radd__(self, other: object) -> Marked:
        return concat((other, self)) if isinstance(other, str) else NotImplemented

    def __mul__(self, times: SupportsIndex) -> Marked:
        return Marked(str.__mul__(self, times), self._trust * times.__index__())

    __rmul__ = __mul__

    def __mod__(self, values: object) -> Marked:
        rest = _PERCENT.sub("", self)
        if "%" in rest or isinstance(values, Mapping):
            return Marked(str.__mod__(self, values))
        arguments = iter(values if isinstance(values, tuple) else (values,))
        parts: list[str] = []
        at = 0
        for match in _PERCENT.finditer(self):
            parts.append(self._cut(at, match.start()))
            if match[0] == "%%":
                parts.append(self._cut(match.start(), match.start() + 1))
            else:
                try:
                    parts.append(str(next(arguments)))
                except StopIteration:
                    raise TypeError("not enough arguments for format string") from None
            at = match.end()
        if next(arguments, self) is not self:
            raise TypeError("not all arguments converted during string formatting")
        return concat((*parts, self._cut(at, len(self))))

    def strip(self, chars: str | None = None, /) -> Marked:
        """See `str.strip`; keeps trust."""
        return self.rstrip(chars).lstrip(chars)

    def lstrip(self, chars: str | None = None, /) -> Marked:
        """See `str.lstrip`; keeps trust."""
        return self._cut(len(self) - len(str.lstrip(self, chars)), len(self))

    def rstrip(self, chars: str | None = None, /) -> Marked:
        """See `str.rstrip`; keeps trust."""
        return self._cut(0, len(str.rstrip(self, chars)))

    def removeprefix(self, prefix: str, /) -> Marked:
        """See `str.removeprefix`; keeps trust."""
        return self._cut(len(prefix), len(self)) if self.startswith(prefix) else self

    def removesuffix(self, suffix: str, /) -> Marked:
        """See `str.removesuffix`; keeps trust."""
        return self._cut(0, len(self) - len(suffix)) if suffix and self.endswith(suffix) else self

    def split(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[Marked]:  # type: ignore[override]
        """See `str.split`; keeps trust."""
        return self._pieces(str.split(self, sep, maxsplit), sep)

    def rsplit(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[Marked]:  # type: ignore[override]
        """See `str.rsplit`; keeps trust."""
        return self._pieces(str.rsplit(self, sep, maxsplit), sep)

    def _pieces(self, pieces: Sequence[str], sep: str | None) -> list[Marked]:
        """Find pieces again: behind exactly one `sep` each, or behind white space only."""
        cut, at = [], 0
        for piece in pieces:
            start = at if sep is not None else str.find(self, piece, at)
            end = start + len(piece)
            cut.append(self._cut(start, end))
            at = end + len(sep or "")
        return cut

    def splitlines(self, keepends: bool = False) -> list[Marked]:  # type: ignore[override]
        """See `str.splitlines`; keeps trust."""
        lines, at = [], 0
        for line, whole in zip(str.splitlines(self, keepends), str.splitlines(self, True), strict=True):
            lines.append(self._cut(at, at + len(line)))
            at += len(whole)
        return lines

    def partition(self, sep: str, /) -> tuple[Marked, Marked, Marked]:
        """See `str.partition`; keeps trust."""
        return self._three(str.partition(self, sep))

    def rpartition(self, sep: str, /) -> tuple[Marked, Marked, Marked]:
        """See `str.rpartition`; keeps trust."""
        return self._three(str.rpartition(self, sep))

    def _three(self, parts: tuple[str, str, str]) -> tuple[Marked, Marked, Marked]:
        a = len(parts[0])
        b = a + len(parts[1])
        return self._cut(0, a), self._cut(a, b), self._cut(b, len(self))

    def replace(self, old: str, new: str, count: SupportsIndex = -1, /) -> Marked:
        """See `str.replace`; keeps the trust of both sides."""
        if not old:
            return Marked(str.replace(self, old, new, count))
        left = count.__index__()
        parts: list[str] = []
        at = 0
        while left != 0 and (found := str.find(self, old, at)) >= 0:
            parts += (self._cut(at, found), new)
            at, left = found + len(old), left - 1
        return concat((*parts, self._cut(at, len(self)))) if parts else self

    def join(self, parts: Iterable[str], /) -> Marked:
        """See `str.join`; keeps the trust of separator and parts."""
        joined: list[str] = []
        for part in parts:
            if joined:
                joined.append(self)
            joined.append(part)
        return concat(joined)

    def lower(self) -> Marked:
        """See `str.lower`; keeps trust while characters stay one to one."""
        return self._same_length(str.lower(self))

    def upper(self) -> Marked:
        """See `str.upper`; keeps trust while characters stay one to one."""
        return self._same_length(str.upper(self))

    def title(self) -> Marked:
        """See `str.title`; keeps trust while characters stay one to one."""
        return self._same_length(str.title(self))

    def capitalize(self) -> Marked:
        """See `str.capitalize`; keeps trust while characters stay one to one."""
        return self._same_length(str.capitalize(self))


class MarkedHtml(Marked):
    """What the filter `safe` makes: added to other text it escapes that text, as `markupsafe.Markup` does.

    No template means it, but some rely on it not mattering, and the text must be what plain Jinja renders. Only `+`
    keeps the property; every other operation gives a plain `Marked`.
    """

    __slots__ = ()

    def __str__(self) -> Marked:
        return Marked(str.__str__(self), self._trust)

    def __add__(self, other: object) -> Marked:
        return _html((self, _escaped(other))) if isinstance(other, str) else NotImplemented

    def __radd__(self, other: object) -> Marked:
        return _html((_escaped(other), self)) if isinstance(other, str) else NotImplemented


def _html(parts: Iterable[str]) -> MarkedHtml:
    joined = concat(parts)
    return MarkedHtml(joined, joined._trust)


def _escaped(text: str) -> Marked:
    escaped = text if isinstance(text, Marked) else Marked(text)
    if not hasattr(text, "__html__") and not isinstance(text, MarkedHtml):
        for char, entity in (("&", "&amp;"), ("<", "&lt;"), (">", "&gt;"), ("'", "&#39;"), ('"', "&#34;")):
            escaped = escaped.replace(char, entity)
    return escaped


def safe(value: object) -> MarkedHtml:
    """The filter `safe`."""
    return _html((value if isinstance(value, Marked) else str(value),))


def trusted(text: str) -> Marked:
    """Text that the template, or a checked list of values, vouches for."""
    return Marked(text, b"\x01" * len(text))


def trust_of(text: str) -> bytes:
    """One byte per character: 1 where the template wrote it."""
    return text._trust if isinstance(text, Marked) else bytes(len(text))


def concat(parts: Iterable[str]) -> Marked:
    """Join parts, each with its own trust."""
    parts = list(parts)
    return Marked("".join(parts), b"".join([trust_of(part) for part in parts]))
