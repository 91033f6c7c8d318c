"""A real redis-server for the tests: on a unix socket in a folder of its own, nobody else's."""

from __future__ import annotations

import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import redis
from deepinfra_kv_redis.store import RedisStore


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    backend: str = request.param
    return backend


class RedisServer:
    """A server that can be started, killed and made to hang; what it holds survives a kill."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.socket = folder, folder / "redis.sock"
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"unix://{self.socket}"

    def start(self, *options: str) -> None:
        program = shutil.which("redis-server")
        assert program, "no redis-server: apt-get install redis-server"
        where = ("--port", "0", "--unixsocket", str(self.socket), "--dir", str(self.folder))
        keep = ("--save", "", "--appendonly", "yes", "--appendfsync", "no")
        self.process = subprocess.Popen([program, *where, *keep, *options], stdout=subprocess.DEVNULL)
        client = redis.Redis(unix_socket_path=str(self.socket))
        while True:
            try:
                client.ping()
            except redis.AuthenticationError:
                break
            except redis.ConnectionError:  # not listening, or reading its file
                assert self.process.poll() is None, "the server ended"
            else:
                break
        client.close()

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    def hang(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGCONT)


def _server() -> Iterator[RedisServer]:
    folder = Path(tempfile.mkdtemp(prefix="redis-"))  # a socket's path must be short
    server = RedisServer(folder)
    server.start()
    try:
        yield server
    finally:
        server.kill()
        shutil.rmtree(folder)


@pytest.fixture(scope="session")
def shared_server() -> Iterator[RedisServer]:
    """One server for tests that leave it alone."""
    yield from _server()


@pytest.fixture
def server() -> Iterator[RedisServer]:
    """A server to be killed."""
    yield from _server()


@pytest.fixture
def make(server: RedisServer) -> Callable[..., RedisStore]:
    """Makes stores on `server`."""
    return lambda **options: RedisStore(server.url, **{"timeout_s": 0.3} | options)
