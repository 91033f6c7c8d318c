from __future__ import annotations

import pytest

from deepinfra.bench.recorder import Recorder, StepRecord, steady
from deepinfra.executors.toy import ToyExecutor
from deepinfra.testing.executor import ExecutorConformance
from deepinfra.testing.host import Host


class TestConformance(ExecutorConformance):
    def make(self) -> Recorder:
        return Recorder(ToyExecutor(num_blocks=20, block_size=2, num_slots=4, max_seqs=4))


def record(at: float, rows: int, positions: int | None = None, *, tokens: int | None = None) -> StepRecord:
    ids = tuple(range(rows if tokens is None else tokens))
    return StepRecord(at, 0.5, rows, rows if positions is None else positions, ids)


def test_steady_is_the_longest_run_of_full_decode_steps() -> None:
    records = [
        record(1.0, 2),
        record(2.0, 2),
        record(3.0, 2, 9),  # a prefill among them
        record(4.0, 2),
        record(5.0, 2),
        record(7.0, 2, tokens=3),
        record(8.0, 1),
    ]
    found = steady(records, 2)
    assert found == (2, 3.0, 1.0, 5)
    assert found.tokens_per_s == pytest.approx(5 / 3)
    assert found.overhead == pytest.approx(2 / 3)


def test_a_run_may_reach_to_the_last_step() -> None:
    assert steady([record(1.0, 4), record(2.0, 4), record(4.0, 4)], 4) == (2, 3.0, 1.0, 8)


@pytest.mark.parametrize("records", [[], [record(1.0, 2)], [record(1.0, 3), record(2.0, 1)]])
def test_without_two_such_steps_nothing_is_claimed(records: list[StepRecord]) -> None:
    assert steady(records, 2).steps == 0


async def test_a_record_says_what_a_step_did() -> None:
    async with Recorder(ToyExecutor()) as recorder:
        host = Host(recorder)
        line = host.line([1, 2, 3])
        await host.generate(line, 2)
        assert [(each.rows, each.positions, each.ids) for each in recorder.records] == [
            (1, 3, tuple(line.output[:1])),
            (1, 1, tuple(line.output[1:2])),
        ]
        assert recorder.records[0].ended_at <= recorder.records[1].ended_at
