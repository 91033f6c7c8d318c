"""Writes grammars for constrained output, as llguidance reads Lark."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence

from deepinfra.core.conversation import JsonValue
from deepinfra.errors import UnsupportedFieldError

__all__ = ("ANY", "Rules")

ANY = "(?s:.*)"
"""Regular expression of any text; control tokens are none."""

_FORM: Mapping[str, JsonValue] = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""JSON as models are trained to write it, without white space that need not end."""


class Rules:
    """A grammar under construction: its methods add rules and return expressions.

    Args:
        control: Spelling and id of the model's control tokens; where a marker contains one only the token matches.
    """

    def __init__(self, control: Mapping[str, int]) -> None:
        self._control = control
        spelled = "|".join(re.escape(marker) for marker in sorted(control, key=len, reverse=True) if marker)
        self._split = re.compile(f"({spelled})" if spelled else "(?!)()")
        self._rules: list[str] = []

    def source(self, start: str) -> str:
        """The whole grammar."""
        return "\n".join((f"start: {start}", *self._rules, ""))

    def rule(self, expression: str, options: str = "") -> str:
        """A name for an expression; `options` are those of its lexeme (`lazy`)."""
        name = f"r{len(self._rules)}"
        self._rules.append(f"{name}{options and f'[{options}]'}: {expression}")
        return name

    def declare(self) -> str:
        """A name for an expression that is defined later, since it contains itself."""
        return self.rule("")

    def define(self, name: str, expression: str) -> None:
        """What a declared name stands for."""
        self._rules[int(name[1:])] = f"{name}: {expression}"

    def either(self, options: Sequence[str]) -> str:
        """One of them, as a whole that can be repeated."""
        return f"({options[0]})" if len(options) == 1 else self.rule(" | ".join(dict.fromkeys(options)))

    def literal(self, text: str) -> str:
        """A marker, its control tokens as tokens."""
        return " ".join(
            f"<[{self._control[part]}]>" if part in self._control else json.dumps(part, ensure_ascii=False)
            for part in self._split.split(text)
            if part
        )

    def pattern(self, expression: str) -> str:
        """Text that matches a regular expression."""
        return self.rule(_regex(expression))

    def until(self, marker: str, expression: str = ANY) -> str:
        """The shortest text that ends with a marker, and the marker."""
        first, *rest = [part for part in self._split.split(marker) if part]
        if first in self._control:
            return f"{self.pattern(expression)} {self.literal(marker)}"
        if rest:  # the token says where the text ends
            return f"{self.pattern(expression + re.escape(first))} {self.literal(''.join(rest))}"
        return self.rule(f"{_regex(expression)} {json.dumps(first, ensure_ascii=False)}", "lazy")

    def json(self, schema: Mapping[str, JsonValue]) -> str:
        """JSON that is valid against a schema."""
        return self.rule(f"%json {json.dumps({**schema, 'x-guidance': _FORM}, ensure_ascii=False)}")

    def json_text(self, schema: str) -> str:
        """JSON that is valid against a schema given as text.

        Raises:
            UnsupportedFieldError: It is no JSON object.
        """
        try:
            value = json.loads(schema)
        except (ValueError, RecursionError) as error:
            raise UnsupportedFieldError("constraint", f"is no JSON Schema: {error}") from None
        if not isinstance(value, dict):
            raise UnsupportedFieldError("constraint", "is no JSON Schema: it is no object")
        return self.json(value)

    def lark(self, source: str) -> str:
        """Another whole grammar."""
        return self.rule(f"%lark {{\n{source}\n}}")


def _regex(expression: str) -> str:
    """As it stands between slashes on one line."""
    inside = re.sub(r"(?<!\\)((?:\\\\)*)/", r"\1\\/", expression)
    return "/" + inside.replace("\n", r"\n").replace("\r", r"\r") + "/"
