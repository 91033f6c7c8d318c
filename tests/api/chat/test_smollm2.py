"""SmolLM2 behind the official client: calls that are demanded, schemas that hold, and usage that adds up."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from openai import OpenAI
from openai.lib.streaming.chat import ChatCompletionStreamState
from openai.types.chat import ChatCompletion
from pydantic import BaseModel

from deepinfra.engine import Engine, Pool
from deepinfra.executors.torch import TorchExecutor
from deepinfra.recipes import ChatTemplate
from deepinfra.schedulers import Bucketed
from deepinfra.testing.served import Served

pytestmark = pytest.mark.slow

PARAMETERS = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 12},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "get_forecast", "parameters": PARAMETERS, "strict": True}},
    {"type": "function", "function": {"name": "get_time", "parameters": {"type": "object", "properties": {}}}},
]
ASK: dict[str, Any] = {
    "model": "smollm2",
    "messages": [{"role": "user", "content": "What is the weather in Paris for the next 3 days?"}],
    "temperature": 0,
    "max_completion_tokens": 160,
}


@pytest.fixture(scope="module")
def client(smollm2_path: Path) -> Iterator[OpenAI]:
    model = str(smollm2_path)
    engine = Engine(ChatTemplate(model), Pool(Bucketed(), TorchExecutor(model)), name="smollm2")
    with Served(engine) as served:
        with OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0, timeout=120) as client:
            yield client


def streamed(client: OpenAI, asked: dict[str, Any]) -> Any:
    """The answer that the client puts together from a stream, with its usage."""
    state = ChatCompletionStreamState()
    for chunk in client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}):
        state.handle_chunk(chunk)
    return state.current_completion_snapshot


def calls_of(answer: Any) -> list[tuple[str, str]]:
    return [(call.function.name, call.function.arguments) for call in answer.choices[0].message.tool_calls or ()]


@pytest.mark.parametrize(
    ("choice", "finish"),
    [
        ("required", "tool_calls"),
        ({"type": "function", "function": {"name": "get_forecast"}}, "stop"),
    ],
    ids=["required", "named"],
)
def test_a_demanded_call_has_arguments_that_hold_its_schema(client: OpenAI, choice: Any, finish: str) -> None:
    asked = {**ASK, "tools": TOOLS, "tool_choice": choice}
    whole = client.chat.completions.create(**asked)
    assert isinstance(whole, ChatCompletion)
    assert whole.choices[0].finish_reason == finish
    calls = calls_of(whole)
    assert calls
    for name, arguments in calls:
        schema = next(tool["function"]["parameters"] for tool in TOOLS if tool["function"]["name"] == name)
        jsonschema.validate(json.loads(arguments), schema)
    if finish == "stop":
        assert {name for name, _ in calls} == {"get_forecast"}
    assert calls_of(streamed(client, asked)) == calls


def test_one_call_at_a_time_is_one_call(client: OpenAI) -> None:
    answer = client.chat.completions.create(**ASK, tools=TOOLS, tool_choice="required", parallel_tool_calls=False)
    assert len(calls_of(answer)) == 1


def test_a_call_and_its_answer_go_round(client: OpenAI) -> None:
    called = (
        client.chat.completions.create(
            **ASK, tools=TOOLS, tool_choice={"type": "function", "function": {"name": "get_forecast"}}
        )
        .choices[0]
        .message
    )
    results = [
        {"role": "tool", "tool_call_id": call.id, "content": "Sunny, 20 C on all days."}
        for call in called.tool_calls or ()
    ]
    history = [*ASK["messages"], called.model_dump(exclude_none=True), *results]
    answer = client.chat.completions.create(**{**ASK, "messages": history}, tools=TOOLS, tool_choice="none")
    assert answer.choices[0].message.content
    assert not answer.choices[0].message.tool_calls


SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 16},
        "population": {"type": "integer", "minimum": 0, "maximum": 99999999},
        "tags": {"type": "array", "items": {"enum": ["city", "capital", "river"]}, "maxItems": 3},
    },
    "required": ["name", "population", "tags"],
    "additionalProperties": False,
}


def test_a_schema_holds_streamed_and_whole(client: OpenAI) -> None:
    asked = {
        **ASK,
        "messages": [{"role": "user", "content": "Describe Paris."}],
        "response_format": {"type": "json_schema", "json_schema": {"name": "city", "schema": SCHEMA, "strict": True}},
    }
    whole, stream = client.chat.completions.create(**asked), streamed(client, asked)
    assert isinstance(whole, ChatCompletion)
    assert whole.choices[0].finish_reason == "stop"
    assert whole.choices[0].message.content == stream.choices[0].message.content
    jsonschema.validate(json.loads(whole.choices[0].message.content or ""), SCHEMA)


class City(BaseModel):
    """What the client is to parse."""

    name: str
    capital: bool


def test_the_clients_own_parser_gets_an_object(client: OpenAI) -> None:
    parsed = client.chat.completions.parse(**ASK, response_format=City)
    choice = parsed.choices[0]
    assert choice.finish_reason == "stop"
    assert isinstance(choice.message.parsed, City)


def test_a_json_object_is_one(client: OpenAI) -> None:
    messages = [{"role": "user", "content": "Give me a short JSON object with a name."}]
    answer = client.chat.completions.create(
        **{**ASK, "messages": messages, "max_completion_tokens": 400}, response_format={"type": "json_object"}
    )
    choice = answer.choices[0]
    assert choice.finish_reason in ("stop", "length")
    if choice.finish_reason == "stop":
        assert isinstance(json.loads(choice.message.content or ""), dict)
    else:
        with pytest.raises(ValueError):
            json.loads(choice.message.content or "")


def test_usage_adds_up_over_turns(client: OpenAI) -> None:
    history: list[Any] = []
    before = 0
    for question in ("Name a river in France, please.", "And one in Spain?", "Which is longer?"):
        history.append({"role": "user", "content": question})
        asked = {**ASK, "messages": history, "max_completion_tokens": 24}
        whole, stream = client.chat.completions.create(**asked), streamed(client, asked)
        for answer in (whole, stream):
            usage = answer.usage
            assert usage is not None
            assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
            assert usage.prompt_tokens_details is not None
            cached = usage.prompt_tokens_details.cached_tokens or 0
            written = usage.prompt_tokens_details.cache_write_tokens or 0
            assert cached + written <= usage.prompt_tokens
            assert usage.model_extra is not None
            assert usage.model_extra["prompt_cache_hit_tokens"] == cached
            assert usage.model_extra["prompt_cache_miss_tokens"] == usage.prompt_tokens - cached
        assert whole.usage is not None
        assert stream.usage is not None
        assert whole.usage.completion_tokens == stream.usage.completion_tokens
        assert whole.usage.prompt_tokens == stream.usage.prompt_tokens > before
        before = whole.usage.prompt_tokens
        assert ((stream.usage.prompt_tokens_details and stream.usage.prompt_tokens_details.cached_tokens) or 0) > 0
        history.append({"role": "assistant", "content": whole.choices[0].message.content})
