"""Executors that break: what a device may do to an engine without a wrong token."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from typing import Self

from deepinfra.core.ids import BlockId, SeqId
from deepinfra.core.kv import KVLayout
from deepinfra.core.model import Computing, ExecutorIdentity, ExecutorLimits
from deepinfra.core.step import MaskRows, SeqFailure, StepPlan, StepResult
from deepinfra.errors import ExecutorLost, StepFailed
from deepinfra.interfaces.executor import Executor, KVMemory, StepHandle
from deepinfra.interfaces.given import Clock, Offload

__all__ = ("FlakyExecutor",)

_NOBODY = SeqId(-1)


class _Handle(StepHandle):
    def __init__(self, outer: FlakyExecutor, inner: StepHandle, plan: StepPlan, fault: str) -> None:
        self._outer, self._inner, self._plan, self._fault = outer, inner, plan, fault

    def masks(self, rows: MaskRows) -> None:
        self._inner.masks(rows)

    def cut(self) -> StepResult | None:
        return self._inner.cut()

    async def result(self) -> StepResult:
        result = await self._inner.result()
        if self._fault == "lose":
            raise ExecutorLost("the device fell off the bus")
        if self._fault == "row" and result.outputs:
            victim = result.outputs[-1]
            kept = result.outputs[:-1]
            return result._replace(outputs=kept, failed=(SeqFailure(victim.seq, "NaN in the logits"),))
        return result


class _Failed(StepHandle):
    def __init__(self, inner: StepHandle, seqs: Sequence[int]) -> None:
        self._inner, self._seqs = inner, seqs

    def masks(self, rows: MaskRows) -> None:
        self._inner.masks(rows)

    async def result(self) -> StepResult:
        raise StepFailed(self._seqs, "out of memory in a kernel")


class _Memory(KVMemory):
    def __init__(self, inner: KVMemory, outer: FlakyExecutor) -> None:
        self._inner, self._outer = inner, outer

    @property
    def num_slots(self) -> int:
        return self._inner.num_slots

    def slot(self, index: int) -> memoryview:
        return self._inner.slot(index)

    async def drain(self, blocks: Sequence[BlockId], slots: Sequence[int]) -> None:
        await self._inner.drain(blocks, slots)
        if self._outer.lost:
            raise ExecutorLost("the device fell off the bus")


class FlakyExecutor(Executor):
    """An executor that loses steps, single rows and itself.

    A failed step (`fail`) told the executor all that its plan says, but none of its rows are kept. A failed row (`row`)
    ran, but its output is lost. A lost executor (`lose`) ran the step and says nothing.

    Args:
        inner: The executor to be broken.
        rng: Where faults come from.
        rate: Probability of a fault per step.
        kinds: Which faults: `fail`, `row`, `lose`.
        most: Faults altogether, so that a run ends.

    Attributes:
        injected: How often each fault struck.
        hit: Sequences named in failed steps and rows; so many answers may fail, and no more.
    """

    def __init__(
        self,
        inner: Executor,
        rng: random.Random,
        *,
        rate: float = 0.1,
        kinds: Sequence[str] = ("fail", "row", "lose"),
        most: int = 2,
    ) -> None:
        self.inner, self._rng, self._rate, self._kinds, self._most = inner, rng, rate, tuple(kinds), most
        self.depth = inner.depth
        self.injected: Counter[str] = Counter()
        self.lost = False
        self.hit = 0

    @property
    def provides(self) -> frozenset[str]:
        """The inner executor's."""
        return self.inner.provides

    @property
    def layout(self) -> KVLayout:
        """The inner executor's."""
        return self.inner.layout

    @property
    def identity(self) -> ExecutorIdentity:
        """The inner executor's."""
        return self.inner.identity

    @property
    def computing(self) -> Computing:
        """The inner executor's."""
        return self.inner.computing

    @property
    def limits(self) -> ExecutorLimits:
        """The inner executor's."""
        return self.inner.limits

    @property
    def memory(self) -> KVMemory:
        """The inner executor's, until it is lost."""
        return _Memory(self.inner.memory, self)

    def give(self, clock: Clock, offload: Offload) -> None:
        """Pass on."""
        super().give(clock, offload)
        self.inner.give(clock, offload)

    @asynccontextmanager
    async def __asynccontextmanager__(self) -> AsyncGenerator[Self]:
        self.lost = False
        async with self.inner:
            yield self

    def submit(self, plan: StepPlan) -> StepHandle:
        """Submit, or break."""
        fault = ""
        if sum(self.injected.values()) < self._most and self._rng.random() < self._rate:
            fault = self._rng.choice(self._kinds)
        seqs = [item.seq for item in plan.items]
        if fault == "fail" and seqs:
            self.injected[fault] += 1
            named = self._rng.sample(seqs, self._rng.randint(1, len(seqs)))
            self.hit += len(named)
            # A row of no sequence makes the inner step fail as a whole: what the plan told stands, no row is kept.
            stray = plan.items[0]._replace(seq=_NOBODY, blocks=())
            inner = self.inner.submit(plan._replace(items=(*plan.items, stray)))
            return _Failed(inner, named)
        if fault == "row" and seqs:
            self.injected[fault] += 1
            self.hit += 1
        if fault == "lose":
            self.injected[fault] += 1
            self.lost = True
        return _Handle(self, self.inner.submit(plan), plan, fault)
