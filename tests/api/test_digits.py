"""Numbers that a client wrote stay as it wrote them, wherever they come out again."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import httpx2
import pytest

from deepinfra.api.body import parse_object
from deepinfra.api.chat.request import CHAT
from deepinfra.api.messages.request import MESSAGES
from deepinfra.api.protocol import Received
from deepinfra.core.conversation import Conversation

NUMBERS = '{"price": 12.50, "rate": 1e-5, "big": 1E300, "n": 12345678901234567890, "plain": 0.5, "in": [1.0, -0.0]}'
SCHEMA = '{"type": "object", "properties": {"x": {"type": "number", "minimum": 0.10, "maximum": 1e5}}}'


def conversation(protocol: Any, body: str) -> Conversation:
    received = Received(headers={}, now="2026-01-02", max_choices=1)
    (request,) = protocol.parse(parse_object(body.encode()), received).requests
    assert isinstance(request.input, Conversation)
    return request.input


def messages_body(**more: str) -> str:
    fields = {
        "model": '"m"',
        "max_tokens": "2000",
        "messages": '[{"role": "user", "content": "q"}, {"role": "assistant", "content": '
        f'[{{"type": "tool_use", "id": "t", "name": "f", "input": {NUMBERS}}}]}}, '
        '{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": "r"}]}]',
        **more,
    }
    return "{" + ", ".join(f'"{name}": {value}' for name, value in fields.items()) + "}"


def test_a_calls_input_is_the_text_that_the_model_wrote() -> None:
    _, asked, _ = conversation(MESSAGES, messages_body()).messages
    assert asked.tool_calls[0].arguments == NUMBERS


def test_a_schema_is_demanded_with_the_digits_it_was_written_in() -> None:
    form = f'{{"format": {{"type": "json_schema", "schema": {SCHEMA}}}}}'
    wanted = conversation(MESSAGES, messages_body(output_config=form))
    assert wanted.constraint is not None
    assert wanted.constraint.source == SCHEMA
    body = (
        '{"model": "m", "messages": [{"role": "user", "content": "q"}], "response_format": '
        f'{{"type": "json_schema", "json_schema": {{"name": "s", "schema": {SCHEMA}}}}}}}'
    )
    asked = conversation(CHAT, body).constraint
    assert asked is not None
    assert asked.source == SCHEMA


@pytest.mark.parametrize("number", ["0.70", "7e-1", "0.7"])
def test_a_field_that_is_a_number_is_a_plain_float(number: str) -> None:
    received = Received(headers={}, now="2026-01-02", max_choices=1)
    numbers = f'"temperature": {number}, "logit_bias": {{"5": 1.50}}'
    body = f'{{"model": "m", "messages": [{{"role": "user", "content": "q"}}], {numbers}}}'
    (request,) = CHAT.parse(parse_object(body.encode()), received).requests
    assert (type(request.sampling.temperature), request.sampling.temperature) == (float, 0.7)
    assert [(type(bias), bias) for _, bias in request.sampling.logit_bias] == [(float, 1.5)]


def test_the_prompts_of_all_protocols_have_the_same_digits(speaker_of: Callable[[Any], Any]) -> None:
    speaker = speaker_of("hermes")
    call = {"id": "t", "type": "function", "function": {"name": "f", "arguments": NUMBERS}}
    calls = {
        "/v1/messages": messages_body(),
        "/v1/chat/completions": json.dumps(
            {
                "model": "m",
                "messages": [
                    {"role": "user", "content": "q"},
                    {"role": "assistant", "tool_calls": [call]},
                    {"role": "tool", "tool_call_id": "t", "content": "r"},
                ],
            }
        ),
        "/v1/responses": json.dumps(
            {
                "model": "m",
                "input": [
                    {"role": "user", "content": "q"},
                    {"type": "function_call", "call_id": "t", "name": "f", "arguments": NUMBERS},
                    {"type": "function_call_output", "call_id": "t", "output": "r"},
                ],
            }
        ),
    }
    asked = []
    for path, body in calls.items():
        speaker.says(speaker.record.text)
        answer = httpx2.post(f"{speaker.url}{path}", content=body, timeout=60)
        assert answer.status_code == 200, answer.text
        asked.append(speaker.asked())
    assert NUMBERS in asked[0]
    assert len(set(asked)) == 1


TOOL = f'{{"type": "function", "name": "f", "parameters": {SCHEMA}}}'


@pytest.mark.parametrize("stream", ["false", "true"])
def test_what_a_response_repeats_keeps_its_digits(speaker_of: Callable[[Any], Any], stream: str) -> None:
    speaker = speaker_of("hermes")
    speaker.says(speaker.record.text)
    body = (
        f'{{"model": "m", "tools": [{TOOL}], "stream": {stream}, "input": [{{"role": "user", "content": "q"}}, '
        '{"role": "assistant", "content": [{"type": "output_text", "text": "a", "annotations": [], "logprobs": '
        '[{"token": "a", "logprob": -1.50, "bytes": [97], "top_logprobs": []}]}]}, {"role": "user", "content": "q"}]}'
    )
    answer = httpx2.post(f"{speaker.url}/v1/responses", content=body, timeout=60)
    assert answer.status_code == 200, answer.text
    assert '"minimum":0.10,"maximum":1e5' in answer.text
