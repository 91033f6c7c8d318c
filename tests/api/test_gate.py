"""Keys: who may come in, how often, and whose requests they are."""

from __future__ import annotations

import hmac
import logging
from collections.abc import MutableMapping
from typing import Any

import anyio
import pytest
from starlette.responses import PlainTextResponse

from deepinfra import ApiKey
from deepinfra.api.app import asgi
from deepinfra.api.gate import KeyRing
from deepinfra.engine import Engine
from deepinfra.errors import RateLimitedError, UnauthorizedError
from deepinfra.testing.client import Client
from deepinfra.testing.clock import ManualClock

CHAT = "/v1/chat/completions"
ANN = ApiKey.of("sk-ann-0123456789", name="ann")
BOB = ApiKey.of("sk-bob-0123456789", name="bob", tenant="team")
ZOE = ApiKey.of("sk-zoe-0123456789", name="zoe", tenant="team")
KEYS = (ANN, BOB, ZOE)


def bearer(key: str) -> list[tuple[str, str]]:
    return [("authorization", f"Bearer {key}")]


async def asked(
    app: Any, headers: list[tuple[str, str]], path: str = "/v1/models", json: Any = None
) -> tuple[int, dict[str, Any], MutableMapping[str, str]]:
    async with Client(app).request("POST" if json else "GET", path, json=json, headers=headers) as response:
        status = await response.started()
        return status, await response.json(), response.headers


# -- who ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "headers",
    [
        bearer("sk-bob-0123456789"),
        [("authorization", "bearer  sk-bob-0123456789")],
        [("x-api-key", "sk-bob-0123456789")],
        [("x-api-key", "anything"), *bearer("sk-bob-0123456789")],
    ],
    ids=str,
)
async def test_a_key_comes_in_either_header(engine: Engine, headers: list[tuple[str, str]]) -> None:
    assert (await asked(asgi(engine, keys=KEYS), headers))[0] == 200


@pytest.mark.parametrize(
    ("headers", "message"),
    [
        ([], "no API key was sent"),
        (bearer(""), "no API key was sent"),
        ([("authorization", "Basic c2stYm9iLTAxMjM0NTY3ODk=")], "no API key was sent"),
        (bearer("sk-bob-012345678"), "not one of this server's"),
        (bearer("sk-bob-0123456789x"), "not one of this server's"),
        (bearer("SK-BOB-0123456789"), "not one of this server's"),
        (bearer("bob"), "not one of this server's"),
        ([("x-api-key", "ä")], "not one of this server's"),
    ],
    ids=str,
)
async def test_no_key_and_a_wrong_key_are_401(engine: Engine, headers: list[tuple[str, str]], message: str) -> None:
    status, answer, sent = await asked(asgi(engine, keys=KEYS), headers)
    error = answer["error"]
    assert (status, error["code"], error["type"]) == (401, "invalid_api_key", "invalid_request_error")
    assert message in error["message"]
    assert sent["www-authenticate"] == "Bearer"
    assert sent["x-request-id"]


@pytest.mark.parametrize("path", ["/health", "/ready", "/metrics"])
async def test_probes_need_no_key(engine: Engine, path: str) -> None:
    async with engine:
        async with Client(asgi(engine, keys=KEYS)).request("GET", path) as response:
            assert await response.started() == 200


@pytest.mark.parametrize("path", ["/", "/v1/models", CHAT, "/metrics/", "/own/thing", "/health/../v1/models"])
async def test_everything_else_needs_one_even_what_is_not_there(engine: Engine, path: str) -> None:
    app = asgi(engine, keys=KEYS)
    app.mount("/own", PlainTextResponse("mine"))
    async with Client(app).request("GET", path) as response:
        assert await response.started() == 401


async def test_a_websocket_needs_a_key_too(engine: Engine) -> None:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        return {"type": "websocket.connect"}

    scope = {"type": "websocket", "path": "/own", "headers": [], "query_string": b""}
    await asgi(engine, keys=KEYS)(scope, receive, send)
    assert sent == [{"type": "websocket.close", "code": 1008}]


