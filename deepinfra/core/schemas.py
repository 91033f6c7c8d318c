"""Which JSON Schema keywords an answer can be held to: the constraint library enforces these and drops others."""

from __future__ import annotations

__all__ = ("LISTS", "MAPS", "SCHEMAS", "VALUES")

SCHEMAS = frozenset({"additionalItems", "additionalProperties", "items"})
"""Keywords whose value is a schema."""

LISTS = frozenset({"allOf", "anyOf", "items", "oneOf", "prefixItems"})
"""Keywords whose value is a list of schemas."""

MAPS = frozenset({"$defs", "definitions", "patternProperties", "properties"})
"""Keywords whose value is an object of schemas."""

VALUES = frozenset(
    {"$ref", "const", "enum", "exclusiveMaximum", "exclusiveMinimum", "format", "maxItems", "maxLength", "maximum"}
    | {"maxProperties", "minItems", "minLength", "minProperties", "minimum", "multipleOf", "pattern", "required"}
    | {"type"}
)
"""Keywords that hold no schema. Not every `format` and `pattern` can be enforced, nor every `minProperties`."""
