"""SmolLM2 behind the official client: a conversation that goes on by id, a demanded call, a format."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import pydantic
import pytest
from openai import OpenAI

from deepinfra.engine import Engine, Pool
from deepinfra.executors.torch import TorchExecutor
from deepinfra.recipes import ChatTemplate
from deepinfra.schedulers import Bucketed
from deepinfra.testing.served import Served

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def client(smollm2_path: Path) -> Iterator[OpenAI]:
    model = str(smollm2_path)
    engine = Engine(ChatTemplate(model), Pool(Bucketed(), TorchExecutor(model)), name="smollm2")
    with Served(engine) as served:
        with OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0, timeout=120) as client:
            yield client


def test_three_turns_by_id_are_three_turns_written_out(client: OpenAI) -> None:
    asked: dict[str, Any] = {"model": "smollm2", "temperature": 0, "max_output_tokens": 24}
    by_id, written, previous = [], [], None
    history: list[Any] = []
    for question in ("What is the capital of France?", "And of Italy?", "Which is larger?"):
        answer = client.responses.create(**asked, input=question, previous_response_id=previous)
        previous = answer.id
        history.append({"role": "user", "content": question})
        events = list(client.responses.create(**asked, input=history, stream=True, store=False))
        final = events[-1].response  # type: ignore[union-attr]
        history += final.output
        by_id.append(answer.output_text)
        written.append("".join(event.delta for event in events if event.type == "response.output_text.delta"))
        assert answer.usage is not None
        assert final.usage is not None
        assert answer.usage.input_tokens == final.usage.input_tokens
        assert final.usage.input_tokens_details.cached_tokens > 0
        assert final.usage.total_tokens == final.usage.input_tokens + final.usage.output_tokens
    assert by_id == written
    assert "Paris" in by_id[0]


WEATHER: dict[str, Any] = {
    "type": "function",
    "name": "get_weather",
    "description": "The weather of a city",
    "parameters": {
        "type": "object",
        "properties": {
            "city": {"type": "string", "maxLength": 12},
            "days": {"type": "integer", "minimum": 1, "maximum": 9},
        },
        "required": ["city", "days"],
        "additionalProperties": False,
    },
    "strict": True,
}


def test_a_demanded_call_fits_its_schema_and_the_loop_goes_on(client: OpenAI) -> None:
    asked: dict[str, Any] = {"model": "smollm2", "tools": [WEATHER], "max_output_tokens": 80, "temperature": 0}
    question = "What is the weather in Paris tomorrow?"
    first = client.responses.create(**asked, input=question, tool_choice="required", parallel_tool_calls=False)
    assert first.status == "completed"
    (call,) = first.output
    assert call.type == "function_call"
    arguments = json.loads(call.arguments)
    assert set(arguments) == {"city", "days"}
    assert len(arguments["city"]) <= 12
    assert 1 <= arguments["days"] <= 9
    output: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "rain, 12 degrees"}
    last = client.responses.create(**asked, input=[output], previous_response_id=first.id, tool_choice="none")
    assert last.output_text


def test_a_format_is_held_to(client: OpenAI) -> None:
    class Capital(pydantic.BaseModel):
        city: Annotated[str, pydantic.Field(max_length=20)]

    answer = client.responses.parse(
        model="smollm2",
        input="What is the capital of France?",
        text_format=Capital,
        max_output_tokens=60,
        temperature=0,
    )
    assert answer.status == "completed"
    assert answer.output_parsed is not None
    assert "Paris" in answer.output_parsed.city
