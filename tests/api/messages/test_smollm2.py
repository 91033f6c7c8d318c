"""SmolLM2 behind Anthropic's client: a conversation, a prefill, a demanded call and its result, a format."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import pytest
from anthropic import Anthropic

from deepinfra.engine import Engine, Pool
from deepinfra.executors.torch import TorchExecutor
from deepinfra.recipes import ChatTemplate
from deepinfra.schedulers import Bucketed
from deepinfra.testing.served import Served

pytestmark = pytest.mark.slow

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 12},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
WEATHER: dict[str, Any] = {"name": "get_weather", "description": "The weather of a city", "input_schema": SCHEMA}
CAPITAL: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def client(smollm2_path: Path) -> Iterator[Anthropic]:
    model = str(smollm2_path)
    engine = Engine(ChatTemplate(model), Pool(Bucketed(), TorchExecutor(model)), name="smollm2")
    with Served(engine) as served:
        with Anthropic(base_url=served.url, api_key="none", max_retries=0, timeout=120) as client:
            yield client


def asked(**fields: Any) -> dict[str, Any]:
    return {"model": "smollm2", "max_tokens": 48, "messages": CAPITAL, "extra_body": {"temperature": 0}, **fields}


def prompt(message: anthropic.types.Message) -> int:
    usage = message.usage
    return usage.input_tokens + (usage.cache_read_input_tokens or 0) + (usage.cache_creation_input_tokens or 0)


def text(message: anthropic.types.Message) -> str:
    return "".join(block.text for block in message.content if block.type == "text")


def test_a_stream_says_what_the_whole_says_and_counts_what_was_counted(client: Anthropic) -> None:
    whole = client.messages.create(**asked(system="Answer in one sentence."))
    with client.messages.stream(**asked(system="Answer in one sentence.")) as stream:
        streamed = stream.get_final_message()
    assert text(whole) == text(streamed)
    assert "Paris" in text(whole)
    counted = client.messages.count_tokens(model="smollm2", messages=CAPITAL, system="Answer in one sentence.")
    assert counted.input_tokens == prompt(whole) == prompt(streamed)


def test_a_prefill_is_continued(client: Anthropic) -> None:
    begun = [*CAPITAL, {"role": "assistant", "content": "The capital of France is the city of"}]
    assert text(client.messages.create(**asked(messages=begun))).startswith(" Paris")


def test_a_demanded_call_matches_its_schema_and_its_result_is_read(client: Anthropic) -> None:
    question: list[Any] = [{"role": "user", "content": "What is the weather in Paris?"}]
    choice = {"type": "tool", "name": "get_weather", "disable_parallel_tool_use": True}
    fields: dict[str, Any] = {"tools": [WEATHER], "tool_choice": choice}
    whole = client.messages.create(**asked(messages=question, **fields))
    with client.messages.stream(**asked(messages=question, **fields)) as stream:
        streamed = stream.get_final_message()
    for message in (whole, streamed):
        assert message.stop_reason == "tool_use", message
        (call,) = message.content
        assert call.type == "tool_use"
        assert call.name == "get_weather"
        assert set(call.input) == {"city", "days"}
        assert 1 <= int(str(call.input["days"])) <= 9
    (call,) = whole.content
    assert call.type == "tool_use"
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "Sunny, 20 degrees"}
    turns = [*question, {"role": "assistant", "content": whole.content}, {"role": "user", "content": [result]}]
    last = client.messages.create(**asked(messages=turns, tools=[WEATHER], tool_choice={"type": "none"}))
    assert last.content
    assert all(block.type == "text" for block in last.content)


def test_an_answer_matches_the_format_that_was_asked_for(client: Anthropic) -> None:
    wanted = {"effort": None, "format": {"type": "json_schema", "schema": SCHEMA}}
    message = client.messages.create(**asked(extra_body={"temperature": 0, "output_config": wanted}))
    assert set(json.loads(text(message))) == {"city", "days"}


def test_leave_to_think_changes_nothing_where_the_model_cannot_and_an_effort_is_refused(client: Anthropic) -> None:
    plain = client.messages.create(**asked(max_tokens=1025, stop_sequences=["Paris"]))
    for thinking in ({"type": "enabled", "budget_tokens": 1024}, {"type": "adaptive"}):
        given = client.messages.create(**asked(thinking=thinking, max_tokens=1025, stop_sequences=["Paris"]))
        assert text(given) == text(plain) != ""
        assert prompt(given) == prompt(plain)
    with pytest.raises(anthropic.BadRequestError, match=r"'output_config\.effort'"):
        client.messages.create(**asked(extra_body={"output_config": {"effort": "high"}}))
