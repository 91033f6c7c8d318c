import json
import logging
from pathlib import Path

import pytest

from deepinfra.core.cost import Sample, StepCost, StepWork
from deepinfra.core.step import DoneRow, Job, StepReport, StepView
from deepinfra.schedulers import Bucketed
from deepinfra.schedulers.predictor import ASSUMED, MEMORY, READY
from deepinfra.schedulers.timings import Timings

COST = StepCost(step=0.010, chunk_token=0.001)
SAMPLES = [Sample(StepWork().chunk(0, 16 + i).decode(7, 3), 0.5 + i) for i in range(5)]


def teach(scheduler: Bucketed, steps: int = 2 * MEMORY) -> None:
    for step in range(steps):
        done = (DoneRow(10**6, 0, 16 + step % 50, 0, 0, False),)
        scheduler.commit(StepReport(step, COST.seconds(StepWork.of(done)), done))


def scheduler(folder: Path, speed: str = "this one") -> Bucketed:
    made = Bucketed(step_budget_s=0.1, timings=folder)
    made.meet(speed)
    return made


def test_what_was_saved_is_loaded(tmp_path: Path):
    timings = Timings(tmp_path / "new", "this one")
    assert timings.load() == ()
    assert timings.save(COST, SAMPLES)
    assert timings.load() == SAMPLES
    assert [path.name for path in timings.path.parent.iterdir()] == [timings.path.name]


def test_another_executor_has_another_file(tmp_path: Path):
    Timings(tmp_path, "this one").save(COST, SAMPLES)
    assert Timings(tmp_path, "that one").load() == ()


@pytest.mark.parametrize(
    "damage",
    [
        lambda told: "",
        lambda told: json.dumps(told)[:-9],
        lambda told: "[1, 2]",
        lambda told: json.dumps({**told, "format": 99}),
        lambda told: json.dumps({**told, "speed": "that one"}),
        lambda told: json.dumps({**told, "steps": 7}),
        lambda told: json.dumps({**told, "steps": [[1, 2, 3]]}),
        lambda told: json.dumps({**told, "steps": [[1, 2, 3, 4, 5, "long"]]}),
        lambda told: json.dumps({**told, "steps": [[1, 2, 3, 4, 5, None]]}),
        lambda told: json.dumps({**told, "steps": [[1, 2, 3, 4, 5, 0.0]]}),
        lambda told: json.dumps({**told, "steps": [[-1, 2, 3, 4, 5, 1.0]]}),
        lambda told: json.dumps({**told, "steps": [[1, 2, 3, 4, float("nan"), 1.0]]}),
        lambda told: json.dumps({**told, "steps": [[10**400, 2, 3, 4, 5, 1.0]]}),
        lambda told: json.dumps({**told, "steps": [[1, 2, 3, 4, 5, 1.0]] * 1000}),
        lambda told: "[" * 100_000,
        lambda told: json.dumps({**told, "more": "x" * (1 << 20)}),
        lambda told: "\udcff",
    ],
)
def test_a_damaged_file_is_ignored_with_a_warning(damage, tmp_path: Path, caplog: pytest.LogCaptureFixture):
    timings = Timings(tmp_path, "this one")
    timings.save(COST, SAMPLES)
    text = damage(json.loads(timings.path.read_text()))
    timings.path.write_bytes(text.encode(errors="surrogateescape"))
    with caplog.at_level(logging.WARNING):
        assert timings.load() == ()
    assert str(timings.path) in caplog.text


def test_a_folder_that_cannot_be_written_to_costs_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    (tmp_path / "file").write_text("")
    assert not Timings(tmp_path / "file", "this one").save(COST, SAMPLES)
    assert "could not be saved" in caplog.text


def test_the_same_reason_is_warned_of_once_until_a_save_succeeds(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    timings = Timings(tmp_path / "folder", "this one")
    timings.path.mkdir(parents=True)  # in the file's place
    assert [timings.save(COST, SAMPLES) for _ in range(3)] == [False] * 3
    assert caplog.text.count("could not be saved") == 1
    timings.path.rmdir()
    assert timings.save(COST, SAMPLES)
    timings.path.unlink()
    timings.path.mkdir()
    assert not timings.save(COST, SAMPLES)
    assert caplog.text.count("could not be saved") == 2


async def test_the_budget_holds_from_the_first_step_of_the_next_life(tmp_path: Path):
    view = StepView(0.0, 0, 4096, 64, 16, 10**6, 10**6, ())
    async with scheduler(tmp_path) as first:
        for seq in (1, 2):
            first.add(Job(seq, 5000, 0, 1, 0.0))
        guessed = sum(grant.max_tokens for grant in first.plan(view).run)
        assert guessed == ASSUMED.tokens_within(0.1 - ASSUMED.step, 0), "nothing is known yet"
        teach(first)
    async with scheduler(tmp_path) as second:
        for seq in (1, 2):
            second.add(Job(seq, 5000, 0, 1, 0.0))
        tokens = sum(grant.max_tokens for grant in second.plan(view).run)
    assert COST.seconds(StepWork().chunk(0, tokens)) == pytest.approx(0.1, rel=0.05)
    assert tokens != guessed


async def test_a_short_life_leaves_the_file_as_it_is(tmp_path: Path):
    async with scheduler(tmp_path) as first:
        teach(first, READY)
    assert list(tmp_path.iterdir()) == []


async def test_no_folder_means_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    made = Bucketed()
    made.meet("this one")
    async with made:
        teach(made)
    assert list(tmp_path.iterdir()) == []


async def test_an_error_inside_leaves_as_itself_and_what_was_learned_is_saved(tmp_path: Path):
    first = scheduler(tmp_path)

    async def fail() -> None:
        async with first:
            teach(first)
            raise ValueError

    with pytest.raises(ValueError):
        await fail()
    assert len(list(tmp_path.iterdir())) == 1
