"""The parent's side: an executor whose steps run in a child process."""

from __future__ import annotations

import fcntl
import mmap
import os
import signal
import socket
import subprocess
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Self

import anyio
from anyio.abc import Process, TaskGroup

from deepinfra.core.ids import BlockId
from deepinfra.core.kv import KVLayout
from deepinfra.core.model import Computing, ExecutorIdentity, ExecutorLimits
from deepinfra.core.step import MaskRows, StepPlan, StepResult
from deepinfra.errors import DeepinfraError, ExecutorLost, ModelError, StepFailed
from deepinfra.executors.process.channel import (
    Channel,
    Closed,
    Done,
    Drain,
    Failed,
    Garbage,
    Lost,
    Masks,
    NotStarted,
    Ready,
    Reply,
    Step,
    Stop,
)
from deepinfra.interfaces.executor import Executor, KVMemory, StepHandle

__all__ = ("ProcessExecutor",)

_STOP_S = 5.0  # for a step to end and the device to be given back; then the child is killed
_DYING_S = 1.0  # from a closed socket to an exit code


class ProcessExecutor(Executor):
    """Runs another executor in a child process; steps and replies cross a socket, KV crosses shared memory.

    The child dies with this process, however that ends. If the child dies, hangs or talks nonsense, everything
    waiting gets `ExecutorLost`; leaving and entering again starts a fresh child.

    Args:
        inner: The same executor as the child builds, never entered: says layout, identity and capabilities.
        command: Program and arguments of the child. The number of a socket is appended as last argument; the program
            builds the executor and calls `serve_child` with it. Its standard output goes to standard error.
        num_slots: Staging slots, in shared memory.
        step_timeout_s: A step or drain that takes longer loses the executor.
        start_timeout_s: Seconds for the child to be ready, weights loaded.
    """

    def __init__(
        self,
        inner: Executor,
        command: Sequence[str],
        *,
        num_slots: int = 8,
        step_timeout_s: float = 120.0,
        start_timeout_s: float = 600.0,
    ) -> None:
        self._inner, self._command, self._num_slots = inner, tuple(command), num_slots
        self._step_timeout_s, self._start_timeout_s = step_timeout_s, start_timeout_s
        self.depth = inner.depth
        self._identity: ExecutorIdentity | None = None

    @property
    def provides(self) -> frozenset[str]:
        """See `Executor.provides`."""
        return self._inner.provides - {"repeat"}  # a step under way over there cannot be cut

    @property
    def layout(self) -> KVLayout:
        """See `Executor.layout`."""
        return self._inner.layout

    @property
    def identity(self) -> ExecutorIdentity:
        """See `Executor.identity`; inside, as the child reported it."""
        return self._identity or self._inner.identity

    @property
    def computing(self) -> Computing:
        """See `Executor.computing`; as the child reported it."""
        return self._computing

    @property
    def speed(self) -> str:
        """See `Executor.speed`; as the inner executor says."""
        return self._inner.speed

    @property
    def limits(self) -> ExecutorLimits:
        """See `Executor.limits`; as the child reported them."""
        return self._limits

    @property
    def memory(self) -> KVMemory:
        """See `Executor.memory`."""
        return self._memory

    def explain(self) -> Mapping[str, str]:
        """See `Component.explain`; as the inner executor says."""
        return self._inner.explain()

    @property
    def pid(self) -> int:
        """Process id of the child; valid inside `async with`."""
        return self._child.pid

    @asynccontextmanager
    async def __asynccontextmanager__(self) -> AsyncGenerator[Self]:
        stride = self.layout.slot_nbytes
        with _shared_memory(self._num_slots * stride) as (fd, staging):
            async with _spawned(self._command, fd) as (process, channel):
                child = _Child(process, channel, self._step_timeout_s)
                ready = await child.start(self._start_timeout_s)
                self._check(ready)
                self._limits, self._computing, self._child = ready.limits, ready.computing, child
                self._identity = ready.identity
                self._memory = _SharedSlots(child, staging, stride)
                try:
                    async with child.running():
                        yield self
                finally:
                    self._identity = None
                    del self._limits, self._computing, self._child, self._memory

    def submit(self, plan: StepPlan) -> StepHandle:
        """See `Executor.submit`."""
        return self._child.submit(plan)

    def _check(self, ready: Ready) -> None:
        """Refuse a child that built something else: its files may have changed since `inner` read them.

        Numerics may be others, where what was hoped for cannot be built over there.
        """
        theirs = (ready.identity._replace(numerics=self.identity.numerics), ready.layout, ready.provides)
        ours = (self.identity, self.layout, self.provides)
        for their, our in zip(theirs, ours, strict=True):
            if their != our:
                raise ModelError(f"the executor's process runs {their} where {our} was expected; restart the server")


