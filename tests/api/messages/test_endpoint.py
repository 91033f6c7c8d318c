"""The endpoint itself, in process, on both backends: statuses, shapes, pings, keys."""

from __future__ import annotations

import json
from typing import Any

import anyio
import pytest

from deepinfra import ApiKey
from deepinfra.api.app import asgi
from deepinfra.engine import Engine
from deepinfra.testing.client import Client

MESSAGES = "/v1/messages"


def body(**fields: Any) -> dict[str, Any]:
    return {"model": "toy", "max_tokens": 8, "messages": [{"role": "user", "content": "hello"}], "seed": 7, **fields}


async def refused(client: Client, method: str, path: str, **sent: Any) -> tuple[int, str, str]:
    """Status, type and message; everything else is the same for every error."""
    async with client.request(method, path, **sent) as response:
        status, told = await response.started(), await response.json()
        assert response.headers["content-type"] == "application/json"
        assert set(told) == {"type", "error", "request_id"}
        assert set(told["error"]) == {"type", "message"}
        assert told["type"] == "error"
        assert told["request_id"] == response.headers["request-id"] == response.headers["x-request-id"]
        return status, told["error"]["type"], told["error"]["message"]


async def test_an_answer_names_its_request(engine: Engine) -> None:
    async with engine:
        async with Client(asgi(engine)).request(
            "POST", MESSAGES, json=body(), headers=[("x-request-id", "trace-7"), ("anthropic-version", "2023-06-01")]
        ) as response:
            assert await response.started() == 200
            assert response.headers["request-id"] == "trace-7"
            assert (await response.json())["type"] == "message"


async def test_errors_from_before_a_request_is_read_have_anthropics_shape(engine: Engine) -> None:
    key = ApiKey.of("sk-ann-0123456789", name="ann", requests_per_minute=1)
    async with engine:
        client = Client(asgi(engine))
        assert (await refused(client, "POST", MESSAGES, body=b"{"))[:2] == (400, "invalid_request_error")
        assert (await refused(client, "GET", MESSAGES))[:2] == (405, "invalid_request_error")
        assert (await refused(client, "POST", f"{MESSAGES}/batches", json={}))[:2] == (404, "not_found_error")
        client = Client(asgi(engine, keys=[key]))
        assert (await refused(client, "POST", MESSAGES, json=body()))[:2] == (401, "authentication_error")
        client = Client(asgi(engine, keys=[key]), headers=[("x-api-key", "sk-ann-0123456789")])
        assert (await client.post(MESSAGES, body()))[0] == 200
        assert (await refused(client, "POST", MESSAGES, json=body()))[:2] == (429, "rate_limit_error")


async def test_a_full_server_is_overloaded(kit: Any) -> None:
    executor = kit.Gated(shut=True)
    engine = kit.build(executor, max_queue=1)
    async with engine:
        client = Client(asgi(engine))
        async with anyio.create_task_group() as group:
            group.start_soon(client.post, MESSAGES, body())
            await kit.until(lambda: executor.steps)
            async with client.request("POST", MESSAGES, json=body(stream=True)) as response:
                assert await response.started() == 529
                assert int(response.headers["retry-after"]) >= 1
                assert (await response.json())["error"]["type"] == "overloaded_error"
            executor.gate.set()
        await kit.settled(engine)


async def test_an_engine_that_does_not_run_is_overloaded(engine: Engine) -> None:
    assert (await refused(Client(asgi(engine)), "POST", MESSAGES, json=body()))[:2] == (529, "overloaded_error")


async def test_a_failure_in_mid_stream_is_the_last_event(kit: Any) -> None:
    engine = kit.build(kit.Gated(fail_at=5))
    async with engine:
        async with Client(asgi(engine)).request("POST", MESSAGES, json=body(stream=True)) as response:
            assert await response.started() == 200
            *_, last = (await response.read()).decode().strip().split("\n\n")
            kind, data = last.split("\n")
    assert kind == "event: error"
    told = json.loads(data.removeprefix("data: "))
    assert (told["type"], told["error"]["type"]) == ("error", "api_error")
    assert told["request_id"] == response.headers["request-id"]


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGVq"}}


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"tools": [{"name": "f", "input_schema": {"type": "object"}}]}, "'tools'"),
        ({"system": "s", "messages": [{"role": "user", "content": [IMAGE]}]}, "content"),
    ],
)
async def test_what_a_models_recipe_cannot_do_is_named(engine: Engine, fields: dict[str, Any], name: str) -> None:
    async with engine:
        status, kind, message = await refused(Client(asgi(engine)), "POST", MESSAGES, json=body(**fields))
    assert (status, kind) == (400, "invalid_request_error")
    assert name in message
