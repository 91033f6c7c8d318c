"""An executor that notes when its steps ran, around any other."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from typing import NamedTuple, Self

from deepinfra.core.kv import KVLayout
from deepinfra.core.model import Computing, ExecutorIdentity, ExecutorLimits
from deepinfra.core.step import MaskRows, StepPlan, StepResult
from deepinfra.interfaces.executor import Executor, KVMemory, StepHandle
from deepinfra.interfaces.given import Clock, Offload

__all__ = ("Recorder", "Steady", "StepRecord", "steady")


class StepRecord(NamedTuple):
    """One step: when its result was there, seconds inside the executor, rows, positions computed, tokens sampled."""

    ended_at: float
    seconds: float
    rows: int
    positions: int
    ids: tuple[int, ...]


class Steady(NamedTuple):
    """A run of alike steps: how many, wall seconds, seconds inside the executor, tokens sampled."""

    steps: int
    wall_s: float
    executor_s: float
    tokens: int

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second of wall time."""
        return self.tokens / self.wall_s

    @property
    def overhead(self) -> float:
        """Share of the wall time that was not spent inside the executor."""
        return 1.0 - self.executor_s / self.wall_s


def steady(records: Sequence[StepRecord], batch: int) -> Steady:
    """The longest run of steps in which exactly `batch` sequences decoded and nothing else happened.

    Wall time runs from the end of the run's first step to the end of its last, so that everything between steps is in
    it; the first step itself is not counted. Without two such steps the result has `steps` 0.
    """
    best: Sequence[StepRecord] = ()
    begin = 0
    for end in range(1, len(records) + 1):
        record = records[end - 1]
        if not record.rows == record.positions == batch:
            begin = end
        elif end - begin > len(best):
            best = records[begin:end]
    if len(best) < 2:
        return Steady(0, 0.0, 0.0, 0)
    counted = best[1:]
    return Steady(
        steps=len(counted),
        wall_s=best[-1].ended_at - best[0].ended_at,
        executor_s=sum(record.seconds for record in counted),
        tokens=sum(len(record.ids) for record in counted),
    )


class _Step(StepHandle):
    def __init__(self, inner: StepHandle, plan: StepPlan, recorder: Recorder) -> None:
        self._inner, self._plan, self._recorder = inner, plan, recorder

    def masks(self, rows: MaskRows) -> None:
        self._inner.masks(rows)

    def cut(self) -> StepResult | None:
        return self._inner.cut()

    async def result(self) -> StepResult:
        result = await self._inner.result()
        self._recorder.note(self._plan, result)
        return result


class Recorder(Executor):
    """Passes everything on to `inner` and keeps a `StepRecord` of every good step in `records`."""

    def __init__(self, inner: Executor) -> None:
        self._inner = inner
        self.depth = inner.depth
        self.records: list[StepRecord] = []

    @property
    def provides(self) -> frozenset[str]:
        """The inner executor's."""
        return self._inner.provides

    @property
    def layout(self) -> KVLayout:
        """The inner executor's."""
        return self._inner.layout

    @property
    def identity(self) -> ExecutorIdentity:
        """The inner executor's."""
        return self._inner.identity

    @property
    def computing(self) -> Computing:
        """The inner executor's."""
        return self._inner.computing

    @property
    def speed(self) -> str:
        """The inner executor's."""
        return self._inner.speed

    @property
    def limits(self) -> ExecutorLimits:
        """The inner executor's."""
        return self._inner.limits

    @property
    def memory(self) -> KVMemory:
        """The inner executor's."""
        return self._inner.memory

    def give(self, clock: Clock, offload: Offload) -> None:
        """Pass on."""
        super().give(clock, offload)
        self._inner.give(clock, offload)

    @asynccontextmanager
    async def __asynccontextmanager__(self) -> AsyncGenerator[Self]:
        async with self._inner:
            yield self

    def submit(self, plan: StepPlan) -> StepHandle:
        """Pass on, and note when the result is there."""
        return _Step(self._inner.submit(plan), plan, self)

    def note(self, plan: StepPlan, result: StepResult) -> None:
        """Keep a record of a step that has just ended."""
        self.records.append(
            StepRecord(
                ended_at=self.clock.now(),
                seconds=result.seconds,
                rows=len(plan.items),
                positions=sum(item.length for item in plan.items),
                ids=tuple(token for output in result.outputs for token in output.tokens),
            )
        )
