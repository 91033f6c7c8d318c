"""Which conversations are short enough to be rendered on the event loop."""

from __future__ import annotations

from typing import Any

import pytest

from deepinfra.core.conversation import (
    Constraint,
    Conversation,
    JsonValue,
    Message,
    TextPart,
    ToolCall,
    ToolDefinition,
)
from deepinfra.core.request import GenerateRequest
from deepinfra.engine import Engine
from deepinfra.engine.lengths import characters, is_short
from deepinfra.interfaces.given import ThreadOffload
from deepinfra.testing.asking import events_of, toy_pool
from deepinfra.testing.tiny import TinyRecipe


def say(text: str, **more: Any) -> Message:
    return Message(role="user", content=(TextPart(text),), **more)


def tool(parameters: dict[str, JsonValue] | None = None, description: str | None = None) -> ToolDefinition:
    return ToolDefinition(name="f", description=description, parameters=parameters)


ASK = say("hello")
DEEP: JsonValue = ["x"]
for _ in range(2000):
    DEEP = [DEEP]


def test_a_question_with_a_tool_is_short() -> None:
    parameters: dict[str, JsonValue] = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}
    assert is_short(Conversation(messages=(ASK,), tools=(tool(parameters, "Does something."),) * 5))
    assert is_short(Conversation(messages=(say("x" * 3000),)))


@pytest.mark.parametrize(
    "long",
    [
        Conversation(messages=(say("x" * 5000),)),
        Conversation(messages=(say("x" * 100),) * 100),
        Conversation(messages=(say(""),) * 1000),
        Conversation(messages=(say("", reasoning="x" * 5000),)),
        Conversation(messages=(say("", tool_calls=(ToolCall(id="a", name="f", arguments="[" * 5000),)),)),
        Conversation(messages=(ASK,), tools=(tool(description="x" * 5000),)),
        Conversation(messages=(ASK,), tools=(tool({"type": "object"}),) * 128),
        Conversation(messages=(ASK,), tools=(tool({"enum": [1] * 2000}),)),
        Conversation(messages=(ASK,), tools=(tool({"x" * 5000: True}),)),
        Conversation(messages=(ASK,), tools=(tool({"items": DEEP}),)),
        Conversation(messages=(ASK,), constraint=Constraint(kind="regex", source="x" * 5000)),
        Conversation(messages=(ASK,), template_options={"a": ["x" * 5000]}),
    ],
    ids=range(12),
)
def test_what_is_long_in_any_way_is_not_short(long: Conversation) -> None:
    assert not is_short(long)


def test_only_content_counts_as_the_characters_of_a_conversation() -> None:
    assert characters(Conversation(messages=(ASK, say("abc", reasoning="no")), tools=(tool({"a": 1}),))) == 8


async def test_a_conversation_of_many_empty_messages_is_rendered_off_the_loop() -> None:
    threads: list[str] = []

    class Noting(ThreadOffload):
        async def __call__(self, function: Any, /, *args: object) -> Any:
            threads.append(getattr(function, "__name__", ""))
            return await super().__call__(function, *args)

    async with Engine(TinyRecipe(), toy_pool(num_blocks=200), offload=Noting()) as engine:
        for messages, off_loop in (((ASK,), False), ((say(""),) * 200, True)):
            await events_of(engine, GenerateRequest(input=Conversation(messages=messages), max_tokens=1))
            assert ("_rendered" in threads) == off_loop
