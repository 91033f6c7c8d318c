from __future__ import annotations

from typing import Any

import anyio
import pytest

from deepinfra.testing.client import Client, running


async def echo(scope: Any, receive: Any, send: Any) -> None:
    message = await receive()
    await send({"type": "http.response.start", "status": 201, "headers": [(b"X-Path", scope["path"].encode())]})
    await send({"type": "http.response.body", "body": message["body"], "more_body": False})


async def test_status_headers_and_body_come_back() -> None:
    async with Client(echo).request("POST", "/a?b=c", json={"x": 1}) as response:
        assert await response.started() == 201
        assert response.headers["x-path"] == "/a"
        assert await response.json() == {"x": 1}
        assert response.finished


async def test_chunks_are_seen_one_by_one_while_the_application_waits() -> None:
    sent: list[int] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for index in range(3):
            await send({"type": "http.response.body", "body": bytes([index]), "more_body": True})
            sent.append(index)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async with Client(app).request("GET", "/") as response:
        await response.started()
        chunks = response.chunks()
        assert await anext(chunks) == b"\x00"
        assert len(sent) <= 1
        assert await response.read() == b"\x01\x02"


@pytest.mark.parametrize("raises", [False, True])
async def test_leaving_disconnects_and_waits_for_the_application(raises: bool) -> None:
    seen: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        seen.append((await receive())["type"])
        try:
            await send({"type": "http.response.body", "body": b"late", "more_body": False})
        except OSError:
            seen.append("OSError")

    async with Client(app, send_raises=raises).request("GET", "/") as response:
        await response.started()
        assert seen == []
    assert seen == ["http.disconnect", *(["OSError"] if raises else [])]


async def test_a_sender_that_waits_is_woken_by_a_disconnect() -> None:
    done = anyio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"never read", "more_body": True})
        done.set()

    async with Client(app).request("GET", "/") as response:
        await response.started()
    assert done.is_set()


async def test_what_the_application_raises_is_raised_here() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        raise KeyError("broken")

    with pytest.raises(KeyError, match="broken"):
        await Client(app).get("/")


@pytest.mark.parametrize("kinds", [["body"], ["start", "start"]])
async def test_messages_out_of_order_are_refused_as_by_a_server(kinds: list[str]) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        for kind in kinds:
            await send({"type": f"http.response.{kind}", "status": 200, "headers": [], "body": b""})

    with pytest.raises(RuntimeError, match="out of order"):
        await Client(app).get("/")


async def test_an_error_of_the_block_comes_out_as_it_is() -> None:
    with pytest.raises(ZeroDivisionError):
        async with Client(echo).request("GET", "/"):
            raise ZeroDivisionError


async def test_a_body_in_parts_arrives_in_parts() -> None:
    parts: list[tuple[bytes, bool]] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        more = True
        while more:
            message = await receive()
            more = message["more_body"]
            parts.append((message["body"], more))

    async with Client(app).request("POST", "/", body=[b"a", b"b"]) as response:
        with pytest.raises(EOFError):
            await response.started()
    assert parts == [(b"a", True), (b"b", False)]


async def test_events_are_cut_out_of_any_chunks() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for piece in (b": hello\n\nda", b'ta: {"a": 1}\n', b"\ndata: [DONE]\n\n"):
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async with Client(app).request("GET", "/") as response:
        assert [event async for event in response.events()] == [{"a": 1}, "[DONE]"]


async def test_a_lifespan_is_run_around_the_block() -> None:
    seen: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        for phase in ("startup", "shutdown"):
            seen.append((await receive())["type"])
            await send({"type": f"lifespan.{phase}.complete"})

    async with running(app):
        assert seen == ["lifespan.startup"]
    assert seen == ["lifespan.startup", "lifespan.shutdown"]


async def test_a_start_up_that_fails_says_why() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await send({"type": "lifespan.startup.failed", "message": "no weights"})

    with pytest.raises(RuntimeError, match="no weights"):
        async with running(app):
            pytest.fail("the block must not run")
