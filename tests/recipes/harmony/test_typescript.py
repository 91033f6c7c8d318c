from __future__ import annotations

import random
from typing import Any

import openai_harmony as oh
import pytest

from deepinfra.core.conversation import ToolDefinition
from deepinfra.recipes.harmony.typescript import namespace

WORDS = ("city", "zeta", "a", "null", "x y", 'q"q', "é")
KINDS: tuple[Any, ...] = (
    *("string", "number", "integer", "boolean", "object", "object", "array", "null", "other", "oneOf", "oneOf"),
    *(["string", "null"], ["integer", "number"], [], ["integer", 3], None),
)


def schema(draw: random.Random, depth: int) -> dict[str, Any]:
    """A JSON Schema with every word that has an effect, right and wrong."""
    made: dict[str, Any] = {}
    kind = draw.choice(KINDS)
    if not depth and kind in ("object", "array", "oneOf"):
        kind = "string"
    if kind == "oneOf":
        variants = [schema(draw, depth - 1) if draw.random() < 0.95 else True for _ in range(draw.randrange(4))]
        made["oneOf"] = variants if draw.random() < 0.95 else "wrong"
    elif kind is not None:
        made["type"] = kind
    if kind == "object" and draw.random() < 0.9:
        made["properties"] = {f"{draw.choice(WORDS)}{i}": schema(draw, depth - 1) for i in range(draw.randrange(4))}
        names = list(made["properties"])
        made["required"] = draw.sample(names, k=draw.randrange(len(names) + 1))
    if kind == "array" and draw.random() < 0.8:
        made["items"] = schema(draw, depth - 1)
    options: dict[str, tuple[Any, ...]] = {
        "enum": (["a", "b"], ["x"], [], [1, 2], ["x", 1]),
        "description": ("text", "two\nlines", "", " sp "),
        "default": ("a", 'he"y', 3, 1.5, None, True, [1, "é"], {"b": 1, "a": []}, ""),
        "title": ("T", "t\nu"),
        "examples": (["e"], [], ["e", 2], [3]),
        "nullable": (True, False),
    }
    return made | {name: draw.choice(values) for name, values in options.items() if draw.random() < 0.22}


def compare(oracle: oh.HarmonyEncoding, seeds: range) -> None:
    for seed in seeds:
        draw = random.Random(seed)
        tools = [
            (
                f"f{i}",
                draw.choice(("d", "a\nb\n", "", "x\r\ny", "\n")),
                schema(draw, 3) if draw.random() < 0.9 else None,
            )
            for i in range(draw.randrange(1, 3))
        ]
        content = oh.DeveloperContent.new().with_function_tools([oh.ToolDescription.new(*tool) for tool in tools])
        message = oh.Message.from_role_and_content(oh.Role.DEVELOPER, content)
        wanted = f"<|start|>developer<|message|>{namespace([definition(*tool) for tool in tools])}<|end|>"
        assert oracle.decode(oracle.render(message)) == wanted, tools


def definition(name: str, description: str, parameters: dict[str, Any] | None) -> ToolDefinition:
    return ToolDefinition(name=name, description=description, parameters=parameters)


def test_random_schemas_are_written_as_openai_writes_them(oracle: oh.HarmonyEncoding) -> None:
    compare(oracle, range(1000))


@pytest.mark.slow
def test_twenty_thousand_random_schemas_are_written_as_openai_writes_them(oracle: oh.HarmonyEncoding) -> None:
    compare(oracle, range(1000, 21000))


def test_a_tool_is_declared_with_its_description_and_arguments() -> None:
    text = namespace(
        [
            ToolDefinition(
                name="get_weather",
                description="Says how it is outside.",
                parameters={
                    "type": "object",
                    "properties": {
                        "city": {"type": "string", "description": "Where"},
                        "unit": {"type": "string", "enum": ["c", "f"], "default": "c"},
                    },
                    "required": ["city"],
                },
            )
        ]
    )
    assert text == (
        "# Tools\n\n## functions\n\nnamespace functions {\n\n// Says how it is outside.\ntype get_weather = (_: {\n"
        '// Where\ncity: string,\nunit?: "c" | "f", // default: c\n}) => any;\n\n} // namespace functions'
    )