async def test_a_wrong_key_is_refused_before_the_body_is_read(engine: Engine) -> None:
    async def receive() -> Any:
        raise AssertionError("the body was read")

    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": CHAT, "headers": [], "query_string": b""}
    await asgi(engine, keys=KEYS)(scope, receive, send)
    assert sent[0]["status"] == 401


def test_every_key_is_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[bytes] = []

    def counting(a: bytes, b: bytes) -> bool:
        compared.append(a)
        return a == b

    ring = KeyRing(KEYS, ManualClock())
    monkeypatch.setattr(hmac, "compare_digest", counting)
    assert ring.find({"x-api-key": "sk-ann-0123456789"}) is ANN
    assert compared == [key.sha256 for key in KEYS]
    with pytest.raises(UnauthorizedError):
        ring.find({"x-api-key": "sk-eve-0123456789"})
    assert compared == [key.sha256 for key in KEYS] * 2


def test_a_key_is_kept_as_a_digest_and_never_shown() -> None:
    assert "sk-ann" not in repr(ANN)
    assert ANN.sha256.hex() not in repr(ANN)


@pytest.mark.parametrize(
    "keys",
    [(), (ANN, ApiKey.of("another-0123456789", name="ann")), (ANN, ApiKey.of("sk-ann-0123456789", name="eve"))],
    ids=["none", "name", "secret"],
)
def test_a_server_with_keys_has_some_and_each_is_one_of_a_kind(engine: Engine, keys: Any) -> None:
    with pytest.raises(ValueError, match="key"):
        asgi(engine, keys=keys)


