"""Answers as Mistral's models write them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from deepinfra.core.conversation import Conversation, Message, TextPart, ToolDefinition
from deepinfra.core.events import Event, ReasoningDelta, TextDelta, ToolArgumentsDelta, ToolEnd, ToolStart
from deepinfra.recipes import Mistral

ASK = Message(role="user", content=(TextPart("a"),))
TOOLS = (ToolDefinition(name="f"), ToolDefinition(name="g"))


def spelled(recipe: Mistral, *parts: str) -> list[int]:
    """Ids of parts, of which those that are exactly a control token are one."""
    control = dict(recipe.report().control)
    ids: list[int] = []
    for part in parts:
        ids += [control[part]] if part in control else recipe.tokenizer.encode(part)
    return ids


def told(recipe: Mistral, ids: Sequence[int], conversation: Conversation | None = None) -> list[Event]:
    """The events of an answer; the same however its ids are cut, deltas joined."""
    prompt = recipe.render(conversation or Conversation(messages=(ASK,), tools=TOOLS))
    found = []
    for size in (1, 2, 3, len(ids)):
        parser = recipe.parser(prompt)
        events = [event for at in range(0, len(ids), size) for event in parser.feed(ids[at : at + size])]
        found.append(joined([*events, *parser.finish("stop")]))
    assert all(events == found[0] for events in found)
    return found[0]


def joined(events: Sequence[Event]) -> list[Event]:
    made: list[Event] = []
    for event in events:
        last = made[-1] if made else None
        if isinstance(event, TextDelta) and isinstance(last, TextDelta):
            made[-1] = TextDelta(choice=0, text=last.text + event.text)
        elif isinstance(event, ReasoningDelta) and isinstance(last, ReasoningDelta):
            made[-1] = ReasoningDelta(choice=0, text=last.text + event.text)
        elif isinstance(event, ToolArgumentsDelta) and isinstance(last, ToolArgumentsDelta):
            made[-1] = ToolArgumentsDelta(choice=0, index=last.index, arguments=last.arguments + event.arguments)
        else:
            made.append(event)
    return made


def calls(*made: tuple[str, str, str]) -> list[Event]:
    return [
        event
        for index, (id_, name, arguments) in enumerate(made)
        for event in (
            ToolStart(choice=0, index=index, id=id_, name=name),
            ToolArgumentsDelta(choice=0, index=index, arguments=arguments),
            ToolEnd(choice=0, index=index),
        )
    ]


@pytest.mark.parametrize("numbered", ["v2", "v3", "v7", "v3-tekken"])
def test_calls_in_a_list_are_read(numbered: str, recipe_of: Callable[[str], Mistral]) -> None:
    """An id behind the arguments comes too late: they were streamed by then."""
    recipe = recipe_of(numbered)
    listed = (
        '[{"id": "AbC123xyz", "name": "f", "arguments": {"q": "日本 🙂"}}, {"name": "g", "arguments": {}, "id": "x"}]'
    )
    assert told(recipe, spelled(recipe, "[TOOL_CALLS]", listed)) == calls(
        ("AbC123xyz", "f", '{"q": "日本 🙂"}'), ("", "g", "{}")
    )


def test_calls_set_off_by_tokens_are_read(recipe_of: Callable[[str], Mistral]) -> None:
    for version, number in (("v11", ("[CALL_ID]", "AbC123xyz")), ("v13", ()), ("v15", ())):
        recipe = recipe_of(version)
        ids = spelled(
            recipe, "I look.", "[TOOL_CALLS]", "f", *number, "[ARGS]", '{"q": 1}', "[TOOL_CALLS]", "g", "[ARGS]", "{}"
        )
        known = number[1] if number else ""
        assert told(recipe, ids) == [
            TextDelta(choice=0, text="I look."),
            *calls((known, "f", '{"q": 1}'), ("", "g", "{}")),
        ]


def test_reasoning_is_set_off_where_the_version_has_tokens_for_it(recipe_of: Callable[[str], Mistral]) -> None:
    recipe = recipe_of("v13")
    ids = spelled(recipe, "[THINK]", "Hm [/THINK] typed.", "[/THINK]", "Yes.")
    assert told(recipe, ids) == [ReasoningDelta(choice=0, text="Hm [/THINK] typed."), TextDelta(choice=0, text="Yes.")]


def test_an_opened_thought_is_read_on(recipe_of: Callable[[str], Mistral]) -> None:
    recipe = recipe_of("v13")
    opened = Conversation(messages=(ASK, Message(role="assistant", reasoning="Let me", prefix=True)))
    ids = spelled(recipe, " see.", "[/THINK]", "Yes.")
    assert told(recipe, ids, opened) == [ReasoningDelta(choice=0, text=" see."), TextDelta(choice=0, text="Yes.")]


def test_the_space_before_the_first_word_is_not_the_answers(recipe: Mistral) -> None:
    plain = Conversation(messages=(ASK,))
    assert told(recipe, recipe.tokenizer.encode("Hello you"), plain) == [TextDelta(choice=0, text="Hello you")]


def test_the_space_after_a_prefix_is(recipe_of: Callable[[str], Mistral]) -> None:
    recipe = recipe_of("v3")
    opened = Conversation(messages=(ASK, Message(role="assistant", content=(TextPart("The weather"),), prefix=True)))
    assert told(recipe, recipe.tokenizer.encode("is"), opened) == [TextDelta(choice=0, text=" is")]


def test_typed_markers_in_an_answer_stay_text(recipe: Mistral) -> None:
    text = '[TOOL_CALLS][{"name": "f", "arguments": {}}]'
    assert told(recipe, recipe.tokenizer.encode(f"x{text}"), Conversation(messages=(ASK,))) == [
        TextDelta(choice=0, text=f"x{text}")
    ]
