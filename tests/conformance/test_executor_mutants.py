"""Executors that each break one law, which that law's test must say."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from typing import Self

import anyio.lowlevel
import pytest

from deepinfra.core.cost import StepCost
from deepinfra.core.ids import BlockId, SeqId
from deepinfra.core.kv import FRAME_NBYTES
from deepinfra.core.model import ExecutorIdentity
from deepinfra.core.step import SeqOutput, StepPlan, StepResult, WorkItem
from deepinfra.errors import DeepinfraError
from deepinfra.executors.simulated import SimulatedExecutor, SimulatedStep
from deepinfra.executors.toy import ToyExecutor, _Seq, _ToyMemory
from deepinfra.interfaces.executor import Executor, KVMemory, StepHandle
from deepinfra.testing.executor import ExecutorConformance
from deepinfra.testing.window_laws import WindowLaws

SMALL = {"num_blocks": 20, "block_size": 2, "num_slots": 4, "max_seqs": 4, "max_step_tokens": 24}


class ReadsOnlyItsChunk(ToyExecutor):
    """test_chunks_do_not_change_the_text"""

    def _sample(self, item: WorkItem, state: _Seq) -> SeqOutput:
        self._start = item.start
        return super()._sample(item, state)

    def _read(self, state: _Seq, length: int) -> bytes:
        return bytes(8 * self._start) + super()._read(state, length)[8 * self._start :]


class MixesRows(ToyExecutor):
    """test_the_batch_does_not_change_the_text"""

    def _run(self, plan: StepPlan) -> StepResult:
        self._rows = len(plan.items)
        return super()._run(plan)

    def _sample(self, item: WorkItem, state: _Seq) -> SeqOutput:
        output = super()._sample(item, state)
        return output._replace(tokens=(*output.tokens[:-1], (output.tokens[-1] + self._rows - 1) % 260))


class RoundsByTheBatch(MixesRows):
    """test_the_batch_does_not_change_the_text"""

    def _sample(self, item: WorkItem, state: _Seq) -> SeqOutput:
        output = ToyExecutor._sample(self, item, state)
        return output._replace(
            probs=tuple(probs._replace(logprob=probs.logprob - self._rows * 1e-9) for probs in output.probs)
        )


class DrawsFromOneGenerator(ToyExecutor):
    """test_draws_depend_on_seed_and_choice_alone"""

    def _sample(self, item: WorkItem, state: _Seq) -> SeqOutput:
        state.draw = lambda position: self._random.random()  # type: ignore[method-assign]
        return super()._sample(item, state)


class IgnoresTheChoice(ToyExecutor):
    """test_draws_depend_on_seed_and_choice_alone"""

    def _sample(self, item: WorkItem, state: _Seq) -> SeqOutput:
        state.opened = state.opened._replace(choice=0)
        return super()._sample(item, state)


class AcceptsEveryDraft(ToyExecutor):
    """test_drafts_change_speed_and_nothing_else"""

    def _sample(self, item: WorkItem, state: _Seq) -> SeqOutput:
        output = super()._sample(item, state)
        return output._replace(tokens=(*item.drafts, output.tokens[-1]))


class AcceptsNoDraft(ToyExecutor):
    """test_drafts_change_speed_and_nothing_else"""

    def _sample(self, item: WorkItem, state: _Seq) -> SeqOutput:
        output = super()._sample(item, state)
        return output._replace(tokens=output.tokens[:1])


class SortsLogprobsWrongly(ToyExecutor):
    """test_logprobs_are_of_the_tokens_that_were_chosen"""

    def _sample(self, item: WorkItem, state: _Seq) -> SeqOutput:
        output = super()._sample(item, state)
        return output._replace(probs=tuple(probs._replace(top=probs.top[1:] + probs.top[:1]) for probs in output.probs))


class IgnoresMasks(ToyExecutor):
    """test_masks_decide_what_may_be_sampled"""

    def _sample(self, item: WorkItem, state: _Seq) -> SeqOutput:
        self._masks = {}
        return super()._sample(item, state)


class MasksEverybody(ToyExecutor):
    """test_masks_decide_what_may_be_sampled"""

    def _sample(self, item: WorkItem, state: _Seq) -> SeqOutput:
        if self._masks:
            self._masks = dict.fromkeys([item.seq], next(iter(self._masks.values())))
        return super()._sample(item, state)


class MasksByTheFirstRow(ToyExecutor):
    """test_every_draft_has_a_mask_of_its_own"""

    def _sample(self, item: WorkItem, state: _Seq) -> SeqOutput:
        self._masks = {seq: masks[:1] * len(masks) for seq, masks in self._masks.items()}
        return super()._sample(item, state)


class NeverCloses(ToyExecutor):
    """test_closing_frees"""

    def _run(self, plan: StepPlan) -> StepResult:
        return super()._run(plan._replace(closed=()))


class AppliesHalfAStep(ToyExecutor):
    """test_a_failed_step_leaves_the_next_working"""

    def _sample(self, item: WorkItem, state: _Seq) -> SeqOutput:
        output = super()._sample(item, state)
        state.tokens.extend(output.tokens)
        return output

    def _run(self, plan: StepPlan) -> StepResult:
        result = super()._run(plan)
        for output in result.outputs:
            if output.tokens:
                del self._seqs[output.seq].tokens[-len(output.tokens) :]
        return result


class TellsBlocksOnlyWhenItWorks(ToyExecutor):
    """test_a_failed_step_leaves_the_next_working"""

    def _run(self, plan: StepPlan) -> StepResult:
        tables = {seq: list(state.table) for seq, state in self._seqs.items()}
        try:
            return super()._run(plan)
        except DeepinfraError:
            for seq, table in tables.items():
                self._seqs[seq].table = table
            raise


class KeepsWhatFailedToOpen(ToyExecutor):
    """test_a_failed_open_can_be_closed"""

    _stuck: frozenset[SeqId] = frozenset()

    def _run(self, plan: StepPlan) -> StepResult:
        try:
            return super()._run(plan._replace(closed=tuple(seq for seq in plan.closed if seq not in self._stuck)))
        except DeepinfraError:
            self._stuck |= {opened.seq for opened in plan.opened}
            raise


class IgnoresEpochs(ToyExecutor):
    """test_work_of_a_past_epoch_is_refused"""

    def _run(self, plan: StepPlan) -> StepResult:
        items = (item._replace(epoch=getattr(self._seqs.get(item.seq), "epoch", item.epoch)) for item in plan.items)
        return super()._run(plan._replace(items=tuple(items)))


class _Lazy(StepHandle):
    def __init__(self, executor: ComputesWhenAsked, plan: StepPlan) -> None:
        self.executor, self.plan = executor, plan

    async def result(self) -> StepResult:
        await anyio.lowlevel.checkpoint()
        return self.executor._run(self.plan)


class ComputesWhenAsked(ToyExecutor):
    """test_a_cancelled_wait_does_not_stop_the_step"""

    def submit(self, plan: StepPlan) -> StepHandle:
        return _Lazy(self, plan)


class DrainsBeforeTheStep(ComputesWhenAsked):
    """test_a_drain_sees_the_steps_before_it"""


class RefusesEmptySteps(ToyExecutor):
    """test_a_step_may_be_empty"""

    def _run(self, plan: StepPlan) -> StepResult:
        return super()._run(plan)._replace(step=max(item.seq for item in plan.items))


class DropsFills(ToyExecutor):
    """test_blocks_go_out_and_come_back"""

    def _run(self, plan: StepPlan) -> StepResult:
        return super()._run(plan._replace(fills=plan.fills[:1]))


class FillsLate(ToyExecutor):
    """test_any_schedule_gives_each_its_own_text"""

    def _run(self, plan: StepPlan) -> StepResult:
        result = super()._run(plan._replace(fills=()))
        for fill in plan.fills:
            self._memory.fill(fill.slot, fill.block)
        return result


class WritesBelowWriteFrom(ToyExecutor):
    """test_rows_below_write_from_write_nothing"""

    def _item(self, item: WorkItem) -> SeqOutput:
        output, state = super()._item(item), self._seqs[item.seq]
        for position in range(item.start, item.write_from):
            offset = (state.table[position // 2] * 2 + position % 2) * 8
            self._memory.cells[offset] |= 1
        return output


class WipesWhatItCloses(ToyExecutor):
    """test_published_blocks_can_be_read_by_many"""

    def _run(self, plan: StepPlan) -> StepResult:
        for seq in plan.closed:
            for block in self._seqs[seq].table:
                self._memory.block(block)[:] = bytes(self.layout.block_nbytes)
        return super()._run(plan)


class OverlappingSlots(ToyExecutor):
    """test_slots_are_separate_lasting_memory"""

    @property
    def memory(self) -> KVMemory:
        return _Overlapping(self._memory)


class _Overlapping(KVMemory):
    def __init__(self, inner: _ToyMemory) -> None:
        self.inner = inner

    @property
    def num_slots(self) -> int:
        return self.inner.num_slots

    def slot(self, index: int) -> memoryview:
        whole = self.inner._slots
        return whole[index * 8 : index * 8 + len(self.inner.slot(0))]

    async def drain(self, blocks: Sequence[BlockId], slots: Sequence[int]) -> None:
        for block, slot in zip(blocks, slots, strict=True):
            self.slot(slot)[FRAME_NBYTES:] = self.inner.block(block)
        await anyio.lowlevel.checkpoint()


class ScribblesIntoFrames(ToyExecutor):
    """test_blocks_go_out_and_come_back"""

    @property
    def memory(self) -> KVMemory:
        return _Scribbling(self._memory)


class _Scribbling(_Overlapping):
    def slot(self, index: int) -> memoryview:
        return self.inner.slot(index)

    async def drain(self, blocks: Sequence[BlockId], slots: Sequence[int]) -> None:
        await super().drain(blocks, slots)
        for slot in slots:
            self.slot(slot)[0] = 1


class IgnoresForeignStaging(ToyExecutor):
    """test_foreign_staging_is_used_or_refused"""

    def use_staging(self, buffer: memoryview) -> None:
        super().use_staging(memoryview(bytearray(buffer)))


class LearnsItsNameByEntering(ToyExecutor):
    """test_what_it_is_does_not_change_by_entering"""

    @property
    def identity(self) -> ExecutorIdentity:
        return super().identity._replace(weights="known" if hasattr(self, "_memory") else "unknown")


class CanBeEnteredOnce(ToyExecutor):
    """test_it_can_be_entered_again"""

    @asynccontextmanager
    async def __asynccontextmanager__(self) -> AsyncGenerator[Self]:
        async with super().__asynccontextmanager__():
            self._seqs = getattr(self, "_kept", {})
            yield self
            self._kept = self._seqs


class ForgetsStepsInFlight(ToyExecutor):
    """test_steps_go_on_from_the_tokens_of_those_in_flight"""

    depth, flying = 2, 0

    def submit(self, plan: StepPlan) -> StepHandle:
        self.flying += 1
        return _Flying(self, super().submit(plan))

    def _sample(self, item: WorkItem, state: _Seq) -> SeqOutput:
        output = super()._sample(item, state)
        return output._replace(tokens=tuple(token ^ (self.flying > 1) for token in output.tokens))


class _Flying(StepHandle):
    def __init__(self, executor: ForgetsStepsInFlight, step: StepHandle) -> None:
        self.executor, self.step = executor, step

    async def result(self) -> StepResult:
        self.executor.flying -= 1
        return await self.step.result()


class Repeating(SimulatedExecutor):
    def __init__(self, **options: int) -> None:
        super().__init__(cost=StepCost(step=0.02), vocab_size=260, **options)  # type: ignore[arg-type]


class RepeatsOnce(Repeating):
    """test_a_repeated_step_gives_what_single_steps_give"""

    def submit(self, plan: StepPlan) -> SimulatedStep:
        return super().submit(plan._replace(repeat=1))


class ForgetsATimeOfCutSteps(Repeating):
    """test_a_repeated_step_that_is_cut_loses_nothing"""

    def _finish(self, item: WorkItem, times: int) -> SeqOutput:
        output = super()._finish(item, times)
        return output._replace(tokens=output.tokens[:1]) if times in (2, 3, 4) else output

    def submit(self, plan: StepPlan) -> SimulatedStep:
        step = super().submit(plan)
        if plan.repeat > 1:
            step.cut = lambda: setattr(step, "times", 2)  # type: ignore[method-assign]
        return step


class CutsSingleSteps(Repeating):
    """test_cut_has_no_effect_on_a_single_step"""

    def submit(self, plan: StepPlan) -> SimulatedStep:
        step = super().submit(plan)
        step.cut = lambda: StepResult(plan.step, (), 0.0)  # type: ignore[method-assign]
        return step


MUTANTS = [
    RepeatsOnce,
    ForgetsATimeOfCutSteps,
    CutsSingleSteps,
    ReadsOnlyItsChunk,
    MixesRows,
    RoundsByTheBatch,
    DrawsFromOneGenerator,
    IgnoresTheChoice,
    AcceptsEveryDraft,
    AcceptsNoDraft,
    SortsLogprobsWrongly,
    IgnoresMasks,
    MasksEverybody,
    MasksByTheFirstRow,
    NeverCloses,
    AppliesHalfAStep,
    TellsBlocksOnlyWhenItWorks,
    KeepsWhatFailedToOpen,
    IgnoresEpochs,
    ComputesWhenAsked,
    DrainsBeforeTheStep,
    RefusesEmptySteps,
    DropsFills,
    FillsLate,
    WritesBelowWriteFrom,
    WipesWhatItCloses,
    OverlappingSlots,
    ScribblesIntoFrames,
    IgnoresForeignStaging,
    LearnsItsNameByEntering,
    ForgetsStepsInFlight,
    CanBeEnteredOnce,
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
async def test_the_law_catches_the_mutant(mutant: type[ToyExecutor] | type[Repeating]) -> None:
    class Kit(ExecutorConformance):
        def make(self) -> Executor:
            return mutant(**SMALL)

    law = mutant.__doc__ or ""
    with pytest.raises((AssertionError, DeepinfraError, ValueError)):
        await getattr(Kit(), law)()


def test_every_law_has_a_mutant() -> None:
    laws = {name for name in dir(ExecutorConformance) if name.startswith("test_") and not hasattr(WindowLaws, name)}
    assert laws == {mutant.__doc__ for mutant in MUTANTS}
