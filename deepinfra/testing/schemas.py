"""Random JSON Schemas with a bound on how long a value can be: what constrained answers are proved with."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any, NamedTuple

__all__ = ("BoundedSchema", "random_schema")

_ESCAPED = 6
"""Bytes of a string's longest character: `\\u001f`."""

_WORDS = ("city", "count", "kind", "label", "note", "ok", "parts", "range", "size", "unit", "ünï", 'with "quotes"')


class BoundedSchema(NamedTuple):
    """A schema, and the most bytes of JSON that a value of it takes (written with `", "` and `": "`)."""

    schema: Mapping[str, Any]
    nbytes: int


def random_schema(rng: random.Random, depth: int = 3) -> BoundedSchema:
    """A schema of an object, nested up to `depth` levels, with every keyword that is in wide use.

    Args:
        rng: Where it comes from; the same state gives the same schema.
        depth: Levels of objects and arrays.
    """
    schema, nbytes = _object(rng, depth)
    if rng.random() < 0.3:
        name = f"def{rng.randrange(3)}"
        used, most = _value(rng, 1)
        properties = {**schema["properties"], "shared": {"$ref": f"#/$defs/{name}"}}
        required = [*schema["required"], "shared"]
        schema = {**schema, "properties": properties, "required": required, "$defs": {name: used}}
        nbytes += most + len('"shared": , ')
    return BoundedSchema({"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}, nbytes)


def _value(rng: random.Random, depth: int) -> BoundedSchema:
    kinds = [_string, _string, _choice, _integer, _plain, _pattern, _format]
    if depth > 0:
        kinds += [_object, _object, _array, _array, _any_of]
    make = rng.choice(kinds)
    return make(rng, depth - 1)


def _object(rng: random.Random, depth: int) -> BoundedSchema:
    names = rng.sample(_WORDS, rng.randint(1, 4))
    parts = {name: _value(rng, depth) for name in names}
    required = [name for name in names if rng.random() < 0.7]
    # A name's own characters may be escaped, which is why it counts as a string of them would.
    nbytes = 2 + sum(_ESCAPED * len(name) + len('"": , ') + part.nbytes for name, part in parts.items())
    schema = {
        "type": "object",
        "description": "an annotation",
        "properties": {name: part.schema for name, part in parts.items()},
        "required": required,
        "additionalProperties": False,
    }
    return BoundedSchema(schema, nbytes)


def _array(rng: random.Random, depth: int) -> BoundedSchema:
    if rng.random() < 0.2:
        parts = [_value(rng, depth) for _ in range(rng.randint(1, 2))]
        tuple_of = {"type": "array", "prefixItems": [part.schema for part in parts], "items": False}
        return BoundedSchema(tuple_of | {"minItems": len(parts)}, 2 + sum(part.nbytes + 2 for part in parts))
    part, most = _value(rng, depth), rng.randint(1, 3)
    schema = {"type": "array", "items": part.schema, "minItems": rng.randint(0, most), "maxItems": most}
    return BoundedSchema(schema, 2 + most * (part.nbytes + 2))


def _any_of(rng: random.Random, depth: int) -> BoundedSchema:
    parts = [_value(rng, depth) for _ in range(2)]
    return BoundedSchema({"anyOf": [part.schema for part in parts]}, max(part.nbytes for part in parts))


def _string(rng: random.Random, depth: int) -> BoundedSchema:
    most = rng.randint(1, 16)
    return BoundedSchema({"type": "string", "minLength": rng.randint(0, most), "maxLength": most}, 2 + _ESCAPED * most)


def _choice(rng: random.Random, depth: int) -> BoundedSchema:
    values = rng.sample(["red", "dark green", 1, 2.5, None, True, "", "日本"], rng.randint(1, 4))
    return BoundedSchema({"const": values[0]} if len(values) == 1 else {"enum": values}, 2 + _ESCAPED * 10)


def _integer(rng: random.Random, depth: int) -> BoundedSchema:
    least = rng.randint(-1000, 1000)
    schema = {"type": "integer", "minimum": least, "maximum": least + rng.randint(0, 2000)}
    if rng.random() < 0.2:
        schema = {"type": "integer", "minimum": 0, "exclusiveMaximum": 100, "multipleOf": rng.choice((2, 5))}
    return BoundedSchema(schema, 5)


def _plain(rng: random.Random, depth: int) -> BoundedSchema:
    return BoundedSchema({"type": rng.choice(("boolean", "null", ["boolean", "null"]))}, 5)


def _pattern(rng: random.Random, depth: int) -> BoundedSchema:
    pattern, most = rng.choice((("^[a-z]{2,8}$", 8), ("^[A-Z]{3}-\\d{1,4}$", 8), ("^(yes|no|maybe)$", 5)))
    return BoundedSchema({"type": "string", "pattern": pattern}, 2 + _ESCAPED * most)


def _format(rng: random.Random, depth: int) -> BoundedSchema:
    return BoundedSchema({"type": "string", "format": rng.choice(("date", "ipv4", "uuid"))}, 2 + 40)
