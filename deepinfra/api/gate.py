"""The gate before everything but the probes: a key is known and within its limits, or the request ends here."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import msgspec
from starlette._utils import get_route_path
from starlette.types import ASGIApp, Receive, Scope, Send

from deepinfra.api.errors import wire_error_of
from deepinfra.api.middleware import headers_of, record_of
from deepinfra.api.protocol import WireProtocol
from deepinfra.core.identity import ApiKey
from deepinfra.errors import DeepinfraError, RateLimitedError, UnauthorizedError
from deepinfra.interfaces.given import Clock

__all__ = ("OPEN", "Gate", "KeyRing")

OPEN = frozenset({"/health", "/ready", "/metrics"})
"""Paths that need no key: what asks them often has none, and they tell nothing of any caller."""


@dataclass(slots=True)
class _Account:
    """What a key has used: tokens of its bucket as they were at `at`, and requests under way."""

    tokens: float
    at: float
    running: int = 0


class KeyRing:
    """A server's keys and what each has used.

    Raises:
        ValueError: No key at all, or two keys of one name or one secret.
    """

    def __init__(self, keys: Sequence[ApiKey], clock: Clock) -> None:
        if not keys:
            raise ValueError("a server with keys needs at least one; leave `keys` out to let everybody in")
        for what, values in (("name", [key.name for key in keys]), ("secret", [key.sha256 for key in keys])):
            if len(set(values)) != len(values):
                raise ValueError(f"two API keys have one {what}")
        self._keys, self._clock = tuple(keys), clock
        now = clock.now()
        self._accounts = {key.name: _Account(float(key.requests_per_minute or 0), now) for key in keys}

    def find(self, headers: Mapping[str, str]) -> ApiKey:
        """The key that a request came with.

        Every key is compared, each in constant time: how long it takes tells nothing about any.

        Raises:
            UnauthorizedError: It has no key, or one that is not known.
        """
        scheme, _, sent = headers.get("authorization", "").partition(" ")
        sent = sent.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
        digest = hashlib.sha256(sent.encode("latin-1")).digest()
        found = [key for key in self._keys if hmac.compare_digest(key.sha256, digest)]
        if not sent or not found:
            raise UnauthorizedError(missing=not sent)
        return found[0]

    def enter(self, key: ApiKey) -> None:
        """Admit a request; whoever calls this calls `leave` when the request is over.

        Raises:
            RateLimitedError: Its key may not make it now.
        """
        account = self._accounts[key.name]
        if key.max_concurrent is not None and account.running >= key.max_concurrent:
            raise RateLimitedError(f"this key has {key.max_concurrent} requests under way, as many as it may")
        if key.requests_per_minute is not None:
            now, per_s = self._clock.now(), key.requests_per_minute / 60
            account.tokens = min(key.requests_per_minute, account.tokens + (now - account.at) * per_s)
            account.at = now
            if account.tokens < 1:
                why = f"this key may make {key.requests_per_minute} requests per minute"
                raise RateLimitedError(why, (1 - account.tokens) / per_s)
            account.tokens -= 1
        account.running += 1

    def leave(self, key: ApiKey) -> None:
        """A request of this key is over."""
        self._accounts[key.name].running -= 1


class Gate:
    """ASGI middleware; `RequestLog` must be outside it.

    Whatever is served behind it needs a key, mounted applications and unknown paths included, except `OPEN`.
    """

    def __init__(self, app: ASGIApp, ring: KeyRing, protocol_at: Callable[[str], WireProtocol]) -> None:
        self._app, self._ring, self._protocol_at = app, ring, protocol_at

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if scope["type"] == "lifespan" or (scope["type"] == "http" and get_route_path(scope) in OPEN):
            await self._app(scope, receive, send)
            return
        try:
            key = self._ring.find(headers_of(scope))
            if scope["type"] == "http":  # before its limits: the log names who met them
                record = record_of(scope)
                record.key, record.tenant, record.retention = key.name, key.tenant, key.retention
            self._ring.enter(key)
        except DeepinfraError as error:
            if scope["type"] == "http":
                await self._refuse(scope, send, error)
            else:
                await send({"type": "websocket.close", "code": 1008})
            return
        try:
            await self._app(scope, receive, send)
        finally:
            self._ring.leave(key)

    async def _refuse(self, scope: Scope, send: Send, error: DeepinfraError) -> None:
        told, record = wire_error_of(error, {}), record_of(scope)
        status, answer = self._protocol_at(get_route_path(scope)).error(told, record.id)
        body = msgspec.json.encode(answer)
        headers = [*told.headers(), (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body, "more_body": False})
