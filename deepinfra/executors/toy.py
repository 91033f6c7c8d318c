"""A toy executor whose text shows every mistake about KV.

The KV cell of a position is a digest of the whole prefix up to it; the next token is a digest of all cells *read back*
through the block table. A wrong, stale, foreign or half-written block therefore changes the text, which a real model
would often hide. A step that writes a block somebody else may read fails. Under a mask the next token is the first
allowed one from there upwards, so a mask of another row, or of another moment, changes the text too.

With `windows` it has window layers too: see `toy_windows`.
"""

from __future__ import annotations

import hashlib
import random
from array import array
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from itertools import accumulate
from math import lcm
from typing import Self

import anyio
import anyio.lowlevel

from deepinfra.core.ids import BlockId, Epoch, SeqId
from deepinfra.core.kv import FRAME_NBYTES, KVGroup, KVLayout
from deepinfra.core.model import ExecutorIdentity, ExecutorLimits
from deepinfra.core.sampling import Purpose, uniform
from deepinfra.core.step import MaskRows, SeqOpen, SeqOutput, Snapshot, StepPlan, StepResult, TokenProbs, WorkItem
from deepinfra.errors import ExecutorError, StepFailed
from deepinfra.executors.toy_windows import ToyWindows, WindowRows
from deepinfra.interfaces.executor import Executor, KVMemory, StepHandle

__all__ = ("ToyExecutor", "toy_cell", "toy_next")

_CELL_NBYTES = 8

_MAX_DRAFTS = 3
"""Rejected drafts that windows can be rolled back by."""


def toy_cell(prefix: Sequence[int], seed: int = 0, window: bytes = b"") -> bytes:
    """The KV of the last position of `prefix`: 8 bytes that depend on all of it, and on what `toy_window` says."""
    h = hashlib.blake2b(array("q", prefix).tobytes(), digest_size=_CELL_NBYTES, key=seed.to_bytes(8, "little"))
    h.update(window)
    return h.digest()


def toy_next(cells: bytes, draw: float, vocab_size: int, allowed: bytes | None = None) -> int:
    """The token after the positions whose cells these are.

    Args:
        cells: Of all positions before; with window layers, behind them what these make of the last one.
        draw: The draw's random number, 0 when greedy.
        vocab_size: Tokens are `0 .. vocab_size - 1`.
        allowed: A mask as in `MaskRows`; of the tokens it allows the first one from the unmasked token upwards is
            taken, beginning again at 0.

    Raises:
        ValueError: The mask allows no token.
    """
    h = hashlib.blake2b(cells, digest_size=8, key=int(draw * 2**53).to_bytes(8, "little"))
    first = int.from_bytes(h.digest(), "little") % vocab_size
    if allowed is None:
        return first
    for step in range(vocab_size):
        token = (first + step) % vocab_size
        if allowed[token >> 3] >> (token & 7) & 1:
            return token
    raise ValueError("the mask allows no token")


class _Seq:
    """What the executor keeps of an open sequence."""

    def __init__(self, opened: SeqOpen, filled: frozenset[BlockId], windows: ToyWindows) -> None:
        self.windows = windows
        self.rows: WindowRows
        self.epoch: Epoch = opened.epoch
        self.opened = opened
        self.tokens = list(opened.tokens)
        self.table = list(opened.blocks)
        self.read_only = frozenset(opened.blocks) - filled

    def take(self, tokens: Sequence[int]) -> None:
        """Take what a good step computed and sampled."""
        self.tokens.extend(tokens)
        self.windows.keep(self.rows)

    def draw(self, position: int) -> float:
        if self.opened.sampling.temperature <= 0.0:
            return 0.0
        return uniform(self.opened.seed, self.opened.choice, position, Purpose.SAMPLE)


