"""Predictions beside what was published, with the error of each."""

from __future__ import annotations

from typing import NamedTuple

from deepinfra.bench.simulate.plan.fleet import DAY_S, Fleet, Plan
from deepinfra.bench.simulate.plan.fleets import fleet_named
from deepinfra.bench.simulate.plan.published import PUBLISHED

__all__ = ("Compared", "compared")


class Compared(NamedTuple):
    """One prediction: a field of `Plan`, its value, what was published, and how far the prediction is above it.

    What is `implied` nobody published as it stands: it follows from figures that were.
    """

    quantity: str
    predicted: float
    published: float
    error: float
    source: str
    implied: bool = False


def compared(name: str, fleet: Fleet, plan: Plan) -> tuple[Compared, ...]:
    """All that was published about a fleet of that name; nothing if it serves another model here.

    A user's speed that was asked for is no prediction, and is left out.
    Where nobody told how many devices there are, what others of its figures say for the same traffic stands in.
    """
    if fleet.model.name != fleet_named(name).model.name:
        return ()
    rows = [(each.quantity, each.value, each.source, False) for each in PUBLISHED.get(name, ())]
    told = {quantity: value for quantity, value, _, _ in rows}
    if rows and "devices" not in told:
        requests_s = fleet.traffic.requests_day / DAY_S
        decode = requests_s * fleet.traffic.output / told["decode_tokens_s"]
        implied = decode * (1.0 + told["prefill_per_decode"])
        rows.append(("devices", implied, "by published speed and ratio", True))
        implied = plan.revenue_usd_hour * plan.devices / told["revenue_usd_hour"]
        rows.append(("devices", implied, "by published revenue and prices", True))
    if fleet.service.user_speed:
        rows = [row for row in rows if row[0] != "user_tokens_s"]
    return tuple(
        Compared(quantity, value, published, value / published - 1.0, source, implied)
        for quantity, published, source, implied in rows
        for value in (float(getattr(plan, quantity)),)
    )
