from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfra.bench.simulate.plan.fleet import DAY_S, Fleet
from deepinfra.bench.simulate.plan.fleets import DEFAULT, FLEETS, fleet_named
from deepinfra.bench.simulate.plan.given import varied
from deepinfra.bench.simulate.plan.sensitivity import sensitivities
from deepinfra.errors import ConfigError

FLEET = FLEETS[DEFAULT]


def changed(fleet: Fleet = FLEET, **places: dict[str, float]) -> Fleet:
    records = {place: dataclasses.replace(getattr(fleet, place), **values) for place, values in places.items()}
    return dataclasses.replace(fleet, **records)


@pytest.mark.parametrize("fleet", FLEETS.values(), ids=FLEETS)
def test_the_devices_do_the_peak_of_the_day_and_a_group_less_would_not(fleet: Fleet) -> None:
    plan, traffic, service = fleet.plan(), fleet.traffic, fleet.service
    answers = traffic.requests_day * traffic.output / DAY_S * service.peak
    prompts = traffic.requests_day * traffic.uncached / DAY_S * service.peak
    for devices, width, each, needed in (
        (plan.decode_devices, fleet.decode_layout.width, plan.decode_tokens_s, answers),
        (plan.prefill_devices, fleet.prefill_layout.width, plan.prefill_tokens_s * service.busy, prompts),
    ):
        assert devices % width == 0
        assert devices * each >= needed > (devices - width) * each
    assert plan.devices == plan.prefill_devices + plan.decode_devices


def test_ten_times_the_traffic_needs_ten_times_the_devices() -> None:
    one, ten = FLEET.plan(), changed(traffic={"tokens_day": 1550e12}).plan()
    assert ten.devices == pytest.approx(10 * one.devices, rel=0.05)
    assert (ten.batch, ten.user_tokens_s) == (one.batch, one.user_tokens_s)
    assert ten.prefill_per_decode == pytest.approx(one.prefill_per_decode)


@settings(max_examples=15)
@given(st.floats(0.05, 0.99), st.floats(0.001, 0.01))
def test_more_hits_need_fewer_prefill_devices_per_decode_device(hit_rate: float, more: float) -> None:
    """Hits of a few tokens would cost more: the window behind them is computed again."""
    less, most = (changed(traffic={"hit_rate": rate}).plan() for rate in (hit_rate, hit_rate + more))
    assert most.prefill_per_decode < less.prefill_per_decode
    assert most.decode_tokens_s == less.decode_tokens_s


def test_without_misses_no_prompt_is_computed() -> None:
    plan = changed(traffic={"hit_rate": 1.0}).plan()
    assert (plan.prefill_devices, plan.prefill_per_decode, plan.input_tokens_s) == (0, 0.0, 0.0)


