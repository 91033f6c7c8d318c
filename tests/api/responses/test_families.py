"""Reasoning and parallel calls of three models' own syntaxes, replayed as token ids for the official client."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
from openai import OpenAI

from deepinfra.testing.recorded import BIG, CITY, FAMILIES, Recorded

PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}, "n": {"type": "integer"}}}
TOOLS: list[Any] = [
    {"type": "function", "name": "get_weather", "parameters": PARAMETERS, "strict": False},
    {"type": "function", "name": "get_time", "parameters": {"type": "object", "properties": {}}, "strict": False},
]
ASKED: dict[str, Any] = {
    "model": "m",
    "input": "Weather and time in Paris?",
    "tools": TOOLS,
    "reasoning": {"effort": "high"},
}


class Model(NamedTuple):
    """A server whose next answers are known."""

    client: OpenAI
    record: Recorded
    says: Callable[..., Any]


@pytest.fixture(params=FAMILIES)
def model(request: pytest.FixtureRequest, speaker_of: Callable[[Any], Any]) -> Iterator[Model]:
    speaker = speaker_of(request.param)
    with OpenAI(base_url=f"{speaker.url}/v1", api_key="none", max_retries=0, timeout=30) as client:
        yield Model(client, speaker.record, speaker.says)


def plain(response: Any) -> list[dict[str, Any]]:
    """Output without the ids, which differ from response to response."""
    return [item.model_dump(exclude={"id", "call_id"}, exclude_none=True) for item in response.output]


def test_reasoning_text_and_parallel_calls_are_items_in_order(model: Model) -> None:
    model.says(model.record.calls, model.record.calls)
    whole = model.client.responses.create(**ASKED)
    with model.client.responses.stream(**ASKED) as stream:
        events = list(stream)
        streamed = stream.get_final_response()
    assert plain(whole) == plain(streamed)
    reasoning, message, weather, time = whole.output
    assert reasoning.type == "reasoning"
    assert reasoning.content is not None
    assert reasoning.content[0].text == "I should look."
    assert message.type == "message"
    assert whole.output_text == "Let me check."
    assert (weather.type, time.type) == ("function_call", "function_call")
    assert json.loads(weather.arguments) == {"city": CITY, "n": int(BIG)}  # type: ignore[union-attr]
    assert BIG in weather.arguments  # type: ignore[union-attr]
    assert (time.name, time.arguments) == ("get_time", "{}")  # type: ignore[union-attr]
    pieces = [event for event in events if event.type == "response.function_call_arguments.delta"]
    assert len([piece for piece in pieces if piece.output_index == 2]) > 4
    assert whole.usage is not None
    assert 0 < whole.usage.output_tokens_details.reasoning_tokens < whole.usage.output_tokens


def test_the_loop_goes_on_by_id(model: Model) -> None:
    model.says(model.record.calls, model.record.text)
    first = model.client.responses.create(**ASKED)
    outputs = [
        {"type": "function_call_output", "call_id": item.call_id, "output": "fine"}
        for item in first.output
        if item.type == "function_call"
    ]
    assert len(outputs) == 2
    last = model.client.responses.create(**{**ASKED, "input": outputs, "previous_response_id": first.id})
    reasoning, _ = last.output
    assert reasoning.content[0].text == "It is noon."  # type: ignore[union-attr,index]
    assert last.output_text == "Sunny."
    assert last.usage is not None
    assert first.usage is not None
    assert last.usage.input_tokens > first.usage.input_tokens
