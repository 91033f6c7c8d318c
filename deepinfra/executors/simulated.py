"""A model without weights: its steps take the time that a cost says, and its text is a pure function of the draws.

For simulation in virtual time, where a step of a large model passes as fast as it is planned, and for a server whose
front end is to be loaded without a device. Everything around the model is real: sequences, blocks, staging, drafts.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from itertools import accumulate
from math import cos, exp, log, pi, sqrt
from typing import Self

import anyio
import anyio.lowlevel

from deepinfra.core.cost import StepCost, StepWork
from deepinfra.core.ids import BlockId, Epoch, SeqId
from deepinfra.core.kv import FRAME_NBYTES, KVGroup, KVLayout
from deepinfra.core.model import ExecutorIdentity, ExecutorLimits
from deepinfra.core.sampling import Purpose, stream_key, uniform
from deepinfra.core.step import MaskRows, SeqOpen, SeqOutput, StepPlan, StepResult, WorkItem
from deepinfra.errors import ExecutorError, StepFailed
from deepinfra.interfaces.executor import Executor, KVMemory, StepHandle

__all__ = ("SIMULATED_COST", "SimulatedExecutor", "SimulatedStep")

SIMULATED_COST = StepCost(
    step=8.5e-3, chunk_token=3.5e-5, chunk_read=6.6e-10, decode_row=3.5e-5, decode_read=1.5e-8, draft=3.5e-5
)
"""A dense model of 70 billion parameters in bfloat16 on eight H100, as arithmetic has it; nothing of it was measured.

