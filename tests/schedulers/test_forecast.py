"""What is foretold of a queue that empties: who is opened when, for lines and tenants."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import inf

import pytest

from deepinfra.core.cost import StepCost
from deepinfra.core.step import StepView
from deepinfra.schedulers.forecast import Credit, Load, Point, drain

COST = StepCost(step=0.01, chunk_token=0.001, decode_row=0.001)
SEATS_1 = StepView(0.0, 0, 512, 1, 16, 1000, 1000, ())


def load(tokens: int, place: int, tenant: str = "public") -> Load:
    return Load(0, tokens, 4.0, tokens / 16 + 1, (float(place), 0.0, place), inf, tenant)


def openings(
    lines: Sequence[Sequence[Load]],
    credit: Sequence[Credit] = (),
    parked: Mapping[str, Iterator[tuple[int, Load]]] | None = None,
    waiting: int = 0,
    running: Sequence[tuple[int, Load]] = (),
) -> list[tuple[str, int]]:
    """Whose begin in which order, and their tokens."""
    now = Point(0.0, waiting or sum(map(len, lines)), 10**6, 10**3)
    loads = [iter(line) for line in lines]
    found = drain(SEATS_1, COST, lambda base_s, decodes: 0.5, loads, running, now, parked or {}, credit)
    return [(opening.tenant, opening.tokens) for opening in found.openings]


def test_the_short_get_their_part_of_the_work_where_seats_are_short() -> None:
    long, short = [load(400, place) for place in range(100)], [load(50, 1000 + place) for place in range(100)]
    assert {tokens for _, tokens in openings([short, long])} == {400}
    begun = [tokens for _, tokens in openings([short, long], [Credit(0.25, 0.0), Credit(0.125, 0.0)])]
    assert len(begun) >= 15
    assert 50 * begun.count(50) / sum(begun) == pytest.approx(0.25, abs=0.1)


def test_what_is_owed_is_paid_before_anybody_passes() -> None:
    long, short = [load(400, place) for place in range(100)], [load(50, 1000 + place) for place in range(100)]
    owing = [Credit(0.25, -0.25), Credit(0.125, -0.25)]
    assert [tokens for _, tokens in openings([short, long], owing)[:4]] == [400, 400, 400, 50]


def test_of_a_tenant_at_its_limit_the_next_begins_when_one_ends_whatever_line_it_waits_in() -> None:
    parked = {"busy": iter([(1, load(400, 3, "busy")), (0, load(50, 4, "busy"))])}
    running = [(0, Load(50, 51, 4.0, 5.0, (0.0, 0.0, 0), inf, "busy"))]
    credit = [Credit(0.25, 0.5), Credit(0.125, 0.5)]
    told = openings([[], [load(400, 9)]], credit, parked, waiting=3, running=running)
    assert told == [("busy", 400), ("busy", 50), ("public", 400)]
