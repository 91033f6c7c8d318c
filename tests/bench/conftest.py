"""A server over the toy executor, on a port of the loopback interface, in a thread of its own."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest
import uvicorn

from deepinfra.api.app import asgi
from deepinfra.engine import Engine, Pool
from deepinfra.executors.toy import ToyExecutor
from deepinfra.schedulers.fcfs import Fcfs
from deepinfra.testing.tiny import TinyRecipe


@pytest.fixture(scope="session")
def server() -> Iterator[str]:
    """Its base URL."""
    engine = Engine(TinyRecipe(), Pool(Fcfs(), ToyExecutor(num_blocks=512, max_context=512)), name="toy")
    server = uvicorn.Server(uvicorn.Config(asgi(engine), log_config=None, ws="none"))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
        server.should_exit = True
        thread.join()
