"""A tool call while it is being written: its events, its arguments as JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence

from deepinfra.core.conversation import JsonValue, ToolDefinition
from deepinfra.core.events import Event, ToolArgumentsDelta, ToolEnd, ToolStart
from deepinfra.recipes.output.grammar import Notation
from deepinfra.recipes.output.literals import LiteralScan
from deepinfra.recipes.output.scan import JsonScan, decoded, escaped, is_json, quoted
from deepinfra.recipes.output.schemas import resolved

__all__ = ("CallWriter", "schema_types", "types_of")

_PYTHON = {"True": "true", "False": "false", "None": "null"}
"""How templates that print a value with Jinja's `string` spell what JSON has other words for."""


class CallWriter:
    """One call's events.

    Args:
        choice: Number of the answer.
        index: Number of the call.
        emit: Takes the events.
    """

    def __init__(self, choice: int, index: int, emit: Callable[[Event], None]) -> None:
        self.name = self.id = ""
        self.key = ""
        self.started = False
        self._choice, self._index, self._emit = choice, index, emit
        self._parameters = 0
        self._said = False
        self._scan: JsonScan | LiteralScan | None = None
        self._lump: list[str] | None = None

    def start(self) -> None:
        """The name is known."""
        if not self.started:
            self.started = True
            self._emit(ToolStart(choice=self._choice, index=self._index, id=self.id, name=self.name))

    def end(self) -> None:
        """The call is complete; one that said nothing has empty arguments."""
        self.start()
        if self._parameters:
            self._say("}")
        elif not self._said:
            self._say("{}")
        self._emit(ToolEnd(choice=self._choice, index=self._index))

    def _say(self, arguments: str) -> None:
        if arguments:
            self._said = True
            self._emit(ToolArgumentsDelta(choice=self._choice, index=self._index, arguments=arguments))

    # -- arguments as one JSON value --------------------------------------------------------------

    def written_in(self, notation: Notation) -> None:
        """The arguments that follow are no JSON."""
        self._scan = LiteralScan(notation)

    def arguments(self, text: str) -> int:
        """Take what belongs to the arguments, and say how many characters did."""
        scan = self._scan = self._scan or JsonScan()
        used, said = scan.feed(text)
        if scan.first == "{":
            self._say(said)
        elif scan.first:  # not an object: decided at its end
            self._lump = [*(self._lump or ()), said]
        if scan.done:
            self._end_lump()
        return used

    @property
    def arguments_done(self) -> bool:
        """The arguments are a complete value."""
        return self._scan is not None and self._scan.done

    @property
    def arguments_bad(self) -> bool:
        """What came cannot be JSON."""
        return self._scan is not None and self._scan.bad

    @property
    def arguments_empty(self) -> bool:
        """Nothing but white space came."""
        return self._scan is None or not self._scan.first

    def arguments_ended(self) -> bool:
        """Nothing more comes: whether the arguments are complete, or none were given."""
        if self._scan is not None and not self._scan.done and self._scan.end():
            self._end_lump()
        return self.arguments_empty or self.arguments_done

    def _end_lump(self) -> None:
        """Arguments that are no object: the object that a string holds, nothing for null, else one parameter."""
        if self._lump is None:
            return
        text, self._lump = "".join(self._lump).strip(), None
        inner = decoded(text) if text.startswith('"') else ""
        if isinstance(inner, str) and inner.strip().startswith("{") and is_json(inner):
            self._say(inner.strip())
        elif text != "null" and text != '""':
            self._say('{"arguments": ' + text + "}")

    # -- arguments one by one ---------------------------------------------------------------------

    def parameter(self, key: str) -> None:
        """A parameter's name."""
        self._say(("{" if not self._parameters else ", ") + quoted(key) + ": ")
        self._parameters += 1

    def open_string(self) -> None:
        """A string begins."""
        self._say('"')

    def string(self, text: str) -> None:
        """A piece of it."""
        self._say(escaped(text))

    def close_string(self) -> None:
        """It ends."""
        self._say('"')

    def value(self, text: str, types: frozenset[str] | None) -> None:
        """A whole value that is JSON if it can be.

        Args:
            text: As it was written.
            types: JSON Schema types that the value may have; `None` if the syntax itself says that it is JSON, empty
                if nothing is known.
        """
        plain = text.strip()
        if types:
            plain = _PYTHON.get(plain, plain)
        said = is_json(plain)
        if said and types is not None and (not types or "string" in types):
            kind = _kind(plain)  # what could be a string is one, unless it is JSON of another type that may be meant
            said = kind != "string" and (not types or kind in types or (kind == "integer" and "number" in types))
        self._say(plain if said else quoted(text))


def _kind(text: str) -> str:
    """The JSON Schema type of JSON text."""
    kinds = {"{": "object", "[": "array", '"': "string", "t": "boolean", "f": "boolean", "n": "null"}
    return kinds.get(text[0]) or ("number" if any(char in text for char in ".eE") else "integer")


def types_of(tools: Sequence[ToolDefinition], name: str, key: str) -> frozenset[str]:
    """JSON Schema types that a tool's schema allows for a parameter; empty if it does not say."""
    tool = next((tool for tool in tools if tool.name == name), None)
    if tool is None or tool.parameters is None:
        return frozenset()
    properties = tool.parameters.get("properties")
    schema = properties.get(key) if isinstance(properties, Mapping) else None
    return schema_types(schema, tool.parameters)


def schema_types(schema: JsonValue, root: Mapping[str, JsonValue], depth: int = 8) -> frozenset[str]:
    """JSON Schema types that a schema allows; empty if it does not say. `root` is where its references point."""
    if not isinstance(schema, Mapping) or not depth:
        return frozenset()
    kind = schema.get("type")
    if isinstance(kind, str):
        return frozenset((kind,))
    if isinstance(kind, Sequence):
        return frozenset(item for item in kind if isinstance(item, str))
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#/"):
        return schema_types(resolved(reference, root), root, depth - 1)
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(values, Sequence) and not isinstance(values, str):
        return frozenset(_kind(json.dumps(value)) for value in values)
    for word in ("anyOf", "oneOf"):
        options = schema.get(word)
        if isinstance(options, Sequence) and not isinstance(options, str):
            found = [schema_types(option, root, depth - 1) for option in options]
            return frozenset().union(*found) if all(found) else frozenset()
    return frozenset()
