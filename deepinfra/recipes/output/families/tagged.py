"""Calls whose parameters stand one by one between tags, and how such parameters are constrained."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from deepinfra.core.conversation import JsonValue
from deepinfra.recipes.output.calls import schema_types
from deepinfra.recipes.output.lark import ANY, Rules
from deepinfra.recipes.output.schemas import string_pattern

__all__ = ("Tags",)

_OTHERS = ("object", "array", "number", "boolean", "null")
_KEY = "[A-Za-z0-9_.-]{1,64}"


@dataclass(frozen=True, slots=True)
class Tags:
    """What stands around a parameter's value.

    Attributes:
        string: What opens a string, by the parameter's name.
        other: What opens any other value.
        end: What ends it: a line's end, if the family writes one, and a tag.
    """

    string: Callable[[str], str]
    other: Callable[[str], str]
    end: str

    def parameters(self, rules: Rules, schema: Mapping[str, JsonValue]) -> str:
        """The parameters of a call in the order of its schema, those that are not required or not; may be empty.

        A schema that names no properties allows any.
        """
        properties, required = schema.get("properties"), schema.get("required", ())
        if not isinstance(properties, Mapping):
            return f"({self._any(rules)})*" if schema.get("additionalProperties") is not False else ""
        required = required if isinstance(required, Sequence) else ()
        parts = []
        for key, each in properties.items():
            one = rules.either(self._options(rules, key, each if isinstance(each, Mapping) else {}, schema))
            parts.append(one if key in required else f"({one})?")
        return " ".join(parts)

    def _any(self, rules: Rules) -> str:
        options = []
        for opening, value in ((self.string, self._until(rules, ANY)), (self.other, self._json(rules, {}, {}))):
            before, after = opening("\0").split("\0")
            options.append(f"{rules.literal(before)} {rules.pattern(_KEY)} {rules.literal(after)} {value}")
        return rules.either(options)

    def _options(
        self, rules: Rules, key: str, schema: Mapping[str, JsonValue], root: Mapping[str, JsonValue]
    ) -> list[str]:
        types = schema_types(schema, root)
        options = []
        if not types or "string" in types:
            options += [f"{rules.literal(self.string(key))} {value}" for value in self._strings(rules, schema, root)]
        if types != {"string"}:
            options.append(f"{rules.literal(self.other(key))} {self._json(rules, schema, root)}")
        return options

    def _json(self, rules: Rules, schema: Mapping[str, JsonValue], root: Mapping[str, JsonValue]) -> str:
        """A value that is no string."""
        types = schema_types(schema, root)
        if not types or "string" in types:
            kinds = [
                kind for kind in _OTHERS if not types or kind in types or (kind == "number" and "integer" in types)
            ]
            schema = _without_strings(schema, kinds)
        definitions = {key: root[key] for key in ("$defs", "definitions") if key in root}
        return f"{rules.json({**schema, **definitions})} {rules.literal(self.end + chr(10))}"

    def _strings(self, rules: Rules, schema: Mapping[str, JsonValue], root: Mapping[str, JsonValue]) -> list[str]:
        """A string as it stands, with the closing tag: of what the schema demands, choices, a pattern or lengths."""
        values = schema.get("enum", [schema["const"]] if "const" in schema else None)
        if isinstance(values, Sequence) and not isinstance(values, str):
            return [rules.literal(value + self.end + "\n") for value in values if isinstance(value, str)]
        return [self._until(rules, string_pattern(schema))]

    def _until(self, rules: Rules, expression: str) -> str:
        """A string up to the first closing tag; the line's end before it may be missing, as parsers have it."""
        tag = self.end.lstrip("\n")
        line = "\n?" if tag != self.end and expression != ANY else ""
        return f"{rules.until(tag, expression + line)} {rules.literal(chr(10))}"


def _without_strings(schema: Mapping[str, JsonValue], kinds: Sequence[str]) -> Mapping[str, JsonValue]:
    for word in ("anyOf", "oneOf"):
        options = schema.get(word)
        if isinstance(options, Sequence) and not isinstance(options, str):
            kept = [option for option in options if not isinstance(option, Mapping) or option.get("type") != "string"]
            return {**schema, word: kept}
    values = schema.get("enum")
    if isinstance(values, Sequence) and not isinstance(values, str):
        return {**schema, "enum": [value for value in values if not isinstance(value, str)]}
    return {**schema, "type": list(kinds)}
