"""A server to measure: `deepinfra serve` as a child of this process, on a port of its own."""

from __future__ import annotations

import re
import sys
from collections import deque
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from subprocess import DEVNULL, STDOUT

import anyio
from anyio.abc import Process
from anyio.streams.text import TextReceiveStream

from deepinfra.engine.collapse import collapsed
from deepinfra.errors import EngineError

__all__ = ("Child", "serving")

_END_S = 60.0
"""After a signal a server is given so long."""


class Child:
    """A running server; `code` is its exit code once it ended, which nobody but `serving` should bring about."""

    def __init__(self, process: Process, url: str) -> None:
        self._process = process
        self.url, self.pid = url, process.pid

    @property
    def code(self) -> int | None:
        """How it ended; `None` while it runs."""
        return self._process.returncode


@asynccontextmanager
async def serving(environ: Mapping[str, str], arguments: Sequence[str]) -> AsyncGenerator[Child]:
    """Start `deepinfra serve` and wait until it serves; end it as an operator does.

    Args:
        environ: Added to this process's own environment.
        arguments: Of the command, beside the port.

    Raises:
        EngineError: It ended before it served; carries what it said last.
    """
    # `env` adds to what is inherited, which nothing here needs to read.
    command = ["env", *(f"{name}={value}" for name, value in environ.items())]
    command += [sys.executable, "-m", "deepinfra", "serve", "--port", "0", *arguments]
    process = await anyio.open_process(command, stdin=DEVNULL, stderr=STDOUT)
    assert process.stdout is not None
    output = TextReceiveStream(process.stdout, errors="replace")
    said: deque[str] = deque(maxlen=20)
    ready, url = anyio.Event(), ""

    async def listen() -> None:
        nonlocal url
        async for text in output:  # to its end: a full pipe would stop the server
            said.append(text)
            if not ready.is_set() and (found := re.search(r"Serving \S+ on (http://\S+:\d+)", "".join(said))):
                url = found[1]
                ready.set()
        ready.set()

    with collapsed():
        async with process, anyio.create_task_group() as tasks:
            tasks.start_soon(listen)
            try:
                await ready.wait()
                if not url:
                    raise EngineError(f"the server ended before it served: {''.join(said).strip()[-500:]}")
                yield Child(process, url)
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
