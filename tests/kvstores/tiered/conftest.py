"""Two tiers in RAM, the slower of which can be broken: everything happens without a disk."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import pytest

from deepinfra.interfaces.given import ThreadOffload
from deepinfra.kvstores import MemoryStore, Tier, TieredStore
from deepinfra.testing import ManualClock
from deepinfra.testing.faults import BrokenStore


@dataclass(frozen=True, slots=True)
class Stack:
    """A store of two tiers, each at hand."""

    store: TieredStore
    ram: MemoryStore
    below: BrokenStore
    clock: ManualClock

    async def held_below(self, records: Any) -> int:
        """How many leading records the slower tier holds."""
        return len((await self.below.inner.match([record.ref.key for record in records])).refs)


MakeStack: TypeAlias = Callable[..., AbstractAsyncContextManager[Stack]]


@pytest.fixture
def stack() -> MakeStack:
    """Makes and enters a `Stack`: `write`, `ram_nbytes`, and what `TieredStore` takes."""

    @asynccontextmanager
    async def entered(
        *, write: Any = "all", ram_nbytes: int = 1 << 20, durable: bool = True, **options: Any
    ) -> AsyncGenerator[Stack]:
        ram, below, clock = MemoryStore(capacity_nbytes=ram_nbytes), BrokenStore(MemoryStore()), ManualClock()
        below.durable = durable
        store = TieredStore([ram, Tier(below, write)], **options)
        store.give(clock, ThreadOffload())
        async with store:
            yield Stack(store, ram, below, clock)

    return entered