80 layers of width 8192 with 8 KV heads of 128. Half of 8 x 989 TFLOP/s for 140 GFLOP a token and 2.6 MFLOP per position
read; 0.8 of 8 x 3.35 TB/s for 140 GB of weights a step (and 2 ms for everything else) and 328 kB of KV per position.
"""

_MARK_NBYTES = 8

_STRIDE = 2_654_435_761
"""Odd and large: texts that step by it through the vocabulary repeat nothing."""

_CYCLE = 16
"""Tokens after which a text that repeats itself begins again."""


class _Seq:
    """What the executor keeps of an open sequence."""

    __slots__ = ("epoch", "key", "known", "table")

    def __init__(self, opened: SeqOpen) -> None:
        self.epoch: Epoch = opened.epoch
        self.known = len(opened.tokens)
        self.table = list(opened.blocks)
        draws = (opened.seed, opened.choice) if opened.sampling.temperature > 0.0 else (0, 0)
        self.key = stream_key(*draws, 0, Purpose.SAMPLE)


class _Memory(KVMemory):
    """Of a block only a mark is kept: behind which position it was last written."""

    def __init__(self, executor: SimulatedExecutor, num_blocks: int, stride: int, slots: memoryview) -> None:
        self._executor, self._stride, self._slots = executor, stride, slots
        self.marks = array("Q", [0]) * num_blocks

    @property
    def num_slots(self) -> int:
        return len(self._slots) // self._stride

    def slot(self, index: int) -> memoryview:
        return self._slots[index * self._stride : (index + 1) * self._stride]

    async def drain(self, blocks: Sequence[BlockId], slots: Sequence[int]) -> None:
        await self._executor._reach_boundary()
        for block, slot in zip(blocks, slots, strict=True):
            self._payload(slot)[:] = self.marks[block].to_bytes(_MARK_NBYTES, "little")
        await anyio.sleep(self._executor.copy_s(len(blocks)))

    def fill(self, slot: int, block: BlockId) -> None:
        self.marks[block] = int.from_bytes(self._payload(slot), "little")

    def _payload(self, slot: int) -> memoryview:
        return self.slot(slot)[FRAME_NBYTES : FRAME_NBYTES + _MARK_NBYTES]


class SimulatedStep(StepHandle):
    """A step under way: when it began, how long each time it is computed takes, and when each of these ends."""

    def __init__(self, executor: SimulatedExecutor, plan: StepPlan, begin: float, each_s: Sequence[float]) -> None:
        self.plan, self.begin, self.each_s = plan, begin, each_s
        self.ends = list(accumulate(each_s, initial=begin))[1:]
        self.times = len(self.ends)
        self.failure: StepFailed | None = None
        self._executor = executor
        self._cut = anyio.Event()
        self._result: StepResult | None = None

    @property
    def end(self) -> float:
        """When it ends, unless it is cut."""
        return self.ends[self.times - 1]

    def boundary(self, now: float) -> int:
        """How many times it has been computed by the first boundary that is not before `now`."""
        return min(self.times, bisect_left(self.ends, now) + 1)

    def masks(self, rows: MaskRows) -> None:
        """Refused: its tokens are no choice of a model's.

        Raises:
            ExecutorError: Always.
        """
        raise ExecutorError("the simulated executor takes no masks")

    def cut(self) -> StepResult | None:
        """See `StepHandle.cut`; the time that has begun becomes the last."""
        if self.times == 1 or self.failure is not None or self._result is not None:
            return None
        self.times = self.boundary(self._executor.clock.now())
        self._cut.set()
        before = self.times - 1
        if not before:
            return None
        outputs = tuple(self._executor._preview(item, before) for item in self.plan.items)
        each_s = tuple(self.each_s[:before])
        return StepResult(self.plan.step, outputs, sum(each_s), each_s=each_s)

    async def result(self) -> StepResult:
        """See `StepHandle.result`; it comes at `end`, or where it was cut."""
        clock = self._executor.clock
        if self.times > 1:
            with anyio.move_on_after(self.end - clock.now()):
                await self._cut.wait()
        await anyio.sleep(max(0.0, self.end - clock.now()))
        return self.settle()

    def settle(self) -> StepResult:
        """What came of it, which is certain from its end on.

        Raises:
            StepFailed: See `StepHandle.result`.
        """
        if self.failure is not None:
            raise self.failure
        if self._result is None:
            outputs = tuple(self._executor._finish(item, self.times) for item in self.plan.items)
            each_s = tuple(self.each_s[: self.times])
            self._result = StepResult(
                self.plan.step, outputs, sum(each_s), each_s=each_s if self.plan.repeat > 1 else ()
            )
        return self._result


class SimulatedExecutor(Executor):
    """See the module.

    What a token is depends on its sequence's seed, choice and position alone. Drafts are verified against that text
    like a model's; `acceptance` makes the text repeat itself, so that a speculator which looks for repetition guesses.
    KV is a mark per block; `block_nbytes` is what copies to and from staging, and modelled stores, take a block for.

    Args:
        cost: What a step costs.
        num_blocks: Blocks of KV.
        block_size: Positions per block.
        block_nbytes: Bytes that a block of the simulated model has.
        copy_nbytes_per_s: How fast blocks are copied between the device and staging; 0 takes no time.
        num_slots: Staging slots.
        max_step_tokens: Most positions per step.
        max_seqs: Most open sequences.
        max_context: Most positions of a sequence.
        vocab_size: Tokens are `0 .. vocab_size - 1`.
        noise: Standard deviation of the logarithm of a step's time; the mean stays. 0 is exact.
        acceptance: Chance that a token continues the text's repetition; 0: nothing repeats.
    """

    def __init__(
        self,
        *,
        cost: StepCost = SIMULATED_COST,
        num_blocks: int = 8192,
        block_size: int = 64,
        block_nbytes: int = 64 * 327_680,
        copy_nbytes_per_s: float = 0.0,
        num_slots: int = 64,
        max_step_tokens: int = 8192,
        max_seqs: int = 256,
        max_context: int = 131_072,
        vocab_size: int = 65_536,
        noise: float = 0.0,
        acceptance: float = 0.0,
    ) -> None:
        self.cost = cost
        self.block_nbytes = block_nbytes
        self._copy_nbytes_per_s, self._noise, self._acceptance = copy_nbytes_per_s, noise, acceptance
        self._limits = ExecutorLimits(
            max_step_tokens=max_step_tokens,
            max_seqs=max_seqs,
            max_context=max_context,
            vocab_size=vocab_size,
            num_blocks=num_blocks,
            num_slots=num_slots,
        )
        group = KVGroup(name="full", kind="full", layers=(0,), nbytes_per_token=-(-block_nbytes // block_size))
        self._layout = KVLayout(block_size=block_size, block_nbytes=_MARK_NBYTES, dtype="mark", groups=(group,))
        self._staging: memoryview | None = None

    @property
    def provides(self) -> frozenset[str]:
        """See `Executor.provides`."""
        return frozenset({"batch-invariant", "drafts", "repeat", "sampling"})

    @property
    def layout(self) -> KVLayout:
        """See `Executor.layout`."""
        return self._layout

    @property
    def identity(self) -> ExecutorIdentity:
        """See `Executor.identity`."""
        return ExecutorIdentity(model="simulated", weights="simulated", kv_dtype="mark")

    @property
    def speed(self) -> str:
        """See `Executor.speed`."""
        return f"simulated {self.cost} {self.copy_s(1)} {self._noise}"

    @property
    def limits(self) -> ExecutorLimits:
        """See `Executor.limits`."""
        return self._limits

    @property
    def memory(self) -> KVMemory:
        """See `Executor.memory`."""
        return self._memory

    def use_staging(self, buffer: memoryview) -> None:
        """See `Executor.use_staging`."""
        self._staging = buffer
        self._limits = self._limits._replace(num_slots=len(buffer) // self._layout.slot_nbytes)

    def copy_s(self, blocks: int) -> float:
        """Seconds that copying so many blocks takes."""
        return blocks * self.block_nbytes / self._copy_nbytes_per_s if self._copy_nbytes_per_s else 0.0

    @asynccontextmanager
    async def __asynccontextmanager__(self) -> AsyncGenerator[Self]:
        stride = self._layout.slot_nbytes
        slots = self._staging if self._staging is not None else memoryview(bytearray(stride * self._limits.num_slots))
        self._memory = _Memory(self, self._limits.num_blocks, stride, slots)
        self._seqs: dict[SeqId, _Seq] = {}
        self._last: SimulatedStep | None = None
        try:
            yield self
        finally:
            del self._memory, self._seqs, self._last

    # -- steps --------------------------------------------------------------------------------------

    def submit(self, plan: StepPlan) -> SimulatedStep:
        """See `Executor.submit`."""
        now, last = self.clock.now(), self._last
        if last is not None and last.failure is None:
            last.settle()  # nobody may have waited for it
        begin = now if last is None else max(now, last.end)
        failure = self._begin(plan)
        each_s = (0.0,) if failure is not None else self._seconds(plan)
        self._last = step = SimulatedStep(self, plan, begin, each_s)
        step.failure = failure
        return step

    async def _reach_boundary(self) -> None:
        """Wait until what is being computed now is."""
        last = self._last
        if last is None:
            await anyio.lowlevel.checkpoint()
            return
        now = self.clock.now()
        await anyio.sleep(max(0.0, last.ends[last.boundary(now) - 1] - now))
        if last is self._last and last.failure is None and last.end <= self.clock.now():
            last.settle()

    def _begin(self, plan: StepPlan) -> StepFailed | None:
        """Take what the plan tells; returns what makes its rows impossible, if anything does."""
        for seq in plan.closed:
            self._seqs.pop(seq, None)
        failure: StepFailed | None = None
        if plan.snapshots:
            failure = StepFailed([], "the simulated model has no windows to take a snapshot of")
        for opened in plan.opened:
            if opened.seq in self._seqs:
                failure = StepFailed([opened.seq], f"sequence {opened.seq} is opened twice")
            self._seqs[opened.seq] = _Seq(opened)
        for fill in plan.fills:
            self._memory.fill(fill.slot, fill.block)
        for item in plan.items:
            state = self._seqs.get(item.seq)
            if state is None or state.epoch != item.epoch:
                failure = StepFailed([item.seq], f"sequence {item.seq} is not open in epoch {item.epoch}")
                continue
            if item.blocks:
                state.table.extend(item.blocks)
            if why := self._impossible(item, state, plan.repeat):
                failure = StepFailed([item.seq], why)
        return failure

    def _impossible(self, item: WorkItem, state: _Seq, repeat: int) -> str:
        """Why an item cannot be computed; empty if it can."""
        end = item.start + item.length
        if item.samples != (end >= state.known) or end > state.known + len(item.drafts):
            return f"positions {item.start}..{end} do not fit {state.known} tokens"
        if repeat > 1 and (item.length != 1 or not item.samples):
            return "only single rows that sample can be repeated"
        if (end + repeat - 2) // self._layout.block_size >= len(state.table):
            return f"position {end + repeat - 2} has no block"
        return ""

    def _seconds(self, plan: StepPlan) -> Sequence[float]:
        """How long the step takes, each time it is computed."""
        chunk_tokens = rows = drafts = 0
        chunk_reads = decode_reads = 0.0
        for item in plan.items:
            start, length, guessed = item.start, item.length, len(item.drafts)
            if length - guessed > 1:
                chunk_tokens += length
                chunk_reads += length * (start + 0.5 * length)
            else:
                rows += 1
                decode_reads += start
                drafts += length - 1
        seconds = []
        for time in range(plan.repeat):
            work = StepWork(chunk_tokens, chunk_reads, rows, decode_reads + time * rows, drafts)
            seconds.append(self.cost.seconds(work) if plan.items else 0.0)
        if self._noise and plan.items:
            seconds = [each * self._factor(plan.items[0], time) for time, each in enumerate(seconds)]
        if plan.fills:
            seconds[0] += self.copy_s(len(plan.fills))
        return seconds

    def _factor(self, item: WorkItem, time: int) -> float:
        """Noise of a step: decided by what its first row computes, however steps are repeated."""
        key, position = self._seqs[item.seq].key, item.start + time
        radius = sqrt(-2.0 * log(1.0 - uniform(key, 0, position, Purpose.RESIDUAL)))  # Box and Muller, 1958
        normal = radius * cos(2.0 * pi * uniform(key, 1, position, Purpose.RESIDUAL))
        return exp(self._noise * normal - 0.5 * self._noise**2)

    def _finish(self, item: WorkItem, times: int) -> SeqOutput:
        """Mark what an item wrote, and say what it sampled."""
        state, size = self._seqs[item.seq], self._layout.block_size
        end = item.start + item.length + times - 1
        for index in range(max(item.start, item.write_from) // size, -(-end // size)):
            self._memory.marks[state.table[index]] = min(end, (index + 1) * size)
        if not item.samples:
            return SeqOutput(item.seq, item.epoch, ())
        tokens = self._text(state, times) if times > 1 else self._verified(state, item.drafts)
        state.known += len(tokens)
        return SeqOutput(item.seq, item.epoch, tokens)

    def _preview(self, item: WorkItem, times: int) -> SeqOutput:
        """What the first times of a repeated item sample."""
        return SeqOutput(item.seq, item.epoch, self._text(self._seqs[item.seq], times))

    def _verified(self, state: _Seq, drafts: Sequence[int]) -> tuple[int, ...]:
        """The text as far as drafts agree with it, and one token more."""
        if not drafts:
            return self._text(state, 1)
        text = self._text(state, len(drafts) + 1)
        agreed = next((i for i, (draft, token) in enumerate(zip(drafts, text, strict=False)) if draft != token), None)
        return text if agreed is None else text[: agreed + 1]

    def _text(self, state: _Seq, count: int) -> tuple[int, ...]:
        """The next `count` tokens."""
        key, first, size = state.key, state.known, self._limits.vocab_size
        if not self._acceptance:
            return tuple([(key + position * _STRIDE) % size for position in range(first, first + count)])
        return tuple(
            (key + (position % _CYCLE if self._repeats(key, position) else position) * _STRIDE) % size
            for position in range(first, first + count)
        )

    def _repeats(self, key: int, position: int) -> bool:
        return uniform(key, 0, position, Purpose.ACCEPT) < self._acceptance
