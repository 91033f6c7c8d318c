"""DeepSeek's tokenizer, recipes that tests share, and the golden records as conversations."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from deepinfra.core.conversation import (
    Constraint,
    ContentPart,
    Conversation,
    MediaPart,
    Message,
    TextPart,
    ToolCall,
    ToolChoice,
    ToolDefinition,
)
from deepinfra.recipes.deepseek.recipe import DeepSeek
from deepinfra.testing.deepseek import DeepSeekTextModel

RECORDS = json.loads((Path(__file__).parents[2] / "data" / "golden" / "deepseek-recipe.json").read_text())


@cache
def _recipe(version: Any) -> DeepSeek:
    return DeepSeek(DeepSeekTextModel(("<｜System｜>",) if version == "v4.1" else ()), version=version)


@pytest.fixture(params=["v4", "v4.1"])
def version(request: pytest.FixtureRequest) -> str:
    """Both versions of the format."""
    wanted: str = request.param
    return wanted


@pytest.fixture
def recipe(version: str) -> DeepSeek:
    """A recipe of that version, built once; V4.1's has V4's tokenizer with the token that it lacks."""
    return _recipe(version)


@pytest.fixture(scope="session")
def shared() -> Callable[[str], DeepSeek]:
    """The same recipes by version."""
    return _recipe


@pytest.fixture
def golden() -> Callable[[str, str], dict[str, Any]]:
    """A golden record by name and version."""
    by_name = {(record["id"], "v4.1" if "4.1" in record["model"] else "v4"): record for record in RECORDS}
    return lambda name, version: by_name[name, version]


@pytest.fixture
def conversation_of() -> Callable[[Mapping[str, Any]], Conversation]:
    """The conversation that the reference library made of a golden record's or a made-up request."""
    return lambda record: _MAKERS[record["protocol"]](record["request"])


def _parts(content: Any) -> tuple[ContentPart, ...]:
    if isinstance(content, str):
        return (TextPart(content),)
    return tuple(
        TextPart(part["text"])
        if part["type"] in ("text", "input_text")
        else MediaPart(data=b"image", digest=b"digest", media_type="image/png")
        for part in content or ()
    )


def _effort(request: Mapping[str, Any]) -> str | None:
    switch = request.get("thinking", {}).get("type")
    wanted: str | None = request.get("reasoning_effort") or request.get("reasoning", {}).get("effort")
    if switch == "disabled":
        return "none"
    return "high" if switch and wanted in (None, "none") else wanted


def _chat(request: Mapping[str, Any]) -> Conversation:
    messages = tuple(
        Message(
            role="reminder" if message["role"] == "latest_reminder" else message["role"],
            content=_parts(message.get("content")),
            reasoning=message.get("reasoning_content"),
            tool_calls=tuple(
                ToolCall(id=call["id"], name=call["function"]["name"], arguments=call["function"]["arguments"])
                for call in message.get("tool_calls") or ()
            ),
            tool_call_id=message.get("tool_call_id"),
            prefix=message.get("prefix", False),
        )
        for message in request["messages"]
    )
    tools = tuple(ToolDefinition(**tool["function"]) for tool in request.get("tools", ()))
    choice = request.get("tool_choice", "auto")
    wanted = request.get("response_format", {})
    constraint = None
    if wanted.get("type") == "json_object":
        constraint = Constraint(kind="json")
    elif wanted:
        constraint = Constraint(kind="json_schema", source=json.dumps(wanted["json_schema"]["schema"]))
    return Conversation(
        messages=messages,
        tools=tools,
        tool_choice=ToolChoice(mode=choice)
        if isinstance(choice, str)
        else ToolChoice(mode="required", names=(choice["function"]["name"],)),
        constraint=constraint,
        effort=_effort(request),
    )


def _messages(request: Mapping[str, Any]) -> Conversation:
    turns = [Message(role="system", content=_parts(request["system"]))] if "system" in request else []
    for message in request["messages"]:
        content = message["content"]
        blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
        text = _parts([block for block in blocks if block["type"] == "text"])
        turns += (
            Message(role="tool", tool_call_id=block["tool_use_id"], content=_parts(block["content"]))
            for block in blocks
            if block["type"] == "tool_result"
        )
        calls = tuple(
            ToolCall(id=block["id"], name=block["name"], arguments=json.dumps(block["input"]))
            for block in blocks
            if block["type"] == "tool_use"
        )
        thought = next((block["thinking"] for block in blocks if block["type"] == "thinking"), None)
        turns.append(Message(role=message["role"], content=text, tool_calls=calls, reasoning=thought))
    return Conversation(messages=tuple(turns), effort=_effort(request))


def _responses(request: Mapping[str, Any]) -> Conversation:
    turns = [Message(role="system", content=_parts(request["instructions"]))] if "instructions" in request else []
    items = request["input"]
    thought = None
    for item in [{"role": "user", "content": items}] if isinstance(items, str) else items:
        match item.get("type", "message"):
            case "message":
                turns.append(Message(role=item["role"], content=_parts(item["content"])))
            case "reasoning":
                thought = item["content"][0]["text"]
            case "function_call":
                call = ToolCall(id=item["call_id"], name=item["name"], arguments=item["arguments"])
                turns.append(Message(role="assistant", reasoning=thought, tool_calls=(call,)))
            case _:
                turns.append(Message(role="tool", tool_call_id=item["call_id"], content=_parts(item["output"])))
    return Conversation(messages=tuple(turns), effort=_effort(request))


_MAKERS: Mapping[str, Callable[[Mapping[str, Any]], Conversation]] = {
    "chat.completions": _chat,
    "messages": _messages,
    "responses": _responses,
}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One test per golden record."""
    if "record" in metafunc.fixturenames:
        names = [f"{'v4.1' if '4.1' in record['model'] else 'v4'}-{record['id']}" for record in RECORDS]
        metafunc.parametrize("record", RECORDS, ids=names)
