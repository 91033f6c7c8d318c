"""An in-process client for ASGI applications: body chunks as they are sent, and a client that can vanish.

`httpx.ASGITransport` and Starlette's `TestClient` join the whole body before they return, so neither can see a stream
or leave one. This one runs on asyncio and trio.
"""

from __future__ import annotations

import json as jsonlib
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Iterable,
    Mapping,
    MutableMapping,
    Sequence,
)
from contextlib import asynccontextmanager, suppress
from typing import Any, TypeAlias

import anyio

__all__ = ("Client", "Response", "running")

Message: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]
AsgiApp: TypeAlias = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]


class _Gone(OSError):
    """What `send` raises to an application whose client is gone."""


class _Events:
    """An iterator rather than a generator: it may be left at any point, also on trio."""

    def __init__(self, chunks: AsyncIterator[bytes]) -> None:
        self._chunks, self._rest = chunks, b""
        self._ready: list[Any] = []

    def __aiter__(self) -> _Events:
        return self

    async def __anext__(self) -> Any:
        while not self._ready:
            *blocks, self._rest = (self._rest + await anext(self._chunks)).split(b"\n\n")
            for block in blocks:
                data = block.removeprefix(b"data: ")
                if data != block:
                    self._ready.append("[DONE]" if data == b"[DONE]" else jsonlib.loads(data))
        return self._ready.pop(0)


class Response:
    """An answer under way.

    Attributes:
        status: HTTP status; `None` until `started` returned.
        headers: Names in lower case.
    """

    def __init__(self, body: Iterable[bytes], raises: bool) -> None:
        self.status: int | None = None
        self.headers: dict[str, str] = {}
        self._body = list(body) or [b""]
        self._raises = raises
        self._gone = anyio.Event()
        self._started = anyio.Event()
        self._finished = False
        self._error: Exception | None = None
        self._sender, self._chunks = anyio.create_memory_object_stream[bytes](0)

    async def started(self) -> int:
        """Wait for the status.

        Raises:
            EOFError: The application returned without one; if it raised, that is raised instead.
        """
        await self._started.wait()
        if self.status is None:
            raise self._error or EOFError("the application sent no response")
        return self.status

    def chunks(self) -> AsyncIterator[bytes]:
        """Body chunks, each as the application sent it; the application waits until a chunk is taken."""
        return self._chunks

    def events(self) -> AsyncIterator[Any]:
        """Objects of a stream of server-sent events; comments are skipped, `[DONE]` comes as that text."""
        return _Events(self._chunks)

    async def read(self) -> bytes:
        """The rest of the body."""
        return b"".join([chunk async for chunk in self._chunks])

    async def json(self) -> Any:
        """The rest of the body, decoded."""
        return jsonlib.loads(await self.read())

    def disconnect(self) -> None:
        """The client is gone: `receive` says so, `send` is read by nobody."""
        self._gone.set()
        self._chunks.close()

    async def _receive(self) -> Message:
        if self._body and not self._gone.is_set():
            chunk = self._body.pop(0)
            return {"type": "http.request", "body": chunk, "more_body": bool(self._body)}
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        if self._gone.is_set():
            if self._raises:
                raise _Gone("the client is gone")
            return
        if (message["type"] == "http.response.start") != (self.status is None):
            raise RuntimeError(f"{message['type']} comes out of order")  # as a server would
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.headers = {name.decode().lower(): value.decode() for name, value in message["headers"]}
            self._started.set()
        elif message["type"] == "http.response.body":
            more = message.get("more_body", False)
            try:
                if message.get("body"):
                    await self._sender.send(message["body"])
            except (anyio.BrokenResourceError, anyio.ClosedResourceError):
                if self._raises:
                    raise _Gone("the client is gone") from None
            if not more:
                self._end()

    def _end(self) -> None:
        """After the last byte a server reports the client as gone, whether it is or not."""
        self._finished = True
        self._gone.set()
        self._sender.close()
        self._started.set()

    @property
    def finished(self) -> bool:
        """Whether the application said its last byte."""
        return self._finished


