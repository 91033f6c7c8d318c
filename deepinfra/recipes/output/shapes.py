"""Arguments in a notation that is not JSON, as a constraint states them: from the schema, part by part."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence

from deepinfra.core.conversation import JsonValue
from deepinfra.core.schemas import LISTS, MAPS, SCHEMAS, VALUES
from deepinfra.errors import UnsupportedFieldError
from deepinfra.recipes.output.family import Allowed
from deepinfra.recipes.output.grammar import Notation
from deepinfra.recipes.output.lark import Rules
from deepinfra.recipes.output.schemas import resolved, string_pattern

__all__ = ("Shapes",)

_UNSAID = ("additionalItems", "allOf", "maxProperties", "minProperties", "patternProperties", "prefixItems")
_NUMERIC = ("exclusiveMaximum", "exclusiveMinimum", "maximum", "minimum", "multipleOf")
_STRING = ("format", "maxLength", "minLength", "pattern")
_SAYS = (VALUES | SCHEMAS | LISTS | MAPS) - {"$defs", "definitions"}
_DEPTH = 4
_KINDS = ("string", "number", "boolean", "null", "array", "object")
_KEY = "[A-Za-z0-9_.-]{1,64}"
_BARE = re.compile(_KEY)


class Shapes:
    """What the arguments of one tool may be.

    Args:
        rules: The grammar.
        notation: How they are written.
        tool: Whose arguments. What the notation cannot be held to is left free, unless the tool is strict.
    """

    def __init__(self, rules: Rules, notation: Notation, tool: Allowed) -> None:
        self._rules, self._notation, self._tool = rules, notation, tool
        self._known: dict[str, str] = {}

    def arguments(self) -> str:
        """The arguments between the call's brackets.

        Raises:
            UnsupportedFieldError: The tool is strict, and its schema says what the notation cannot be held to.
        """
        return self._members(self._tool.schema, False)

    def _value(self, schema: JsonValue, depth: int = 0) -> str:
        """A value: one rule for each schema. One that nothing is said of is JSON at some depth."""
        if not isinstance(schema, Mapping) or not schema.keys() & _SAYS:
            return self._once(f"any {depth}", lambda: self._any(depth))
        reference = schema.get("$ref")
        if isinstance(reference, str):
            return self._once(reference, lambda: self._value(resolved(reference, self._tool.schema)))
        return self._once(json.dumps(schema), lambda: self._said(schema))

    def _said(self, schema: Mapping[str, JsonValue]) -> str:
        self._check(schema)
        values = schema.get("enum", [schema["const"]] if "const" in schema else None)
        if isinstance(values, Sequence) and not isinstance(values, str):
            return self._rules.either([self._constant(value) for value in values])
        for word in ("anyOf", "oneOf"):
            options = schema.get(word)
            if isinstance(options, Sequence) and not isinstance(options, str):
                rest = {key: value for key, value in schema.items() if key != word}
                return self._rules.either(
                    [self._value({**rest, **option} if isinstance(option, Mapping) else option) for option in options]
                )
        kinds = schema.get("type", "object" if "properties" in schema else _KINDS)
        kinds = (kinds,) if isinstance(kinds, str) else kinds
        return self._rules.either([self._typed(str(kind), schema) for kind in kinds or _KINDS])  # type: ignore[union-attr]

    def _any(self, depth: int) -> str:
        if depth == _DEPTH:
            return self._rules.json({})
        return self._rules.either([self._typed(kind, {}, depth + 1) for kind in _KINDS])

    def _typed(self, kind: str, schema: Mapping[str, JsonValue], depth: int = 0) -> str:
        rules, notation = self._rules, self._notation
        true, false, null = notation.words
        if kind == "string":
            return self._string(schema)
        if kind == "boolean":
            return f'("{true}" | "{false}")'
        if kind == "null":
            return f'"{null}"'
        if kind == "array":
            item = self._value(schema.get("items", True), depth)
            return f'"[" {self._repeated(item, schema.get("minItems", 0), schema.get("maxItems"))} "]"'
        if kind == "object":
            return f'"{{" {self._members(schema, True, depth)} "}}"'
        return rules.json({"type": kind, **{word: schema[word] for word in _NUMERIC if word in schema}})

    def _string(self, schema: Mapping[str, JsonValue]) -> str:
        rules, quote = self._rules, self._notation.quote
        if quote:
            return f"{rules.literal(quote)} {rules.until(quote, string_pattern(schema))}"
        said = {word: schema[word] for word in _STRING if word in schema}
        double = rules.json({"type": "string", **said})
        return double if said else rules.either([double, rules.rule(r"/'([^'\\\n]|\\.)*'/")])

    def _constant(self, value: JsonValue) -> str:
        written = self._rules.literal(self._written(value))
        if not isinstance(value, str) or self._notation.quote:
            return written
        return self._rules.either([written, self._rules.literal(json.dumps(value, ensure_ascii=False))])

    def _written(self, value: JsonValue) -> str:
        notation = self._notation
        true, false, null = notation.words
        if isinstance(value, str):
            return notation.quote + value + notation.quote if notation.quote else repr(value)
        if isinstance(value, Mapping):
            pairs = (f"{self._named(key)}{notation.colon}{self._written(each)}" for key, each in value.items())
            return "{" + notation.comma.join(pairs) + "}"
        if isinstance(value, Sequence):
            return "[" + notation.comma.join(map(self._written, value)) + "]"
        if value is None or isinstance(value, bool):
            return {True: true, False: false, None: null}[value]
        return json.dumps(value)

    def _named(self, key: str) -> str:
        """The key of an inner object."""
        return key if self._notation.bare and _BARE.fullmatch(key) else self._written(key)

    def _key(self, key: str) -> str:
        plain = self._named(key)
        either = (plain,) if plain == key or self._notation.quote else (plain, json.dumps(key, ensure_ascii=False))
        return self._rules.either([self._rules.literal(each + self._notation.colon) for each in either])

    def _members(self, schema: Mapping[str, JsonValue], inner: bool, depth: int = 0) -> str:
        """Members in the order of the schema, those that are not required or not, with what stands between them."""
        self._check(schema)
        rules, comma = self._rules, self._rules.literal(self._notation.comma)
        properties, required = schema.get("properties"), schema.get("required", ())
        properties = properties if isinstance(properties, Mapping) else {}
        required = required if isinstance(required, Sequence) else ()
        properties = {**properties, **{str(name): True for name in required if name not in properties}}
        more = schema.get("additionalProperties", "properties" not in schema)
        other = "" if more is False else rules.rule(f"{self._other(inner)} {self._value(more, depth)}")
        behind = f"({comma} {other})*" if other else ""
        firsts = [f"{other} {behind}"] if other else []
        for name, each in reversed(list(properties.items())):
            key = self._key(name) if inner else rules.literal(name + self._notation.assign)
            member = rules.rule(f"{key} {self._value(each)}")
            needed = name in required
            firsts = [f"{member} {behind}", *(() if needed else firsts)]
            behind = rules.rule(f"{comma} {member} {behind}" if needed else f"({comma} {member})? {behind}")
        needed = any(name in required for name in properties)
        return "" if not firsts else rules.either(firsts) + ("" if needed else "?")

    def _other(self, inner: bool) -> str:
        """The key of a member that the schema does not name."""
        rules, notation = self._rules, self._notation
        if not inner:
            return f"{rules.pattern(_KEY)} {rules.literal(notation.assign)}"
        quotes = (notation.quote,) if notation.quote else ("'", '"')
        keys = [f"{rules.literal(quote)} {rules.pattern(_KEY)} {rules.literal(quote)}" for quote in quotes]
        keys += [rules.pattern(_KEY)] if notation.bare else []
        return f"{rules.either(keys)} {rules.literal(notation.colon)}"

    def _repeated(self, item: str, least: JsonValue, most: JsonValue) -> str:
        comma = self._rules.literal(self._notation.comma)
        least = least if isinstance(least, int) else 0
        if most == 0:
            return ""
        more = f"({comma} {item}){{{max(least - 1, 0)},{most - 1 if isinstance(most, int) else ''}}}"
        return f"({item} {more if most != 1 else ''}){'' if least else '?'}"

    def _once(self, name: str, build: Callable[[], str]) -> str:
        """A rule for what may contain itself."""
        if name not in self._known:
            self._known[name] = self._rules.declare()
            self._rules.define(self._known[name], build())
        return self._known[name]

    def _check(self, schema: Mapping[str, JsonValue]) -> None:
        if self._tool.strict:
            unsaid = [word for word in (*_UNSAID, *(("format",) if self._notation.quote else ())) if word in schema]
            if unsaid:
                said = f"{unsaid[0]!r} of the strict tool {self._tool.name!r}"
                raise UnsupportedFieldError("tools", f"cannot be enforced in this model's syntax: {said}")
