"""JSON Schemas as the constraint library gets them: whatever it would silently not enforce is refused by name."""

from __future__ import annotations

import json
import re
from typing import Any

from deepinfra.core.schemas import LISTS, MAPS, SCHEMAS, VALUES
from deepinfra.engine.nesting import MAX_LEVELS, grammar_levels, inner_schemas, schema_levels
from deepinfra.errors import RequestError

__all__ = ("bounded_grammar", "bounded_schema")

_MAX_PATTERNS = 8
"""Patterns of a schema that says of one value that it matches several schemas. What matches several patterns at once
is found by trying all combinations: ten take 50 ms, fourteen a quarter of a minute, twenty for ever."""

_FORM = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": ", "lenient": False}
"""One space where people write one, and no other white space: a model may not fill its answer with blanks."""

_ANNOTATIONS = frozenset(
    {"$comment", "$id", "$schema", "contentEncoding", "contentMediaType", "contentSchema", "default", "deprecated"}
    | {"description", "discriminator", "example", "examples", "externalDocs", "id", "readOnly", "title", "writeOnly"}
    | {"xml"}
)
"""Keywords that say something about a value and nothing about which are valid."""

_NO_EFFECT: dict[str, Any] = {"uniqueItems": False, "nullable": False, "unevaluatedProperties": True, "minContains": 0}
"""Keywords that are not enforced, with the value that demands nothing."""


def bounded_schema(source: str) -> str:
    """A schema with nothing in it but what is enforced, and with bounded white space.

    Raises:
        RequestError: It is no schema, or has a keyword that cannot be enforced; the message names it and its place.
    """
    try:
        schema = json.loads(source)
    except (ValueError, RecursionError) as error:
        raise _refused(f"the schema is not JSON: {error}") from None
    return json.dumps(_formed(schema), ensure_ascii=False)


def bounded_grammar(source: str) -> str:
    """A Lark grammar whose `%json` schemas are as `bounded_schema` makes them.

    Raises:
        RequestError: As `bounded_schema`, or its rules lead too deep.
    """
    decoder, parts, at = json.JSONDecoder(), list[str](), 0
    for found in re.finditer(r"%json\s*(?=\{)", source):
        if found.start() < at:
            continue  # inside the schema before
        try:
            schema, end = decoder.raw_decode(source, found.end())
        except (ValueError, RecursionError) as error:
            raise _refused(f"a %json schema of the grammar is not JSON: {error}") from None
        parts += [source[at : found.end()], json.dumps(_formed(schema), ensure_ascii=False)]
        at = end
    parts.append(source[at:])
    levels = grammar_levels("".join(parts[::2]))
    if levels > MAX_LEVELS:
        raise _refused(f"the grammar's rules are {levels} levels deep; at most {MAX_LEVELS} are taken")
    return "".join(parts)


def _formed(schema: Any) -> Any:
    if isinstance(schema, dict):
        schema = {key: value for key, value in schema.items() if key != "x-guidance"}
    try:
        kept = _kept(schema, "")
    except RecursionError:
        raise _refused("the schema is nested too deeply") from None
    levels = schema_levels(kept)
    if levels > MAX_LEVELS:
        raise _refused(f"the schema is {levels} levels deep, '$ref' followed; at most {MAX_LEVELS} are taken")
    _check_patterns(kept)
    return {**kept, "x-guidance": _FORM} if isinstance(kept, dict) else kept


def _kept(schema: Any, path: str) -> Any:
    """The parts of a schema that decide which values are valid; all of them are enforced."""
    if isinstance(schema, bool):
        return schema
    if not isinstance(schema, dict):
        raise _refused(f"the schema at {path or '/'} is {schema!r:.40}, not an object")
    kept: dict[str, Any] = {}
    for key, value in schema.items():
        if key in _ANNOTATIONS or (key.startswith("x-") and key != "x-guidance"):
            continue
        where = f"{path}/{key}"
        if key in MAPS and isinstance(value, dict):
            kept[key] = {name: _kept(each, f"{where}/{name}") for name, each in value.items()}
        elif key in LISTS and isinstance(value, list):
            kept[key] = [_kept(each, f"{where}/{index}") for index, each in enumerate(value)]
        elif key in SCHEMAS:
            kept[key] = _kept(value, where)
        elif key in VALUES:
            kept[key] = value
        elif key not in _NO_EFFECT or value is not _NO_EFFECT[key]:
            raise _refused(f"the schema's {key!r} (at {path or '/'}) cannot be enforced")
    _check_count(kept, path)
    return kept


def _check_count(schema: dict[str, Any], path: str) -> None:
    """Refuse a count of properties that a repeated key could feign."""
    least, required = schema.get("minProperties"), schema.get("required", ())
    if isinstance(least, int) and isinstance(required, list) and least > len(set(map(str, required))) + 1:
        raise _refused(f"the schema's 'minProperties' (at {path or '/'}) can be enforced up to one above 'required'")


def _check_patterns(schema: Any) -> None:
    """Refuse patterns that one value may have to match all at once, if they are many."""
    patterns, joined, waiting = 0, False, [schema]
    while waiting:
        each = waiting.pop()
        if not isinstance(each, dict):
            continue
        patterns += ("pattern" in each) + ("format" in each) + len(each.get("patternProperties", ()))
        joined = joined or "allOf" in each or ("$ref" in each and not each.keys() <= {"$ref", "$defs", "definitions"})
        waiting += inner_schemas(each)
    if joined and patterns > _MAX_PATTERNS:
        raise _refused(
            f"the schema has {patterns} of 'pattern', 'patternProperties' and 'format', and an 'allOf' or a '$ref' "
            f"beside other keywords; at most {_MAX_PATTERNS} can be enforced together"
        )


def _refused(why: str) -> RequestError:
    return RequestError(why, "constraint")
