"""A server to measure, as a child of this process: `deepinfra serve`, or a peer."""

from __future__ import annotations

import re
import sys
from collections import deque
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from subprocess import DEVNULL, STDOUT

import anyio
from anyio.abc import Process
from anyio.streams.text import TextReceiveStream

from deepinfra.engine.collapse import collapsed
from deepinfra.errors import EngineError

__all__ = ("SERVING", "Child", "serving", "started")

SERVING = r"Serving \S+ on (http://\S+:\d+)"
"""What `deepinfra serve` prints when it serves; the group is its URL."""

_END_S = 60.0
"""After a signal a server is given so long."""


class Child:
    """A running server; `code` is its exit code once it ended, which nobody but `started` should bring about."""

    def __init__(self, process: Process, url: str) -> None:
        self._process = process
        self.url, self.pid = url, process.pid

    @property
    def code(self) -> int | None:
        """How it ended; `None` while it runs."""
        return self._process.returncode


def serving(environ: Mapping[str, str], arguments: Sequence[str]) -> AbstractAsyncContextManager[Child]:
    """Start `deepinfra serve` and wait until it serves; see `started`.

    Args:
        environ: Added to this process's own environment.
        arguments: Of the command, beside the port.
    """
    command = [sys.executable, "-m", "deepinfra", "serve", "--port", "0", *arguments]
    return started(command, environ, SERVING)


@asynccontextmanager
async def started(
    command: Sequence[str], environ: Mapping[str, str], ready: str, url: str = ""
) -> AsyncGenerator[Child]:
    """Start a server and wait until it says that it serves; end it as an operator does.

    Args:
        command: Program and arguments.
        environ: Added to this process's own environment.
        ready: What it prints then, as a pattern whose group is its URL unless `url` is given.
        url: Where it was told to listen.

    Raises:
        EngineError: It ended before it served; carries what it said last.
    """
    # `env` adds to what is inherited, which nothing here needs to read.
    whole = ["env", *(f"{name}={value}" for name, value in environ.items()), *command]
    process = await anyio.open_process(whole, stdin=DEVNULL, stderr=STDOUT)
    assert process.stdout is not None
    output = TextReceiveStream(process.stdout, errors="replace")
    said: deque[str] = deque(maxlen=20)
    served, where = anyio.Event(), ""

    async def listen() -> None:
        nonlocal where
        async for text in output:  # to its end: a full pipe would stop the server
            said.append(text)
            if not served.is_set() and (found := re.search(ready, "".join(said))):
                where = url or found[1]
                served.set()
        served.set()

    with collapsed():
        async with process, anyio.create_task_group() as tasks:
            tasks.start_soon(listen)
            try:
                await served.wait()
                if not where:
                    raise EngineError(f"the server ended before it served: {''.join(said).strip()[-500:]}")
                yield Child(process, where)
            finally:
                with anyio.CancelScope(shield=True):
                    if process.returncode is None:
                        process.terminate()
                        with anyio.move_on_after(_END_S):
                            await process.wait()
                        if process.returncode is None:
                            process.kill()
                    await process.wait()
                    tasks.cancel_scope.cancel()
