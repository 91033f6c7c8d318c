"""From an admitted call to the bytes of its answer, while the client is there."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from typing import Any, TypeVar

import anyio
import anyio.lowlevel
from starlette.types import Receive

from deepinfra.api.body import ClientGone
from deepinfra.api.encoding import json_bytes
from deepinfra.api.middleware import RequestRecord
from deepinfra.api.protocol import Call, Extension, Frame, Head
from deepinfra.api.sse import EventStream, encoded
from deepinfra.api.wire import add_usage
from deepinfra.core.events import Event, Failed
from deepinfra.core.request import Usage
from deepinfra.engine import Engine, Stream
from deepinfra.engine.receipts import joined

__all__ = ("AnswerFailed", "Exchange", "unless_gone")

T = TypeVar("T")


class AnswerFailed(Exception):
    """Raised when the engine gave up one of a call's answers."""

    def __init__(self, event: Failed) -> None:
        self.event = event
        super().__init__(event.message)


async def unless_gone(receive: Receive, work: Callable[[], Awaitable[T]]) -> T:
    """Await `work()` and cancel it if the client leaves. What it raises comes out as it is, in no exception group.

    Raises:
        ClientGone: The client left.
    """
    gone = False
    error: Exception | None = None
    results: list[T] = []

    async def watch() -> None:
        nonlocal gone
        try:
            while (await receive())["type"] != "http.disconnect":
                await anyio.lowlevel.checkpoint()
        except Exception:  # a server that cannot say any more whether the client is there
            pass
        gone = True
        group.cancel_scope.cancel()

    async with anyio.create_task_group() as group:
        group.start_soon(watch)
        try:
            results.append(await work())
        except Exception as raised:
            error = raised
        group.cancel_scope.cancel()
    if results:
        return results[0]
    if gone or error is None:
        raise ClientGone from error
    raise error


def _fingerprint(engine: Engine) -> str:
    facts: list[object] = [engine.recipe.version]
    for pool in engine.pools:
        facts += (pool.executor.identity, pool.computing)
        if any(group.kind == "window" for group in pool.executor.layout.groups):
            facts.append(pool.replay)
    return f"fp_{hashlib.sha256(repr(tuple(facts)).encode()).hexdigest()[:16]}"


class Exchange:
    """One call on one engine: admission, answer, and nothing of it left afterwards."""

    def __init__(self, call: Call, engine: Engine, record: RequestRecord, out: EventStream, created: float) -> None:
        self._call, self._engine, self._record, self._out = call, engine, record, out
        self._created = int(created)
        self._streams: list[Stream] = []
        self._fold = call.writer.fold()
        self._begun = False
        self._error: Exception | None = None

    async def run(self) -> bytes:
        """Ask the engine, deliver what it says, and return what is left to send when the engine is done.

        Admission errors are raised as they are: nothing has been sent then, and no task group is around them.

        Raises:
            DeepinfraError: The request was not admitted.
            AnswerFailed: It was, and an answer of it failed.
            OSError: The client cannot be written to.
        """
        async with AsyncExitStack() as stack:
            for request in self._call.requests:
                self._streams.append(await stack.enter_async_context(self._engine.generate(request)))
            try:
                await self._deliver()
            finally:
                self._record.usage = self._usage
        if self._error is not None:
            raise self._error
        writer = self._call.writer
        frames = [*self._begin(), *writer.end(self._usage, self._extension)]
        if self._call.stream:
            return b"".join(map(encoded, frames)) + writer.closing
        for frame in frames:
            self._fold.add(frame)
        return json_bytes(self._fold.answer())

    @property
    def _usage(self) -> Usage:
        return add_usage(stream.usage for stream in self._streams)

    @property
    def _extension(self) -> Extension:
        explanation = self._streams[0].explanation
        if explanation is not None and self._record.key == "-":  # without keys, callers share a tenant with anybody
            explanation = explanation.without_text()
        return Extension(
            seed=self._streams[0].seed,
            cached=self._usage.cached,
            explanation=explanation,
            receipt=joined([stream.receipt for stream in self._streams]),
        )

    async def _deliver(self) -> None:
        """Every prompt's events, as they come; errors are kept, so that they leave the engine's contexts unwrapped."""
        take = self._send if self._call.stream else self._keep
        async with anyio.create_task_group() as group:
            async with anyio.create_task_group() as readers:

                async def guarded(work: Callable[..., Awaitable[None]], *args: Any) -> None:
                    try:
                        await work(*args)
                    except Exception as error:
                        self._error = self._error or error
                        readers.cancel_scope.cancel()

                if self._call.stream:
                    group.start_soon(guarded, self._out.keep_alive, self._sign)
                for prompt, stream in enumerate(self._streams):
                    readers.start_soon(guarded, self._read, prompt, stream, take)
            self._out.hush()

    def _sign(self) -> bytes:
        """That the answer is under way, with its beginning if nothing was said yet."""
        return b"".join(map(encoded, self._begin())) + self._call.writer.keepalive

    async def _read(self, prompt: int, stream: Stream, take: Callable[[int, Sequence[Event]], Awaitable[None]]) -> None:
        async for event in stream:
            ready = [event]
            while (more := stream.next_nowait()) is not None:
                ready.append(more)
            await take(prompt, ready)

    def _begin(self) -> Sequence[Frame]:
        if self._begun:
            return ()
        self._begun = True
        head = Head(
            id=self._call.id_prefix + secrets.token_hex(12),
            created=self._created,
            model=self._call.model,
            fingerprint=_fingerprint(self._engine),
        )
        return self._call.writer.begin(head, self._usage)

    def _frames(self, prompt: int, events: Sequence[Event]) -> tuple[list[Frame], Failed | None]:
        """What all these events say, up to a failure."""
        frames: list[Frame] = []
        for event in events:
            if isinstance(event, Failed):
                return frames, event
            frames += self._begin()
            frames += self._call.writer.write(prompt, event)
        return frames, None

    async def _keep(self, prompt: int, events: Sequence[Event]) -> None:
        frames, failed = self._frames(prompt, events)
        if failed is not None:
            raise AnswerFailed(failed)
        for frame in frames:
            self._fold.add(frame)

    async def _send(self, prompt: int, events: Sequence[Event]) -> None:
        """One body message for all events that are there; a failure is told after what came before it."""
        frames, failed = self._frames(prompt, events)
        if frames:
            await self._out.write(b"".join(map(encoded, frames)))
        if failed is not None:
            raise AnswerFailed(failed)
