"""One ASGI endpoint per protocol; one object owns a request from its first byte to its last."""

from __future__ import annotations

import logging
import re
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from types import MappingProxyType
from typing import Literal, TypeAlias, TypeVar

from starlette.datastructures import QueryParams
from starlette.types import Message, Receive, Scope, Send

from deepinfra.api.body import ClientGone, parse_object, read_body
from deepinfra.api.encoding import json_bytes
from deepinfra.api.errors import WireError, wire_error, wire_error_of
from deepinfra.api.exchange import AnswerFailed, Exchange, unless_gone
from deepinfra.api.middleware import RequestRecord, headers_of, record_of
from deepinfra.api.protocol import Call, Json, Received, WireProtocol
from deepinfra.api.retention import retention_of
from deepinfra.api.sse import EventStream, encoded
from deepinfra.engine import Engine
from deepinfra.errors import DeepinfraError, ModelUnknownError, RequestError, UnsupportedFieldError
from deepinfra.interfaces.given import Clock, Offload

__all__ = ("DEADLINE", "RECEIPT", "Door", "Endpoint", "Query", "ReceiptPolicy")

T = TypeVar("T")

_logger = logging.getLogger("deepinfra.api")

_OFFLOAD_NBYTES = 16 * 1024
"""Bodies above this are parsed off the loop; measured: 32 KiB of messages take 0.2 ms, as token ids 1.7 ms."""

_JSON = [(b"content-type", b"application/json")]

EXPLAIN = "x-deepinfra-explain"
"""The header that asks why no more of a prompt was found in the cache."""

RECEIPT = "x-deepinfra-receipt"
"""The header that asks what decided an answer's tokens, for clients whose bodies have no room for `deepinfra`."""

ReceiptPolicy: TypeAlias = Literal["never", "asked", "always"]
"""Which answers carry a receipt."""

DEADLINE = "x-deepinfra-deadline-s"
"""The header that says after how many seconds an answer is of no use any more."""

