"""JSON Schemas of tool arguments, as a constraint states them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from deepinfra.core.conversation import JsonValue, ToolDefinition
from deepinfra.core.schemas import LISTS, MAPS, SCHEMAS, VALUES
from deepinfra.recipes.output.lark import ANY

__all__ = ("arguments_schema", "resolved", "string_pattern")

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


def resolved(reference: str, root: Mapping[str, JsonValue]) -> JsonValue:
    """What a `$ref` inside the schema `root` points to; `None` if to nothing there."""
    target: JsonValue = root
    if not reference.startswith("#"):
        return None
    for part in reference.removeprefix("#").split("/")[1:]:
        target = target.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(target, Mapping) else None
    return target


def string_pattern(schema: Mapping[str, JsonValue]) -> str:
    """Regular expression of strings that are valid: a pattern need not match from the first character to the last."""
    pattern = schema.get("pattern")
    if isinstance(pattern, str):
        start = "" if pattern.startswith("^") else ANY
        end = "" if re.search(r"(?<!\\)\$$", pattern) else ANY
        body = pattern.removeprefix("^")
        return f"{start}(?:{body.removesuffix('$') if not end else body}){end}"
    least, most = schema.get("minLength", 0), schema.get("maxLength", "")
    return ANY if not least and most == "" else f"(?s:.{{{least},{most}}})"
