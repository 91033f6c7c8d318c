"""One thread that does an executor's work in the order it was given, and tells the event loop."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import anyio
import anyio.lowlevel

from deepinfra.errors import ExecutorLost

__all__ = ("Job", "Worker")

T = TypeVar("T")


class Job(Generic[T]):
    """Something the thread does once; `wait` once, from the event loop that posted it.

    It lets go of its call when that is done, and of an error when that is raised: a step's call knows its handle, which
    knows this, and an error's traceback too. In such a ring a model and its KV would stay for as long as Python likes.
    """

    def __init__(self, call: Callable[[], T]) -> None:
        self._call: Callable[[], T] | None = call
        self._done = anyio.Event()
        self._value: T | None = None
        self._error: BaseException | None = None

    def run(self, *, gone: bool) -> Callable[[], None]:
        """Do it, on the thread; returns what the event loop has to call."""
        call, self._call = self._call, None
        try:
            if gone or call is None:
                raise ExecutorLost("the executor was left")
            self._value = call()
        except BaseException as error:  # a thread's door: whatever it is belongs to who waits
            self._error = error
        return self._done.set

    async def wait(self) -> T:
        """The result; a cancelled wait leaves the thread at its work."""
        await self._done.wait()
        if self._error is not None:
            error, self._error = self._error, None
            try:
                raise error
            finally:
                del error
        return self._value  # type: ignore[return-value]


class Worker:
    """A thread with a queue; made on the event loop that will post to it."""

    def __init__(self, name: str) -> None:
        self._jobs: queue.SimpleQueue[Job[object] | None] = queue.SimpleQueue()
        self._tell = _teller()
        self._ended = anyio.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self.leaving = threading.Event()
        self._thread.start()

    def post(self, call: Callable[[], T]) -> Job[T]:
        """Queue a call; never blocks. Once `close` has begun, jobs fail with `ExecutorLost`."""
        job = Job(call)
        if self.leaving.is_set():
            job.run(gone=True)()
        else:
            self._jobs.put(job)  # type: ignore[arg-type]
        return job

    async def close(self) -> None:
        """Let the running job end, fail those behind it, and end the thread; not cancellable."""
        self.leaving.set()
        self._jobs.put(None)
        with anyio.CancelScope(shield=True):
            await self._ended.wait()
        self._thread.join()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            self._tell(job.run(gone=self.leaving.is_set()))
        self._tell(self._ended.set)


def _teller() -> Callable[[Callable[[], None]], object]:
    """Has a function called on this event loop, from any thread and without waiting for it.

    `anyio.from_thread.run_sync` waits: the next step would begin a turn of the loop later, 70 us with nothing to do.
    """
    loop: Any = anyio.lowlevel.current_token().native_token
    soon: Callable[[Callable[[], None]], object] = getattr(loop, "call_soon_threadsafe", None) or loop.run_sync_soon
    return soon
