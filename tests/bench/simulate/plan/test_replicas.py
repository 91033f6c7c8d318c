from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfra.bench.simulate.plan.replicas import cost_for, fitted, names, replica_for
from deepinfra.core.cost import Sample, StepCost, StepWork
from deepinfra.errors import ConfigError

figures = st.floats(1e-9, 1e-2)


@pytest.mark.parametrize("name", names())
def test_a_name_gives_a_cost_and_room(name: str) -> None:
    replica = replica_for(name)
    assert min(replica.cost) >= 0.0 < replica.cost.step
    assert replica.num_blocks * replica.block_size > 100_000
    assert cost_for(name) == replica.cost


@pytest.mark.parametrize("name", names())
def test_a_linear_cost_is_as_near_to_the_roofline_as_is_said(name: str) -> None:
    replica = replica_for(name)
    assert replica.error_median < 0.12
    assert replica.error_median <= replica.error_p95 < 0.45


def test_a_faster_device_costs_less() -> None:
    work = StepWork().chunk(0, 2048)
    assert cost_for("b200/llama-8b").seconds(work) < cost_for("h100/llama-8b").seconds(work)


def test_a_dense_pool_is_its_whole_group_and_one_of_experts_a_device() -> None:
    assert replica_for("h100x8/llama-70b").devices == 8
    assert replica_for("gb200x64/deepseek-v4.1-flash").devices == 1


@settings(max_examples=10)
@given(st.builds(StepCost, figures, figures, st.floats(1e-12, 1e-8), figures, st.floats(1e-10, 1e-6), figures))
def test_a_cost_that_is_linear_is_found_again(cost: StepCost) -> None:
    works = [
        StepWork(0, 0.0, rows, float(rows * context), rows * drafts).chunk(start, chunk)
        for rows, context, drafts in ((0, 0, 0), (4, 500, 0), (4, 5000, 2), (64, 1000, 1), (200, 3000, 0))
        for start, chunk in ((0, 0), (0, 100), (3000, 1000), (100, 4000))
    ]
    found, errors = fitted([Sample(work, cost.seconds(work)) for work in works])
    assert errors[-1] < 0.02
    assert min(found) >= 0.0


@pytest.mark.parametrize("name", ["h100", "h100x/llama-8b", "h100x0/llama-8b", "x8/llama-8b", "/"])
def test_what_is_no_device_number_and_model_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=r"is no device, number and model like h100x8|device: none is named ''"):
        replica_for(name)


def test_an_unknown_part_of_a_name_is_named() -> None:
    with pytest.raises(ConfigError, match="device: none is named 'a100'"):
        replica_for("a100x8/llama-70b")
    with pytest.raises(ConfigError, match="model: none is named 'llama-9b'"):
        replica_for("h100x8/llama-9b")