def test_beyond_the_chosen_batch_users_lose_a_larger_share_than_the_fleet_wins() -> None:
    chosen = FLEET.chosen()
    more = FLEET.decoding(2 * chosen.sequences)
    assert chosen.user_tokens_s / more.user_tokens_s > more.tokens_s / chosen.tokens_s
    less = FLEET.decoding(chosen.sequences // 2)
    assert chosen.tokens_s / less.tokens_s > less.user_tokens_s / chosen.user_tokens_s


@pytest.mark.parametrize("speed", [50.0, 200.0, 900.0])
def test_a_wanted_speed_is_reached_by_the_largest_batch_that_does(speed: float) -> None:
    fleet = changed(service={"user_speed": speed})
    batch = fleet.chosen()
    assert batch.user_tokens_s >= speed > fleet.decoding(int(1.03 * batch.sequences) + 1).user_tokens_s


def test_a_wanted_batch_is_used() -> None:
    assert changed(service={"batch": 100}).plan().batch == 100


@pytest.mark.parametrize(
    ("places", "words"),
    [
        ({"service": {"user_speed": 1e6}}, "user_speed: 1e\\+06 tokens per second are more than the"),
        ({"service": {"batch": 10**6}}, "batch: 1000000 sequences are more than the"),
        ({"traffic": {"context": 1e9}}, "context: no sequence of 1000000000 tokens fits"),
    ],
)
def test_what_cannot_be_reached_is_refused(places: dict[str, dict[str, float]], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        changed(**places).plan()


@pytest.mark.parametrize(
    ("place", "name", "value", "limits"),
    [
        ("traffic", "hit_rate", 1.5, "at least 0 and at most 1"),
        ("traffic", "output", 0.0, "above 0"),
        ("decode", "memory_bytes_s", -1.0, "above 0"),
        ("efficiency", "products", float("nan"), "above 0 and at most 1"),
        ("decode_layout", "width", 0, "above 0"),
        ("service", "busy", 2.0, "above 0 and at most 1"),
    ],
)
def test_a_figure_out_of_its_limits_is_named(place: str, name: str, value: float, limits: str) -> None:
    with pytest.raises(ConfigError, match=rf"{place}\.{name}: {value:g} must be {limits}$"):
        changed(**{place: {name: value}})


def test_kv_is_what_is_new_in_a_day_for_so_many_days() -> None:
    traffic, plan = FLEET.traffic, FLEET.plan()
    new = 155e12 * (traffic.prompt * 0.04 + traffic.output) / (traffic.prompt + traffic.output)
    assert plan.kv_nbytes_day == pytest.approx(890 * new)
    assert plan.kv_7_days_nbytes == pytest.approx(7 * plan.kv_nbytes_day)
    assert plan.handoff_nbytes == pytest.approx(890 * traffic.prompt + FLEET.model.window_nbytes)


def test_price_and_revenue_are_per_device_and_token() -> None:
    fleet = FLEETS["deepseek-2025"]
    plan, traffic, service = fleet.plan(), fleet.traffic, fleet.service
    assert plan.usd_million == pytest.approx(plan.devices * 2.0 * 24 / (traffic.requests_day * traffic.output / 1e6))
    request = (
        traffic.prompt * (0.563 * service.hit_usd + 0.437 * service.miss_usd) + traffic.output * service.output_usd
    )
    assert plan.revenue_usd_hour * plan.devices * 24 == pytest.approx(traffic.requests_day * request / 1e6)
    assert FLEET.plan().usd_million == 0.0


def test_rows_that_are_computed_again_are_not_useful() -> None:
    plain = changed(model={"replay_tokens": 0, "tail_tokens": 0})
    assert plain.prefill_useful == 1.0
    assert plain.plan().prefill_tokens_s == pytest.approx(FLEET.plan().prefill_tokens_s / FLEET.prefill_useful)


def test_what_matters_most_comes_first_and_moves_as_a_second_plan_does() -> None:
    fleet = changed(service={"batch": 41})  # found for every variation it would take seconds
    plan, rows = fleet.plan(), sensitivities(fleet)
    assert [row.largest for row in rows] == sorted((row.largest for row in rows), reverse=True)
    accepted, hits = (
        next(row for row in rows if row.name == name) for name in ("service.accepted", "traffic.hit_rate")
    )
    assert accepted.less is not None
    assert accepted.less["user_tokens_s"] == pytest.approx(-0.2)
    fewer = dataclasses.replace(fleet, traffic=varied(fleet.traffic, "hit_rate", 0.8)).plan()
    assert hits.less is not None
    assert hits.less["devices"] == pytest.approx(fewer.devices / plan.devices - 1)


def test_what_is_nothing_does_not_move() -> None:
    rows = sensitivities(changed(traffic={"hit_rate": 1.0}, service={"batch": 41}))
    assert all(moves is None or moves["prefill_per_decode"] == 0.0 for row in rows for moves in (row.less,))


def test_an_unknown_fleet_is_refused() -> None:
    with pytest.raises(ConfigError, match="fleet: none is named 'mine'; known: deepseek-2026, deepseek-2025"):
        fleet_named("mine")
