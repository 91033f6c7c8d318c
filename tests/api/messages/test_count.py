"""`count_tokens` counts what the request itself counts, always."""

from __future__ import annotations

from typing import Any

import anthropic
import pytest

from deepinfra.api.app import asgi
from deepinfra.engine import Engine
from deepinfra.testing.client import Client

COUNT = "/v1/messages/count_tokens"
HELLO: list[Any] = [{"role": "user", "content": "hello"}]


def test_random_requests_count_what_they_cost(model: Any, random_request: Any) -> None:
    for seed in range(25):
        body = random_request(seed, "m")
        counted = model.client.post("/v1/messages/count_tokens", body=body, cast_to=anthropic.types.MessageTokensCount)
        model.says("</think>Yes.")
        usage = model.client.post("/v1/messages", body=body, cast_to=anthropic.types.Message).usage
        asked = usage.input_tokens + usage.cache_read_input_tokens + usage.cache_creation_input_tokens
        assert counted.input_tokens == asked == len(model.prompts[0])


def test_the_clients_own_method_counts(model: Any) -> None:
    fields: dict[str, Any] = {"model": "m", "messages": HELLO, "system": "Be brief."}
    plain = model.client.messages.count_tokens(**fields).input_tokens
    schema = {"type": "object", "properties": {}}
    more = model.client.messages.count_tokens(**fields, tools=[{"name": "f", "input_schema": schema}]).input_tokens
    assert more > plain + 100
    thinking = model.client.messages.count_tokens(**fields, thinking={"type": "enabled", "budget_tokens": 100_000})
    assert thinking.input_tokens == plain


def test_what_the_request_would_be_refused_for_is_refused(model: Any) -> None:
    for fields, word in (
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "web_search_20250305"),
        ({"messages": []}, "messages"),
        ({"extra_body": {"nonsense": 1}}, "nonsense"),
    ):
        with pytest.raises(anthropic.BadRequestError, match=word):
            model.client.messages.count_tokens(**{"model": "m", "messages": HELLO, **fields})
    with pytest.raises(anthropic.NotFoundError):
        model.client.messages.count_tokens(model="other", messages=HELLO)


async def test_a_prompt_counts_the_same_with_and_without_max_tokens(engine: Engine) -> None:
    body = {"model": "toy", "messages": [*HELLO, {"role": "assistant", "content": "Well"}]}
    async with engine:
        client = Client(asgi(engine))
        for more in ({}, {"max_tokens": 5}, {"max_tokens": 5, "stream": True, "temperature": 0.5}):
            assert await client.post(COUNT, {**body, **more}) == (200, {"input_tokens": 3 + len("hello") + len("Well")})


async def test_an_engine_that_does_not_run_cannot_count(engine: Engine) -> None:
    status, told = await Client(asgi(engine)).post(COUNT, {"model": "toy", "messages": HELLO})
    assert (status, told["error"]["type"]) == (529, "overloaded_error")
