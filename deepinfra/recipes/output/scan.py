"""Where a JSON value ends, found while it is being written."""

from __future__ import annotations

import json
import re
from typing import Any

__all__ = ("JsonScan", "decoded", "escaped", "is_json", "quoted")

_PLAIN = re.compile(r'[^"\\\x00-\x1f\ud800-\udfff]+')
_SPACE = re.compile(r"[ \t\n\r]*")
_SCALAR = re.compile(r"[-+.0-9A-Za-z]+")
_WHOLE_SCALAR = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?|true|false|null")
_HEX = frozenset("0123456789abcdefABCDEF")
_DEPTH = 500


class JsonScan:
    """Follows one JSON value, fed piece by piece; work is linear and nothing is kept but the nesting.

    Attributes:
        done: The value is complete.
        bad: What was fed can be no JSON value, from the character on at which `feed` stopped.
        first: The first character of the value, once it was seen.
    """

    def __init__(self) -> None:
        self.done = self.bad = False
        self.first = ""
        self._stack: list[str] = []
        self._expect = "value"  # value, key, key or end, colon, comma or end; or inside: string, escape, hex, scalar
        self._hex = 0
        self._is_key = False
        self._scalar = ""

    def feed(self, text: str) -> tuple[int, str]:
        """How many characters belong to the value, and what of it they say.

        That is the same characters, less white space before the value, and with the line breaks and tabs that some
        models write into strings escaped as JSON wants them.
        """
        at, size = 0, len(text)
        said: list[str] = []
        while at < size and not self.over:
            if self._expect == "string":
                at = self._string(text, at, said)
            elif self._expect in ("escape", "hex"):
                self._escape(text[at])
                if not self.bad:
                    said.append(text[at])
                    at += 1
            elif self._expect == "scalar":
                at = self._more_scalar(text, at, said)
            else:
                end = _SPACE.match(text, at).end()  # type: ignore[union-attr]
                if self.first:
                    said.append(text[at:end])
                at = end
                if at < size:
                    self._structure(text[at])
                    if not self.bad and self._expect != "scalar":
                        said.append(text[at])
                        at += 1
        return at, "".join(said)

    @property
    def over(self) -> bool:
        """No more characters belong to the value."""
        return self.done or self.bad

    def end(self) -> bool:
        """Nothing more comes: whether the value is complete (a number ends only here)."""
        if self._expect == "scalar" and not self._stack and not self.done:
            self._close_scalar()
        return self.done

    def _string(self, text: str, at: int, said: list[str]) -> int:
        plain = _PLAIN.match(text, at)
        if plain is not None:
            said.append(plain.group())
            return plain.end()
        char = text[at]
        if char == '"':
            said.append(char)
            if self._is_key:
                self._expect = "colon"
            else:
                self._close()
        elif char == "\\":
            said.append(char)
            self._expect = "escape"
        elif char < " ":
            said.append(escaped(char))
        else:
            self.bad = True
            return at
        return at + 1

    def _escape(self, char: str) -> None:
        if self._expect == "hex":
            self._hex -= 1
            self.bad = char not in _HEX
            if not self._hex:
                self._expect = "string"
        elif char == "u":
            self._expect, self._hex = "hex", 4
        else:
            self.bad = char not in '"\\/bfnrt'
            self._expect = "string"

    def _more_scalar(self, text: str, at: int, said: list[str]) -> int:
        found = _SCALAR.match(text, at)
        if found is None or len(self._scalar) > 4096:
            self._close_scalar()
            return at
        self._scalar += found.group()
        said.append(found.group())
        return found.end()

    def _close_scalar(self) -> None:
        if _WHOLE_SCALAR.fullmatch(self._scalar):
            self._scalar = ""
            self._close()
        else:
            self.bad = True

    def _structure(self, char: str) -> None:
        expect, stack = self._expect, self._stack
        if "\ud800" <= char <= "\udfff":  # a control token
            self.bad = True
            return
        self.first = self.first or char
        if char == '"' and expect in ("value", "value or end", "key", "key or end"):
            self._is_key = expect.startswith("key")
            self._expect = "string"
        elif char in "{[" and expect.startswith("value") and len(stack) < _DEPTH:
            stack.append(char)
            self._expect = "key or end" if char == "{" else "value or end"
        elif char in "}]" and expect.endswith("or end") and stack and stack[-1] == ("{" if char == "}" else "["):
            stack.pop()
            self._close()
        elif char == ":" and expect == "colon":
            self._expect = "value"
        elif char == "," and expect == "comma or end":
            self._expect = "key" if stack[-1] == "{" else "value"
        elif expect.startswith("value") and _SCALAR.match(char):
            self._expect = "scalar"
        else:
            self.bad = True

    def _close(self) -> None:
        """A value ended."""
        self._expect = "comma or end"
        self.done = not self._stack


def escaped(text: str) -> str:
    """Text as it stands inside a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def quoted(text: str) -> str:
    """Text as a JSON string."""
    return json.dumps(text, ensure_ascii=False)


def is_json(text: str) -> bool:
    """Whether this is one JSON value as the standard has it (no `NaN`)."""
    scan = JsonScan()
    stripped = text.strip(" \t\n\r")
    used, said = scan.feed(stripped)
    return scan.end() and used == len(stripped) and said == stripped


def decoded(text: str) -> Any:
    """The value of JSON text whose numbers do not matter."""
    return json.loads(text, strict=False)
