"""Executors that each break one law of windows, which that law's test must say."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from deepinfra.core.kv import FRAME_NBYTES
from deepinfra.core.step import SeqOpen, SeqOutput, StepPlan, StepResult, WorkItem
from deepinfra.errors import DeepinfraError
from deepinfra.executors.toy import ToyExecutor, _Seq, toy_cell
from deepinfra.interfaces.executor import Executor
from deepinfra.testing.executor import ExecutorConformance
from deepinfra.testing.window_laws import WindowLaws

WINDOWED = {"num_blocks": 40, "block_size": 2, "num_slots": 4, "max_seqs": 4, "max_step_tokens": 24, "windows": (3, 3)}


class KeepsTooShortWindows(ToyExecutor):
    """test_chunks_do_not_change_long_texts"""

    def _run(self, plan: StepPlan) -> StepResult:
        result = super()._run(plan)
        for state in self._seqs.values():
            for window, cells in zip(self._windows, state.windows._cells, strict=True):
                for position in sorted(cells)[: 2 - window]:
                    del cells[position]
        return result


class IgnoresSnapshots(ToyExecutor):
    """test_behind_a_snapshot_it_goes_on_as_before"""

    def _run(self, plan: StepPlan) -> StepResult:
        return super()._run(plan._replace(opened=tuple(opened._replace(restore=-1) for opened in plan.opened)))


class RestoresOneForAll(ToyExecutor):
    """test_snapshots_of_several_sequences_are_restored_in_one_step"""

    def _run(self, plan: StepPlan) -> StepResult:
        return super()._run(plan._replace(opened=tuple(one._replace(restore=0) for one in plan.opened)))

    def _open(self, opened: SeqOpen, items: Sequence[WorkItem]) -> _Seq:
        start = next((item.start for item in items if item.seq == opened.seq), 0)
        if start:
            self._memory.slot(0)[FRAME_NBYTES : FRAME_NBYTES + 8] = toy_cell(opened.tokens[:start])
        return super()._open(opened._replace(restore=0 if start else -1), items)


class SnapshotsLate(ToyExecutor):
    """test_a_snapshot_is_of_the_time_before_its_step"""

    def _run(self, plan: StepPlan) -> StepResult:
        result = super()._run(plan._replace(snapshots=()))
        for snapshot in plan.snapshots:
            self._snapshot(snapshot)
        return result


class KeepsRejectedDrafts(ToyExecutor):
    """test_rejected_drafts_leave_no_trace_in_windows"""

    def _sample(self, item: WorkItem, state: _Seq) -> SeqOutput:
        output = super()._sample(item, state)
        for new, old in zip(state.rows.cells, state.windows._cells, strict=True):
            new.update({position: cell for position, cell in old.items() if position in new})
        return output


class SeesNothingOfReplayedRows(ToyExecutor):
    """test_exact_replay_gives_the_whole_text"""

    def _item(self, item: WorkItem) -> SeqOutput:
        if self._seqs[item.seq].windows._floor is None:
            self._seqs[item.seq].windows._floor = item.write_from
        return super()._item(item)


class SharesWindows(ToyExecutor):
    """test_rows_below_the_first_are_not_seen"""

    def _open(self, opened: SeqOpen, items: Sequence[WorkItem]) -> _Seq:
        state = super()._open(opened, items)
        self._shared = getattr(self, "_shared", state.windows._cells)
        state.windows._floor, state.windows._cells = 0, self._shared
        return state


class KeepsRowsOfFailedSteps(ToyExecutor):
    """test_a_failed_step_leaves_windows_as_they_were"""

    def _item(self, item: WorkItem) -> SeqOutput:
        output, state = super()._item(item), self._seqs[item.seq]
        state.windows.keep(state.rows)
        return output


MUTANTS: list[type[ToyExecutor]] = [
    KeepsTooShortWindows,
    IgnoresSnapshots,
    RestoresOneForAll,
    SnapshotsLate,
    KeepsRejectedDrafts,
    SeesNothingOfReplayedRows,
    SharesWindows,
    KeepsRowsOfFailedSteps,
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
async def test_the_law_catches_the_mutant(mutant: type[ToyExecutor]) -> None:
    class Kit(ExecutorConformance):
        def make(self) -> Executor:
            return mutant(**WINDOWED)  # type: ignore[arg-type]

    with pytest.raises((AssertionError, DeepinfraError, ValueError)):
        await getattr(Kit(), mutant.__doc__ or "")()


def test_every_law_of_windows_has_a_mutant() -> None:
    assert {name for name in dir(WindowLaws) if name.startswith("test_")} == {mutant.__doc__ for mutant in MUTANTS}
