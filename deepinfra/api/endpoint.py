"""One ASGI endpoint per protocol; one object owns a request from its first byte to its last."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime

import msgspec
from starlette.types import Message, Receive, Scope, Send

from deepinfra.api.body import ClientGone, parse_object, read_body
from deepinfra.api.errors import WireError, wire_error, wire_error_of
from deepinfra.api.exchange import AnswerFailed, Exchange, unless_gone
from deepinfra.api.middleware import RequestRecord, record_of
from deepinfra.api.protocol import Call, Received, WireProtocol
from deepinfra.api.sse import EventStream, encoded
from deepinfra.engine import Engine
from deepinfra.errors import DeepinfraError, ModelUnknownError
from deepinfra.interfaces.given import Clock, Offload

__all__ = ("Endpoint", "Limits")

_logger = logging.getLogger("deepinfra.api")

_OFFLOAD_NBYTES = 16 * 1024
"""Bodies above this are parsed off the loop; measured: 32 KiB of messages take 0.2 ms, as token ids 1.7 ms."""

_JSON = [(b"content-type", b"application/json")]


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a request may ask of the server itself; see `app.asgi`."""

    max_body_nbytes: int
    max_n: int
    keepalive_s: float


class Endpoint:
    """An ASGI application for one protocol.

    Parse, then ask the engine inside `async with`, then answer: the client gone at any point means that the engine's
    context is left, whatever middleware stands between.
    """

    def __init__(
        self, protocol: WireProtocol, engines: Mapping[str, Engine], limits: Limits, clock: Clock, offload: Offload
    ) -> None:
        self._protocol, self._engines, self._limits = protocol, engines, limits
        self._clock, self._offload = clock, offload

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        record = record_of(scope)
        send = _failing_as_oserror(send)
        out = EventStream(send, self._limits.keepalive_s)
        call: Call | None = None
        try:
            call = await self._read(scope, receive)
            exchange = Exchange(call, self._engine(call, record), record, out, self._clock.wall())
            rest = await unless_gone(receive, exchange.run)
            if call.stream:
                await out.write(rest, last=True)
            else:
                await _send(send, 200, _JSON, rest)
        except (ClientGone, OSError):
            record.gone = True
            if not out.begun:  # middleware that waits for a response gets one; the client no longer sees it
                with suppress(OSError):
                    await _send(send, 499, [], b"")
        except Exception as error:
            await self._fail(send, out, call, _told(error, call, record), record.id)

    async def _read(self, scope: Scope, receive: Receive) -> Call:
        received = Received(
            headers={name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]},
            now=datetime.fromtimestamp(self._clock.wall(), UTC).date().isoformat(),
            max_choices=self._limits.max_n,
        )
        body = await read_body(scope, receive, self._limits.max_body_nbytes)
        if len(body) <= _OFFLOAD_NBYTES:
            return self._call(body, received)
        return await self._offload(self._call, body, received)

    def _call(self, body: bytes, received: Received) -> Call:
        call = self._protocol.parse(parse_object(body), received)
        return replace(call, requests=tuple(replace(request, tenant=received.tenant) for request in call.requests))

    def _engine(self, call: Call, record: RequestRecord) -> Engine:
        engine = self._engines.get(call.model)
        if engine is None:
            raise ModelUnknownError(call.model, tuple(self._engines))
        record.model = call.model
        return engine

    async def _fail(self, send: Send, out: EventStream, call: Call | None, told: WireError, request_id: str) -> None:
        with suppress(OSError):
            if out.begun and call is not None:
                await out.write(encoded(call.writer.failed(told, request_id)), last=True)
            else:
                status, answer = self._protocol.error(told, request_id)
                await _send(send, status, told.headers(), msgspec.json.encode(answer))


def _failing_as_oserror(send: Send) -> Send:
    """`send` that says in ASGI's words that the client is gone.

    uvloop has words of its own when a connection was reset and uvicorn has not been told yet.
    """

    async def sender(message: Message) -> None:
        try:
            await send(message)
        except RuntimeError as error:
            if "handler is closed" not in str(error):
                raise
            raise OSError("the connection is closed") from error

    return sender


async def _send(send: Send, status: int, headers: list[tuple[bytes, bytes]], body: bytes) -> None:
    headers = [*headers, (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": False})


def _told(error: Exception, call: Call | None, record: RequestRecord) -> WireError:
    """What the client is told; what it is not told, or what is the server's own fault, is logged."""
    if isinstance(error, AnswerFailed):
        told = wire_error(error.event.code, error.event.message)
    else:
        told = wire_error_of(error, call.param_names if call else {})
    if not isinstance(error, DeepinfraError | AnswerFailed):
        _logger.error("request %s failed", record.id, exc_info=error)
    elif told.status == 500:
        _logger.error("request %s failed: %s: %s", record.id, told.code, told.message)
    return told
