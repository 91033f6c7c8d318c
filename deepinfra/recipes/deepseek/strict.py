"""Schemas of strict tools: every object closed, every property required."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from deepinfra.errors import RequestError

__all__ = ("closed",)


def closed(schema: Mapping[str, Any], path: str) -> dict[str, Any]:
    """The same schema with `additionalProperties` and `required` of every object filled in.

    Raises:
        RequestError: An object says something else about them; `path` names the schema.
    """
    filled: dict[str, Any] = {key: _within(key, value, f"{path}.{key}") for key, value in schema.items()}
    kind = schema.get("type")
    if kind != "object" and not (isinstance(kind, Sequence) and "object" in kind and not isinstance(kind, str)):
        return filled
    properties = filled.setdefault("properties", {})
    if not isinstance(properties, Mapping):
        raise RequestError(f"{path + '.properties'!r} must be an object", f"{path}.properties")
    if filled.setdefault("additionalProperties", False) is not False:
        raise RequestError(f"a strict tool's {path!r} must not allow additional properties", path)
    required = filled.setdefault("required", list(properties))
    if not isinstance(required, Sequence) or sorted(map(str, required)) != sorted(properties):
        raise RequestError(f"a strict tool's {path!r} must require every property", path)
    return filled


def _within(key: str, value: Any, path: str) -> Any:
    """Schemas inside: values of keywords that hold one, a list or a mapping of them; anything else as it is."""
    if key in ("properties", "$defs", "definitions") and isinstance(value, Mapping):
        return {
            name: closed(item, f"{path}.{name}") if isinstance(item, Mapping) else item for name, item in value.items()
        }
    if key in ("items", "not") and isinstance(value, Mapping):
        return closed(value, path)
    if key in ("anyOf", "allOf", "oneOf", "prefixItems") and isinstance(value, Sequence):
        return [closed(item, f"{path}[{n}]") if isinstance(item, Mapping) else item for n, item in enumerate(value)]
    return value
