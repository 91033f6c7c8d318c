"""Answers read by id: reasoning, text and calls (facts/recipe.md 1.7, and of section 4 what concerns this family)."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from deepinfra.core.conversation import Conversation, Message, TextPart, ToolCall, ToolChoice, ToolDefinition
from deepinfra.core.events import Event, TextDelta, TokenLogprobs, ToolArgumentsDelta
from deepinfra.core.request import Prompt
from deepinfra.recipes.deepseek.dialect import DIALECTS
from deepinfra.recipes.deepseek.recipe import DeepSeek
from deepinfra.testing.answers import Answer, answer_of
from deepinfra.testing.recipe import merged

Write = Callable[..., list[int]]

TOOL = ToolDefinition(name="f", parameters={"type": "object", "properties": {"a": {"type": "string"}}})


_TAG = re.compile(r"⟨(/?)(C|I|P|think)([^⟩]*)⟩")


@pytest.fixture
def write(recipe: DeepSeek, version: Any) -> Write:
    """Ids of an answer: `⟨C⟩`, `⟨I name="f"⟩`, `⟨P …⟩` are the tags of calls, `⟨/think⟩` is the token."""
    dialect, control = DIALECTS[version], dict(recipe.report().control)
    names = {"C": dialect.calls, "I": dialect.invoke, "P": dialect.parameter}

    def write(answer: str) -> list[int]:
        ids: list[int] = []
        plain, at = "", 0
        for tag in _TAG.finditer(answer):
            plain += answer[at : tag.start()]
            at = tag.end()
            slash, name, more = tag.groups()
            if name == "think":
                ids += [*recipe.tokenizer.encode(plain), control[f"<{slash}think>"]]
                plain = ""
            else:
                ids += [*recipe.tokenizer.encode(f"{plain}<{slash}"), control["｜DSML｜"]]
                plain = f"{names[name]}{more}>"
        return [*ids, *recipe.tokenizer.encode(plain + answer[at:])]

    return write


@pytest.fixture
def prompt(recipe: DeepSeek) -> Prompt:
    """A question with a tool, without reasoning."""
    return recipe.render(Conversation(messages=(_say("user", "q"),), tools=(TOOL,), effort="none"))


def _say(role: Any, text: str, **more: Any) -> Message:
    return Message(role=role, content=(TextPart(text),), **more)


def events(recipe: DeepSeek, prompt: Prompt, ids: Sequence[int], reason: Any = "stop") -> list[Event]:
    parser = recipe.parser(prompt)
    fed = [event for token in ids for event in parser.feed([token])]
    return [*fed, *parser.finish(reason)]


def read(recipe: DeepSeek, prompt: Prompt, ids: Sequence[int], reason: Any = "stop") -> Answer:
    return answer_of(events(recipe, prompt, ids, reason))


def thinking(prompt: Prompt) -> Prompt:
    return replace(prompt, start="reasoning")


BLOCK = (
    'Let me\n\n⟨C⟩\n⟨I name="f"⟩\n⟨P name="a" string="true"⟩Par\nis "x" 日本⟨/P⟩\n'
    '⟨P name="b" string="false"⟩{"c": [1]}⟨/P⟩\n'
    '⟨/I⟩\n⟨I name="g"⟩\n\n⟨/I⟩\n⟨/C⟩'
)


def test_reasoning_text_and_calls_are_told_apart(recipe: DeepSeek, prompt: Prompt, write: Write) -> None:
    answer = read(recipe, thinking(prompt), write(f"I think.⟨/think⟩{BLOCK}"))
    assert (answer.reasoning, answer.text) == ("I think.", "Let me")
    assert [call.name for call in answer.calls] == ["f", "g"]
    assert answer.calls[0].arguments == '{"a": "Par\\nis \\"x\\" 日本", "b": {"c": [1]}}'
    assert answer.calls[1].arguments == "{}"
    assert all(call.ended and not call.id for call in answer.calls)


def test_what_the_recipe_renders_is_what_it_reads(recipe: DeepSeek, prompt: Prompt) -> None:
    """The ids of a turn in the history are read as the calls that it was made of."""
    arguments = '{"text": "a </P> b\\n", "n": 12345678901234567890, "list": [1.50, "x"], "é": null}'
    calls = (ToolCall(id="1", name="f", arguments=arguments), ToolCall(id="2", name="g", arguments="{}"))
    turns = (_say("user", "q"), _say("assistant", "ok", tool_calls=calls), _say("user", "v"))
    history = recipe.render(Conversation(messages=turns, tools=(TOOL,), effort="none"))
    begin = len(prompt.ids)
    assert history.ids[:begin] == prompt.ids
    answer = read(recipe, prompt, history.ids[begin : history.ids.index(1, begin)])
    assert answer.text == "ok"
    assert [json.loads(call.arguments) for call in answer.calls] == [json.loads(call.arguments) for call in calls]
    assert '"n": 12345678901234567890, "list": [1.50, "x"]' in answer.calls[0].arguments


def test_an_answer_in_an_opened_block_begins_with_a_call(recipe: DeepSeek, write: Write) -> None:
    choice = ToolChoice(mode="required")
    forced = recipe.render(
        Conversation(messages=(_say("user", "q"),), tools=(TOOL,), tool_choice=choice, effort="none")
    )
    answer = read(recipe, forced, write('⟨I name="f"⟩\n⟨P name="a" string="true"⟩x⟨/P⟩\n⟨/I⟩\n⟨/C⟩'))
    assert (answer.text, answer.calls[0].name, answer.calls[0].arguments) == ("", "f", '{"a": "x"}')


def test_markers_spelled_by_other_tokens_are_text(recipe: DeepSeek, prompt: Prompt) -> None:
    typed = 'a </think> <｜DSML｜tool_calls>\n<｜DSML｜invoke name="f">'
    answer = read(recipe, prompt, recipe.tokenizer.encode(typed))
    assert (answer.text, answer.calls) == (typed, [])
    thought = read(recipe, thinking(prompt), recipe.tokenizer.encode("a </think> b"))
    assert (thought.reasoning, thought.text) == ("a </think> b", "")


def test_a_block_is_text_where_no_tools_were_declared(recipe: DeepSeek, write: Write, version: Any) -> None:
    plain = recipe.render(Conversation(messages=(_say("user", "q"),), effort="none"))
    answer = read(recipe, plain, write(BLOCK))
    assert answer.calls == []
    assert answer.text.endswith(f"</｜DSML｜{DIALECTS[version].calls}>")


def test_a_parameter_that_is_no_json_becomes_a_string(recipe: DeepSeek, prompt: Prompt, write: Write) -> None:
    """The reference writes invalid JSON there."""
    answer = read(recipe, prompt, write('⟨C⟩\n⟨I name="f"⟩\n⟨P name="n" string="false"⟩not json⟨/P⟩\n⟨/I⟩\n⟨/C⟩'))
    assert json.loads(answer.calls[0].arguments) == {"n": "not json"}


def test_a_call_cut_by_the_limit_does_not_end(recipe: DeepSeek, prompt: Prompt, write: Write) -> None:
    answer = read(recipe, prompt, write('⟨C⟩\n⟨I name="f"⟩\n⟨P name="a" string="true"⟩half of'), "length")
    assert [(call.arguments, call.ended) for call in answer.calls] == [('{"a": "half of', False)]


def test_fact_1_9_tokens_of_half_a_character_are_counted(recipe: DeepSeek, prompt: Prompt) -> None:
    """Every id's logprobs arrive, also where its bytes make no character: usage is counted by the engine, by id."""
    ids = recipe.tokenizer.encode("I 🤷🏽‍♀️日")[:-1]
    parser = recipe.parser(prompt)
    probs = [TokenLogprobs(token, recipe.tokenizer.token_bytes(token), -1.0) for token in ids]
    said = [*parser.feed(ids, probs), *parser.finish("length")]
    assert [entry.token for event in said if isinstance(event, TextDelta) for entry in event.tokens] == ids


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cuts=st.lists(st.integers(0, 400), max_size=8))
def test_fact_4_11_events_do_not_depend_on_how_the_stream_is_cut(
    recipe: DeepSeek, prompt: Prompt, write: Write, cuts: list[int]
) -> None:
    ids = write(f"Hm.⟨/think⟩{BLOCK}")
    parser = recipe.parser(thinking(prompt))
    points = sorted({0, *(cut % len(ids) for cut in cuts), len(ids)})
    cut = [event for a, b in pairwise(points) for event in parser.feed(ids[a:b])]
    assert joined([*cut, *parser.finish("stop")]) == joined(events(recipe, thinking(prompt), ids))


