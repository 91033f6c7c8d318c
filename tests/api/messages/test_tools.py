"""Reasoning and tool calls end to end: recorded answers, real recipes, the official client."""

from __future__ import annotations

from typing import Any

import pytest

from deepinfra.testing.recorded import BIG, CITY, FAMILIES

WEATHER: dict[str, Any] = {
    "name": "get_weather",
    "description": "Weather of a city",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
}
ASKED: list[Any] = [{"role": "user", "content": "Weather in Paris?"}]
EOS, END_OF_THINKING = 1, 128822
NAMED = 17
"""Tokens of an answer without reasoning up to the name of its first call."""

HUGE = 12345678901234567890123
THOUGHT = "The user asks about Paris."
CALLS = (
    "\n\n<｜DSML｜tool_calls>\n"
    '<｜DSML｜invoke name="get_weather">\n'
    '<｜DSML｜parameter name="city" string="true">Paris "é"</｜DSML｜parameter>\n'
    f'<｜DSML｜parameter name="days" string="false">{HUGE}</｜DSML｜parameter>\n'
    "</｜DSML｜invoke>\n"
    '<｜DSML｜invoke name="get_weather">\n'
    '<｜DSML｜parameter name="city" string="true">Rome</｜DSML｜parameter>\n'
    "</｜DSML｜invoke>\n"
    "</｜DSML｜tool_calls>"
)


def asked(**fields: Any) -> dict[str, Any]:
    return {"model": "m", "max_tokens": 4000, "messages": ASKED, **fields}


def plain(message: Any) -> list[dict[str, Any]]:
    return [block.model_dump(exclude_none=True, exclude={"id"}) for block in message.content]


def test_reasoning_is_a_thinking_block_before_the_text(model: Any) -> None:
    said = f"{THOUGHT}</think>It rains."
    answer = model.says(said, said)
    whole = model.client.messages.create(**asked())
    with model.client.messages.stream(**asked()) as stream:
        streamed = stream.get_final_message()
    assert plain(whole) == plain(streamed)
    thinking, text = whole.content
    assert (thinking.type, thinking.thinking) == ("thinking", THOUGHT)
    assert (text.type, text.text) == ("text", "It rains.")
    assert thinking.signature
    assert whole.usage.output_tokens_details is not None
    assert whole.usage.output_tokens_details.thinking_tokens == answer.index(END_OF_THINKING)


def test_thinking_can_be_left_unshown_and_still_comes_back(model: Any) -> None:
    answer = model.says(f"{THOUGHT}</think>It rains.", "</think>Yes.")
    fields: dict[str, Any] = {"thinking": {"type": "adaptive", "display": "omitted"}, "tools": [WEATHER]}
    first = model.client.messages.create(**asked(**fields))
    assert first.content[0].type == "thinking"
    assert first.content[0].thinking == ""
    turns = [*ASKED, {"role": "assistant", "content": first.content}, {"role": "user", "content": "Sure?"}]
    model.client.messages.create(**asked(messages=turns, **fields))
    before, after = model.prompts
    assert after[: len(before) + len(answer) + 1] == (*before, *answer, EOS)


def test_calls_are_tool_use_blocks_whose_input_is_what_the_model_wrote(model: Any) -> None:
    said = f"{THOUGHT}</think>Let me look.{CALLS}"
    model.says(said, said)
    raw = model.client.messages.with_raw_response.create(**asked(tools=[WEATHER]))
    with model.client.messages.stream(**asked(tools=[WEATHER])) as stream:
        events = list(stream)
        streamed = stream.get_final_message()
    whole = raw.parse()
    assert [block.type for block in whole.content] == ["thinking", "text", "tool_use", "tool_use"]
    assert plain(whole) == plain(streamed)
    assert whole.stop_reason == streamed.stop_reason == "tool_use"
    calls = [block for block in whole.content if block.type == "tool_use"]
    assert [call.input for call in calls] == [{"city": 'Paris "é"', "days": HUGE}, {"city": "Rome"}]
    assert all(call.id.startswith("toolu_") for call in calls)
    assert calls[0].id != calls[1].id
    assert str(HUGE) in raw.text()
    pieces = [event.partial_json for event in events if event.type == "input_json"]
    assert all(pieces)
    assert len(pieces) > 4


