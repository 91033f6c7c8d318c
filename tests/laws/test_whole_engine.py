"""The whole-engine law, as a property and as a seeded soak."""

from __future__ import annotations

import random

import anyio
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from deepinfra.testing.engine import Coverage, random_scenario, run_scenario

BACKENDS = ("asyncio", "trio")


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck), print_blob=True)
@given(seed=st.integers(0, 2**32), backend=st.sampled_from(BACKENDS))
def test_any_configuration_gives_the_reference_text(seed: int, backend: str) -> None:
    scenario = random_scenario(random.Random(seed))
    assert anyio.run(run_scenario, scenario, backend=backend) == []


def soak(first: int, count: int) -> Coverage:
    coverage = Coverage()
    for seed in range(first, first + count):
        scenario = random_scenario(random.Random(seed))
        wrong = anyio.run(run_scenario, scenario, coverage, backend=BACKENDS[seed % 2])
        assert wrong == [], (seed, scenario)
    return coverage


def check_covered(coverage: Coverage) -> None:
    for mechanism in (
        "preemptions",
        "steps ahead",
        "losses",
        "drafts accepted",
        "drafts rejected",
        "records damaged",
        "executor fail",
        "executor row",
        "executor lose",
        "cached device",
        "cached ram",
        "ended stop",
        "ended length",
        "ended constraint-failed",
        "ended cancelled",
        "rows replayed",
        "hits too short",
        "snapshots taken",
        "snapshots dropped",
        "snapshots restored",
    ):
        assert coverage.counts[mechanism] > 0, coverage.counts


def test_a_seeded_soak_finds_nothing_and_exercises_every_mechanism() -> None:
    check_covered(soak(0, 150))


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_soak_of_1500_scenarios_finds_nothing() -> None:
    check_covered(soak(10_000, 1500))
