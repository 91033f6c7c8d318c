"""The child's side: an executor behind a socket, gone when its parent is."""

from __future__ import annotations

import mmap
import os
import select
import signal
import socket
import threading

import anyio
from anyio.abc import TaskGroup, TaskStatus

from deepinfra.errors import DeepinfraError, ExecutorLost, StepFailed
from deepinfra.executors.process.channel import (
    Channel,
    Closed,
    Done,
    Drain,
    Failed,
    Lost,
    Masks,
    NotStarted,
    Ready,
    Request,
    Step,
    Stop,
)
from deepinfra.interfaces.executor import Executor, StepHandle
from deepinfra.interfaces.given import InlineOffload, SystemClock

__all__ = ("serve_child",)


def serve_child(executor: Executor, fd: int) -> None:
    """Run `executor` for the parent at the other end of `fd`; returns when the parent says so.

    The whole of a child's `main`: ignores SIGINT, SIGTERM and SIGHUP, which are the parent's to act on (a service
    manager sends them to both), and ends the process at once when the parent dies in whatever way. The executor
    computes on this process's main thread: nothing else needs it.

    Args:
        executor: Not entered.
        fd: The number that `ProcessExecutor` appended to the command.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    os.set_inheritable(fd, False)
    with socket.socket(fileno=fd) as sock:
        threading.Thread(target=_end_with_parent, args=(fd, os.getppid()), daemon=True).start()
        fds = socket.recv_fds(sock, 1, 1)[1]
        if not fds:
            return
        try:
            staging = mmap.mmap(fds[0], 0)
        finally:
            os.close(fds[0])
        anyio.run(_serve, executor, Channel[Request](sock, Request), memoryview(staging))


def _end_with_parent(fd: int, parent: int) -> None:
    # Not PR_SET_PDEATHSIG: it fires when the *thread* that started this process ends, and trio starts processes from
    # a worker thread that retires after ten idle seconds. The pidfd is for a socket that somebody else holds open.
    poll = select.poll()
    poll.register(fd, select.POLLRDHUP)
    poll.register(os.pidfd_open(parent), select.POLLIN)
    poll.poll()
    os._exit(1)


async def _serve(executor: Executor, channel: Channel[Request], staging: memoryview) -> None:
    executor.give(SystemClock(), InlineOffload())
    entered = False
    try:
        executor.use_staging(staging)
        async with executor:
            entered = True
            provides = executor.provides - {"repeat"}
            channel.send(Ready(executor.limits, executor.layout, executor.identity, provides, executor.computing))
            await channel.flush()
            async with anyio.create_task_group() as tasks:
                await _Service(executor, channel, tasks).run()
                tasks.cancel_scope.cancel()
    except DeepinfraError as error:
        if entered:
            raise
        codes = [kind.code for kind in type(error).__mro__ if issubclass(kind, DeepinfraError)]
        channel.send(NotStarted(tuple(codes), str(error)))
        await channel.flush()


class _Service:
    """Answers requests until told to stop."""

    def __init__(self, executor: Executor, channel: Channel[Request], tasks: TaskGroup) -> None:
        self._executor, self._channel, self._tasks = executor, channel, tasks
        self._steps: dict[int, StepHandle] = {}

    async def run(self) -> None:
        while True:
            try:
                request = await self._channel.receive()
            except Closed:
                return
            match request:
                case Step(ticket, plan):
                    self._steps[ticket] = self._executor.submit(plan)
                    self._tasks.start_soon(self._finish, ticket)
                case Masks(ticket, rows):
                    if ticket in self._steps:
                        self._steps[ticket].masks(rows)
                case Drain():
                    # `start` returns when the drain has begun, so that no later step can come before it.
                    await self._tasks.start(self._drain, request)
                case Stop():
                    return

    async def _finish(self, ticket: int) -> None:
        reply: Done | Failed | Lost
        try:
            reply = Done(ticket, await self._steps[ticket].result())
        except StepFailed as error:
            reply = Failed(ticket, error.seqs, error.why)
        except ExecutorLost as error:
            reply = Lost(str(error))
        del self._steps[ticket]
        await self._reply(reply)

    async def _drain(self, request: Drain, *, task_status: TaskStatus[None]) -> None:
        reply: Done | Lost = Done(request.ticket)
        task_status.started()
        try:
            await self._executor.memory.drain(request.blocks, request.slots)
        except ExecutorLost as error:
            reply = Lost(str(error))
        await self._reply(reply)

    async def _reply(self, reply: Done | Failed | Lost) -> None:
        if not self._channel.send(reply):
            await self._channel.flush()
