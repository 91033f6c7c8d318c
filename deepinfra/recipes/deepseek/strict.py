"""Schemas of strict tools: every object closed, every property required."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from deepinfra.core.conversation import Conversation
from deepinfra.errors import RequestError

__all__ = ("with_strict_tools",)


def with_strict_tools(conversation: Conversation) -> Conversation:
    """The same conversation with its strict tools' schemas filled in.

    Raises:
        RequestError: A schema says something else; its path is named.
    """
    if not any(tool.strict for tool in conversation.tools):
        return conversation
    tools = (
        replace(tool, parameters=_closed(tool.parameters, f"tools[{index}].parameters"))
        if tool.strict and tool.parameters is not None
        else tool
        for index, tool in enumerate(conversation.tools)
    )
    return replace(conversation, tools=tuple(tools))


def _closed(schema: Mapping[str, Any], path: str) -> dict[str, Any]:
    """The same schema with `additionalProperties` and `required` of every object filled in."""
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
            name: _closed(item, f"{path}.{name}") if isinstance(item, Mapping) else item for name, item in value.items()
        }
    if key == "items" and isinstance(value, Mapping):
        return _closed(value, path)
    if key in ("anyOf", "allOf", "oneOf", "prefixItems") and isinstance(value, Sequence):
        return [_closed(item, f"{path}[{n}]") if isinstance(item, Mapping) else item for n, item in enumerate(value)]
    return value