def test_the_next_turn_of_a_tool_loop_extends_the_tokens_of_the_last(model: Any) -> None:
    answer = model.says(f"{THOUGHT}</think>Let me look.{CALLS}", "</think>It rains in both.")
    first = model.client.messages.create(**asked(tools=[WEATHER]))
    results = [
        {"type": "tool_result", "tool_use_id": block.id, "content": "rain"}
        for block in first.content
        if block.type == "tool_use"
    ]
    turns = [*ASKED, {"role": "assistant", "content": first.content}, {"role": "user", "content": results}]
    last = model.client.messages.create(**asked(tools=[WEATHER], messages=turns))
    assert plain(last) == [{"type": "text", "text": "It rains in both."}]
    before, after = model.prompts
    assert after[: len(before) + len(answer) + 1] == (*before, *answer, EOS)
    assert (last.usage.cache_read_input_tokens or 0) > len(before)


@pytest.mark.parametrize("kept", range(3, 40, 3))
def test_a_call_that_was_cut_is_told_as_far_as_it_goes(model: Any, kept: int) -> None:
    said = f"</think>{CALLS}"
    model.says(said, said)
    whole = model.client.messages.create(**asked(tools=[WEATHER], max_tokens=kept))
    with model.client.messages.stream(**asked(tools=[WEATHER], max_tokens=kept)) as stream:
        streamed = stream.get_final_message()
    assert whole.stop_reason == "max_tokens"
    assert plain(whole) == plain(streamed)
    assert whole.usage.output_tokens == kept
    if kept > NAMED:  # before, what may still become the marker of a call is told as text
        (call,) = whole.content
        assert call.type == "tool_use"


# -- three models' own syntaxes -------------------------------------------------------------------

TIME: dict[str, Any] = {"name": "get_time", "input_schema": {"type": "object", "properties": {}}}


THINK: dict[str, Any] = {"thinking": {"type": "enabled", "budget_tokens": 1024}, "tools": [WEATHER, TIME]}


@pytest.fixture(params=FAMILIES)
def any_model(request: pytest.FixtureRequest, model_of: Any) -> Any:
    return model_of(request.param)


def test_every_syntax_becomes_the_same_blocks(any_model: Any) -> None:
    said = any_model.recorded.calls
    any_model.says(said, said)
    whole = any_model.client.messages.create(**asked(**THINK))
    with any_model.client.messages.stream(**asked(**THINK)) as stream:
        streamed = stream.get_final_message()
    assert plain(whole) == plain(streamed)
    assert whole.stop_reason == streamed.stop_reason == "tool_use"
    thinking, text, weather, time = whole.content
    assert (thinking.thinking, text.text) == ("I should look.", "Let me check.")
    assert (weather.name, weather.input) == ("get_weather", {"city": CITY, "n": int(BIG)})
    assert (time.name, time.input) == ("get_time", {})
    assert weather.id.startswith("toolu_")
    assert time.id.startswith("toolu_")


def test_every_syntax_takes_its_own_answer_back(any_model: Any) -> None:
    any_model.says(any_model.recorded.calls, any_model.recorded.text)
    first = any_model.client.messages.create(**asked(**THINK))
    ids = [block.id for block in first.content if block.type == "tool_use"]
    results = [{"type": "tool_result", "tool_use_id": each, "content": "noon"} for each in reversed(ids)]
    turns = [*ASKED, {"role": "assistant", "content": first.content}, {"role": "user", "content": results}]
    counted = any_model.client.messages.count_tokens(model="m", messages=turns, **THINK)
    last = any_model.client.messages.create(**asked(messages=turns, **THINK))
    assert plain(last)[0]["thinking"] == "It is noon."
    assert plain(last)[1:] == [{"type": "text", "text": "Sunny."}]
    assert last.stop_reason == "end_turn"
    assert counted.input_tokens == len(any_model.prompts[1])
