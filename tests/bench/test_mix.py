import pytest

from deepinfra.bench.mix import MixRun, mixed, run_mix
from deepinfra.core.cost import StepCost
from deepinfra.errors import ConfigError
from deepinfra.executors.simulated import SimulatedExecutor

RUN = MixRun(chats=8, chat=20, giants=1, giant=200, new=24, over_s=0.2)


def executor(**sizes: int) -> SimulatedExecutor:
    """One whose steps take their time for real."""
    return SimulatedExecutor(cost=StepCost(step=2e-3, chunk_token=2e-5, decode_row=1e-4), **sizes)


def test_a_mix_has_the_requests_asked_for_by_time():
    arrivals = mixed(MixRun(chats=50, giants=4))
    assert sorted(arrival.prompt for arrival in arrivals)[-4:] == [6000] * 4
    assert len(arrivals) == 54
    assert [arrival.at_s for arrival in arrivals] == sorted(arrival.at_s for arrival in arrivals)


def test_both_schedulers_serve_the_whole_mix_measured_and_simulated():
    report, results = run_mix(executor, RUN)
    assert [result.name for result in results] == ["fcfs", "bucketed", "fcfs, simulated", "bucketed, simulated"]
    for result in results:
        assert [row.output for row in result.requests] == [24] * 9
    for summary in report.summaries:
        assert [bucket.requests for bucket in summary.buckets] == [8, 1]
    measured, simulated = (report.summaries[i].output_tokens_per_s for i in (0, 2))
    assert report.errors["fcfs"]["output_tokens_per_s"] == pytest.approx(simulated / measured - 1)


def test_a_mix_that_does_not_fit_is_refused():
    with pytest.raises(ConfigError, match="cannot run this mix"):
        run_mix(lambda: executor(max_context=128), RUN)
