"""Reasoning and parallel calls end to end: recorded ids of DeepSeek's format, its recipe, the official client."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from openai import OpenAI

EOS = 1
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
WEATHER: dict[str, Any] = {
    "type": "function",
    "name": "get_weather",
    "description": "Weather of a city",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
    "strict": False,
}
ASKED: dict[str, Any] = {"model": "m", "tools": [WEATHER]}
QUESTION: list[Any] = [{"role": "user", "content": "Weather in Paris and Rome?"}]


class Model:
    """DeepSeek V4's recipe over recorded answers, served."""

    def __init__(self, client: OpenAI, speaker: Any) -> None:
        self.client, self._speaker = client, speaker

    def says(self, *texts: str) -> tuple[int, ...]:
        """What it will answer, markers as the control tokens they are; the first answer's ids."""
        ids: tuple[int, ...] = self._speaker.says(*texts)[0]
        return ids

    @property
    def prompts(self) -> list[tuple[int, ...]]:
        """What it was asked since then."""
        prompts: list[tuple[int, ...]] = self._speaker.prompts
        return prompts


@pytest.fixture
def model(speaker_of: Callable[[Any], Any]) -> Iterator[Model]:
    speaker = speaker_of("dsml")
    with OpenAI(base_url=f"{speaker.url}/v1", api_key="none", max_retries=0, timeout=30) as client:
        yield Model(client, speaker)


def plain(response: Any) -> list[dict[str, Any]]:
    """Output without the ids, which differ from response to response."""
    return [item.model_dump(exclude={"id", "call_id"}, exclude_none=True) for item in response.output]


def test_reasoning_is_an_item_before_the_message(model: Model) -> None:
    said = f"{THOUGHT}</think>It rains."
    answer = model.says(said, said)
    whole = model.client.responses.create(**ASKED, input=QUESTION)
    with model.client.responses.stream(**ASKED, input=QUESTION) as stream:
        thought = [event.delta for event in stream if event.type == "response.reasoning_text.delta"]
        streamed = stream.get_final_response()
    assert plain(whole) == plain(streamed)
    reasoning, message = whole.output
    assert reasoning.type == "reasoning"
    assert reasoning.content is not None
    assert reasoning.content[0].text == "".join(thought) == THOUGHT
    assert reasoning.summary == []
    assert message.type == "message"
    assert whole.output_text == "It rains."
    assert whole.usage is not None
    details = whole.usage.output_tokens_details
    assert 0 < details.reasoning_tokens <= answer.index(128822) + 1 < whole.usage.output_tokens


def test_parallel_calls_are_items_whose_arguments_are_what_the_model_wrote(model: Model) -> None:
    said = f"{THOUGHT}</think>Let me look.{CALLS}"
    model.says(said, said)
    whole = model.client.responses.create(**ASKED, input=QUESTION)
    with model.client.responses.stream(**ASKED, input=QUESTION) as stream:
        events = list(stream)
        streamed = stream.get_final_response()
    assert [item.type for item in whole.output] == ["reasoning", "message", "function_call", "function_call"]
    assert plain(whole) == plain(streamed)
    assert whole.status == streamed.status == "completed"
    calls = [item for item in whole.output if item.type == "function_call"]
    assert [json.loads(call.arguments) for call in calls] == [{"city": 'Paris "é"', "days": HUGE}, {"city": "Rome"}]
    assert len({call.call_id for call in calls} | {call.id for call in calls}) == 4
    pieces = [event for event in events if event.type == "response.function_call_arguments.delta"]
    assert len(pieces) > 4
    done = [event.arguments for event in events if event.type == "response.function_call_arguments.done"]
    assert done == [call.arguments for call in calls]


@pytest.mark.parametrize("by_id", [False, True])
def test_the_next_turn_of_a_tool_loop_extends_the_tokens_of_the_last(model: Model, by_id: bool) -> None:
    answer = model.says(f"{THOUGHT}</think>Let me look.{CALLS}", "</think>It rains in both.")
    first = model.client.responses.create(**ASKED, input=QUESTION, include=["reasoning.encrypted_content"])
    outputs: list[Any] = [
        {"type": "function_call_output", "call_id": item.call_id, "output": "rain"}
        for item in first.output
        if item.type == "function_call"
    ]
    if by_id:
        last = model.client.responses.create(**ASKED, input=outputs, previous_response_id=first.id)
    else:
        kept: list[Any] = [item.model_dump() for item in first.output]
        kept[0]["content"] = None  # as clients do that trust `encrypted_content` alone
        last = model.client.responses.create(**ASKED, input=[*QUESTION, *kept, *outputs], store=False)
    assert last.output_text == "It rains in both."
    before, after = model.prompts
    assert after[: len(before) + len(answer) + 1] == (*before, *answer, EOS)
    assert last.usage is not None
    assert last.usage.input_tokens == len(after)
    assert last.usage.input_tokens_details.cached_tokens > len(before) - 16


@pytest.mark.parametrize("kept", range(21, 60, 3))
def test_a_call_that_was_cut_is_told_as_far_as_it_goes(model: Model, kept: int) -> None:
    said = f"</think>{CALLS}"
    model.says(said, said)
    whole = model.client.responses.create(**ASKED, input=QUESTION, max_output_tokens=kept)
    events = list(model.client.responses.create(**ASKED, input=QUESTION, max_output_tokens=kept, stream=True))
    assert events[-1].type == "response.incomplete"
    assert plain(events[-1].response) == plain(whole)
    assert whole.usage is not None
    assert whole.usage.output_tokens == kept
    assert {item.type for item in whole.output} == {"function_call"}
    assert [item.status for item in whole.output] == ["completed"] * (len(whole.output) - 1) + ["incomplete"]  # type: ignore[union-attr]


ALLOWED = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "get_weather"}]}


@pytest.mark.parametrize("choice", ["required", ALLOWED])
@pytest.mark.parametrize("effort", ["none", "high"])
def test_calls_can_be_demanded_and_be_several(model: Model, choice: Any, effort: Any) -> None:
    opened = "\n\n<｜DSML｜tool_calls>\n"  # by the prompt, if there is nothing to think
    model.says(CALLS.removeprefix(opened) if effort == "none" else f"{THOUGHT}</think>{CALLS}")
    answer = model.client.responses.create(**ASKED, input=QUESTION, tool_choice=choice, reasoning={"effort": effort})
    assert [item.type for item in answer.output][-2:] == ["function_call", "function_call"]
    assert answer.status == "completed"
