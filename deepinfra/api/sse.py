"""Server-sent events: one response that begins as late as it can, shows that it lives, and ends once."""

from __future__ import annotations

from collections.abc import Callable

import anyio
from starlette.types import Send

from deepinfra.api.encoding import json_bytes
from deepinfra.api.protocol import Frame

__all__ = ("HEADERS", "EventStream", "encoded")

HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
"""Of every stream; the last keeps nginx from buffering it."""

_LINE_BREAKS = (
    (b"\xe2\x80\xa8", b"\\u2028"),
    (b"\xe2\x80\xa9", b"\\u2029"),
    (b"\xc2\x85", b"\\u0085"),
)
"""Characters at which `str.splitlines` breaks although JSON need not escape them; clients split with it."""


def encoded(frame: Frame) -> bytes:
    """One event with a JSON object in its only data line."""
    data = json_bytes(frame.data)
    if not data.isascii():
        for plain, escaped in _LINE_BREAKS:
            data = data.replace(plain, escaped)
    if frame.event is None:
        return b"data: " + data + b"\n\n"
    return b"event: " + frame.event.encode() + b"\ndata: " + data + b"\n\n"


class EventStream:
    """A response of server-sent events.

    It begins with the first `write`, so that whatever fails before can still have a status of its own. Writers may
    be several tasks; each `write` arrives whole, in the order of the calls.
    """

    def __init__(self, send: Send, keepalive_s: float) -> None:
        self._send, self._keepalive_s = send, keepalive_s
        self._lock = anyio.Lock(fast_acquire=True)  # `send` gives way to others; a turn of the loop before it is vain
        self._writes = 0
        self._begun = False
        self._hushed = anyio.Event()

    @property
    def begun(self) -> bool:
        """Whether the status was sent; a `write` that was cancelled before that leaves it open."""
        return self._begun

    async def write(self, data: bytes, *, last: bool = False) -> None:
        """Send frames; waits while the client is slow."""
        async with self._lock:
            self._writes += 1
            if not self._begun:
                await self._send({"type": "http.response.start", "status": 200, "headers": list(HEADERS)})
                self._begun = True
            await self._send({"type": "http.response.body", "body": data, "more_body": not last})

    async def keep_alive(self, sign: Callable[[], bytes]) -> None:
        """Write `sign()` whenever nothing was written for `keepalive_s`, until `hush`; run beside the writers.

        A sign is made when it is its turn, so that it may depend on what was made before it. Do not cancel this while
        the stream goes on: a sign that was made would be lost.
        """
        while not self._hushed.is_set():
            writes = self._writes
            with anyio.move_on_after(self._keepalive_s):
                await self._hushed.wait()
            if writes == self._writes and not self._hushed.is_set():
                await self.write(sign())

    def hush(self) -> None:
        """End `keep_alive`, behind a sign that is being written."""
        self._hushed.set()
