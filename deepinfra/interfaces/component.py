"""The root of all parts: cheap to construct, acquired by `async with`, usable again after exit."""

from __future__ import annotations

from abc import ABC
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from typing import Self

from anyio import AsyncContextManagerMixin

from deepinfra.interfaces.given import Clock, Offload, SystemClock, ThreadOffload

__all__ = ("Component",)


class Component(AsyncContextManagerMixin, ABC):
    """A swappable part.

    The constructor stores settings and reads at most headers. Files, memory, threads and children are acquired in
    `async with` and gone after it; the same object may be entered again, not twice at once. Override
    `__asynccontextmanager__` with one generator to acquire something.
    """

    clock: Clock = SystemClock()
    offload: Offload = ThreadOffload()

    def give(self, clock: Clock, offload: Offload) -> None:
        """Replace time and threads; called by the engine before `async with`."""
        self.clock, self.offload = clock, offload

    def explain(self) -> Mapping[str, str]:
        """What was left to the part to decide, by the name of its option, and what it decided; default: nothing.

        Valid after construction, from headers alone; words for people, shown by `deepinfra explain` and `serve`.
        """
        return {}

    @asynccontextmanager
    async def __asynccontextmanager__(self) -> AsyncGenerator[Self]:
        yield self