_DEADLINE = re.compile(r"[0-9]{1,6}(\.[0-9]{1,6})?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Door:
    """What all endpoints of an application share: how much may come in, and what reads it; see `app.asgi`."""

    max_body_nbytes: int
    max_n: int
    keepalive_s: float
    clock: Clock
    offload: Offload
    receipts: ReceiptPolicy = "asked"

    async def read(
        self, scope: Scope, receive: Receive, parse: Callable[[Json, Received], T], *, off_loop: bool = False
    ) -> T:
        """A request's body, parsed; a large one off the loop, or any.

        Raises:
            RequestError: It is too large, no JSON object, or `parse` refuses it.
            ClientGone: The client left first.
        """
        received = self.received(scope)
        body = await read_body(scope, receive, self.max_body_nbytes)

        def parsed(body: bytes) -> T:
            return parse(parse_object(body), received)

        return await self.offload(parsed, body) if off_loop or len(body) > _OFFLOAD_NBYTES else parsed(body)

    def received(self, scope: Scope) -> Received:
        """What is known about a request without its body."""
        record = record_of(scope)
        return Received(
            tenant=record.tenant,
            retention=record.retention,
            headers=headers_of(scope),
            now=datetime.fromtimestamp(self.clock.wall(), UTC).date().isoformat(),
            max_choices=self.max_n,
        )


class Query:
    """An ASGI application for what is answered without generating, in a protocol's words.

    Args:
        protocol: Whose errors.
        answer: Takes the body (empty for GET and DELETE), what is known about the request, and the parameters of its
            path and query string.
        door: See `Door`.
        param_names: See `Call`.
    """

    def __init__(
        self,
        protocol: WireProtocol,
        answer: Callable[[Json, Received, Mapping[str, str]], Awaitable[Json]],
        door: Door,
        param_names: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self._protocol, self._answer, self._door, self._param_names = protocol, answer, door, param_names

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        record = record_of(scope)
        send = _failing_as_oserror(send)
        try:
            if scope["method"] == "POST":
                raw, received = await self._door.read(scope, receive, lambda raw, received: (raw, received))
            else:
                raw, received = {}, self._door.received(scope)
            params = {**QueryParams(scope["query_string"]), **scope["path_params"]}
            answer = await self._answer(raw, received, params)
            await _send(send, 200, _JSON, json_bytes(answer))
        except (ClientGone, OSError):
            record.gone = True
            with suppress(OSError):
                await _send(send, 499, [], b"")
        except Exception as error:
            await _refuse(send, self._protocol, _told(error, self._param_names, record), record.id)


class Endpoint:
    """An ASGI application for one protocol.

    Parse, then ask the engine inside `async with`, then answer: the client gone at any point means that the engine's
    context is left, whatever middleware stands between.

    `off_loop` is for a protocol that may take long to parse a small body.
    """

    def __init__(
        self, protocol: WireProtocol, engines: Mapping[str, Engine], door: Door, *, off_loop: bool = False
    ) -> None:
        self._protocol, self._engines, self._door, self._off_loop = protocol, engines, door, off_loop

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        record = record_of(scope)
        send = _failing_as_oserror(send)
        out = EventStream(send, self._door.keepalive_s)
        call: Call | None = None
        try:
            call = await self._door.read(scope, receive, self._call, off_loop=self._off_loop)
            exchange = Exchange(call, self._engine(call, record), record, out, self._door.clock.wall())
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
            await self._fail(send, out, call, _told(error, call.param_names if call else {}, record), record.id)

    def _call(self, raw: Json, received: Received) -> Call:
        call = self._protocol.parse(raw, received)
        explain, deadline_s = _switched(received, EXPLAIN), _deadline_s(received)
        receipt = self._certifies(received, asked=any(request.receipt for request in call.requests))
        requests = (
            replace(
                request,
                tenant=received.tenant,
                retention=retention_of(request, received),
                explain=explain and number == 0,
                deadline_s=deadline_s,
                receipt=receipt,
            )
            for number, request in enumerate(call.requests)
        )
        return replace(call, requests=tuple(requests))

    def _certifies(self, received: Received, *, asked: bool) -> bool:
        """Whether the answers carry a receipt; `asked` says the body."""
        header = _switched(received, RECEIPT)
        if (asked or header) and self._door.receipts == "never":
            raise UnsupportedFieldError("deepinfra.receipt" if asked else RECEIPT, "is not given by this server")
        return asked or header or self._door.receipts == "always"

    def _engine(self, call: Call, record: RequestRecord) -> Engine:
        engine = self._engines.get(call.model)
        if engine is None:
            raise ModelUnknownError(call.model, tuple(self._engines))
        record.model = call.model
        return engine

    async def _fail(self, send: Send, out: EventStream, call: Call | None, told: WireError, request_id: str) -> None:
        if out.begun and call is not None:
            with suppress(OSError):
                await out.write(encoded(call.writer.failed(told, request_id)), last=True)
        else:
            await _refuse(send, self._protocol, told, request_id)


def _switched(received: Received, header: str) -> bool:
    value = received.headers.get(header, "0")
    if value not in ("0", "1"):
        raise RequestError(f"the header {header} is 0 or 1, not {value[:32]!r}", header)
    return value == "1"


def _deadline_s(received: Received) -> float | None:
    value = received.headers.get(DEADLINE)
    if value is None:
        return None
    if not _DEADLINE.fullmatch(value) or not float(value):
        raise RequestError(f"the header {DEADLINE} is a number of seconds above 0, not {value[:32]!r}", DEADLINE)
    return float(value)


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


async def _refuse(send: Send, protocol: WireProtocol, told: WireError, request_id: str) -> None:
    status, answer = protocol.error(told, request_id)
    with suppress(OSError):
        await _send(send, status, told.headers(), json_bytes(answer))


def _told(error: Exception, param_names: Mapping[str, str], record: RequestRecord) -> WireError:
    """What the client is told; what it is not told, or what is the server's own fault, is logged."""
    if isinstance(error, AnswerFailed):
        event = error.event
        told = wire_error(event.code, event.message, retry_after_s=event.retry_after_s)
    else:
        told = wire_error_of(error, param_names)
    if not isinstance(error, DeepinfraError | AnswerFailed):
        _logger.error("request %s failed", record.id, exc_info=error)
    elif told.status == 500:
        _logger.error("request %s failed: %s: %s", record.id, told.code, told.message)
    return told