@contextmanager
def _shared_memory(nbytes: int) -> Iterator[tuple[int, memoryview]]:
    """Anonymous memory that a child can map; views of it that others still hold keep it alive."""
    fd = os.memfd_create("deepinfra-staging", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, nbytes)
        # A child that shrank it would kill us with SIGBUS.
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        mapping = mmap.mmap(fd, nbytes)
        staging = memoryview(mapping)
        try:
            yield fd, staging
        finally:
            with suppress(BufferError):
                staging.release()
                mapping.close()
    finally:
        os.close(fd)


@asynccontextmanager
async def _spawned(command: Sequence[str], memory_fd: int) -> AsyncIterator[tuple[Process, Channel[Reply]]]:
    """A child with a socket and the shared memory; dead and reaped afterwards."""
    ours, theirs = socket.socketpair()
    with ours:
        with theirs, anyio.CancelScope(shield=True):
            fd = theirs.fileno()
            # Of its own session: Ctrl-C in a terminal is for the parent, which decides what becomes of the child.
            process = await anyio.open_process(
                [*command, str(fd)],
                stdin=subprocess.DEVNULL,
                stdout=2,
                stderr=None,
                pass_fds=(fd,),
                start_new_session=True,
            )
        try:
            socket.send_fds(ours, [b"\0"], [memory_fd])
            yield process, Channel[Reply](ours, Reply)
        finally:
            with anyio.CancelScope(shield=True):
                _kill(process)
                await process.wait()


def _kill(process: Process) -> None:
    if process.returncode is None:
        with suppress(ProcessLookupError):
            process.kill()


class _SharedSlots(KVMemory):
    def __init__(self, child: _Child, staging: memoryview, stride: int) -> None:
        self._child, self._staging, self._stride = child, staging, stride

    @property
    def num_slots(self) -> int:
        return len(self._staging) // self._stride

    def slot(self, index: int) -> memoryview:
        return self._staging[index * self._stride : (index + 1) * self._stride]

    async def drain(self, blocks: Sequence[BlockId], slots: Sequence[int]) -> None:
        await self._child.drain(tuple(blocks), tuple(slots))


class _Wait:
    """Somebody waits for the reply to one ticket."""

    __slots__ = ("_done", "_reply")

    def __init__(self) -> None:
        self._done = anyio.Event()
        self._reply: Done | Failed | Lost

    def settle(self, reply: Done | Failed | Lost) -> None:
        self._reply = reply
        self._done.set()

    async def result(self) -> StepResult | None:
        await self._done.wait()
        match self._reply:
            case Done(_, result):
                return result
            case Failed(_, seqs, why):
                raise StepFailed(seqs, why)
            case Lost(why):
                raise ExecutorLost(why)


class _StepInFlight(StepHandle):
    def __init__(self, child: _Child, ticket: int, wait: _Wait) -> None:
        self._child, self._ticket, self._wait = child, ticket, wait

    def masks(self, rows: MaskRows) -> None:
        self._child.masks(self._ticket, rows)

    async def result(self) -> StepResult:
        result = await self._child.wait_for(self._wait, "a step")
        assert result is not None
        return result


