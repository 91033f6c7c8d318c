"""Virtual time: an event loop on which nobody ever waits, and what is given to parts that live in it."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from itertools import count
from typing import TypeVar

import anyio
import trio
import trio.testing
from trio._core import _run as trio_loop

__all__ = ("ModelledOffload", "VirtualClock", "run_virtually")

T = TypeVar("T")

_EPOCH = 1_800_000_000.0
"""Unix seconds at which every simulation begins, so that two of them are alike."""


class VirtualClock:
    """A `Clock` of the event loop that runs in virtual time; it begins at 0."""

    def __init__(self) -> None:
        self.loop = trio.testing.MockClock(autojump_threshold=0.0)

    def now(self) -> float:
        """See `Clock.now`."""
        return self.loop.current_time()

    def wall(self) -> float:
        """See `Clock.wall`."""
        return _EPOCH + self.loop.current_time()


class ModelledOffload:
    """An `Offload` without threads, which let virtual time jump: work is done at once, and takes `seconds`."""

    def __init__(self, seconds: float = 0.5e-3) -> None:
        self._seconds = seconds

    async def __call__(self, function: Callable[..., T], /, *args: object) -> T:
        """See `Offload`."""
        result = function(*args)
        await anyio.sleep(self._seconds)
        return result


class _InOrder(random.Random):
    """Says that no batch is to be turned round."""

    def random(self) -> float:
        return 0.0


@contextmanager
def _in_order() -> Iterator[None]:
    """Let the loop run tasks in the order in which they became ready, and equal deadlines in that of their making.

    It turns every other batch of tasks round, at random, and orders equal deadlines by address; nothing public makes
    it do otherwise.
    """
    usual, serial = trio_loop._r, count()
    trio_loop._r = _InOrder()
    trio_loop.id = lambda scope: next(serial)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        trio_loop._r = usual
        del trio_loop.id  # type: ignore[attr-defined]


def run_virtually(main: Callable[[], Awaitable[T]], clock: VirtualClock) -> T:
    """Run a program in virtual time, the same each time."""
    with _in_order():
        return trio.run(main, clock=clock.loop)
