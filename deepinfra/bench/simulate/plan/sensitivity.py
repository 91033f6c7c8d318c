"""What a plan depends on: every figure it is given, varied one at a time."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from deepinfra.bench.simulate.plan.fleet import Fleet, Plan
from deepinfra.bench.simulate.plan.given import varied
from deepinfra.errors import ConfigError

__all__ = ("OUTPUTS", "Sensitivity", "sensitivities")

OUTPUTS = ("decode_tokens_s", "user_tokens_s", "prefill_per_decode", "devices")
"""Fields of `Plan` that are looked at."""


class Sensitivity(NamedTuple):
    """One given figure: how far each of `OUTPUTS` moves, relative to itself, with less and with more of it.

    `None` where there is no plan, for example because weights do not fit.
    """

    name: str
    value: float
    less: dict[str, float] | None
    more: dict[str, float] | None

    @property
    def largest(self) -> float:
        """The largest move of any."""
        return max((abs(move) for moves in (self.less, self.more) if moves for move in moves.values()), default=0.0)


def sensitivities(fleet: Fleet, share: float = 0.2) -> list[Sensitivity]:
    """Every given figure that moves something, the most moving first.

    Args:
        fleet: What to vary.
        share: How much less and more; of a hit rate it is the misses that are varied.
    """
    plan = fleet.plan()
    found = []
    for given in fleet.givens():
        if given.value:
            less, more = (_moves(fleet, plan, given.name, factor) for factor in (1.0 - share, 1.0 + share))
            found.append(Sensitivity(given.name, given.value, less, more))
    moving = [row for row in found if row.largest > 0.0005 or row.less is None or row.more is None]
    return sorted(moving, key=lambda row: -row.largest)


def _moves(fleet: Fleet, plan: Plan, name: str, factor: float) -> dict[str, float] | None:
    place, _, figure = name.partition(".")
    try:
        changed = dataclasses.replace(fleet, **{place: varied(getattr(fleet, place), figure, factor)}).plan()
    except ConfigError:
        return None
    before = {each: getattr(plan, each) for each in OUTPUTS}
    return {each: getattr(changed, each) / value - 1.0 if value else 0.0 for each, value in before.items()}
