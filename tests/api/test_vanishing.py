"""Clients that vanish: under any middleware, at any moment, their sequence is over."""

from __future__ import annotations

import random
from contextlib import suppress
from typing import Any

import anyio
import anyio.lowlevel
import pytest
from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Receive, Scope, Send

from deepinfra.api.app import asgi
from deepinfra.engine import Engine
from deepinfra.testing.client import Client

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"


async def streamed(client: Client, path: str, body: dict[str, Any]) -> list[Any]:
    async with client.request("POST", path, json={**body, "stream": True}) as response:
        assert await response.started() == 200
        return [event async for event in response.events()]


class Plain:
    """Pure ASGI middleware."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def forward(message: Any) -> None:
            await send(message)

        await self.app(scope, receive, forward)


class Base(BaseHTTPMiddleware):
    async def dispatch(self, request: Request, call_next: Any) -> Any:
        return await call_next(request)


class ReadingBase(BaseHTTPMiddleware):
    async def dispatch(self, request: Request, call_next: Any) -> Any:
        await request.body()
        return await call_next(request)


STACKS = {
    "bare": [],
    "plain": [Middleware(Plain)],
    "gzip": [Middleware(GZipMiddleware, minimum_size=1)],
    "base": [Middleware(Base)],
    "reading": [Middleware(ReadingBase)],
    "all": [Middleware(Base), Middleware(GZipMiddleware, minimum_size=1), Middleware(Plain), Middleware(ReadingBase)],
}


def wrapped(engine: Engine, stack: str) -> ASGIApp:
    app: ASGIApp = asgi(engine)
    for middleware in reversed(STACKS[stack]):
        app = middleware.cls(app, *middleware.args, **middleware.kwargs)
    return app


@pytest.mark.parametrize("send_raises", [False, True], ids=["drops", "raises"])
@pytest.mark.parametrize("stack", STACKS)
async def test_a_stream_that_is_left_ends_its_sequence(kit: Any, stack: str, send_raises: bool) -> None:
    engine = kit.build(kit.Gated(num_blocks=2048))
    async with engine:
        client = Client(wrapped(engine, stack), send_raises=send_raises)
        async with client.request(
            "POST", CHAT, json=kit.chat(stream=True, max_tokens=4000, ignore_eos=True)
        ) as response:
            chunks = response.chunks()
            for _ in range(3):
                await anext(chunks)
        await kit.settled(engine)
        assert engine.stats().generated_tokens < 4000
        assert (await client.post(CHAT, kit.chat()))[0] == 200


@pytest.mark.parametrize("send_raises", [False, True], ids=["drops", "raises"])
@pytest.mark.parametrize("stack", STACKS)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_before_the_first_byte_ends_its_sequence(
    kit: Any, stack: str, stream: bool, send_raises: bool
) -> None:
    executor = kit.Gated(shut=True)
    engine = kit.build(executor)
    async with engine:
        client = Client(wrapped(engine, stack), send_raises=send_raises)
        async with client.request("POST", CHAT, json=kit.chat(stream=stream)):
            await kit.until(lambda: executor.steps)
        executor.gate.set()
        await kit.settled(engine)
        assert engine.stats().generated_tokens <= 1
        assert (await client.post(CHAT, kit.chat()))[0] == 200


@pytest.mark.parametrize("stack", STACKS)
async def test_a_whole_answer_passes_through_any_middleware(kit: Any, stack: str, engine: Engine) -> None:
    async with engine:
        bare = (await Client(asgi(engine)).post(CHAT, kit.chat()))[1]
        through = (await Client(wrapped(engine, stack)).post(CHAT, kit.chat()))[1]
        events = await streamed(Client(wrapped(engine, stack)), CHAT, kit.chat())
    assert through["choices"] == bare["choices"]
    assert events[-1] == "[DONE]"


async def test_two_hundred_clients_that_vanish_leave_nothing(kit: Any) -> None:
    rng = random.Random(5)
    engine = kit.build(kit.Gated(num_blocks=64, max_context=200, max_seqs=8))

    async def one(client: Client) -> None:
        many = kit.completion(["a", "bc"], n=2, max_tokens=rng.randrange(1, 60))
        body = rng.choice([kit.chat(max_tokens=rng.randrange(1, 60), n=rng.randrange(1, 4)), many])
        path = CHAT if "messages" in body else COMPLETIONS
        patience, chunks = rng.randrange(60), rng.randrange(5)
        with suppress(ClientDisconnect):  # a middleware that reads the body itself says so
            async with client.request("POST", path, json={**body, "stream": rng.random() < 0.6}) as response:
                for _ in range(patience):
                    await anyio.lowlevel.checkpoint()
                if rng.random() < 0.5:
                    async for _ in response.chunks():
                        chunks -= 1
                        if chunks < 0:
                            break

    async with engine:
        clients = [Client(wrapped(engine, stack), send_raises=raises) for stack in STACKS for raises in (False, True)]
        async with anyio.create_task_group() as group:
            for index in range(200):
                group.start_soon(one, clients[index % len(clients)])
        await kit.settled(engine)
        assert (await clients[0].post(CHAT, kit.chat()))[0] == 200
        await kit.settled(engine)
