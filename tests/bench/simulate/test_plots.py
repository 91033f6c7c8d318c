from __future__ import annotations

import xml.etree.ElementTree as ET
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepinfra.bench.simulate.plots import (
    Line,
    Range,
    Segment,
    axis_for,
    lines,
    number_text,
    ranges,
    seconds_text,
    stacks,
)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0 s"),
        (1.5e-5, "15 µs"),
        (0.0123, "12.3 ms"),
        (0.99996, "1 s"),
        (1.0, "1 s"),
        (123.4, "123 s"),
        (1800.0, "30 min"),
        (36000.0, "10 h"),
    ],
)
def test_seconds_are_written_in_a_fitting_unit(seconds: float, text: str) -> None:
    assert seconds_text(seconds) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0"), (0.12345, "0.123"), (12.0, "12"), (12345.0, "12,345"), (1.234e6, "1.23 M"), (155e12, "155 T")],
)
def test_numbers_are_short(value: float, text: str) -> None:
    assert number_text(value) == text


@given(st.lists(st.floats(1e-6, 1e9), min_size=1, max_size=20), st.booleans())
def test_an_axis_holds_all_values_and_has_round_ticks_on_it(values: list[float], log: bool) -> None:
    axis = axis_for("x", values, log=log)
    assert axis.low <= min(values) * (1 + 1e-8) or not log
    assert axis.high >= max(values) * (1 - 1e-8)
    ticks = axis.ticks()
    assert 2 <= len(ticks) <= 13
    places = [axis.at(tick) for tick in ticks]
    assert all(a < b for a, b in pairwise(places))
    assert all(0.0 <= axis.at(value) <= 1.0 for value in values)


@given(st.floats(1e-3, 1e3), st.floats(1e-3, 1e3))
def test_larger_values_never_lie_before_smaller_ones(one: float, other: float) -> None:
    axis = axis_for("x", [0.5, 20.0], log=True)
    assert (axis.at(min(one, other))) <= axis.at(max(one, other))


def test_a_curve_goes_through_its_points() -> None:
    axis = axis_for("x", [0.0, 4.0])
    svg = ET.fromstring(lines("t", axis, axis, [Line(0, "a", [(0.0, 0.0), (2.0, 4.0), (4.0, 2.0)])]))
    (curve,) = svg.findall("polyline")
    points = [tuple(map(float, point.split(","))) for point in (curve.get("points") or "").split()]
    assert points == [(50.0, 174.0), (198.0, 10.0), (346.0, 92.0)]


def test_the_pointer_finds_the_value_at_its_place() -> None:
    axis = axis_for("x", [0.0, 4.0])
    curve = Line(0, "a", [(0.0, 1.0), (2.0, 3.0)], [(0.5, 1.5), (2.5, 3.5)])
    svg = ET.fromstring(lines("t", axis, axis, [curve]))
    told = [node.findtext("title") or "" for node in svg.findall("g")]
    assert "a: 1 (0.5 to 1.5)" in told[0]
    assert "a: 3 (2.5 to 3.5)" in told[24]
    assert "a:" not in told[-1]


def test_a_row_without_marks_says_so() -> None:
    text = ranges("t", axis_for("x", [1.0]), [("group", [Range(0, "a", []), Range(1, "b", [("p50", 1.0)])])])
    assert "a: none" in text
    assert "<title>b: p50 1</title>" in text


def test_a_limit_is_drawn_where_it_is() -> None:
    rows = [("group", [Range(0, "a", [("most", 10.0)])])]
    svg = ET.fromstring(ranges("t", axis_for("x", [10.0]), rows, limits=[("a", 10.0)]))
    limit, mark = svg.find(".//line[@class='limit']"), svg.find(".//path")
    assert limit is not None
    assert mark is not None
    assert f"M{float(limit.get('x1') or 0) - 2.6:.1f} " in (mark.get("d") or "")


def test_segments_of_a_bar_follow_each_other() -> None:
    svg = ET.fromstring(stacks("t", axis_for("x", [1.0]), [("a", [Segment(0, "ram", 0.25), Segment(1, "ssd", 0.5)])]))
    bars = [(float(bar.get("x") or 0), float(bar.get("width") or 0)) for bar in svg.iter("rect")]
    assert bars == [(16.0, 82.5), (98.5, 165.0)]
