from __future__ import annotations

from collections.abc import Sequence

import pytest

from deepinfra.bench.offline import OfflineRun, run_offline
from deepinfra.bench.recorder import Recorder
from deepinfra.engine import Engine, Pool
from deepinfra.errors import ConfigError
from deepinfra.executors.toy import ToyExecutor
from deepinfra.schedulers.fcfs import Fcfs
from deepinfra.testing.tiny import TinyRecipe


class SteadyPeer:
    """Always as fast as it says."""

    name = "steady"

    def __init__(self, log: list[str]) -> None:
        self.log = log

    def prefill(self, prompt: tuple[int, ...]) -> float:
        self.log.append("steady: prefill")
        return len(prompt) / 50.0

    def decode(self, prompts: Sequence[tuple[int, ...]], new: int) -> float:
        assert len({len(prompt) for prompt in prompts}) == 1
        self.log.append(f"steady: decode {len(prompts)}")
        return 10.0 * len(prompts)


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
        assert len(figure.ours.values) == 3
        assert sorted(figure.ours.values)[1] == figure.ours.median > 0
        assert figure.peer is figure.ratio is None
        if figure.name == "overhead":
            assert figure.ours.median <= 1
    assert (report.kind, report.model, report.weights, report.kv_dtype) == ("offline", "toy", "toy-0", "digest64")


async def test_sides_take_turns_in_going_first() -> None:
    log: list[str] = []
    engine, recorder = build()
    async with engine:
        report = await run_offline(engine, recorder, RUN, peer=SteadyPeer(log), progress=log.append)
    rounds = [line for line in log if line.startswith("round")]
    assert [line.split(": ")[1].split(",")[0] for line in rounds if "prefill" in line] == [
        "deepinfra",
        "steady",
        "steady",
        "deepinfra",
        "deepinfra",
        "steady",
    ]
    assert log.count("steady: decode 4") == 3
    decode = next(figure for figure in report.figures if (figure.name, figure.batch) == ("decode", 4))
    assert decode.peer is not None
    assert decode.peer.median == 40.0
    assert decode.ratio == decode.ours.median / 40.0


async def test_decoding_is_counted_behind_prompts_that_were_computed_before() -> None:
    engine, recorder = build()
    async with engine:
        await run_offline(engine, recorder, RUN)
        # Warm: each of the four prompts is a hit but for its last position, so no step does more than decode.
        assert sum(record.positions - record.rows for record in recorder.records) <= 4 * 4
        assert sum(record.tokens for record in recorder.records) == 4 * 16


@pytest.mark.parametrize("options", [{"max_seqs": 2}, {"num_blocks": 39}])
async def test_a_batch_that_does_not_fit_is_refused_by_name(options: dict[str, int]) -> None:
    engine, recorder = build(**options)
    async with engine:
        with pytest.raises(ConfigError, match=r"a batch of 4 needs as many sequences and 40 blocks"):
            await run_offline(engine, recorder, RUN)
