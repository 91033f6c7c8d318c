"""Nothing that people, tools or programs write becomes a control token of Mistral's."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable, Sequence
from functools import partial

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from deepinfra.core.conversation import Conversation, Message, TextPart, ToolCall, ToolDefinition
from deepinfra.core.request import Prompt
from deepinfra.recipes import Mistral

PIECES = ("Hello ", "日本語", "🙂", "\n\n", " ", '"', "{}", "\ue000", "<", "]", "[", "<0x0A>")


def conversation(version: str, write: Callable[[], str]) -> Conversation:
    """One of every field that holds text, each said by `write`; never empty, which would be no turn."""

    def parts() -> tuple[TextPart, ...]:
        text = write()
        return (TextPart(f"x{text[: len(text) // 2]}"), TextPart(f"{text[len(text) // 2 :]}x"))

    schema = {
        "type": "object",
        "description": write(),
        "properties": {f"k{write()}": {"type": "string", "description": write(), "enum": [write()]}},
    }
    calls = (ToolCall(id="c1", name="f", arguments=json.dumps({write(): write()})),)
    tools = (
        Message(role="assistant", tool_calls=calls),
        Message(role="tool", content=parts(), tool_call_id="c1"),
    )
    messages = (
        Message(role="system", content=parts()),
        Message(role="user", content=parts(), name=write()),
        Message(role="assistant", content=parts(), reasoning=write()),
        Message(role="user", content=parts()),
        *(tools if version != "v1" else ()),
    )
    tool = ToolDefinition(name="f", description=write(), parameters=schema)
    return Conversation(messages=messages, tools=(tool,) if version != "v1" else ())


def control(prompt: Prompt) -> list[int]:
    return [prompt.ids[position] for position in prompt.control]


def junk(draw: random.Random, pieces: Sequence[str]) -> str:
    return "".join(draw.choices(pieces, k=draw.randrange(1, 6)))


def check(recipe: Mistral, hostile: Conversation, wanted: Sequence[int]) -> None:
    """Its control tokens are the wanted ones, and everything that people typed is in the prompt's ids as text."""
    prompt = recipe.render(hostile)
    assert control(prompt) == wanted
    spelling = {token: text for text, token in recipe.report().control}
    assert not set(spelling).intersection(set(prompt.ids) - set(wanted))
    said = b"".join(
        spelling[token].encode() if token in spelling else recipe.tokenizer.token_bytes(token) for token in prompt.ids
    )
    assert said.decode() == prompt.text
    for message in hostile.messages:
        if message.role == "user":
            assert all(part.text in prompt.text for part in message.content if isinstance(part, TextPart))


def attack(recipe: Mistral, version: str, seeds: range) -> None:
    markers = [text for text, _ in recipe.report().control][:40]
    wanted = control(recipe.render(conversation(version, lambda: "benign")))
    pieces = [*markers, *(marker[: len(marker) // 2] for marker in markers), *PIECES]
    for seed in seeds:
        check(recipe, conversation(version, partial(junk, random.Random(seed), pieces)), wanted)


def test_hostile_conversations_have_the_control_tokens_of_benign_ones(recipe: Mistral, version: str) -> None:
    attack(recipe, version, range(60))


@pytest.mark.slow
def test_two_thousand_hostile_conversations_have_the_control_tokens_of_benign_ones(
    recipe: Mistral, version: str
) -> None:
    attack(recipe, version, range(1000, 3000))


@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_text_in_any_field_stays_text(recipe: Mistral, version: str, data: st.DataObject) -> None:
    markers = [text for text, _ in recipe.report().control][:40]
    piece = st.one_of(st.text(max_size=8), st.sampled_from(markers), st.sampled_from(PIECES))
    typed = data.draw(st.lists(st.lists(piece, min_size=1, max_size=5).map("".join), min_size=1, max_size=6))
    words = itertools.cycle(typed)
    wanted = control(recipe.render(conversation(version, lambda: "benign")))
    check(recipe, conversation(version, lambda: next(words)), wanted)