def joined(said: Sequence[Event]) -> list[Event]:
    """Neighbouring pieces of text, and of one call's arguments, together."""
    result: list[Event] = []
    for event in merged(said):
        last = result[-1] if result else None
        if isinstance(event, ToolArgumentsDelta) and isinstance(last, ToolArgumentsDelta):
            result[-1] = replace(last, arguments=last.arguments + event.arguments)
        else:
            result.append(event)
    return result


def test_fact_4_12_no_part_of_a_closing_tag_leaks_into_a_value(recipe: DeepSeek, prompt: Prompt, write: Write) -> None:
    for value in ("ls 2>&1", "ls 2 <", "a </", "<<<", "x\n"):
        answer = read(recipe, prompt, write(f'⟨C⟩\n⟨I name="f"⟩\n⟨P name="a" string="true"⟩{value}⟨/P⟩\n⟨/I⟩\n⟨/C⟩'))
        assert json.loads(answer.calls[0].arguments) == {"a": value}


def test_fact_4_13_a_long_string_is_streamed_as_it_comes(recipe: DeepSeek, prompt: Prompt, write: Write) -> None:
    parser = recipe.parser(prompt)
    opened = parser.feed(write('⟨C⟩\n⟨I name="f"⟩\n⟨P name="a" string="true"⟩'))
    story = 'a long story about "quotes"\nand lines ' * 9
    said = [parser.feed([token]) for token in recipe.tokenizer.encode(story)]
    assert sum(map(len, said)) > len(said) * 0.9
    pieces = [event for some in (opened, *said) for event in some if isinstance(event, ToolArgumentsDelta)]
    written = "".join(piece.arguments for piece in pieces)
    assert json.loads(written + '"}')["a"].startswith(story[:-20])


