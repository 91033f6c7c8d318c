from __future__ import annotations

import os

import pytest

from deepinfra.config.openmp import calm_openmp


def test_threads_sleep_soon_unless_the_user_says_how_they_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    calm_openmp()
    assert os.environ["GOMP_SPINCOUNT"] == "1000"
    monkeypatch.setenv("GOMP_SPINCOUNT", "7")
    calm_openmp()
    assert os.environ["GOMP_SPINCOUNT"] == "7"


def test_a_wait_policy_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")
    calm_openmp()
    assert "GOMP_SPINCOUNT" not in os.environ
