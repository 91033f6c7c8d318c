"""A real server for official clients: uvicorn in a thread, on a free port."""

from __future__ import annotations

import socket
import threading
from collections.abc import Mapping
from typing import Any, Self

import uvicorn

from deepinfra.api.app import asgi
from deepinfra.engine import Engine

__all__ = ("Served",)


class Served:
    """An engine, or several by name, behind uvicorn on a free port of 127.0.0.1; a context manager.

    Args:
        engine: What is served.
        options: Of `asgi`.

    Attributes:
        engines: By the names they are served under.
        port: Where it listens, already before it is entered.
    """

    def __init__(self, engine: Engine | Mapping[str, Engine], **options: Any) -> None:
        self._socket = socket.create_server(("127.0.0.1", 0), backlog=512)
        self.port: int = self._socket.getsockname()[1]
        app = asgi(engine, **{"keepalive_s": 30, **options})
        self.engines = app.engines
        self.server = uvicorn.Server(uvicorn.Config(app, log_level="warning", ws="none", lifespan="on"))
        self._thread = threading.Thread(target=self.server.run, kwargs={"sockets": [self._socket]})

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.server.should_exit = True
        self._thread.join(30)
        self._socket.close()
        assert not self._thread.is_alive()

    @property
    def url(self) -> str:
        """Of the server itself, without a path."""
        return f"http://127.0.0.1:{self.port}"
