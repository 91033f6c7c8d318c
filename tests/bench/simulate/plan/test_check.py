from __future__ import annotations

import dataclasses

import pytest

from deepinfra.bench.simulate.plan.asked import Asked
from deepinfra.bench.simulate.plan.check import checked
from deepinfra.bench.simulate.plan.fleet import Fleet
from deepinfra.errors import ConfigError


@pytest.fixture(scope="module")
def fleet() -> Fleet:
    """Short answers, so that few requests show how many decode together."""
    figures = {"traffic": {"output": 40.0, "hit_rate": 0.5}, "service": {"batch": 8, "busy": 0.8}}
    return Asked(prefill="h100", decode="h100", model="llama-8b", context=600, figures=figures).assembled()


def test_one_pool_does_its_share_about_as_planned(fleet: Fleet) -> None:
    plan = fleet.plan()
    found = checked(fleet, plan, requests=150)
    assert found.user_tokens_s == pytest.approx(plan.user_tokens_s, rel=0.15)
    assert found.batch == pytest.approx(plan.batch, rel=0.3)
    assert found.batch_most > plan.batch
    assert found.user_tokens_s_p10 < found.user_tokens_s
    assert 0.6 < found.busy < 0.95


def test_a_prompt_waits_longer_the_busier_its_pool_is(fleet: Fleet) -> None:
    idle, busy = (
        dataclasses.replace(fleet, service=dataclasses.replace(fleet.service, busy=share)) for share in (0.3, 0.95)
    )
    less, more = (checked(each, each.plan(), requests=60) for each in (idle, busy))
    assert less.busy < more.busy
    assert less.first_token_s_p99 < more.first_token_s_p99


def test_the_same_seed_gives_the_same_result(fleet: Fleet) -> None:
    plan = fleet.plan()
    first, second = (dataclasses.replace(checked(fleet, plan, requests=20, seed=3), took_s=0.0) for _ in range(2))
    assert first == second


def test_a_plan_without_prompts_to_compute_has_nothing_to_simulate(fleet: Fleet) -> None:
    hits = dataclasses.replace(fleet, traffic=dataclasses.replace(fleet.traffic, hit_rate=1.0))
    with pytest.raises(ConfigError, match="hit_rate: no prompt is computed"):
        checked(hits, hits.plan())
