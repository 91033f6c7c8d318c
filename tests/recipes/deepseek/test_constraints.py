"""Answers that are demanded: the grammar of the whole output allows what the format writes, and nothing else."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from deepinfra.core.conversation import (
    Constraint,
    Conversation,
    Message,
    TextPart,
    ToolCall,
    ToolChoice,
    ToolDefinition,
)
from deepinfra.core.ids import SeqId
from deepinfra.core.request import Prompt, SeqSpec
from deepinfra.engine.constraints import Constraints
from deepinfra.interfaces.given import ThreadOffload
from deepinfra.recipes.deepseek.recipe import DeepSeek

Allows = Callable[[Prompt, tuple[int, ...]], Awaitable[bool]]

CITY = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}, "required": ["city"]}
TOOLS = (ToolDefinition(name="weather", parameters=CITY), ToolDefinition(name="time"))
RIGHT = ToolCall(id="1", name="weather", arguments='{"city": "Paris <b> </think>", "days": 2}')
REQUIRED = ToolChoice(mode="required")
QUESTION = (Message(role="user", content=(TextPart("q"),)),)


@cache
def _constraints(recipe: DeepSeek, backend: str) -> Constraints:
    """One for each backend, whose locks it holds; the vocabulary takes seconds."""
    return Constraints(recipe, ThreadOffload(), time_limit_s=60.0)


@pytest.fixture
def allows(recipe: DeepSeek, anyio_backend: str) -> Allows:
    """Whether an answer of these ids is allowed, and its end after them."""

    async def allows(prompt: Prompt, ids: tuple[int, ...]) -> bool:
        (stop,) = prompt.stop_ids
        spec = SeqSpec(
            seq=SeqId(1),
            tokens=prompt.ids,
            prompt_len=len(prompt.ids),
            max_tokens=100,
            seed=1,
            stop_ids=prompt.stop_ids,
            constraint=prompt.constraint,
        )
        matcher = await _constraints(recipe, anyio_backend).matcher(spec)
        assert matcher is not None
        if not all(matcher.take(token) for token in ids):
            return False
        row = matcher.rows((), recipe.tokenizer.vocab_size // 8 + 1)[0]
        return bool(row[stop // 8] >> stop % 8 & 1)

    return allows


@pytest.fixture
def answer(recipe: DeepSeek) -> Callable[..., tuple[int, ...]]:
    """Ids behind a prompt that answer with text, calls or both, as the recipe renders them in the history."""

    def answer(prompt: Prompt, *calls: ToolCall, text: str = "", reasoning: str = "") -> tuple[int, ...]:
        content = (TextPart(text),) if text else ()
        turn = Message(role="assistant", content=content, reasoning=reasoning, tool_calls=calls)
        effort = "low" if prompt.start == "reasoning" else "none"
        shown = recipe.render(Conversation(messages=(*QUESTION, turn), tools=TOOLS, effort=effort)).text
        head = "<｜Assistant｜><think>" if prompt.start == "reasoning" else "<｜Assistant｜></think>"
        said = shown.partition(head)[2].partition("<｜end▁of▁sentence｜>")[0]
        begun = prompt.text.rpartition(head)[2]
        assert said.startswith(begun)
        said = said.removeprefix(begun)
        spans = [
            (at, at + len(token))
            for token in ("</think>", "｜DSML｜")
            for at in range(len(said))
            if said.startswith(token, at) and not said.endswith("<b> ", 0, at)
        ]
        return tuple(recipe.built.vocabulary.encoder.encode(said, sorted(spans))[0])

    return answer


def ask(recipe: DeepSeek, **more: Any) -> Prompt:
    wanted: dict[str, Any] = {"tools": TOOLS, "effort": "none", **more}
    return recipe.render(Conversation(messages=QUESTION, **wanted))


async def test_a_demanded_call_is_one_of_the_tools_offered(
    recipe: DeepSeek, allows: Allows, answer: Callable[..., tuple[int, ...]]
) -> None:
    prompt = ask(recipe, tool_choice=REQUIRED)
    assert await allows(prompt, answer(prompt, RIGHT))
    assert await allows(prompt, answer(prompt, RIGHT, replace(RIGHT, name="time", arguments="{}")))
    assert not await allows(prompt, answer(prompt, replace(RIGHT, name="whether")))
    assert not await allows(prompt, answer(prompt, replace(RIGHT, arguments='{"city": 1}')))
    assert not await allows(prompt, answer(prompt, replace(RIGHT, arguments="{}")))
    assert not await allows(prompt, tuple(recipe.tokenizer.encode("Sunny.")))


async def test_a_call_demanded_by_name_is_of_that_tool(
    recipe: DeepSeek, allows: Allows, answer: Callable[..., tuple[int, ...]]
) -> None:
    prompt = ask(recipe, tool_choice=ToolChoice(mode="required", names=("time",)))
    assert await allows(prompt, answer(prompt, replace(RIGHT, name="time", arguments="{}")))
    assert not await allows(prompt, answer(prompt, RIGHT))


async def test_fact_1_8_a_call_demanded_while_thinking_comes_after_the_reasoning(
    recipe: DeepSeek, allows: Allows, answer: Callable[..., tuple[int, ...]]
) -> None:
    prompt = ask(recipe, tool_choice=REQUIRED, effort="low")
    assert prompt.start == "reasoning"
    assert await allows(prompt, answer(prompt, RIGHT, reasoning="Hm. I need a tool."))
    assert not await allows(prompt, answer(prompt, text="Sunny.", reasoning="Hm."))


async def test_one_call_at_most_is_one_call(
    recipe: DeepSeek, allows: Allows, answer: Callable[..., tuple[int, ...]]
) -> None:
    prompt = ask(recipe, tool_choice=ToolChoice(mode="auto", parallel=False))
    assert await allows(prompt, answer(prompt, text="Sunny."))
    assert await allows(prompt, answer(prompt, RIGHT, text="Let me see."))
    assert not await allows(prompt, answer(prompt, RIGHT, RIGHT, text="Let me see."))


async def test_a_strict_tool_is_called_as_its_schema_says_or_not_at_all(
    recipe: DeepSeek, allows: Allows, answer: Callable[..., tuple[int, ...]]
) -> None:
    strict = replace(TOOLS[0], strict=True, parameters={**CITY, "required": ["city", "days"]})
    prompt = ask(recipe, tools=(strict, TOOLS[1]))
    assert await allows(prompt, answer(prompt, text="Sunny."))
    assert await allows(prompt, answer(prompt, RIGHT))
    assert not await allows(prompt, answer(prompt, replace(RIGHT, arguments='{"city": "Paris"}')))


async def test_an_answer_held_to_a_schema_may_be_thought_about_first(recipe: DeepSeek, allows: Allows) -> None:
    schema = '{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}'
    prompt = ask(recipe, tools=(), effort="low", constraint=Constraint(kind="json_schema", source=schema))
    think = dict(recipe.report().control)["</think>"]
    for said, right in (('{"a": 1}', True), ('{"a": "x"}', False), ("one", False)):
        assert await allows(prompt, (*recipe.tokenizer.encode("Hm."), think, *recipe.tokenizer.encode(said))) == right


def test_nothing_is_constrained_that_nobody_demanded(recipe: DeepSeek) -> None:
    assert ask(recipe).constraint is None
    assert ask(recipe, tools=(), effort="low").constraint is None
