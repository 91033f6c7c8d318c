"""What every part is given instead of reaching for it: time and threads. The only place that touches either."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Protocol, TypeVar

import anyio.to_thread

__all__ = ("Clock", "InlineOffload", "Offload", "SystemClock", "ThreadOffload")

T = TypeVar("T")


class Clock(Protocol):
    """Time in seconds."""

    def now(self) -> float:
        """Monotonic seconds; differences only."""

    def wall(self) -> float:
        """Seconds since the Unix epoch; for records that outlive the process."""


class Offload(Protocol):
    """Runs a function that would hold the event loop for more than 1 ms."""

    async def __call__(self, function: Callable[..., T], /, *args: object) -> T:
        """Return `function(*args)`; a cancelled caller does not wait for the function, whose result is dropped."""


class SystemClock:
    """The machine's clocks."""

    def now(self) -> float:
        """See `Clock.now`."""
        return time.monotonic()

    def wall(self) -> float:
        """See `Clock.wall`."""
        return time.time()


class ThreadOffload:
    """Worker threads of the event loop's own limiter."""

    async def __call__(self, function: Callable[..., T], /, *args: object) -> T:
        """See `Offload`."""
        return await anyio.to_thread.run_sync(partial(function, *args), abandon_on_cancel=True)


class InlineOffload:
    """Runs on the loop: for simulation in virtual time, where a worker thread would let time jump."""

    async def __call__(self, function: Callable[..., T], /, *args: object) -> T:
        """See `Offload`."""
        await anyio.lowlevel.checkpoint()
        return function(*args)
