"""JSON Schemas as the TypeScript-like text in which gpt-oss was shown its tools.

Source: openai-harmony, `src/encoding.rs`; the texts are equal, odd corners included, because the model was trained on
them. What the text cannot say (`anyOf`, limits, patterns) is `any` or left out there too.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from deepinfra.core.conversation import JsonValue, ToolDefinition

__all__ = ("namespace",)

_WORDS = {"number": "number", "integer": "number", "boolean": "boolean"}


def namespace(tools: Sequence[ToolDefinition]) -> str:
    """The section of a developer message that declares functions."""
    parts = ["# Tools\n\n## functions\n\nnamespace functions {\n\n"]
    for tool in tools:
        parts += (f"// {line}\n" for line in _lines(tool.description or ""))
        arguments = "" if tool.parameters is None else f"_: {_type(tool.parameters, '')}"
        parts.append(f"type {tool.name} = ({arguments}) => any;\n\n")
    return "".join((*parts, "} // namespace functions"))


def _lines(text: str) -> list[str]:
    lines = text.split("\n")
    return [line.removesuffix("\r") for line in (lines[:-1] if not lines[-1] else lines)]


def _type(schema: JsonValue, indent: str) -> str:
    if not isinstance(schema, Mapping):
        return "any"
    variants = _list(schema.get("oneOf"))
    if variants is not None:
        return "".join(f"\n{indent} | {_variant(variant, indent, nested=True)}" for variant in variants)
    kind = schema.get("type")
    if isinstance(kind, str):
        return _named(kind, schema, indent)
    names = [name for name in _list(kind) or () if isinstance(name, str)]
    return " | ".join("number" if name == "integer" else name for name in names) or "any"


def _named(kind: str, schema: Mapping[str, JsonValue], indent: str) -> str:
    if kind == "object":
        return _object(schema, indent)
    if kind == "array":
        return f"{_type(schema['items'], indent)}[]" if "items" in schema else "Array<any>"
    if kind == "string":
        words = [f'"{word}"' for word in _list(schema.get("enum")) or () if isinstance(word, str)]
        return " | ".join(words) or "string"
    return _WORDS.get(kind, "any")


def _object(schema: Mapping[str, JsonValue], indent: str) -> str:
    about = _text(schema, "description")
    parts = [f"{indent}// {about}\n" if about is not None else "", "{\n"]
    required = _list(schema.get("required")) or ()
    properties = schema.get("properties")
    for name, value in properties.items() if isinstance(properties, Mapping) else ():
        parts += _property(name, value if isinstance(value, Mapping) else {}, indent, optional=name not in required)
    return "".join((*parts, f"{indent}}}"))


def _property(name: str, schema: Mapping[str, JsonValue], indent: str, *, optional: bool) -> list[str]:
    title, about, examples = _text(schema, "title"), _text(schema, "description"), _list(schema.get("examples"))
    variants = _list(schema.get("oneOf"))
    notes = [] if title is None else [f"// {title}\n{indent}//"]
    notes += [] if about is None or "oneOf" in schema else [f"// {about}"]
    if examples:
        notes += ["// Examples:", *(f'// - "{example}"' for example in examples if isinstance(example, str))]
    name = f"{name}?" if optional else name
    if variants is None:
        value = _nullable(_type(schema, f"{indent}    "), schema)
        default = f" // {_default(schema)}" if "default" in schema and "oneOf" not in schema else ""
        body = f"{indent}{name}: {value},{default}\n"
    else:
        # What the first variant says is not repeated, whether it is the property's own description or another one.
        first = _text(variants[0], "description") if variants else None
        notes += [] if about is None or about == first else [f"// {about}"]
        notes += [f"// {_default(schema)}"] if "default" in schema else []
        shown = [
            _variant(
                variant, indent, silent=about is not None and (index == 0 or _text(variant, "description") == about)
            )
            for index, variant in enumerate(variants)
        ]
        body = f"{indent}{name}:\n{''.join(f'{indent} | {variant}{chr(10)}' for variant in shown)}{indent},\n"
    return [*(f"{indent}{note}\n" for note in notes), body]


def _variant(schema: JsonValue, indent: str, *, silent: bool = False, nested: bool = False) -> str:
    text = _type(schema, f"{indent}   ")
    if not isinstance(schema, Mapping):
        return text
    about = None if silent else _text(schema, "description")
    notes = [] if about is None else [about]
    notes += [_default(schema, bare_enum=not nested)] if "default" in schema else []
    return _nullable(text, schema) + (f" // {' '.join(notes)}" if notes else "")


def _nullable(text: str, schema: Mapping[str, JsonValue]) -> str:
    return f"{text} | null" if schema.get("nullable") is True and "null" not in text else text


def _default(schema: Mapping[str, JsonValue], *, bare_enum: bool = True) -> str:
    value = schema["default"]
    choice = bool(_list(schema.get("enum")))
    if isinstance(value, str) and (bare_enum or not choice):
        return f"default: {value}" if choice else f'default: "{value}"'
    return f"default: {json.dumps(value, ensure_ascii=False, separators=(',', ':'), default=_plain)}"


def _plain(value: object) -> object:
    """Mappings and sequences that json does not know by themselves."""
    return dict(value) if isinstance(value, Mapping) else list(value) if isinstance(value, Sequence) else str(value)


def _list(value: JsonValue) -> Sequence[JsonValue] | None:
    return value if isinstance(value, Sequence) and not isinstance(value, str) else None


def _text(schema: JsonValue, key: str) -> str | None:
    value = schema.get(key) if isinstance(schema, Mapping) else None
    return value if isinstance(value, str) else None
