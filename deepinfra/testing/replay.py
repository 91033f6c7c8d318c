"""An executor that says what it was told to say: recorded token ids, through everything real above it."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Self

import anyio.lowlevel

from deepinfra.core.ids import BlockId, SeqId
from deepinfra.core.kv import FRAME_NBYTES, KVGroup, KVLayout
from deepinfra.core.model import ExecutorIdentity, ExecutorLimits
from deepinfra.core.step import MaskRows, SeqFailure, SeqOpen, SeqOutput, StepPlan, StepResult, TokenProbs, WorkItem
from deepinfra.errors import StepFailed
from deepinfra.interfaces.executor import Executor, KVMemory, StepHandle

__all__ = ("ReplayExecutor", "Script")


class Script(Mapping[tuple[int, ...], Sequence[int]]):
    """Answers for a `ReplayExecutor` that are decided while it runs: given in this order, whatever the prompt.

    Attributes:
        answers: Those that are still to come.
    """

    def __init__(self) -> None:
        self.answers: list[Sequence[int]] = []

    def __getitem__(self, prompt: tuple[int, ...]) -> Sequence[int]:
        if not self.answers:
            raise KeyError(prompt)
        return self.answers.pop(0)

    def __iter__(self) -> Iterator[tuple[int, ...]]:
        return iter(())

    def __len__(self) -> int:
        return len(self.answers)


class _Memory(KVMemory):
    """Slots whose bytes mean nothing: what is said does not depend on KV."""

    def __init__(self, num_slots: int, nbytes: int) -> None:
        self._slots = [bytearray(nbytes) for _ in range(num_slots)]

    @property
    def num_slots(self) -> int:
        return len(self._slots)

    def slot(self, index: int) -> memoryview:
        return memoryview(self._slots[index])

    async def drain(self, blocks: Sequence[BlockId], slots: Sequence[int]) -> None:
        await anyio.lowlevel.checkpoint()


class _Step(StepHandle):
    def __init__(self, outcome: StepResult | StepFailed) -> None:
        self._outcome = outcome
        self._forbidden: dict[SeqId, int] = {}

    def masks(self, rows: MaskRows) -> None:
        if isinstance(self._outcome, StepFailed) or not rows.seqs:
            return
        width = len(rows.bits) // sum(rows.rows_per_seq)
        said = {output.seq: output.tokens for output in self._outcome.outputs}
        row = 0
        for seq, count in zip(rows.seqs, rows.rows_per_seq, strict=True):
            for index, token in enumerate(said.get(seq, ())):
                if not rows.bits[(row + index) * width + token // 8] >> token % 8 & 1:
                    self._forbidden.setdefault(seq, token)
            row += count

    async def result(self) -> StepResult:
        await anyio.lowlevel.checkpoint()
        if isinstance(self._outcome, StepFailed):
            raise self._outcome
        failed = tuple(
            SeqFailure(seq, f"token {token} of the record is forbidden here") for seq, token in self._forbidden.items()
        )
        outputs = tuple(output for output in self._outcome.outputs if output.seq not in self._forbidden)
        return self._outcome._replace(outputs=outputs, failed=failed)


class ReplayExecutor(Executor):
    """Answers with recorded ids, whatever it is asked and however it is to sample.

    A token that a mask forbids fails its sequence, so a constraint that would not admit a record is seen.

    Args:
        answers: Ids of each answer: by prompt, or in the order in which sequences reach the executor.
        eos: Said after an answer's last id.
        vocab_size: Tokens are `0 .. vocab_size - 1`.
        max_context: Most positions of a sequence.

    Attributes:
        prompts: Ids of every prompt it was asked, in order.
    """

    def __init__(
        self,
        answers: Mapping[tuple[int, ...], Sequence[int]] | Sequence[Sequence[int]],
        *,
        eos: int,
        vocab_size: int,
        max_context: int = 16384,
    ) -> None:
        self._by_prompt = answers if isinstance(answers, Mapping) else None
        self._in_order = () if isinstance(answers, Mapping) else tuple(answers)
        self._eos = eos
        block_size, num_blocks = 16, 4 * max_context // 16
        group = KVGroup(name="full", kind="full", layers=(0,), nbytes_per_token=1)
        self._layout = KVLayout(block_size=block_size, block_nbytes=block_size, dtype="none", groups=(group,))
        self._limits = ExecutorLimits(
            max_step_tokens=max_context,
            max_seqs=16,
            max_context=max_context,
            vocab_size=vocab_size,
            num_blocks=num_blocks,
            num_slots=2,
            grid=1,
        )
        self.prompts: list[tuple[int, ...]] = []

    @property
    def provides(self) -> frozenset[str]:
        """See `Executor.provides`."""
        return frozenset({"batch-invariant", "drafts", "logprobs", "masks", "sampling"})

    @property
    def layout(self) -> KVLayout:
        """See `Executor.layout`."""
        return self._layout

    @property
    def identity(self) -> ExecutorIdentity:
        """See `Executor.identity`."""
        return ExecutorIdentity(model="replay", weights="replay", kv_dtype="none")

    @property
    def limits(self) -> ExecutorLimits:
        """See `Executor.limits`."""
        return self._limits

    @property
    def memory(self) -> KVMemory:
        """See `Executor.memory`."""
        return self._memory

    @asynccontextmanager
    async def __asynccontextmanager__(self) -> AsyncGenerator[Self]:
        self._memory = _Memory(self._limits.num_slots, FRAME_NBYTES + self._layout.block_nbytes)
        self._open: dict[SeqId, tuple[SeqOpen, list[int]]] = {}
        self._answers: dict[SeqId, Sequence[int]] = {}
        yield self

    def submit(self, plan: StepPlan) -> StepHandle:
        """See `Executor.submit`."""
        for seq in plan.closed:
            self._open.pop(seq, None)
        for opened in plan.opened:
            self._open[opened.seq] = (opened, list(opened.tokens))
        try:
            return _Step(StepResult(step=plan.step, outputs=tuple(map(self._item, plan.items)), seconds=0.0))
        except StepFailed as error:
            return _Step(error)

    def _item(self, item: WorkItem) -> SeqOutput:
        opened, tokens = self._open[item.seq]
        if not item.samples:
            return SeqOutput(item.seq, item.epoch, ())
        answer = self._answer(opened)
        said: list[int] = []
        for index in range(len(item.drafts) + 1):
            at = len(tokens) + index - opened.prompt_len
            said.append(answer[at] if at < len(answer) else self._eos)
            if index < len(item.drafts) and item.drafts[index] != said[-1]:
                break
        tokens += said
        probs: tuple[TokenProbs, ...] = ()
        if (wanted := opened.sampling.logprobs) is not None:
            size = self._limits.vocab_size
            probs = tuple(TokenProbs(-0.5, tuple(((t + i) % size, -0.5 - i) for i in range(wanted))) for t in said)
        return SeqOutput(item.seq, item.epoch, tuple(said), probs)

    def _answer(self, opened: SeqOpen) -> Sequence[int]:
        """A sequence's answer, the same when it is opened again."""
        answer = self._answers.get(opened.seq)
        if answer is not None:
            return answer
        prompt = opened.tokens[: opened.prompt_len]
        self.prompts.append(prompt)
        if self._by_prompt is not None:
            answer = self._by_prompt.get(prompt)
        elif len(self.prompts) <= len(self._in_order):
            answer = self._in_order[len(self.prompts) - 1]
        if answer is None:
            raise StepFailed([opened.seq], f"no answer is recorded for prompt number {len(self.prompts)}")
        self._answers[opened.seq] = answer
        return answer
