"""One answer counted in three protocols: the same five numbers, each protocol's own names (facts 3.6)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
from anthropic import Anthropic
from openai import OpenAI

from deepinfra.testing.recorded import FAMILIES

PARAMETERS: Any = {"type": "object", "properties": {"city": {"type": "string"}, "n": {"type": "integer"}}}


class Counts(NamedTuple):
    """Tokens: of the prompt, those of it read from the cache and written to it, of the answer, and its reasoning."""

    prompt: int
    cached: int
    written: int
    output: int
    reasoning: int


def by_chat(url: str, question: str, stream: bool) -> Counts:
    function = {"name": "get_weather", "description": "d", "parameters": PARAMETERS}
    fields: dict[str, Any] = {
        "model": "m",
        "messages": [{"role": "user", "content": question}],
        "tools": [{"type": "function", "function": function}],
        "extra_body": {"thinking": {"type": "enabled"}},
    }
    with OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=30) as client:
        if stream:
            *_, last = client.chat.completions.create(**fields, stream=True, stream_options={"include_usage": True})
            usage: Any = last.usage
        else:
            usage = client.chat.completions.create(**fields).usage
    prompt, output = usage.prompt_tokens_details, usage.completion_tokens_details
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert usage.prompt_cache_hit_tokens == prompt.cached_tokens
    assert usage.prompt_cache_miss_tokens == usage.prompt_tokens - prompt.cached_tokens
    return Counts(
        usage.prompt_tokens,
        prompt.cached_tokens,
        prompt.cache_write_tokens,
        usage.completion_tokens,
        output.reasoning_tokens,
    )


def by_responses(url: str, question: str, stream: bool) -> Counts:
    tool = {"type": "function", "name": "get_weather", "description": "d", "parameters": PARAMETERS, "strict": False}
    fields: dict[str, Any] = {
        "model": "m",
        "input": question,
        "tools": [tool],
        "extra_body": {"reasoning": {"effort": "high"}},
    }
    with OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=30) as client:
        if stream:
            *_, last = client.responses.create(**fields, stream=True)
            usage: Any = last.response.usage
        else:
            usage = client.responses.create(**fields).usage
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens
    return Counts(
        usage.input_tokens,
        usage.input_tokens_details.cached_tokens,
        usage.input_tokens_details.cache_write_tokens,
        usage.output_tokens,
        usage.output_tokens_details.reasoning_tokens,
    )


def by_messages(url: str, question: str, stream: bool) -> Counts:
    fields: dict[str, Any] = {
        "model": "m",
        "max_tokens": 4000,
        "messages": [{"role": "user", "content": question}],
        "tools": [{"name": "get_weather", "description": "d", "input_schema": PARAMETERS}],
        "thinking": {"type": "enabled", "budget_tokens": 1024},
    }
    with Anthropic(base_url=url, api_key="none", max_retries=0, timeout=30) as client:
        if stream:
            with client.messages.stream(**fields) as events:
                usage: Any = events.get_final_message().usage
        else:
            usage = client.messages.create(**fields).usage
    read, written = usage.cache_read_input_tokens, usage.cache_creation_input_tokens
    return Counts(
        usage.input_tokens + read + written,
        read,
        written,
        usage.output_tokens,
        usage.output_tokens_details.thinking_tokens,
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_an_answer_is_counted_alike_in_every_protocol(speaker_of: Callable[[Any], Any], family: str) -> None:
    speaker = speaker_of(family)
    asks = [(ask, stream) for ask in (by_chat, by_responses, by_messages) for stream in (False, True)]
    questions = [f"{number} " + "Weather and time in Paris? " * 20 for number in range(len(asks))]
    ids, *_ = speaker.says(*[speaker.record.calls] * (2 * len(asks) + 1))
    by_chat(speaker.url, "9", False)  # so that all that follow find the same of what stands before the question
    ended = speaker.record.calls.endswith("<|call|>")  # by itself, else the end token follows
    for cached in (False, True):
        counted = [ask(speaker.url, question, stream) for (ask, stream), question in zip(asks, questions, strict=True)]
        (counts,) = set(counted)
        assert counts.prompt == len(speaker.prompts[-1])
        assert counts.output == len(ids) + (not ended)
        assert 0 < counts.reasoning < counts.output
        assert counts.cached + counts.written <= counts.prompt
        assert (counts.cached > counts.prompt - 32, counts.written > 80) == (cached, not cached)
