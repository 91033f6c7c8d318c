from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepinfra.core.drafts import CostCurve, RowConfidence, allot

CURVES = [
    CostCurve((), ()),
    CostCurve((1,), (2.0,)),
    CostCurve((1, 4, 8, 16), (1.0, 1.1, 1.3, 4.0)),
    CostCurve((1, 2, 3, 4, 5, 6), (1.0, 2.0, 2.0, 5.0, 5.5, 5.6)),
]


def rate(rows: list[list[float]], lengths: tuple[int, ...], curve: CostCurve) -> float:
    expected = float(len(rows))
    for row, length in zip(rows, lengths, strict=True):
        survival = 1.0
        for confidence in row[:length]:
            survival *= confidence
            expected += survival
    return expected / curve.seconds(len(rows) + sum(lengths))


@given(
    rows=st.lists(st.lists(st.floats(0.0, 1.0), max_size=3), min_size=1, max_size=4),
    curve=st.sampled_from(CURVES),
)
def test_no_other_choice_yields_more_tokens_per_second(rows: list[list[float]], curve: CostCurve):
    lengths = allot([RowConfidence(i, tuple(row)) for i, row in enumerate(rows)], curve).lengths
    best = max(rate(rows, other, curve) for other in product(*(range(len(row) + 1) for row in rows)))
    assert rate(rows, lengths, curve) == pytest.approx(best)


def test_without_a_known_cost_every_possible_draft_is_verified():
    rows = [RowConfidence(1, (0.1, 0.1)), RowConfidence(2, (0.5, 0.0, 0.9))]
    assert allot(rows, CostCurve((), ())).lengths == (2, 1)


def test_expensive_tokens_are_verified_only_when_sure():
    rows = [RowConfidence(1, (0.99,)), RowConfidence(2, (0.2,))]
    assert allot(rows, CostCurve((1, 2, 3, 4), (1.0, 2.0, 2.9, 3.8))).lengths == (1, 0)


def test_of_equal_rates_the_smaller_choice_is_taken():
    assert allot([RowConfidence(1, (1.0,))], CostCurve((1, 2), (1.0, 2.0))).lengths == (0,)


def test_confidences_outside_their_range_are_clamped():
    assert allot([RowConfidence(1, (7.0, -1.0, 0.5))], CostCurve((), ())).lengths == (1,)


@pytest.mark.parametrize("curve", CURVES)
def test_nothing_is_allotted_to_nobody(curve: CostCurve):
    assert allot([], curve).lengths == ()


@pytest.mark.parametrize(("tokens", "seconds"), [(0, 1.0), (1, 1.0), (2, 2.0), (3, 3.0), (9, 3.0)])
def test_a_curve_is_linear_between_its_points_and_flat_outside(tokens: int, seconds: float):
    assert CostCurve((1, 3), (1.0, 3.0)).seconds(tokens) == seconds
