"""Arguments that are written as literals of another language than JSON, read while they are being written."""

from __future__ import annotations

import re

from deepinfra.recipes.output.grammar import TOKENS, Notation
from deepinfra.recipes.output.scan import escaped, is_json, quoted

__all__ = ("LiteralScan",)

_SPACE = re.compile(r"[ \t\n\r]*")
_NAME = re.compile(r"([^\s=:,(){}\[\]\"'\ud800-\udfff]+)[ \t\n\r]*(?=([^ \t\n\r])?)")
_WORD = re.compile(r"[-+.0-9A-Za-z_]+(?=(.)?)", re.DOTALL)
_IN_SINGLE = re.compile(r"[^\\'\ud800-\udfff]+")
_IN_DOUBLE = re.compile(r'[^\\"\ud800-\udfff]+')
_BEHIND = re.compile(r"[ \t\n\r]*([^ \t\n\r])?")
_ESCAPE = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|([^xuU]))", re.DOTALL)
_PART_OF_ESCAPE = re.compile(r"\\(?:x[0-9a-fA-F]?|u[0-9a-fA-F]{0,3}|U[0-9a-fA-F]{0,7})?")
_ESCAPED = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "v": "\v", "a": "\a", "0": "\0"}
_ESCAPED |= {"\n": "", "'": "'", '"': '"', "\\": "\\", "/": "/"}
_JSON = {"True": "true", "False": "false", "None": "null"}
_LONGEST = 4096
_DEPTH = 500


class LiteralScan:
    """Follows the arguments of one call behind their opening bracket, and says them as a JSON object; see `JsonScan`.

    A quotation mark in the middle of a string that nobody escaped is part of it: it ends the string only before what
    may follow a value.

    Args:
        notation: Its `quote` is spelled as it stands in the stream.
    """

    first = "{"

    def __init__(self, notation: Notation) -> None:
        self.done = self.bad = False
        self._notation = notation
        self._open = [(notation.close, "}")]  # closing brackets, here and in JSON
        self._expect = "key or end"  # key or end, colon, value, value or end, comma or end, string
        self._said_open = False
        self._comma = False
        self._quote = ""
        self._is_key = False

    @property
    def over(self) -> bool:
        """No more characters belong to the arguments."""
        return self.done or self.bad

    def end(self) -> bool:
        """Nothing more comes: whether the arguments are complete."""
        return self.done

    def feed(self, text: str) -> tuple[int, str]:
        """How many characters belong to the arguments for sure, and what they say; the rest is to be fed again."""
        said = [] if self._said_open or not text else ["{"]
        self._said_open = self._said_open or bool(text)
        at, before = 0, -1
        while before < at < len(text) and not self.over:
            before = at
            at = self._string(text, at, said) if self._expect == "string" else self._structure(text, at, said)
        return at, "".join(said)

    def _structure(self, text: str, at: int, said: list[str]) -> int:
        at = _SPACE.match(text, at).end()  # type: ignore[union-attr]
        if at == len(text):
            return at
        expect, char = self._expect, text[at]
        close, closing = self._open[-1]
        if char == close and expect.endswith("or end"):
            self._open.pop()
            said.append(closing)
            self.done, self._comma, self._expect = not self._open, False, "comma or end"
        elif char == "," and expect == "comma or end":
            self._comma = True
            self._expect = "key or end" if closing == "}" else "value or end"
        elif expect == "colon" and char == self._assign:
            said.append(": ")
            self._expect = "value"
        elif expect.startswith(("key", "value")):
            return self._begin(text, at, said, is_key=expect == "key or end")
        else:
            self.bad = True
            return at
        return at + 1

    @property
    def _assign(self) -> str:
        return self._notation.assign if len(self._open) == 1 else ":"

    def _begin(self, text: str, at: int, said: list[str], is_key: bool) -> int:
        """A key or a value."""
        comma = ", " if self._comma else ""
        quote = self._notation.quote
        for mark in ('"', "'", quote):
            if mark and text.startswith(mark, at):
                said.append(comma + '"')
                self._expect, self._quote, self._is_key, self._comma = "string", mark, is_key, False
                return at + len(mark)
        if quote.startswith(text[at:]):
            return at  # it may be the beginning of a quote
        if not is_key and text[at] in "{[" and len(self._open) < _DEPTH:
            self._open.append(("}", "}") if text[at] == "{" else ("]", "]"))
            said.append(comma + text[at])
            self._expect, self._comma = ("key or end" if text[at] == "{" else "value or end"), False
            return at + 1
        found = (_NAME if is_key else _WORD).match(text, at)
        if found is None or len(found.group()) > _LONGEST:
            self.bad = True
        elif found.groups()[-1] is None:
            return at  # it may go on
        elif is_key:
            said.append(comma + quoted(found.group(1)))
            self._expect, self._comma = "colon", False
            return found.end()
        else:
            word = _JSON.get(found.group(), found.group())
            self.bad = not is_json(word)
            if not self.bad:
                said.append(comma + word)
                self._expect, self._comma = "comma or end", False
                return found.end()
        return at

    def _string(self, text: str, at: int, said: list[str]) -> int:
        quote = self._quote
        if quote == self._notation.quote:
            return self._raw(text, at, said)
        plain = (_IN_DOUBLE if quote == '"' else _IN_SINGLE).match(text, at)
        if plain is not None:
            said.append(escaped(plain.group()))
            return plain.end()
        if text[at] == "\\":
            return self._escape(text, at, said)
        if text[at] != quote:  # a control token
            self.bad = True
            return at
        behind = _BEHIND.match(text, at + 1).group(1)  # type: ignore[union-attr]
        if behind is None:
            return at  # what follows decides
        if behind == self._assign if self._is_key else behind in ",)]}" or TOKENS.match(behind):
            self._close(said)
        else:
            said.append(escaped(quote))
        return at + 1

    def _raw(self, text: str, at: int, said: list[str]) -> int:
        quote = self._quote
        end = text.find(quote, at)
        closed = end >= 0
        if not closed:
            end = len(text) - next((n for n in range(len(quote) - 1, 0, -1) if text.endswith(quote[:n], at)), 0)
        stray = TOKENS.search(text, at, end)
        self.bad = stray is not None
        end = end if stray is None else stray.start()
        said.append(escaped(text[at:end]))
        if self.bad or not closed:
            return end
        self._close(said)
        return end + len(quote)

    def _close(self, said: list[str]) -> None:
        said.append('"')
        self._expect = "colon" if self._is_key else "comma or end"

    def _escape(self, text: str, at: int, said: list[str]) -> int:
        found = _ESCAPE.match(text, at)
        if found is None:
            if _PART_OF_ESCAPE.fullmatch(text, at):
                return at
            said.append(escaped("\\"))
            return at + 1
        byte, short, long, char = found.groups()
        if char is not None:
            said.append(escaped(_ESCAPED.get(char, "\\" + char)))
        elif short is not None:  # a half of a pair stays one
            said.append("\\u" + short)
        elif int(byte or long, 16) > 0x10FFFF:
            self.bad = True
            return at
        else:
            said.append(escaped(chr(int(byte or long, 16))))
        return found.end()
