"""Random conversations rendered here and by DeepSeek's own library: text, control ranges and ids are the same.

What facts/recipe.md 1.9 lists as wrong or refused there is left out, each where it is left out.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import deepseek_recipe
import pytest

from deepinfra.core.conversation import Conversation, Message, TextPart, ToolChoice
from deepinfra.recipes.deepseek.recipe import DeepSeek
from deepinfra.testing.conversations import BENIGN, conversation, hostile_words
from deepinfra.testing.deepseek import DeepSeekTextModel

Oracle = Callable[[Conversation], tuple[str, list[tuple[int, int]], list[int]]]

MARKERS = ("<｜User｜>", "<｜Assistant｜>", "<｜end▁of▁sentence｜>", "<think>", "</think>", "｜DSML｜", "<｜System｜>")


@pytest.fixture(scope="module")
def oracle_of() -> Callable[[str], Oracle]:
    made: dict[str, Oracle] = {}

    def oracle(version: str) -> Oracle:
        if version not in made:
            made[version] = _oracle(version)
        return made[version]

    return oracle


def _oracle(version: str) -> Oracle:
    old = version == "v4"
    model = DeepSeekTextModel(() if old else ("<｜System｜>",))
    tokenizer = deepseek_recipe.Tokenizer.from_str(model.definition)
    encoding = (deepseek_recipe.DeepseekV4Encoding if old else deepseek_recipe.DeepseekV41Encoding)()
    encoding = encoding.with_tokenizer(tokenizer)
    name = "DeepSeek-V4-Pro" if old else "DeepSeek-V4.1-Flash"

    def ask(wanted: Conversation) -> tuple[str, list[tuple[int, int]], list[int]]:
        request = deepseek_recipe.ChatCompletionRequest({"model": name, **_request(wanted)})
        converted = request.convert(deepseek_recipe.ConversionOptions()).conversation
        rendered = encoding.render_conversation(converted)
        return rendered.prompt, rendered.special_ranges, encoding.encode(converted)

    return ask


def _request(wanted: Conversation) -> dict[str, Any]:
    """A conversation as a body of Chat Completions."""
    request: dict[str, Any] = {"messages": [_message(message) for message in wanted.messages]}
    if wanted.effort == "none":
        request["thinking"] = {"type": "disabled"}
    elif wanted.effort is not None:
        request["reasoning_effort"] = wanted.effort
    if wanted.tools:
        request["tools"] = [
            {
                "type": "function",
                "function": {
                    "name": tool.name,
                    "description": tool.description,
                    "parameters": tool.parameters,
                    "strict": tool.strict,
                },
            }
            for tool in wanted.tools
        ]
        names = wanted.tool_choice.names
        named = {"type": "function", "function": {"name": names[0]}} if names else wanted.tool_choice.mode
        request["tool_choice"] = named
    if wanted.constraint is not None and wanted.constraint.kind == "json":
        request["response_format"] = {"type": "json_object"}
    elif wanted.constraint is not None:
        schema = json.loads(wanted.constraint.source)
        request["response_format"] = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    return request


def _message(message: Message) -> dict[str, Any]:
    role = "latest_reminder" if message.role == "reminder" else message.role
    parts = [{"type": "text", "text": part.text} for part in message.content if isinstance(part, TextPart)]
    body: dict[str, Any] = {"role": role, "content": message.text if role == "latest_reminder" else parts}
    if message.reasoning is not None:
        body["reasoning_content"] = message.reasoning
    if message.tool_calls:
        body["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in message.tool_calls
        ]
    if message.tool_call_id is not None:
        body["tool_call_id"] = message.tool_call_id
    if message.prefix:
        body["prefix"] = True
    return body


def _agreed(draw: random.Random, say: Callable[[], str], version: str) -> Conversation:
    """A conversation on which both agree."""
    made = conversation(draw, lambda: say().replace('"', "'"), reminders=True)  # quotes end the reference's attributes
    developer = "user" if version == "v4" else "system"  # the reference refuses the role
    messages = [
        replace(
            message,
            role=developer if message.role == "developer" else message.role,  # type: ignore[arg-type]
            content=(TextPart(message.text),) if message.role == "reminder" else message.content,
            is_error=False,  # the reference does not show it
        )
        for message in made.messages
    ]
    reminders = [one.role == other.role == "reminder" for one, other in pairwise(messages)]
    messages = [messages[0], *(m for m, again in zip(messages[1:], reminders, strict=True) if not again)]
    if made.constraint is not None and made.constraint.kind == "json":
        messages.append(Message(role="user", content=(TextPart("as json"),)))  # the word that the protocol demands
    made = replace(made, messages=tuple(messages))
    kind = draw.randrange(4)
    plain = not made.tools and made.constraint is None and not any(message.tool_calls for message in messages)
    if kind == 0 and plain:  # the reference refuses a prefix with any of them
        reasoning = say() if draw.random() < 0.5 else None
        content = (TextPart(say()),) if draw.random() < 0.7 else (TextPart(""),)
        last = Message(role="assistant", content=content, reasoning=reasoning, prefix=True)
        return replace(made, messages=(*messages, last))
    if kind == 1 and made.tools and made.effort == "none":  # the reference refuses a demanded call while thinking
        names = draw.choice(((), (made.tools[0].name,)))
        return replace(made, tool_choice=ToolChoice(mode="required", names=names))
    return made


def _compare(recipe: DeepSeek, oracle: Oracle, version: str, seeds: range) -> None:
    for seed in seeds:
        draw, words = random.Random(seed), random.Random(-seed - 1)
        say = hostile_words(words, MARKERS) if seed % 2 else (lambda words=words: words.choice(BENIGN))
        wanted = _agreed(draw, say, version)
        text, ranges, ids = oracle(wanted)
        prompt = recipe.render(wanted)
        assert prompt.text == text, wanted
        assert list(prompt.ranges) == ranges, wanted
        assert list(prompt.ids) == ids, wanted


def test_random_conversations_are_rendered_as_the_reference_does(
    recipe: DeepSeek, oracle_of: Callable[[str], Oracle], version: str
) -> None:
    _compare(recipe, oracle_of(version), version, range(300))


@pytest.mark.slow
def test_thousands_of_random_conversations_are_rendered_as_the_reference_does(
    recipe: DeepSeek, oracle_of: Callable[[str], Oracle], version: str
) -> None:
    _compare(recipe, oracle_of(version), version, range(300, 5_000))
