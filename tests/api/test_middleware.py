from __future__ import annotations

import logging
import re
from typing import Any

import anyio
import pytest
from starlette.types import Message, Receive, Scope, Send

from deepinfra.api.app import asgi
from deepinfra.engine import Engine
from deepinfra.testing.client import Client

CHAT = "/v1/chat/completions"


async def request_id(client: Client, sent: str | None, path: str = "/health") -> str:
    headers = [] if sent is None else [("x-request-id", sent)]
    async with client.request("GET", path, headers=headers) as response:
        await response.started()
        return response.headers["x-request-id"]


async def test_a_request_gets_an_id_of_its_own(engine: Engine) -> None:
    client = Client(asgi(engine))
    first, second = await request_id(client, None), await request_id(client, None)
    assert re.fullmatch(r"req_[0-9a-f]{32}", first)
    assert first != second


async def test_a_well_formed_id_of_the_client_is_kept(engine: Engine) -> None:
    assert await request_id(Client(asgi(engine)), "trace-1.A_b") == "trace-1.A_b"


@pytest.mark.parametrize("sent", ["", "a b", "x" * 129, "a\r\nset-cookie: b", "ä"])
async def test_an_ill_formed_id_is_replaced(engine: Engine, sent: str) -> None:
    assert (await request_id(Client(asgi(engine)), sent)).startswith("req_")


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "deepinfra.access"]


async def test_the_access_log_counts_tokens_and_tells_no_text(
    kit: Any, engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with engine:
        async with Client(asgi(engine)).request(
            "POST",
            f"{CHAT}?key=hunter2",
            json=kit.chat("my-secret", stream=True),
            headers=[("authorization", "hunter2")],
        ) as response:
            await response.read()
            name = response.headers["x-request-id"]
    (line,) = lines(caplog)
    tokens = r"prompt=12 cached=0 completion=\d+"
    assert re.fullmatch(rf"POST {CHAT} 200 \d+ B [\d.]+ ms id={name} key=- model=toy {tokens}", line)
    assert "hunter2" not in caplog.text
    assert "my-secret" not in caplog.text


async def test_a_client_that_left_is_logged_as_499(kit: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    executor = kit.Gated(shut=True)
    async with kit.build(executor) as engine:
        client = Client(asgi(engine))
        async with client.request("POST", CHAT, json=kit.chat()):
            await kit.until(lambda: executor.steps)
        executor.gate.set()
        async with client.request(
            "POST", CHAT, json=kit.chat(stream=True, max_tokens=200, ignore_eos=True)
        ) as response:
            await anext(response.chunks())
    assert [line.split()[2] for line in lines(caplog)] == ["499", "499"]


@pytest.mark.parametrize("stream", [True, False])
async def test_a_connection_that_uvloop_found_closed_is_a_client_that_left(
    kit: Any, engine: Engine, caplog: pytest.LogCaptureFixture, stream: bool
) -> None:
    caplog.set_level(logging.INFO)
    app = asgi(engine)

    async def reset(scope: Scope, receive: Receive, send: Send) -> None:
        async def closed(message: Message) -> None:
            raise RuntimeError("unable to perform operation on <TCPTransport closed=True>; the handler is closed")

        await app(scope, receive, closed)

    async with engine:
        async with Client(reset).request("POST", CHAT, json=kit.chat(stream=stream)):
            await kit.until(lambda: lines(caplog))
    assert [line.split()[2] for line in lines(caplog)] == ["499"]
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


async def test_a_path_cannot_forge_a_line(engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    await Client(asgi(engine)).get("/a\nPOST /forged 200")
    (line,) = lines(caplog)
    assert "\n" not in line


async def test_an_id_is_one_requests_own_under_load(kit: Any, engine: Engine) -> None:
    async with engine:
        client = Client(asgi(engine))

        async def one(name: str) -> None:
            async with client.request("POST", CHAT, json=kit.chat(), headers=[("x-request-id", name)]) as response:
                await response.started()
                assert response.headers["x-request-id"] == name

        async with anyio.create_task_group() as group:
            for index in range(20):
                group.start_soon(one, f"id-{index}")
