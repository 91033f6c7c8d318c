"""Public prefixes from files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from deepinfra.config import read_settings, resolve
from deepinfra.config.prefixes import read_prefix
from deepinfra.core.conversation import Conversation, Message, TextPart, ToolChoice, ToolDefinition
from deepinfra.core.digits import json_text
from deepinfra.errors import ConfigError
from deepinfra.registry import load_plugins

TOOL: dict[str, Any] = {"name": "f", "description": "d", "parameters": {"type": "object", "z": 1.50, "a": 2}}
SYSTEM = (Message(role="system", content=(TextPart("Be brief."),)),)


def file(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_bytes(text.encode())
    return path


@pytest.mark.parametrize("end", ["", "\n", "\r\n"])
def test_plain_text_is_a_system_prompt(tmp_path: Path, end: str) -> None:
    made = read_prefix(file(tmp_path, "system.txt", f"Be brief.{end}"))
    assert made == Conversation(messages=SYSTEM, tool_choice=ToolChoice(mode="none"))


def test_text_inside_is_kept_to_the_character(tmp_path: Path) -> None:
    (system,) = read_prefix(file(tmp_path, "system.md", " a\r\n\n<|im_end|> \u00e9\n\n")).messages
    assert system.text == " a\r\n\n<|im_end|> \u00e9\n"


def test_json_has_a_system_prompt_and_tools(tmp_path: Path) -> None:
    text = json.dumps({"system": "Be brief.", "tools": [{"type": "function", "function": TOOL}]})
    made = read_prefix(file(tmp_path, "prefix.json", text.replace("1.5,", "1.50,")))
    (tool,) = made.tools
    assert (made.messages, made.tool_choice) == (SYSTEM, ToolChoice(mode="auto"))
    assert tool == ToolDefinition(name="f", description="d", parameters=TOOL["parameters"])
    assert json_text(tool.parameters) == '{"type": "object", "z": 1.50, "a": 2}'


@pytest.mark.parametrize(
    ("name", "text", "sentence"),
    [
        ("a.txt", "", "has neither a system prompt nor tools"),
        ("a.json", "{}", "has neither a system prompt nor tools"),
        ("a.json", "{", "is no JSON file"),
        ("a.json", "[]", "all of it: Input should be"),
        ("a.json", '{"systems": "a"}', "systems: Extra inputs are not permitted"),
        ("a.json", '{"system": 1}', "system: Input should be a valid string"),
        ("a.json", '{"tools": [{"type": "function", "function": {}}]}', "tools.0.function.name: Field required"),
        ("a.json", '{"tools": [{"type": "custom"}]}', "tools.0.type: Input should be 'function'"),
    ],
)
def test_a_wrong_file_is_one_sentence(tmp_path: Path, name: str, text: str, sentence: str) -> None:
    path = file(tmp_path, name, text)
    with pytest.raises(ConfigError) as caught:
        read_prefix(path)
    assert str(caught.value).startswith(str(path))
    assert sentence in str(caught.value)


def test_bytes_that_are_no_text_and_files_that_are_not_there_are_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_bytes(b"\xff")
    with pytest.raises(ConfigError, match="cannot be read: UnicodeDecodeError"):
        read_prefix(tmp_path / "b.txt")
    with pytest.raises(ConfigError, match="there is no file"):
        read_prefix(tmp_path / "c.txt")


def test_the_engine_of_a_configuration_has_its_prefixes(tmp_path: Path) -> None:
    path = file(tmp_path, "system.txt", "Be brief.")
    settings, provenance = read_settings(
        None,
        keywords={"pool": {"executor": {"use": "toy"}, "store": {"use": "none"}}},
        environ={"DEEPINFRA_PUBLIC_PREFIXES": json.dumps([str(path)])},
    )
    blueprint = resolve(settings, load_plugins(), provenance)
    assert [made.messages for made in blueprint.public_prefixes] == [SYSTEM]
    settings, provenance = read_settings(None, keywords={"public_prefixes": [str(tmp_path / "no.txt")]}, environ={})
    with pytest.raises(ConfigError, match=r"there is no file .*no\.txt for a public prefix"):
        resolve(settings, load_plugins(), provenance)
