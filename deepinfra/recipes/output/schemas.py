"""JSON Schemas of tool arguments, as a constraint states them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from deepinfra.core.conversation import JsonValue, ToolDefinition
from deepinfra.core.schemas import LISTS, MAPS, SCHEMAS, VALUES

__all__ = ("arguments_schema",)

_FORMATS = frozenset({"date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "uuid"})
_LOOKS = re.compile(r"\(\?<?[=!]|\\[1-9]|\\k")
_COMBINED = ("$ref", "additionalProperties", "allOf", "anyOf", "oneOf", "patternProperties")


def arguments_schema(tool: ToolDefinition) -> Mapping[str, JsonValue]:
    """The schema of a tool's arguments: an object, with no properties but those it names.

    A tool without parameters takes none. What no grammar can hold an answer to (`uniqueItems`, look-around in a
    pattern, an unknown format) is left out of a tool that is not strict; in a strict one it stays, to be refused by
    name.
    """
    if tool.parameters is None:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    schema: dict[str, JsonValue] = {"type": "object", **tool.parameters}
    if not tool.strict:
        schema = _loosened(schema)
    if "properties" in schema and not any(word in schema for word in _COMBINED):
        schema["additionalProperties"] = False
    return schema


def _loosened(schema: Mapping[str, JsonValue]) -> dict[str, JsonValue]:
    kept: dict[str, JsonValue] = {}
    for key, value in schema.items():
        if key in MAPS and isinstance(value, Mapping):
            kept[key] = {name: _each(part) for name, part in value.items()}
        elif key in LISTS and isinstance(value, Sequence) and not isinstance(value, str):
            kept[key] = [_each(part) for part in value]
        elif key in SCHEMAS:
            kept[key] = _each(value)
        elif key in VALUES and _enforced(key, value):
            kept[key] = value
    return kept


def _enforced(key: str, value: JsonValue) -> bool:
    if key == "format":
        return isinstance(value, str) and value in _FORMATS
    if key == "pattern":
        return isinstance(value, str) and not _LOOKS.search(value)
    return key != "minProperties"


def _each(schema: JsonValue) -> JsonValue:
    return _loosened(schema) if isinstance(schema, Mapping) else schema