class _ToyMemory(KVMemory):
    def __init__(self, num_blocks: int, layout: KVLayout, slots: memoryview) -> None:
        self.cells = bytearray(b"\xff" * (num_blocks * layout.block_nbytes))
        self._block_nbytes = layout.block_nbytes
        self._stride = layout.slot_nbytes
        self._slots = slots
        self.step: anyio.Event | None = None

    @property
    def num_slots(self) -> int:
        return len(self._slots) // self._stride

    def slot(self, index: int) -> memoryview:
        return self._slots[index * self._stride : (index + 1) * self._stride]

    async def drain(self, blocks: Sequence[BlockId], slots: Sequence[int]) -> None:
        if self.step is not None:  # a step that waits for its masks comes first
            await self.step.wait()
        for block, slot in zip(blocks, slots, strict=True):
            self.payload(slot, self._block_nbytes)[:] = self.block(block)
        await anyio.lowlevel.checkpoint()

    def block(self, block: BlockId) -> memoryview:
        return memoryview(self.cells)[block * self._block_nbytes : (block + 1) * self._block_nbytes]

    def fill(self, slot: int, block: BlockId) -> None:
        self.block(block)[:] = self.payload(slot, self._block_nbytes)

    def payload(self, slot: int, nbytes: int) -> memoryview:
        return self.slot(slot)[FRAME_NBYTES : FRAME_NBYTES + nbytes]


class _Step(StepHandle):
    def __init__(self, executor: ToyExecutor, plan: StepPlan, checkpoints: int) -> None:
        self._executor, self._plan, self._checkpoints = executor, plan, checkpoints
        self._outcome: StepResult | StepFailed
        self._over = anyio.Event()
        if plan.masked:
            executor._memory.step = self._over
        else:
            self._run({})

    def masks(self, rows: MaskRows) -> None:
        if not self._plan.masked or self._over.is_set():
            raise ExecutorError("masks are given once, and only to a step whose plan is masked")
        self._run(_by_seq(rows))

    def _run(self, masks: Mapping[SeqId, Sequence[bytes]]) -> None:
        self._executor._masks = masks
        try:
            self._outcome = self._executor._run(self._plan)
        except StepFailed as error:
            self._outcome = error
        self._over.set()

    async def result(self) -> StepResult:
        for _ in range(self._checkpoints):
            await anyio.lowlevel.checkpoint()
        await self._over.wait()
        if isinstance(self._outcome, StepFailed):
            raise self._outcome
        return self._outcome


