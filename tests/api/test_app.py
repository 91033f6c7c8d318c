"""Mounting, lifespans, several engines, and what is asked about the server itself."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from fastapi import FastAPI
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Mount, Route

from deepinfra.api.app import asgi
from deepinfra.engine import Engine
from deepinfra.testing.client import Client, running

CHAT = "/v1/chat/completions"


async def test_served_by_itself_it_enters_its_engine(kit: Any, engine: Engine) -> None:
    app = asgi(engine)
    assert engine.state == "stopped"
    async with running(app):
        assert engine.state == "ready"
        assert (await Client(app).post(CHAT, kit.chat()))[0] == 200
    assert engine.state == "stopped"


async def test_it_can_be_started_again(kit: Any, engine: Engine) -> None:
    app = asgi(engine)
    for _ in range(2):
        async with running(app):
            assert (await Client(app).post(CHAT, kit.chat()))[0] == 200


def mounted_in_fastapi(engine: Engine, *, help_it: bool) -> Any:
    llm = asgi(engine)
    app = FastAPI(lifespan=llm.lifespan if help_it else None)
    app.mount("/llm", llm)

    @app.get("/own")
    def own() -> str:
        return "mine"

    return app


def mounted_in_starlette(engine: Engine, *, help_it: bool) -> Any:
    llm = asgi(engine)

    async def own(request: Request) -> PlainTextResponse:
        return PlainTextResponse('"mine"')

    routes = [Route("/own", own), Mount("/llm", llm)]
    return Starlette(routes=routes, lifespan=llm.lifespan if help_it else None)


MOUNTS = pytest.mark.parametrize("mount", [mounted_in_fastapi, mounted_in_starlette])


@MOUNTS
async def test_mounted_with_its_lifespan_it_serves(kit: Any, engine: Engine, mount: Any) -> None:
    app = mount(engine, help_it=True)
    async with running(app):
        client = Client(app)
        assert (await client.get("/own")) == (200, "mine")
        status, answer = await client.post(f"/llm{CHAT}", kit.chat())
        assert (status, answer["model"]) == (200, "toy")
        async with client.request("POST", f"/llm{CHAT}", json=kit.chat(stream=True)) as response:
            assert [event async for event in response.events()][-1] == "[DONE]"
        assert (await client.get("/llm/ready"))[0] == 200
        assert (await client.get(f"/llm{CHAT}"))[1]["error"]["code"] == "method_not_allowed"
        assert (await client.get("/llm/nothing"))[1]["error"]["code"] == "not_found"
    assert engine.state == "stopped"


@MOUNTS
async def test_mounted_without_its_lifespan_it_says_what_to_write(kit: Any, engine: Engine, mount: Any) -> None:
    app = mount(engine, help_it=False)
    async with running(app):
        status, answer = await Client(app).post(f"/llm{CHAT}", kit.chat())
        assert (status, answer["error"]["code"]) == (503, "engine-not-running")
        assert "lifespan=llm.lifespan" in answer["error"]["message"]
        assert (await Client(app).get("/llm/ready"))[0] == 503


@MOUNTS
async def test_mounted_it_sees_its_client_leave(kit: Any, mount: Any) -> None:
    executor = kit.Gated(num_blocks=2048)
    engine = kit.build(executor)
    app = mount(engine, help_it=True)
    async with running(app):
        body = kit.chat(stream=True, max_tokens=4000, ignore_eos=True)
        async with Client(app).request("POST", f"/llm{CHAT}", json=body) as response:
            await anext(response.chunks())
        await kit.settled(engine)
        assert engine.stats().generated_tokens < 4000


async def test_its_lifespan_fits_inside_another(kit: Any, engine: Engine) -> None:
    llm = asgi(engine)
    seen: list[str] = []

    @asynccontextmanager
    async def lifespan(app: Any) -> AsyncGenerator[dict[str, str]]:
        async with llm.lifespan(app):
            seen.append(engine.state)
            yield {"own": "state"}

    app = FastAPI(lifespan=lifespan)
    app.mount("/llm", llm)

    @app.get("/own")
    def own(request: Request) -> str:
        return str(request.state.own)

    async with running(app) as state:
        client = Client(app, state=state)
        assert (await client.get("/own")) == (200, "state")
        assert (await client.post(f"/llm{CHAT}", kit.chat()))[0] == 200
    assert seen == ["ready"]


async def test_inside_async_with_engine_no_lifespan_is_needed(kit: Any, engine: Engine) -> None:
    async with engine:
        assert (await Client(asgi(engine)).post(CHAT, kit.chat()))[0] == 200


async def test_several_engines_serve_under_their_names(kit: Any) -> None:
    one = kit.build(kit.Gated(seed=1))
    two = kit.build(kit.Gated(seed=2))
    app = asgi({"first": one, "second": two, "alias": one})
    async with running(app):
        client = Client(app)
        answers = {}
        for name in ("first", "second", "alias"):
            status, answer = await client.post(CHAT, kit.chat(model=name, max_tokens=40))
            assert (status, answer["model"]) == (200, name)
            answers[name] = answer["choices"][0]["message"]["content"]
        assert answers["first"] == answers["alias"] != answers["second"]
        status, answer = await client.post(CHAT, kit.chat())
        assert (status, answer["error"]["code"]) == (404, "model_not_found")
        assert "first, second, alias" in answer["error"]["message"]
        models = (await client.get("/v1/models"))[1]
        assert [model["id"] for model in models["data"]] == ["first", "second", "alias"]


async def test_two_applications_share_nothing(kit: Any) -> None:
    one, two = asgi(kit.build()), asgi(kit.build())
    async with running(one):
        assert (await Client(one).get("/ready"))[0] == 200
        assert (await Client(two).get("/ready"))[0] == 503
        async with running(two):
            assert (await Client(two).get("/ready"))[0] == 200
        assert (await Client(one).post(CHAT, kit.chat()))[0] == 200


def test_no_engine_is_an_error() -> None:
    with pytest.raises(ValueError, match="at least one engine"):
        asgi({})


async def test_health_and_readiness_differ(kit: Any, engine: Engine) -> None:
    client = Client(asgi(engine))
    assert await client.get("/health") == (200, {"status": "ok", "engines": {"toy": "stopped"}})
    assert await client.get("/ready") == (503, {"ready": False, "engines": {"toy": "stopped"}})
    async with engine:
        assert await client.get("/ready") == (200, {"ready": True, "engines": {"toy": "ready"}})
        assert await engine.drain(5)
        assert (await client.get("/health"))[0] == 200
        assert await client.get("/ready") == (503, {"ready": False, "engines": {"toy": "draining"}})


async def test_an_executor_lost_too_often_is_unhealthy(kit: Any) -> None:
    engine = kit.build(kit.Gated(fail_at=1, loses=True))
    async with engine:
        client = Client(asgi(engine))
        codes = [(await client.post(CHAT, kit.chat()))[1]["error"]["code"] for _ in range(2)]
        assert codes == ["executor-lost", "pool-failed"]
        assert await client.get("/health") == (503, {"status": "failed", "engines": {"toy": "failed"}})
        assert (await client.post(CHAT, kit.chat()))[1]["error"]["code"] == "pool-failed"


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", CHAT, 405, "method_not_allowed"),
        ("DELETE", "/v1/models", 405, "method_not_allowed"),
        ("POST", "/health", 405, "method_not_allowed"),
        ("GET", "/", 404, "not_found"),
        ("POST", "/v1/embeddings", 404, "not_found"),
    ],
)
async def test_routing_refuses_in_openais_shape(engine: Engine, method: str, path: str, status: int, code: str) -> None:
    async with Client(asgi(engine)).request(method, path) as response:
        assert await response.started() == status
        assert (await response.json())["error"]["code"] == code
        assert response.headers["x-request-id"]
        assert ("allow" in response.headers) == (status == 405)


async def test_no_cors_headers_are_sent(kit: Any, engine: Engine) -> None:
    async with engine:
        headers = [("origin", "https://example.com")]
        async with Client(asgi(engine)).request("POST", CHAT, json=kit.chat(), headers=headers) as response:
            await response.started()
            assert not any(name.startswith("access-control") for name in response.headers)
