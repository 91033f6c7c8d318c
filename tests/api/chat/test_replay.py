"""Reasoning and parallel calls through the official client: three models' own syntaxes, replayed as token ids."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
from openai import OpenAI
from openai.lib.streaming.chat import ChatCompletionStreamState
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from deepinfra.testing.recorded import BIG, CITY, FAMILIES

WEATHER = {"city": {"type": "string"}, "n": {"type": "integer"}}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object", "properties": WEATHER}}},
    {"type": "function", "function": {"name": "get_time", "parameters": {"type": "object", "properties": {}}}},
]
QUESTION: Any = {"role": "user", "content": "Weather and time in Paris?"}


class Model(NamedTuple):
    """A server whose next answers are known."""

    client: OpenAI
    speaker: Any
    extra: dict[str, Any]

    @property
    def calls(self) -> str:
        """An answer with reasoning, text and two calls."""
        text: str = self.speaker.record.calls
        return text

    @property
    def text(self) -> str:
        """An answer with reasoning and text."""
        text: str = self.speaker.record.text
        return text

    def says(self, *texts: str) -> list[tuple[int, ...]]:
        """What it answers next, and the ids of that."""
        ids: list[tuple[int, ...]] = self.speaker.says(*texts)
        return ids

    def asked(self, **fields: Any) -> dict[str, Any]:
        """A question with tools."""
        return {"model": "m", "messages": [QUESTION], "tools": TOOLS, "extra_body": self.extra, **fields}

    def ask(self, **fields: Any) -> ChatCompletion:
        """One question with tools, answered whole."""
        answer = self.client.chat.completions.create(**self.asked(**fields))
        assert isinstance(answer, ChatCompletion)
        return answer

    def stream(self, **fields: Any) -> list[ChatCompletionChunk]:
        """The same, streamed with usage."""
        asked = self.asked(**fields)
        asked |= {"stream": True, "stream_options": {"include_usage": True}}
        return list(self.client.chat.completions.create(**asked))


@pytest.fixture(params=FAMILIES)
def model(request: pytest.FixtureRequest, speaker_of: Callable[[Any], Any]) -> Iterator[Model]:
    speaker = speaker_of(request.param)
    extra = {"chat_template_kwargs": {"enable_thinking": True}} if request.param == "hermes" else {}
    with OpenAI(base_url=f"{speaker.url}/v1", api_key="none", max_retries=0, timeout=30) as client:
        yield Model(client, speaker, extra)


def calls_of(answer: Any) -> list[tuple[str, str]]:
    return [(call.function.name, call.function.arguments) for call in answer.tool_calls or ()]


def test_reasoning_text_and_parallel_calls_arrive_whole(model: Model) -> None:
    (ids,) = model.says(model.calls)
    answer = model.ask()
    (choice,) = answer.choices
    message = choice.message
    assert choice.finish_reason == "tool_calls"
    assert message.content == "Let me check."
    assert message.model_extra is not None
    assert message.model_extra["reasoning_content"] == "I should look."
    (weather, arguments), time = calls_of(message)
    assert weather == "get_weather"
    assert json.loads(arguments) == {"city": CITY, "n": int(BIG)}
    assert BIG in arguments
    assert time == ("get_time", "{}")
    first, second = (call.id for call in message.tool_calls or ())
    assert first.startswith("call_")
    assert first != second
    assert answer.usage is not None
    ended = model.calls.endswith("<|call|>")  # by itself; else the end token follows
    assert answer.usage.completion_tokens == len(ids) + (not ended)


def test_the_clients_own_state_makes_of_the_stream_what_the_whole_is(model: Model) -> None:
    model.says(model.calls, model.calls)
    whole = model.ask().choices[0].message
    state = ChatCompletionStreamState()
    for chunk in model.stream():
        state.handle_chunk(chunk)
    streamed = state.get_final_completion().choices[0]
    assert streamed.finish_reason == "tool_calls"
    assert streamed.message.content == whole.content
    assert streamed.message.model_extra is not None
    assert whole.model_extra is not None
    assert streamed.message.model_extra["reasoning_content"] == whole.model_extra["reasoning_content"]
    assert calls_of(streamed.message) == calls_of(whole)


def test_id_and_name_come_once_and_arguments_in_pieces_that_are_json(model: Model) -> None:
    model.says(model.calls)
    deltas = [call for chunk in model.stream() for c in chunk.choices for call in c.delta.tool_calls or ()]
    for index in (0, 1):
        first, *rest = [delta for delta in deltas if delta.index == index]
        assert first.id
        assert first.type == "function"
        assert first.function is not None
        assert first.function.name == ("get_weather", "get_time")[index]
        assert all(delta.id is None and delta.type is None for delta in rest)
        assert all(delta.function is not None and delta.function.name is None for delta in rest)
        pieces = [delta.function.arguments or "" for delta in (first, *rest) if delta.function]
        json.loads("".join(pieces))


def test_call_ids_differ_between_answers(model: Model) -> None:
    model.says(model.calls, model.calls)
    messages = [model.ask().choices[0].message for _ in range(2)]
    ids = [call.id for message in messages for call in message.tool_calls or ()]
    assert len(set(ids)) == 4


def test_usage_adds_up_and_is_the_same_streamed(model: Model) -> None:
    question = {"role": "user", "content": "again " * 40}
    model.says(model.calls, model.calls)
    first = model.ask(messages=[question]).usage
    *_, last = model.stream(messages=[question])
    second = last.usage
    prompt = len(model.speaker.prompts[0])
    assert last.choices == []
    for usage in (first, second):
        assert usage is not None
        assert usage.prompt_tokens == prompt
        assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
        assert usage.prompt_tokens_details is not None
        assert usage.completion_tokens_details is not None
        assert 0 < (usage.completion_tokens_details.reasoning_tokens or 0) < usage.completion_tokens
        cached = usage.prompt_tokens_details.cached_tokens or 0
        written = usage.prompt_tokens_details.cache_write_tokens or 0
        assert cached + written <= prompt
        assert usage.model_extra is not None
        assert usage.model_extra["prompt_cache_hit_tokens"] == cached
        assert usage.model_extra["prompt_cache_miss_tokens"] == prompt - cached
    assert first is not None
    assert second is not None
    assert first.completion_tokens == second.completion_tokens
    assert ((second.prompt_tokens_details and second.prompt_tokens_details.cached_tokens) or 0) > 32


def test_an_answer_that_is_cut_within_a_call_says_length_and_keeps_what_there_is(model: Model) -> None:
    (ids,) = model.says(model.calls, model.calls)[:1]
    limit = len(ids) - 30
    answer = model.ask(max_completion_tokens=limit)
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == limit
    *_, last, _ = model.stream(max_completion_tokens=limit)
    assert last.choices[0].finish_reason == "length"


def test_a_tool_loop_goes_round(model: Model) -> None:
    model.says(model.calls, model.text)
    called = model.ask().choices[0].message
    results: list[Any] = [
        {"role": "tool", "tool_call_id": call.id, "content": f"result {index}"}
        for index, call in enumerate(called.tool_calls or ())
    ]
    history = [QUESTION, called.model_dump(exclude_none=True), *results]
    answer = model.ask(messages=history).choices[0]
    assert answer.finish_reason == "stop"
    assert answer.message.content == "Sunny."
    assert answer.message.tool_calls is None
    asked = model.speaker.asked(1)
    assert "result 0" in asked
    assert "result 1" in asked
    assert BIG in asked


def test_a_choice_has_a_parser_of_its_own(model: Model) -> None:
    """Fact 14: parsers that two choices share mix their calls."""
    model.says(model.calls, model.text, model.calls)
    answer = model.ask(n=3)
    assert [choice.finish_reason for choice in answer.choices] == ["tool_calls", "stop", "tool_calls"]
    assert [len(choice.message.tool_calls or ()) for choice in answer.choices] == [2, 0, 2]
    ids = [call.id for choice in answer.choices for call in choice.message.tool_calls or ()]
    assert len(set(ids)) == 4


def test_logprobs_of_reasoning_and_text_are_apart(model: Model) -> None:
    model.says(model.text)
    logprobs = model.ask(logprobs=True, top_logprobs=1).choices[0].logprobs
    assert logprobs is not None
    assert logprobs.model_extra is not None
    assert "".join(entry.token for entry in logprobs.content or ()) == "Sunny."
    assert "".join(entry["token"] for entry in logprobs.model_extra["reasoning_content"]) == "It is noon."
