"""Quotas: what is too much, and how fast is too fast."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepinfra.kvstores.quotas import BURST_S, Quotas


def test_a_tenants_own_quota_goes_before_the_default() -> None:
    quotas = Quotas(1_000, {"big": 5_000, "free": 0})
    assert (quotas.quota("big"), quotas.quota("free"), quotas.quota("other")) == (5_000, 0, 1_000)


def test_the_excess_is_what_has_to_go() -> None:
    quotas = Quotas(1_000, {"free": 0})
    assert quotas.excess("a", 1_000) == 0
    assert quotas.excess("a", 1_300) == 300
    assert quotas.excess("free", 1 << 40) == 0


def test_it_is_true_if_it_limits_what_somebody_holds() -> None:
    assert not Quotas(write_nbytes_per_s=5)
    assert not Quotas(quotas={"a": 0})
    assert Quotas(1)
    assert Quotas(quotas={"a": 1})


def test_without_a_rate_everything_is_written() -> None:
    assert all(Quotas().take("a", 1 << 40, 0.0) for _ in range(10))


def test_an_idle_tenant_has_a_burst_and_then_its_rate() -> None:
    quotas = Quotas(write_nbytes_per_s=100)
    assert sum(quotas.take("a", 100, 5.0) for _ in range(100)) == BURST_S
    assert sum(quotas.take("a", 100, 5.0 + i / 10) for i in range(1, 101)) == pytest.approx(10, abs=1)


def test_tenants_do_not_pay_for_each_other() -> None:
    quotas = Quotas(write_nbytes_per_s=100)
    while quotas.take("a", 500, 0.0):
        pass
    assert quotas.take("b", 500, 0.0)


def test_a_record_larger_than_the_bucket_is_written_and_paid_for() -> None:
    quotas = Quotas(write_nbytes_per_s=100)
    assert quotas.take("a", 3_000, 0.0)
    assert not quotas.take("a", 1, 19.9)
    assert quotas.take("a", 1, 20.1)


def test_many_tenants_are_forgotten_when_their_buckets_are_full_again() -> None:
    quotas = Quotas(write_nbytes_per_s=100)
    for i in range(10_000):
        assert quotas.take(f"tenant {i}", 50, i / 10)
    assert len(quotas._buckets) <= 1_024


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        ({"default_nbytes": -1}, "quota of tenant ''"),
        ({"quotas": {"a": -1}}, "quota of tenant 'a'"),
        ({"write_nbytes_per_s": -1}, "write_nbytes_per_s"),
    ],
)
def test_a_limit_below_zero_is_refused_by_name(bad: dict[str, object], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Quotas(**bad)  # type: ignore[arg-type]


@given(
    rate=st.integers(1, 1_000),
    writes=st.lists(st.tuples(st.floats(0, 20), st.integers(1, 5_000)), max_size=50),
)
def test_no_history_writes_more_than_rate_burst_and_one_record(rate: int, writes: list[tuple[float, int]]) -> None:
    quotas = Quotas(write_nbytes_per_s=rate)
    now = written = 0.0
    for pause, nbytes in writes:
        now += pause
        if quotas.take("a", nbytes, now):
            written += nbytes
    assert written <= (now + BURST_S) * rate + max((n for _, n in writes), default=0)