async def test_the_log_names_the_key_and_tells_no_secret(
    kit: Any, engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    async with engine:
        app = asgi(engine, keys=KEYS)
        assert (await asked(app, bearer("sk-bob-0123456789"), CHAT, kit.chat()))[0] == 200
        assert (await asked(app, [("x-api-key", "sk-wrong-secret")], f"{CHAT}?api_key=hunter2", kit.chat()))[0] == 401
    lines = [record.getMessage() for record in caplog.records if record.name == "deepinfra.access"]
    assert [" key=bob " in line for line in lines] == [True, False]
    assert " 401 " in lines[1]
    for secret in ("sk-bob", "sk-wrong", "hunter2", "Bearer"):
        assert secret not in caplog.text


async def test_the_log_names_the_key_that_met_its_limit(
    kit: Any, engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    limited = ApiKey.of("sk-lim-0123456789", name="lim", requests_per_minute=1)
    async with engine:
        app = asgi(engine, keys=(limited,), clock=ManualClock())
        for _ in range(2):
            await asked(app, bearer("sk-lim-0123456789"), CHAT, kit.chat())
    lines = [record.getMessage() for record in caplog.records if record.name == "deepinfra.access"]
    assert [(" key=lim " in line, " 429 " in line) for line in lines] == [(True, False), (True, True)]


# -- whose ----------------------------------------------------------------------------------------


async def test_tenants_share_no_cache_and_keys_of_one_tenant_do(kit: Any, engine: Engine) -> None:
    body = kit.chat("x" * 40)
    async with engine:
        app = asgi(engine, keys=KEYS)
        cached = []
        for key in ("ann", "bob", "zoe"):
            _, answer, _ = await asked(app, bearer(f"sk-{key}-0123456789"), CHAT, body)
            cached.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
    assert cached[:2] == [0, 0]
    assert cached[2] >= 36


# -- how often ------------------------------------------------------------------------------------


def test_a_bucket_fills_with_time_and_never_beyond_a_minutes_worth() -> None:
    clock = ManualClock()
    key = ApiKey.of("sk-0123456789abcdef", name="k", requests_per_minute=6)
    ring = KeyRing((key,), clock)

    def taken() -> int:
        count = 0
        while True:
            try:
                ring.enter(key)
                ring.leave(key)
            except RateLimitedError:
                return count
            count += 1

    assert taken() == 6
    with pytest.raises(RateLimitedError, match="6 requests per minute") as caught:
        ring.enter(key)
    assert caught.value.retry_after_s == pytest.approx(10)
    clock.advance(5)
    with pytest.raises(RateLimitedError) as caught:
        ring.enter(key)
    assert caught.value.retry_after_s == pytest.approx(5)
    clock.advance(5)
    assert taken() == 1
    clock.advance(3600)
    assert taken() == 6


async def test_too_many_requests_are_429_and_another_key_is_not_touched(kit: Any, engine: Engine) -> None:
    limited = ApiKey.of("sk-lim-0123456789", name="lim", requests_per_minute=1)
    async with engine:
        app = asgi(engine, keys=(limited, BOB), clock=ManualClock())
        assert (await asked(app, bearer("sk-lim-0123456789"), CHAT, kit.chat()))[0] == 200
        status, answer, headers = await asked(app, bearer("sk-lim-0123456789"), CHAT, kit.chat())
        assert (status, answer["error"]["code"]) == (429, "rate_limit_exceeded")
        assert headers["retry-after"] == "60"
        assert (await asked(app, bearer("sk-bob-0123456789"), CHAT, kit.chat()))[0] == 200


async def test_requests_under_way_are_limited_until_they_end_in_whatever_way(kit: Any) -> None:
    key = ApiKey.of("sk-one-0123456789", name="one", max_concurrent=1)
    executor = kit.Gated(shut=True)
    headers = bearer("sk-one-0123456789")
    async with kit.build(executor) as engine:
        app = asgi(engine, keys=(key,))
        client = Client(app)
        async with client.request("POST", CHAT, json=kit.chat(stream=True), headers=headers):
            await kit.until(lambda: executor.steps)
            status, answer, _ = await asked(app, headers, CHAT, kit.chat())
            assert (status, answer["error"]["code"]) == (429, "rate_limit_exceeded")
            assert "1 requests under way" in answer["error"]["message"]
        executor.gate.set()  # the client of the first has left
        assert (await asked(app, headers, CHAT, kit.chat()))[0] == 200
        assert (await asked(app, headers, CHAT, {"nonsense": 1}))[0] == 400
        assert (await asked(app, headers, CHAT, kit.chat()))[0] == 200


async def test_many_at_once_never_exceed_the_limit(kit: Any, engine: Engine) -> None:
    key = ApiKey.of("sk-few-0123456789", name="few", max_concurrent=3)
    headers = bearer("sk-few-0123456789")
    statuses: list[int] = []
    async with engine:
        app = asgi(engine, keys=(key,))

        async def one() -> None:
            statuses.append((await asked(app, headers, CHAT, kit.chat()))[0])

        async with anyio.create_task_group() as group:
            for _ in range(20):
                group.start_soon(one)
    assert set(statuses) == {200, 429}
    assert statuses.count(200) >= 3


# -- pages in browsers ----------------------------------------------------------------------------


async def test_a_named_origin_may_read_answers_and_another_may_not(kit: Any, engine: Engine) -> None:
    app = asgi(engine, keys=KEYS, cors_origins=["https://chat.example.com"])
    async with engine:
        for origin, allowed in (("https://chat.example.com", True), ("https://evil.example.com", False)):
            headers = [*bearer("sk-bob-0123456789"), ("origin", origin)]
            _, _, sent = await asked(app, headers, CHAT, kit.chat())
            assert sent.get("access-control-allow-origin") == (origin if allowed else None)


async def test_a_preflight_needs_no_key(engine: Engine) -> None:
    app = asgi(engine, keys=KEYS, cors_origins=["https://chat.example.com"])
    headers = [
        ("origin", "https://chat.example.com"),
        ("access-control-request-method", "POST"),
        ("access-control-request-headers", "authorization, content-type"),
    ]
    async with Client(app).request("OPTIONS", CHAT, headers=headers) as response:
        assert await response.started() == 200
        assert response.headers["access-control-allow-origin"] == "https://chat.example.com"
        assert "authorization" in response.headers["access-control-allow-headers"]