class _Child:
    """A running child: numbers requests, hands out replies, says why it was lost."""

    def __init__(self, process: Process, channel: Channel[Reply], step_timeout_s: float) -> None:
        self._process, self._channel, self._step_timeout_s = process, channel, step_timeout_s
        self._waits: dict[int, _Wait] = {}
        self._tickets = 0
        self._lost: str | None = None
        self._tasks: TaskGroup
        self._reading: anyio.CancelScope

    @property
    def pid(self) -> int:
        return self._process.pid

    async def start(self, timeout_s: float) -> Ready:
        try:
            with anyio.fail_after(timeout_s):
                first = await self._channel.receive()
        except TimeoutError:
            raise ExecutorLost(f"the executor's process was not ready within {timeout_s:g} s") from None
        except Closed:
            raise ExecutorLost(f"{await self._obituary()} while it started") from None
        except Garbage as error:
            raise ExecutorLost(f"the executor's process sent nonsense: {error}") from None
        if isinstance(first, NotStarted):
            raise _rebuilt(first)
        if not isinstance(first, Ready):
            raise ExecutorLost(f"the executor's process sent nonsense: {type(first).__name__} before it was ready")
        return first

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Reads replies meanwhile; stops the child at the end. Errors of the body leave ungrouped."""
        failure: Exception | None = None
        # Shielded: whoever is cancelled while a step is under way still waits for its reply, which must be read.
        self._reading = anyio.CancelScope(shield=True)
        async with anyio.create_task_group() as self._tasks:
            self._tasks.start_soon(self._read)
            try:
                yield
            except Exception as error:
                failure = error
            finally:
                with anyio.move_on_after(_STOP_S, shield=True):
                    if self._lost is None:
                        self._send(Stop())
                        await self._process.wait()
                self._reading.cancel()
                self._tasks.cancel_scope.cancel()
        if failure is not None:
            raise failure

    def submit(self, plan: StepPlan) -> StepHandle:
        ticket, wait = self._ticket()
        self._send(Step(ticket, _portable(plan)))
        return _StepInFlight(self, ticket, wait)

    def masks(self, ticket: int, rows: MaskRows) -> None:
        self._send(Masks(ticket, rows))

    async def drain(self, blocks: tuple[BlockId, ...], slots: tuple[int, ...]) -> None:
        ticket, wait = self._ticket()
        self._send(Drain(ticket, blocks, slots))
        await self.wait_for(wait, "a drain")

    async def wait_for(self, wait: _Wait, what: str) -> StepResult | None:
        with anyio.move_on_after(self._step_timeout_s):
            return await wait.result()
        self._lose(f"{what} took longer than {self._step_timeout_s:g} s")
        return await wait.result()

    def _ticket(self) -> tuple[int, _Wait]:
        self._tickets += 1
        wait = _Wait()
        if self._lost is None:
            self._waits[self._tickets] = wait
        else:
            wait.settle(Lost(self._lost))
        return self._tickets, wait

    def _send(self, message: Step | Masks | Drain | Stop) -> None:
        if self._lost is None and not self._channel.send(message):
            self._tasks.start_soon(self._channel.flush)

    async def _read(self) -> None:
        with self._reading:
            try:
                while self._lost is None:
                    self._settle(await self._channel.receive())
            except Closed:
                self._lose(await self._obituary())
            except Garbage as error:
                self._lose(f"the executor's process sent nonsense: {error}")

    def _settle(self, reply: Reply) -> None:
        match reply:
            case Done(ticket) | Failed(ticket) if ticket in self._waits:
                self._waits.pop(ticket).settle(reply)
            case Lost(why):
                self._lose(why)
            case _:
                raise Garbage(f"{type(reply).__name__} that nobody waits for")

    def _lose(self, why: str) -> None:
        if self._lost is None:
            self._lost = why
            _kill(self._process)
            for wait in self._waits.values():
                wait.settle(Lost(why))
            self._waits.clear()

    async def _obituary(self) -> str:
        with anyio.move_on_after(_DYING_S):
            await self._process.wait()
        code = self._process.returncode
        if code is None:
            return "the executor's process closed its socket"
        if code >= 0:
            return f"the executor's process ended with exit code {code}"
        hint = " (out of memory?)" if -code == signal.SIGKILL else ""
        return f"the executor's process was killed by {signal.Signals(-code).name}{hint}"


def _portable(plan: StepPlan) -> StepPlan:
    """Seeds modulo 2**64, as draws take them anyway: msgpack has no larger integers."""
    if all(0 <= opened.seed < 2**64 for opened in plan.opened):
        return plan
    return plan._replace(opened=tuple(opened._replace(seed=opened.seed % 2**64) for opened in plan.opened))


def _rebuilt(refusal: NotStarted) -> DeepinfraError:
    """The child's error, of the nearest class known here; attributes other than the sentence do not cross."""
    known: dict[str, type[DeepinfraError]] = {}
    kinds: list[type[DeepinfraError]] = [DeepinfraError]
    while kinds:
        kind = kinds.pop()
        known.setdefault(kind.code, kind)
        kinds += kind.__subclasses__()
    kind = next((known[code] for code in refusal.codes if code in known), DeepinfraError)
    error = kind.__new__(kind)
    Exception.__init__(error, refusal.message)
    return error