class Client:
    """Sends requests to an ASGI application.

    Args:
        app: Any ASGI application.
        headers: Sent with every request.
        state: What the application's lifespan made, from `running`.
        send_raises: What a server does when the client is gone: drop bytes (uvicorn), or raise `OSError` (ASGI 2.4).
    """

    def __init__(
        self,
        app: AsgiApp,
        *,
        headers: Sequence[tuple[str, str]] = (),
        state: Mapping[str, Any] | None = None,
        send_raises: bool = False,
    ) -> None:
        self._app, self._headers, self._state, self._send_raises = app, tuple(headers), state or {}, send_raises

    @asynccontextmanager
    async def request(
        self,
        method: str,
        path: str,
        *,
        json: object = None,
        body: bytes | Iterable[bytes] = b"",
        headers: Sequence[tuple[str, str]] = (),
    ) -> AsyncGenerator[Response]:
        """Send a request; leaving the block disconnects and waits until the application returned.

        What the application raises is raised here, unless the block raised first.
        """
        if json is not None:
            body = jsonlib.dumps(json).encode()
        parts = [body] if isinstance(body, bytes) else list(body)
        response = Response(parts, raises=self._send_raises)
        fields = [(b"host", b"test"), (b"content-type", b"application/json")]
        fields += [(name.lower().encode(), value.encode()) for name, value in (*self._headers, *headers)]
        scope: MutableMapping[str, Any] = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.4" if self._send_raises else "2.3"},
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": path.partition("?")[0],
            "raw_path": path.partition("?")[0].encode(),
            "query_string": path.partition("?")[2].encode(),
            "root_path": "",
            "headers": fields,
            "server": ("test", 80),
            "client": ("client", 1),
            "state": dict(self._state),
        }

        async def serve() -> None:
            try:
                await self._app(scope, response._receive, response._send)
            except _Gone:
                pass  # some middleware lets it through; a server takes it as the end
            except Exception as raised:
                response._error = raised
            finally:
                response._end()

        block: list[Exception] = []
        async with anyio.create_task_group() as group:
            group.start_soon(serve)
            try:
                yield response
            except Exception as raised:
                block.append(response._error or raised)
            finally:
                response.disconnect()
        if error := block[0] if block else response._error:
            raise error

    async def get(self, path: str) -> tuple[int, Any]:
        """Status and decoded body of a GET."""
        async with self.request("GET", path) as response:
            return await response.started(), await response.json()

    async def post(self, path: str, json: object) -> tuple[int, Any]:
        """Status and decoded body of a POST."""
        async with self.request("POST", path, json=json) as response:
            return await response.started(), await response.json()


@asynccontextmanager
async def running(app: AsgiApp) -> AsyncGenerator[MutableMapping[str, Any]]:
    """Run an application's lifespan, as a server does; gives the state it made, for `Client(app, state=...)`.

    Raises:
        RuntimeError: Start-up or shutdown failed; carries the application's message.
    """
    to_app, receive = anyio.create_memory_object_stream[Message](2)
    send, from_app = anyio.create_memory_object_stream[Message](2)
    state: MutableMapping[str, Any] = {}

    async def serve() -> None:
        with receive, send:
            with suppress(Exception):  # told by the message, or by its absence
                await app({"type": "lifespan", "asgi": {"version": "3.0"}, "state": state}, receive.receive, send.send)

    async def say(phase: str) -> str | None:
        """What went wrong."""
        await to_app.send({"type": f"lifespan.{phase}"})
        try:
            message = await from_app.receive()
        except anyio.EndOfStream:
            return f"the application returned before lifespan.{phase}.complete"
        if message["type"] == f"lifespan.{phase}.complete":
            return None
        return message.get("message") or f"lifespan {phase} failed"

    failure: str | None = None
    block: list[Exception] = []
    with to_app, from_app:
        async with anyio.create_task_group() as group:
            group.start_soon(serve)
            failure = await say("startup")
            if failure is None:
                try:
                    yield state
                except Exception as raised:
                    block.append(raised)
                finally:
                    with anyio.CancelScope(shield=True):
                        failure = await say("shutdown")
    if block:
        raise block[0]
    if failure is not None:
        raise RuntimeError(failure)
