from __future__ import annotations

import pytest

from deepinfra.bench.offline import OfflineRun, run_offline
from deepinfra.bench.recorder import Recorder
from deepinfra.engine import Engine, Pool
from deepinfra.errors import ConfigError
from deepinfra.executors.toy import ToyExecutor
from deepinfra.schedulers.fcfs import Fcfs
from deepinfra.testing.tiny import TinyRecipe


def build(**options: int) -> tuple[Engine, Recorder]:
    recorder = Recorder(ToyExecutor(**{"num_blocks": 128, "max_seqs": 8, **options}))
    return Engine(TinyRecipe(), Pool(Fcfs(), recorder), name="toy"), recorder


RUN = OfflineRun(batches=(1, 4), prompt=24, new=16, repeat=3)


async def test_every_figure_has_a_value_for_each_round() -> None:
    engine, recorder = build()
    async with engine:
        report = await run_offline(engine, recorder, RUN)
    names = [(figure.name, figure.batch) for figure in report.figures]
    assert names == [("prefill", 1), ("decode", 1), ("overhead", 1), ("decode", 4), ("overhead", 4)]
    for figure in report.figures:
        assert len(figure.values) == 3
        assert sorted(figure.values)[1] == figure.median > 0
        if figure.name == "overhead":
            assert figure.median <= 1
    assert (report.kind, report.model, report.weights, report.kv_dtype) == ("offline", "toy", "toy-0", "digest64")


async def test_decoding_is_counted_behind_prompts_that_were_computed_before() -> None:
    engine, recorder = build()
    async with engine:
        await run_offline(engine, recorder, RUN)
        # Warm: each of the four prompts is a hit but for its last position, so no step does more than decode.
        assert sum(record.positions - record.rows for record in recorder.records) <= 4 * 4
        assert sum(len(record.ids) for record in recorder.records) == 4 * 16


@pytest.mark.parametrize("options", [{"max_seqs": 2}, {"num_blocks": 39}])
async def test_a_batch_that_does_not_fit_is_refused_by_name(options: dict[str, int]) -> None:
    engine, recorder = build(**options)
    async with engine:
        with pytest.raises(ConfigError, match=r"a batch of 4 needs as many sequences and 40 blocks"):
            await run_offline(engine, recorder, RUN)
