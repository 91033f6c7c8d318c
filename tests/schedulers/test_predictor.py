import random
import statistics

import pytest

from deepinfra.core.cost import StepCost, StepWork
from deepinfra.core.step import DoneRow, StepReport
from deepinfra.schedulers.predictor import READY, RECENT, StepPredictor, percentile

TRUTH = StepCost(step=0.012, chunk_token=9e-4, chunk_read=1.5e-8, decode_row=7e-4, decode_read=2e-7, draft=5e-4)


def rows(draw: random.Random) -> tuple[DoneRow, ...]:
    chunks = [
        DoneRow(i, draw.randrange(6000), draw.choice([16, 64, 256, 512]), 0, 0, False)
        for i in range(draw.choice([0, 0, 1, 2]))
    ]
    most = draw.choice([0, 0, 3])
    drafts = [draw.randint(0, most) for _ in range(draw.randrange(1, 32))]
    decoding = [DoneRow(100 + i, draw.randrange(10, 4000), 1 + k, k, 1, False) for i, k in enumerate(drafts)]
    return (*chunks, *decoding)


def errors(predictor: StepPredictor, draw: random.Random, cost: StepCost, count: int = 200) -> list[float]:
    assert predictor.cost is not None
    works = [StepWork.of(rows(draw)) for _ in range(count)]
    return sorted(abs(predictor.cost.seconds(w) - cost.seconds(w)) / cost.seconds(w) for w in works)


def learn(predictor: StepPredictor, draw: random.Random, cost: StepCost, steps: int, outliers: float = 0.0) -> None:
    for step in range(steps):
        done = rows(draw)
        seconds = cost.seconds(StepWork.of(done)) * draw.lognormvariate(0.0, 0.05)
        if draw.random() < outliers:
            seconds *= draw.uniform(3.0, 10.0)
        predictor.observe(StepReport(step, seconds, done))


def test_nothing_is_predicted_before_enough_steps():
    predictor = StepPredictor()
    draw = random.Random(0)
    learn(predictor, draw, TRUTH, READY - 1)
    assert predictor.cost is None
    learn(predictor, draw, TRUTH, 1)
    assert predictor.cost is not None


@pytest.mark.parametrize("seed", range(5))
def test_mixed_steps_are_predicted_within_ten_percent_after_three_hundred(seed: int):
    predictor, draw = StepPredictor(), random.Random(seed)
    learn(predictor, draw, TRUTH, 300, outliers=0.05)
    found = errors(predictor, draw, TRUTH)
    assert statistics.median(found) <= 0.10
    assert found[int(0.95 * len(found))] <= 0.30


def test_a_machine_that_slows_down_is_noticed():
    predictor, draw = StepPredictor(), random.Random(1)
    learn(predictor, draw, TRUTH, 200)
    slower = StepCost(*(3.0 * figure for figure in TRUTH))
    learn(predictor, draw, slower, 300)
    assert statistics.median(errors(predictor, draw, slower)) <= 0.10


def test_figures_are_never_negative():
    predictor, draw = StepPredictor(), random.Random(2)
    for step in range(100):
        predictor.observe(StepReport(step, draw.uniform(0.001, 1.0), rows(draw)))
        assert predictor.cost is None or min(predictor.cost) >= 0.0


def test_steps_without_rows_or_time_teach_nothing():
    predictor = StepPredictor()
    for step in range(2 * READY):
        predictor.observe(StepReport(step, 0.0, (DoneRow(1, 0, 8, 0, 0, True),)))
        predictor.observe(StepReport(step, 1.0, ()))
    assert predictor.cost is None


def test_the_error_is_that_of_predictions_made_before_the_step():
    predictor, draw = StepPredictor(), random.Random(3)
    learn(predictor, draw, TRUTH, 300)
    assert 0.0 < percentile(predictor.errors, 0.5) < 0.10
    assert len(predictor.errors) == RECENT
    done = rows(draw)
    assert predictor.cost is not None
    predicted = predictor.cost.seconds(StepWork.of(done))
    predictor.observe(StepReport(300, 4.0 * predicted, done))
    assert predictor.errors[-1] == pytest.approx(0.75)


def test_hours_of_decoding_leave_what_is_known_of_prompts():
    predictor, draw = StepPredictor(), random.Random(4)
    learn(predictor, draw, TRUTH, 300)
    for step in range(5000):
        done = (DoneRow(1, draw.randrange(200, 400), 1, 0, 1, False),)
        predictor.observe(StepReport(step, TRUTH.seconds(StepWork.of(done)) * draw.lognormvariate(0.0, 0.05), done))
    assert statistics.median(errors(predictor, draw, TRUTH)) <= 0.10


def test_a_few_steps_that_took_a_hundred_times_too_long_change_little():
    predictor, draw = StepPredictor(), random.Random(5)
    learn(predictor, draw, TRUTH, 300)
    for step in range(10):
        done = rows(draw)
        predictor.observe(StepReport(step, 100.0 * TRUTH.seconds(StepWork.of(done)), done))
    assert statistics.median(errors(predictor, draw, TRUTH)) <= 0.10


def test_one_that_learns_from_the_latest_steps_of_another_predicts_like_it():
    predictor, draw = StepPredictor(), random.Random(6)
    learn(predictor, draw, TRUTH, 300)
    other = StepPredictor()
    other.restore(predictor.samples)
    assert statistics.median(errors(other, draw, TRUTH)) <= 0.10
    assert (other.learned, other.errors) == (0, ())


def test_work_counts_chunks_and_decoding_rows_apart():
    work = StepWork.of([DoneRow(1, 100, 10, 0, 0, True), DoneRow(2, 50, 4, 3, 2, False)])
    assert work == StepWork(chunk_tokens=10, chunk_reads=10 * 105.0, decode_rows=1, decode_reads=50.0, drafts=3)


@pytest.mark.parametrize("start", [0, 1000, 600_000])
@pytest.mark.parametrize("cost", [TRUTH, StepCost(chunk_token=1e-3), StepCost(chunk_read=1e-7)])
def test_a_chunk_within_a_time_is_the_longest_that_fits(cost: StepCost, start: int):
    length = cost.tokens_within(0.25, start)
    base = cost.seconds(StepWork())
    assert cost.seconds(StepWork().chunk(start, length)) - base <= 0.25 * (1 + 1e-9)
    assert cost.seconds(StepWork().chunk(start, length + 1)) - base > 0.25 * (1 - 1e-9)


def test_free_tokens_have_no_limit_and_no_time_fits_none():
    assert StepCost().tokens_within(1.0, 0) > 10**9
    assert TRUTH.tokens_within(0.0, 0) == 0
    assert TRUTH.tokens_within(-1.0, 0) == 0
