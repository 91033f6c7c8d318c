"""The least HTTP that a load generator needs, so that it costs little beside the server it measures."""

from __future__ import annotations

import errno
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

import anyio
import httptools
from anyio.abc import SocketStream

from deepinfra.errors import ConfigError, EngineError

__all__ = ("Endpoint", "Refused", "Response")


class Refused(EngineError):
    """Raised when the answer's status is not 200; `retry_after_s` is what its header says, if it has one."""

    code = "refused"

    def __init__(self, path: str, status: int, why: str, retry_after_s: float | None) -> None:
        self.status, self.retry_after_s = status, retry_after_s
        super().__init__(f"{path}: status {status}: {why}")


class Endpoint:
    """A base URL such as `http://127.0.0.1:8000/v1`; plain HTTP, one connection per request.

    Raises:
        ConfigError: The URL is not of that form.
    """

    def __init__(self, url: str, *, api_key: str | None = None) -> None:
        parts = urlsplit(url)
        try:
            port = parts.port or 80
        except ValueError:  # no number, or none of a port
            port = 0
        if parts.scheme != "http" or not parts.hostname or not port:
            raise ConfigError(f"{url!r} is not an address like http://127.0.0.1:8000/v1 (plain http only)")
        self._host, self._port = parts.hostname, port
        self._path = parts.path.rstrip("/")
        self._headers = {"host": parts.netloc, "connection": "close", "accept": "*/*"}
        if api_key:
            self._headers["authorization"] = f"Bearer {api_key}"

    @asynccontextmanager
    async def request(self, path: str, body: Mapping[str, object] | None = None) -> AsyncIterator[Response]:
        """Send a GET, or a POST of JSON, and give the response once its head is there.

        Raises:
            OSError: Nobody listens there; names the address.
            Refused: The answer's status is not 200; carries its message.
            EngineError: What comes back is no answer.
        """
        data = b"" if body is None else json.dumps(body).encode()
        headers = self._headers | ({} if body is None else {"content-type": "application/json"})
        lines = [f"{'GET' if body is None else 'POST'} {self._path}{path} HTTP/1.1"]
        lines += [f"{name}: {value}" for name, value in (headers | {"content-length": str(len(data))}).items()]
        try:
            connected = await anyio.connect_tcp(self._host, self._port)
        except OSError as error:  # of several attempts, without words that a person would be shown
            why = error.strerror or "cannot connect: is a server running there?"
            raise OSError(error.errno or errno.ECONNREFUSED, why, self._headers["host"]) from error
        async with connected as stream:
            await stream.send("\r\n".join((*lines, "", "")).encode() + data)
            response = Response(stream)
            await response.head()
            if response.status != 200:
                raise Refused(path, response.status, await response.message(), response.retry_after_s)
            yield response


class Response:
    """A response being read."""

    def __init__(self, stream: SocketStream) -> None:
        self._stream = stream
        self._parser = httptools.HttpResponseParser(self)
        self._body = bytearray()
        self._headed = self._over = False
        self.retry_after_s: float | None = None

    @property
    def status(self) -> int:
        """The status code; valid after `head`."""
        return int(self._parser.get_status_code())

    async def head(self) -> None:
        """Read up to the end of the headers."""
        while not self._headed:
            await self._more()

    async def text(self) -> str:
        """The whole body."""
        while not self._over:
            await self._more()
        return self._body.decode("utf-8", "replace")

    async def json(self) -> object:
        """The whole body."""
        return json.loads(await self.text())

    async def message(self) -> str:
        """The sentence in an error's body, or its beginning."""
        text = await self.text()
        try:
            return str(json.loads(text)["error"]["message"])
        except (ValueError, KeyError, TypeError):
            return text[:200]

    async def event(self) -> bytes | None:
        """The data of the next server-sent event, or `None` at the end.

        Comments are left out; an event has one data line.
        """
        while True:
            while (end := self._body.find(b"\n\n")) >= 0:
                event = bytes(self._body[:end])
                del self._body[: end + 2]
                if event.startswith(b"data:"):
                    return event[5:].strip()
            if self._over:
                return None
            await self._more()

    async def _more(self) -> None:
        try:
            data = await self._stream.receive()
        except anyio.EndOfStream:
            raise EngineError("the server closed the connection in the middle of its answer") from None
        except anyio.BrokenResourceError as error:
            raise EngineError("the connection to the server broke") from error
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            raise EngineError(f"the server's answer is not HTTP: {error}") from error

    # -- called by the parser ---------------------------------------------------------------------

    def on_header(self, name: bytes, value: bytes) -> None:
        """One header."""
        if name.lower() == b"retry-after" and value.isdigit():
            self.retry_after_s = float(value)

    def on_headers_complete(self) -> None:
        """The head is there."""
        self._headed = True

    def on_body(self, data: bytes) -> None:
        """A piece of the body."""
        self._body += data

    def on_message_complete(self) -> None:
        """The body is whole."""
        self._over = True
