"""Answers as gpt-oss writes them, against OpenAI's own parser."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Sequence

import openai_harmony as oh
import pytest

from deepinfra.core.conversation import Conversation, Message, TextPart, ToolDefinition
from deepinfra.core.events import Event, ReasoningDelta, TextDelta, ToolArgumentsDelta, ToolEnd, ToolStart
from deepinfra.core.request import FinishReason
from deepinfra.recipes import Harmony

TEXTS = (
    "Hello",
    " two  spaces ",
    "line\n\n\tline\r\n",
    "naïve 日本語 한국어 🙂🤷🏽‍♀️",
    'say {"a": [1]} <b>',
    "<|end|><|start|>assistant<|channel|>final<|message|>typed",
    "to=functions.x <|call|>",
)
ASK = Conversation(
    messages=(Message(role="user", content=(TextPart("a"),)),),
    tools=(ToolDefinition(name="f"), ToolDefinition(name="g")),
)


def spelled(recipe: Harmony, *parts: str) -> list[int]:
    """Ids of parts, of which those that are exactly a control token are one."""
    control = dict(recipe.report().control)
    ids: list[int] = []
    for part in parts:
        ids += [control[part]] if part in control else recipe.tokenizer.encode(part)
    return ids


def parse(recipe: Harmony, ids: Sequence[int], cuts: Sequence[int] = (), reason: FinishReason = "stop") -> list[Event]:
    parser = recipe.parser(recipe.render(ASK))
    events: list[Event] = []
    edges = [0, *cuts, len(ids)]
    for start, end in itertools.pairwise(edges):
        events += parser.feed(ids[start:end])
    return [*events, *parser.finish(reason)]


def told(events: Sequence[Event]) -> tuple[str, str, list[list[str]], int]:
    """Reasoning, text, calls with name and arguments, and how many of them were complete."""
    reasoning = "".join(event.text for event in events if isinstance(event, ReasoningDelta))
    text = "".join(event.text for event in events if isinstance(event, TextDelta))
    calls: list[list[str]] = []
    for event in events:
        if isinstance(event, ToolStart):
            assert event.index == len(calls)
            assert event.id == ""
            calls.append([event.name, ""])
        elif isinstance(event, ToolArgumentsDelta):
            calls[event.index][1] += event.arguments
    return reasoning, text, calls, sum(isinstance(event, ToolEnd) for event in events)


def random_answer(draw: random.Random) -> list[str]:
    """Headers in every form that the format allows; ends like the model does."""
    parts: list[str] = []
    for index in range(draw.randrange(1, 5)):
        if index:
            parts += ["<|end|>", "<|start|>", "assistant"]
        channel = draw.choice(("analysis", "commentary", "final"))
        parts += ["<|channel|>", channel, "<|message|>", draw.choice(TEXTS)]
    if draw.random() < 0.6:
        name, arguments = draw.choice("fg"), json.dumps({"q": draw.choice(TEXTS), "n": 12345678901234567890123})
        parts += ["<|end|>", "<|start|>", "assistant"]
        if draw.random() < 0.5:
            parts += [f" to=functions.{name}", "<|channel|>", "commentary"]
        else:
            parts += ["<|channel|>", f"commentary to=functions.{name}"]
        parts += draw.choice(([" ", "<|constrain|>", "json"], [" json"], []))
        parts += ["<|message|>", arguments, "<|call|>"]
    else:
        parts.append("<|return|>")
    return parts


def compare(recipe: Harmony, oracle: oh.HarmonyEncoding, seeds: range) -> None:
    for seed in seeds:
        draw = random.Random(seed)
        ids = spelled(recipe, *random_answer(draw))
        parser = oh.StreamableParser(oracle, oh.Role.ASSISTANT)
        for token in ids:
            parser.process(token)
        reasoning, text, calls = "", "", []
        for message in parser.messages:
            content = "".join(part.text for part in message.content if isinstance(part, oh.TextContent))
            if message.recipient is not None and message.recipient.startswith("functions."):
                calls.append([message.recipient.removeprefix("functions."), content])
            elif message.channel == "analysis":
                reasoning += content
            else:
                text += content
        cuts = sorted(draw.choices(range(len(ids)), k=3))
        for some in ((), cuts, range(1, len(ids) - 1)):
            assert told(parse(recipe, ids[:-1], some)) == (reasoning, text, calls, len(calls)), seed


def test_random_answers_are_read_as_openai_harmony_reads_them(recipe: Harmony, oracle: oh.HarmonyEncoding) -> None:
    compare(recipe, oracle, range(200))


@pytest.mark.slow
def test_four_thousand_random_answers_are_read_as_openai_harmony_reads_them(
    recipe: Harmony, oracle: oh.HarmonyEncoding
) -> None:
    compare(recipe, oracle, range(200, 4200))


def test_preambles_are_shown_and_arguments_come_as_they_are_written(recipe: Harmony) -> None:
    ids = spelled(
        recipe,
        *("<|channel|>", "analysis", "<|message|>", "Look it up.", "<|end|>", "<|start|>", "assistant"),
        *("<|channel|>", "commentary", "<|message|>", "I look.", "<|end|>", "<|start|>", "assistant"),
        *("<|channel|>", "commentary to=functions.f ", "<|constrain|>", "json", "<|message|>", '{"q": "a b c d e f"}'),
    )
    events = parse(recipe, ids, range(1, len(ids)))
    assert told(events) == ("Look it up.", "I look.", [["f", '{"q": "a b c d e f"}']], 1)
    assert sum(isinstance(event, ToolArgumentsDelta) for event in events) > 5


def test_a_call_cut_by_the_limit_is_not_complete(recipe: Harmony) -> None:
    ids = spelled(recipe, " to=functions.f", "<|channel|>", "commentary", "<|message|>", '{"q": "a')
    assert told(parse(recipe, ids, reason="length"))[2:] == ([["f", '{"q": "a']], 0)


def test_a_call_without_arguments_has_an_empty_object(recipe: Harmony) -> None:
    ids = spelled(recipe, " to=functions.f", "<|channel|>", "commentary", "<|message|>")
    assert told(parse(recipe, ids))[2:] == ([["f", "{}"]], 1)


@pytest.mark.parametrize(
    ("parts", "wanted"),
    [
        (("Just an answer.",), ("", "Just an answer.")),
        (("<|message|>", "No channel."), ("", "No channel.")),
        (("<|channel|>", "shout", "<|message|>", "Odd channel."), ("", "Odd channel.")),
        (("<|channel|>", "analysis", "<|message|>", "Cut"), ("Cut", "")),
        (
            (
                "<|channel|>",
                "analysis",
                "<|message|>",
                "a",
                "<|start|>",
                "assistant",
                "<|channel|>",
                "final",
                "<|message|>",
                "b",
            ),
            ("a", "b"),
        ),
        (
            ("<|channel|>", "analysis", "<|message|>", "a", "<|end|>", "<|channel|>", "final", "<|message|>", "b"),
            ("a", "b"),
        ),
        (("<|channel|>", "final", "<|message|>", "a", "<|end|>", "<|start|>", "assistant"), ("", "a")),
        (("<|channel|>", "commentary to=assistant", "<|message|>", "note"), ("", "note")),
    ],
)
def test_broken_headers_lose_no_text(recipe: Harmony, parts: Sequence[str], wanted: tuple[str, str]) -> None:
    events = parse(recipe, spelled(recipe, *parts))
    assert told(events)[:2] == wanted


def test_an_opened_message_is_read_on(recipe: Harmony) -> None:
    for reasoning, text, wanted in (("R", "", ("x", "")), ("R", "T", ("", "x"))):
        last = Message(role="assistant", content=(TextPart(text),) if text else (), reasoning=reasoning, prefix=True)
        parser = recipe.parser(recipe.render(Conversation(messages=(*ASK.messages, last))))
        events = [*parser.feed(recipe.tokenizer.encode("x")), *parser.finish("stop")]
        assert told(events)[:2] == wanted