def test_fact_4_14_answers_have_parsers_of_their_own(recipe: DeepSeek, prompt: Prompt, write: Write) -> None:
    ids = write(BLOCK)
    parsers = [recipe.parser(prompt, choice) for choice in range(2)]
    said: list[list[Event]] = [[], []]
    for token in ids:
        for choice, parser in enumerate(parsers):
            said[choice] += parser.feed([token])
    for choice, parser in enumerate(parsers):
        said[choice] += parser.finish("stop")
        assert {event.choice for event in said[choice]} == {choice}
    assert answer_of(said[0]) == answer_of(said[1])
    assert len(answer_of(said[0]).calls) == 2


def test_fact_4_15_a_call_drafted_inside_the_reasoning_is_none(
    recipe: DeepSeek, prompt: Prompt, write: Write, version: Any
) -> None:
    """Reasoning first: the reference ends the reasoning there and executes the draft."""
    answer = read(recipe, thinking(prompt), write(f"maybe {BLOCK} or not⟨/think⟩No."))
    assert (answer.calls, answer.text) == ([], "No.")
    assert answer.reasoning.startswith("maybe Let me\n\n<｜DSML｜" + DIALECTS[version].calls + ">")
    assert answer.reasoning.endswith(" or not")


def test_fact_4_16_a_closing_marker_nobody_asked_for_is_no_text(recipe: DeepSeek, prompt: Prompt, write: Write) -> None:
    assert read(recipe, prompt, write("⟨/think⟩Yes.")).text == "Yes."


def test_fact_4_19_no_syllable_is_lost(recipe: DeepSeek, prompt: Prompt) -> None:
    text = "안녕하세요, 뷁쀍 한국어 문장을 조금씩 보냅니다. 🤷🏽‍♀️" * 5
    assert read(recipe, prompt, recipe.tokenizer.encode(text)).text == text
