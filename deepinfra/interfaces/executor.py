"""Executor: the model on a device."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol

from deepinfra.core.ids import BlockId
from deepinfra.core.kv import KVLayout
from deepinfra.core.model import Computing, ExecutorIdentity, ExecutorLimits
from deepinfra.core.step import MaskRows, StepPlan, StepResult
from deepinfra.errors import ExecutorError
from deepinfra.interfaces.component import Component

__all__ = ("Executor", "KVMemory", "StepHandle")


class StepHandle(Protocol):
    """A submitted step."""

    def masks(self, rows: MaskRows) -> None:
        """Give token masks; exactly once if `plan.masked`, before the step samples, else never."""

    def cut(self) -> StepResult | None:
        """End a repeated step (`StepPlan.repeat`) behind the time that it is computing; no effect on any other step.

        Returns:
            What the times before that one gave, in `each_s` their seconds, which `result` will say once more; `None` if
            there were none. Default: `None` and no effect, for executors that do not provide `repeat`.
        """
        return None

    async def result(self) -> StepResult:
        """Wait for the step; called once. A cancelled wait does not stop the step.

        Raises:
            StepFailed: The step failed for some or all of its sequences; those lose the KV written in this step, and
                the executor takes the next step. What the plan told stands (`closed`, `opened`, `fills`, and the
                `blocks` of items); sequences not named have neither tokens nor computed positions more than before.
            ExecutorLost: The executor is gone with everything on the device.
        """


class KVMemory(ABC):
    """Host staging beside the device's KV: slots of `layout.slot_nbytes` bytes.

    The engine owns which slot is used for what. A slot's payload begins at `FRAME_NBYTES`; the room before it is the
    engine's frame, so that a record is saved and loaded without a copy.
    """

    @property
    @abstractmethod
    def num_slots(self) -> int:
        """Number of slots; at least 1."""

    @abstractmethod
    def slot(self, index: int) -> memoryview:
        """The writable bytes of one slot; the same memory each time, valid inside the executor's `async with`."""

    @abstractmethod
    async def drain(self, blocks: Sequence[BlockId], slots: Sequence[int]) -> None:
        """Copy blocks into slots' payloads, as they are after every step submitted so far.

        Raises:
            ExecutorLost: The blocks are gone; slots hold anything.
        """


class Executor(Component):
    """Runs steps in the order submitted.

    `provides`, `layout` and `identity` are valid after construction (headers only), `limits`, `memory` and `computing`
    inside `async with`. After `ExecutorLost` the object is left and entered again, with empty memory.

    Capabilities in `provides`: `batch-invariant` (a sequence's bits do not depend on its batch), `drafts` (verifies
    `WorkItem.drafts`), `logprobs`, `masks`, `media`, `sampling` (all of `SamplingParams`), `placement`, `repeat`
    (several steps of the same decoding sequences at once, see `StepPlan.repeat`).
    """

    depth: int = 1
    """Steps that may be in flight at once; 1 = the result of a step is awaited before the next is submitted.

    With more, decoding rows go on from tokens that steps in flight will sample: the executor keeps each sequence's
    tokens, so that a plan names positions only. If a step fails, those submitted behind it for the same sequences fail.
    """

    @property
    def holds_interpreter(self) -> bool:
        """Whether its steps take Python's lock often or long, so that a server had better run it in a child process.

        Valid when `identity` is. Default: it does.
        """
        return True

    @property
    @abstractmethod
    def provides(self) -> frozenset[str]:
        """Names of optional capabilities."""

    @property
    @abstractmethod
    def layout(self) -> KVLayout:
        """How it keeps KV."""

    @property
    @abstractmethod
    def identity(self) -> ExecutorIdentity:
        """What decides what it writes: the same before, inside and after `async with`.

        Only `numerics` may be others inside, if something else computes than could be known before.
        """

    @property
    def computing(self) -> Computing:
        """How it computes; valid inside `async with`, as what runs may be known only then.

        Default: all that `identity` says of it.
        """
        return Computing(self.identity.kv_dtype)

    @property
    def speed(self) -> str:
        """What decides how long steps take, as text: step times measured under one text are kept for the same text.

        Valid when `identity` is. Default: the class and the identity.
        """
        return " ".join((type(self).__qualname__, *filter(None, self.identity)))

    @property
    @abstractmethod
    def limits(self) -> ExecutorLimits:
        """How much it takes."""

    @property
    @abstractmethod
    def memory(self) -> KVMemory:
        """Staging slots."""

    def use_staging(self, buffer: memoryview) -> None:
        """Place the staging slots in `buffer` (slot after slot) instead of memory of its own.

        Called at most once, before `async with`, by a process that shares the buffer with the engine's. The buffer
        holds a whole number of slots; that number becomes `limits.num_slots`. Default: refused.

        Raises:
            ExecutorError: This executor cannot use foreign memory.
        """
        raise ExecutorError(f"{type(self).__name__} cannot place its staging slots in shared memory")

    @abstractmethod
    def submit(self, plan: StepPlan) -> StepHandle:
        """Queue a step; never blocks, never raises for the plan's content (that is the result's business).

        A step applies `snapshots`, `closed`, `opened` and `fills`, then computes `items`: chunks and single rows mixed.
        A row that samples yields the token after its position, drawn as `core.sampling` says; drafts are verified in
        `matched` fashion: the target's token is drawn at each position and a draft is accepted iff equal.
        """
