"""All that one planning gives: the plan, what was published, what moves it, and what the simulator makes of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from deepinfra.bench.simulate.plan.check import Checked, checked
from deepinfra.bench.simulate.plan.compare import Compared, compared
from deepinfra.bench.simulate.plan.fleet import Fleet, Plan
from deepinfra.bench.simulate.plan.sensitivity import Sensitivity, sensitivities

__all__ = ("Outcome", "outcome_of")


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """See the module.

    Attributes:
        name: The fleet that was begun with.
        fleet: What was planned.
        plan: Its plan.
        compared: What was published about the fleet of that name.
        moves: What the plan depends on, if that was wanted.
        checked: What the simulator makes of it, if that was wanted.
    """

    name: str
    fleet: Fleet
    plan: Plan
    compared: Sequence[Compared]
    moves: Sequence[Sensitivity] = ()
    checked: Checked | None = None

    def document(self) -> dict[str, object]:
        """For JSON; docs/reference/plan.md names the fields."""
        return {
            "kind": "plan",
            "fleet": self.name,
            "plan": dataclasses.asdict(self.plan),
            "compared": [each._asdict() for each in self.compared],
            "checked": dataclasses.asdict(self.checked) if self.checked is not None else None,
            "batches": [dataclasses.asdict(each) for each in self.fleet.batches()],
            "inputs": [each._asdict() for each in self.fleet.givens()],
            "sensitivity": [each._asdict() for each in self.moves],
        }


def outcome_of(name: str, fleet: Fleet, *, sensitivity: bool = False, check: int = 0) -> Outcome:
    """Plan a fleet.

    Args:
        name: Of the fleet that was begun with: what was published about it is compared.
        fleet: What to plan.
        sensitivity: Whether to vary every figure it is given.
        check: Requests to simulate in each pool; 0 simulates none.

    Raises:
        ConfigError: There is no plan; see `Fleet.plan`.
    """
    plan = fleet.plan()
    return Outcome(
        name=name,
        fleet=fleet,
        plan=plan,
        compared=compared(name, fleet, plan),
        moves=sensitivities(fleet) if sensitivity else (),
        checked=checked(fleet, plan, requests=check) if check else None,
    )
