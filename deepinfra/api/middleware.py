"""What happens to every request, whatever it asks for: an id in and out, and one line in the access log."""

from __future__ import annotations

import logging
import re
import secrets
from dataclasses import dataclass

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deepinfra.core.kv import Traffic
from deepinfra.core.request import PUBLIC, Usage
from deepinfra.interfaces.given import Clock

__all__ = ("RequestLog", "RequestRecord", "headers_of", "record_of")

_access = logging.getLogger("deepinfra.access")

_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")
_ID_HEADERS = (b"x-request-id", b"request-id")
"""OpenAI's clients read the first, Anthropic's the second."""

_KEY = "deepinfra.record"


@dataclass(slots=True)
class RequestRecord:
    """What is known of a request but what it says: its id is told to the client, most to the access log.

    Attributes:
        key: Name of the API key it came with.
        tenant: Whose it is.
        retention: Its key's policy.
    """

    id: str
    key: str = "-"
    tenant: str = PUBLIC
    retention: Traffic | None = None
    model: str = "-"
    usage: Usage | None = None
    gone: bool = False


def headers_of(scope: Scope) -> dict[str, str]:
    """A request's headers by lower-case name; the last of repeated ones counts."""
    return {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}


def record_of(scope: Scope) -> RequestRecord:
    """The record of the request that this scope belongs to."""
    record: RequestRecord = scope[_KEY]
    return record


class RequestLog:
    """Gives every request an id (the client's own `x-request-id` if it is well-formed) and logs how it went.

    The logger is `deepinfra.access` at level INFO, so nothing is written unless logging was configured. Neither query
    strings nor headers nor bodies are logged. Status 499 means that the client left.
    """

    def __init__(self, app: ASGIApp, clock: Clock) -> None:
        self._app, self._clock = app, clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        record = RequestRecord(_request_id(scope))
        scope[_KEY] = record
        told = [(name, record.id.encode()) for name in _ID_HEADERS]
        begun, status, nbytes = self._clock.now(), 0, 0

        async def tagged(message: Message) -> None:
            nonlocal status, nbytes
            if message["type"] == "http.response.start":
                status = message["status"]
                message = {**message, "headers": [*message.get("headers", ()), *told]}
            elif message["type"] == "http.response.body":
                nbytes += len(message.get("body", b""))
            await send(message)

        try:
            await self._app(scope, receive, tagged)
        finally:
            if _access.isEnabledFor(logging.INFO):
                usage = record.usage or Usage(prompt_tokens=0)
                _access.info(
                    "%s %s %d %d B %.1f ms id=%s key=%s model=%s prompt=%d cached=%d completion=%d",
                    scope["method"],
                    scope["path"].encode("unicode_escape").decode("ascii")[:200],
                    499 if record.gone else status,
                    nbytes,
                    1000 * (self._clock.now() - begun),
                    record.id,
                    record.key,
                    record.model,
                    usage.prompt_tokens,
                    usage.cached.total,
                    usage.completion_tokens,
                )


def _request_id(scope: Scope) -> str:
    for name, value in scope["headers"]:
        text: str = value.decode("latin-1")
        if name == b"x-request-id" and _ID.fullmatch(text):
            return text
    return f"req_{secrets.token_hex(16)}"