class ToyExecutor(Executor):
    """See the module. Computes at `submit`, or when it gets its masks; `result` yields a few times, as a wait would.

    Args:
        num_blocks: Blocks of KV.
        block_size: Positions per block.
        num_slots: Staging slots.
        max_step_tokens: Most positions per step.
        max_seqs: Most open sequences.
        max_context: Most positions of a sequence.
        vocab_size: Tokens are `0 .. vocab_size - 1`.
        seed: Another seed is another model.
        grid: Granularity of chunk ends it asks for.
        windows: How many positions each window layer reads, first layer first; none: full KV only.
    """

    def __init__(
        self,
        *,
        num_blocks: int = 64,
        block_size: int = 4,
        num_slots: int = 8,
        max_step_tokens: int = 64,
        max_seqs: int = 16,
        max_context: int = 4096,
        vocab_size: int = 260,
        seed: int = 0,
        grid: int = 1,
        windows: Sequence[int] = (),
    ) -> None:
        self._limits = ExecutorLimits(
            max_step_tokens=max_step_tokens,
            max_seqs=max_seqs,
            max_context=max_context,
            vocab_size=vocab_size,
            num_blocks=num_blocks,
            num_slots=num_slots,
            grid=grid,
        )
        self._windows = tuple(windows)
        self._layout = _layout(block_size, grid, self._windows)
        self._seed = seed
        self._staging: memoryview | None = None
        self._random = random.Random(seed)
        self.computed_tokens = 0

    @property
    def provides(self) -> frozenset[str]:
        """See `Executor.provides`."""
        return frozenset({"batch-invariant", "drafts", "logprobs", "masks"})

    @property
    def layout(self) -> KVLayout:
        """See `Executor.layout`."""
        return self._layout

    @property
    def identity(self) -> ExecutorIdentity:
        """See `Executor.identity`."""
        return ExecutorIdentity(model="toy", weights=f"toy-{self._seed}", kv_dtype="digest64")

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

    @asynccontextmanager
    async def __asynccontextmanager__(self) -> AsyncGenerator[Self]:
        slots = self._staging
        if slots is None:
            slots = memoryview(bytearray(self._layout.slot_nbytes * self._limits.num_slots))
        self._memory = _ToyMemory(self._limits.num_blocks, self._layout, slots)
        self._seqs: dict[SeqId, _Seq] = {}
        self._masks: Mapping[SeqId, Sequence[bytes]] = {}
        try:
            yield self
        finally:
            del self._memory, self._seqs

    def submit(self, plan: StepPlan) -> StepHandle:
        """See `Executor.submit`."""
        return _Step(self, plan, self._random.randrange(4))

    def _run(self, plan: StepPlan) -> StepResult:
        wrong = [why for snapshot in plan.snapshots if (why := self._snapshot(snapshot))]
        for seq in plan.closed:
            self._seqs.pop(seq, None)
        filled = frozenset(fill.block for fill in plan.fills)
        for opened in plan.opened:
            if opened.seq in self._seqs:
                raise StepFailed([opened.seq], f"sequence {opened.seq} is opened twice")
            self._seqs[opened.seq] = self._open(opened, plan.items)
        for fill in plan.fills:
            self._check_unread(fill.block, filled)
            self._memory.fill(fill.slot, fill.block)
        for item in plan.items:
            state = self._seqs.get(item.seq)
            if state is not None and state.epoch == item.epoch:
                state.table.extend(item.blocks)
        if wrong:
            raise StepFailed([], "; ".join(wrong))
        # What rows leave behind in windows is kept only if all of the step's rows are good.
        outputs = tuple(self._item(item) for item in plan.items)
        for output in outputs:
            self._seqs[output.seq].take(output.tokens)
        return StepResult(step=plan.step, outputs=outputs, seconds=0.0)

    def _snapshot(self, snapshot: Snapshot) -> str:
        """Take a snapshot; says what is wrong with it, if anything is."""
        state = self._seqs.get(snapshot.seq)
        if state is None or state.epoch != snapshot.epoch:
            return f"a snapshot of sequence {snapshot.seq}, which is not open in epoch {snapshot.epoch}"
        if snapshot.position % self._layout.block_size:
            return f"a snapshot at {snapshot.position}, which is no block boundary"
        try:
            cells = state.windows.snapshot(snapshot.position)
        except ValueError as error:
            return str(error)
        tag = toy_cell(state.tokens[: snapshot.position], self._seed)
        self._memory.payload(snapshot.slot, self._layout.snapshot_nbytes)[:] = tag + cells
        return ""

    def _open(self, opened: SeqOpen, items: Sequence[WorkItem]) -> _Seq:
        state = _Seq(opened, frozenset(), ToyWindows(self._windows, self._layout.snapshot_reach, self._seed))
        if opened.restore >= 0:
            data = bytes(self._memory.payload(opened.restore, self._layout.snapshot_nbytes))
            start = next((item.start for item in items if item.seq == opened.seq), 0)
            if data[:_CELL_NBYTES] != toy_cell(opened.tokens[:start], self._seed):
                raise StepFailed([opened.seq], f"position {start} begins behind the windows of other tokens")
            state.windows.restore(start, data[_CELL_NBYTES:])
        return state

    def _check_unread(self, block: BlockId, filled: frozenset[BlockId]) -> None:
        for seq, state in self._seqs.items():
            if block in state.table and block not in state.read_only:
                raise StepFailed([seq], f"block {block} is filled while sequence {seq} owns it")

    def _item(self, item: WorkItem) -> SeqOutput:
        state = self._seqs.get(item.seq)
        if state is None or state.epoch != item.epoch:
            raise StepFailed([item.seq], f"sequence {item.seq} is not open in epoch {item.epoch}")
        line = state.tokens + list(item.drafts)
        end = item.start + item.length
        if item.samples != (end >= len(state.tokens)) or end > len(line):
            raise StepFailed([item.seq], f"positions {item.start}..{end} do not fit {len(line)} tokens")
        state.rows = rows = state.windows.rows(line, item.start, end)
        for position in range(item.start, end):
            if position >= item.write_from:
                cell = toy_cell(line[: position + 1], self._seed, rows.out[position])
                self._write(item.seq, state, position, cell)
        self.computed_tokens += item.length
        if not item.samples:
            return SeqOutput(item.seq, item.epoch, ())
        return self._sample(item, state)

    def _write(self, seq: SeqId, state: _Seq, position: int, cell: bytes) -> None:
        size = self._layout.block_size
        if position // size >= len(state.table):
            raise StepFailed([seq], f"position {position} has no block")
        block = state.table[position // size]
        shared = any(block in other.table for name, other in self._seqs.items() if name != seq)
        if block in state.read_only or shared:
            raise StepFailed([seq], f"position {position} would write block {block}, which is published")
        offset = (block * size + position % size) * _CELL_NBYTES
        self._memory.cells[offset : offset + _CELL_NBYTES] = cell

    def _read(self, state: _Seq, length: int) -> bytes:
        size = self._layout.block_size
        blocks = [bytes(self._memory.block(block)) for block in state.table[: -(-length // size)]]
        return b"".join(blocks)[: length * _CELL_NBYTES]

    def _sample(self, item: WorkItem, state: _Seq) -> SeqOutput:
        known = len(state.tokens)
        cells = self._read(state, known + len(item.drafts))
        size, masks = self._limits.vocab_size, self._masks.get(item.seq)
        tokens: list[int] = []
        for index in range(len(item.drafts) + 1):
            length = known + index
            allowed = masks[index] if masks is not None else None
            read = cells[: length * _CELL_NBYTES] + state.rows.out[length - 1]
            token = toy_next(read, state.draw(length), size, allowed)
            tokens.append(token)
            if index < len(item.drafts) and item.drafts[index] != token:
                break
        probs: tuple[TokenProbs, ...] = ()
        wanted = state.opened.sampling.logprobs
        if wanted is not None:
            probs = tuple(
                TokenProbs(-0.5, tuple(((token + i) % size, -0.5 - i) for i in range(wanted))) for token in tokens
            )
        return SeqOutput(item.seq, item.epoch, tuple(tokens), probs)


def _layout(block_size: int, grid: int, windows: Sequence[int]) -> KVLayout:
    groups = [KVGroup(name="full", kind="full", layers=(len(windows),), nbytes_per_token=_CELL_NBYTES)]
    for window in sorted(set(windows)):
        layers = tuple(layer for layer, one in enumerate(windows) if one == window)
        nbytes = _CELL_NBYTES * len(layers)
        groups.append(
            KVGroup(name=f"window-{window}", kind="window", layers=layers, nbytes_per_token=nbytes, window=window)
        )
    return KVLayout(
        block_size=block_size,
        block_nbytes=_CELL_NBYTES * block_size,
        dtype="digest64",
        groups=tuple(groups),
        snapshot_nbytes=_CELL_NBYTES * (1 + sum(windows)) if windows else 0,
        snapshot_reach=lcm(block_size, grid) + _MAX_DRAFTS if windows else 0,
    )


def _by_seq(rows: MaskRows) -> dict[SeqId, list[bytes]]:
    nbytes = len(rows.bits) // sum(rows.rows_per_seq)
    masks = [rows.bits[at : at + nbytes] for at in range(0, len(rows.bits), nbytes)]
    ends = accumulate(rows.rows_per_seq)
    return {seq: masks[end - count : end] for seq, count, end in zip(rows.seqs, rows.rows_per_seq, ends, strict=True)}
