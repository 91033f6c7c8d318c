"""A tool call as one JSON object: `{"name": …, "arguments": {…}}`, keys in either order."""

from __future__ import annotations

from collections.abc import Collection

from deepinfra.recipes.output.calls import CallWriter
from deepinfra.recipes.output.scan import JsonScan, decoded

__all__ = ("Envelope",)

_ARGUMENTS, _NAMES, _IDS = ("arguments", "parameters"), ("name", "tool_name"), ("id",)
_KEYS = ("type", "tool_call_id", *_ARGUMENTS, *_NAMES, *_IDS)
_SPACE = " \t\n\r"
_LONGEST = 512
"""Characters that a key or a name may have: longer ones are those of an answer that is JSON, and must not be held."""


class Envelope:
    """Reads one call's object piece by piece; arguments go on as they come once the name is known.

    Args:
        call: Takes what was read.
        declared: Names of the tools, if an object without one of them, or with other keys, is no call.

    Attributes:
        done: The object is complete.
        bad: It is no call, or no JSON, from the character on at which `feed` stopped.
        ended: The call is complete; what may still come of the object adds nothing.
    """

    def __init__(self, call: CallWriter, declared: Collection[str] | None = None) -> None:
        self.done = self.bad = self.ended = False
        self._call, self._declared = call, declared
        self._phase = "open"
        self._scan = JsonScan()
        self._text: list[str] = []
        self._length = 0
        self._key = ""
        self._early: str | None = None

    def feed(self, text: str) -> int:
        """Take what belongs to the object, and say how many characters did."""
        at = 0
        while at < len(text) and not self.done and not self.bad:
            if self._phase == "key text":
                at += self._collect(text[at:])
            elif self._phase == "value":
                if self._key in _ARGUMENTS and self._call.name:
                    at += self._arguments(text[at:])
                else:
                    at += self._collect(text[at:])
            else:
                at += self._structure(text[at])
        return at

    def _structure(self, char: str) -> int:
        """Take one character between the members, or none if it begins a key or is wrong."""
        phase = self._phase
        if char in _SPACE:
            pass
        elif char == "{" and phase == "open":
            self._phase = "key or end"
        elif char == '"' and phase in ("key", "key or end"):
            self._phase = "key text"
            self._fresh()
            return 0
        elif char == ":" and phase == "colon":
            self._phase = "value"
            self._fresh()
        elif char == "," and phase == "comma or end":
            self._phase = "key"
        elif char == "}" and phase.endswith("or end"):
            if self._call.name:
                self._end()
                self.done = True
            else:
                self.bad = True
        else:
            self.bad = True
        return int(not self.bad)

    def _fresh(self) -> None:
        self._scan, self._text, self._length = JsonScan(), [], 0

    def _collect(self, text: str) -> int:
        used, said = self._scan.feed(text)
        self._text.append(said)
        self._length += len(said)
        if self._scan.bad or (self._length > _LONGEST and (self._phase == "key text" or self._key in _NAMES)):
            self.bad = True
        elif self._scan.done:
            whole = "".join(self._text)
            if self._phase == "key text":
                self._key = decoded(whole)
                self._phase = "colon"
                self.bad = self._declared is not None and self._key not in _KEYS
            else:
                self._phase = "comma or end"
                self._know(whole)
        return used

    def _know(self, text: str) -> None:
        """A member other than arguments under way is complete."""
        if self._key in _ARGUMENTS:
            self._early = text
            return
        value = decoded(text)
        if not isinstance(value, str):
            self.bad = self._key in _NAMES
        elif self._key in _IDS and not self._call.started:
            self._call.id = value
        elif self._key in _NAMES and not self._call.started:
            self.bad = not value or (self._declared is not None and value not in self._declared)
            self._call.name = "" if self.bad else value

    def _arguments(self, text: str) -> int:
        self._call.start()
        used = self._call.arguments(text)
        if self._call.arguments_done:
            self._phase = "comma or end"
            self._end()
        self.bad = self._call.arguments_bad
        return used

    def _end(self) -> None:
        if self.ended:
            return
        self._call.start()
        if self._early is not None:
            self._call.arguments(self._early + " ")
        self._call.end()
        self.ended = True
