"""Each law of the placer kit can fail."""

from collections.abc import Callable

import pytest
from hypothesis import Phase, settings

from deepinfra.core.experts import Placement
from deepinfra.interfaces.placer import ExpertPlacer
from deepinfra.placers import Eplb, StaticPlacer
from deepinfra.testing.placer import ExpertPlacerConformance

PLACED = "test_every_expert_is_placed_and_replicas_are_apart"


class LosesAnExpert(StaticPlacer):
    def place(self, load, topology, current):
        placed = super().place(load, topology, current)
        return Placement(tuple(tuple(max(1, e) if load.shape[2] > 1 else e for e in row) for row in placed.experts))


class LeavesSlotsEmpty(StaticPlacer):
    def place(self, load, topology, current):
        return Placement(tuple(row[: load.shape[2]] for row in super().place(load, topology, current).experts))


class SkipsALayer(StaticPlacer):
    def place(self, load, topology, current):
        return Placement(super().place(load, topology, current).experts[:1])


class InventsExperts(StaticPlacer):
    def place(self, load, topology, current):
        return Placement(tuple((*row[:-1], load.shape[2]) for row in super().place(load, topology, current).experts))


class KeepsReplicasTogether(Eplb):
    def place(self, load, topology, current):
        return Placement(tuple(tuple(sorted(row)) for row in super().place(load, topology, current).experts))


class ForgetsTopologyOnAMove(Eplb):
    def place(self, load, topology, current):
        placed = super().place(load, topology, current)
        return placed if current is None else Placement(tuple(row[1:] for row in placed.experts))


class Remembers(Eplb):
    calls = 0

    def place(self, load, topology, current):
        Remembers.calls += 1
        placed = super().place(load, topology, current)
        return Placement(tuple(row[::-1] for row in placed.experts)) if Remembers.calls % 2 else placed


class HotTogether(StaticPlacer):
    """Puts the heaviest experts side by side."""

    def place(self, load, topology, current):
        rows = []
        for layer, row in enumerate(super().place(load, topology, current).experts):
            total = [sum(step[layer][e] for step in load.tokens) for e in range(load.shape[2])]
            order = sorted(range(load.shape[2]), key=lambda e: -total[e])
            rows.append(tuple(order[e] for e in row))
        return Placement(tuple(rows))


class SaysItBalances(StaticPlacer):
    balances = True


class SqueezesIn(StaticPlacer):
    def place(self, load, topology, current):
        return Placement((tuple(range(topology.slots)),) * load.shape[1])


@pytest.mark.parametrize(
    ("mutant", "law"),
    [
        (LosesAnExpert, PLACED),
        (LeavesSlotsEmpty, PLACED),
        (SkipsALayer, PLACED),
        (InventsExperts, PLACED),
        (KeepsReplicasTogether, PLACED),
        (ForgetsTopologyOnAMove, "test_a_move_keeps_the_laws"),
        (Remembers, "test_equal_loads_give_equal_placements"),
        (HotTogether, "test_no_peak_is_higher_than_round_robins"),
        (SaysItBalances, "test_hot_experts_are_spread"),
        (SqueezesIn, "test_fewer_slots_than_experts_are_refused"),
    ],
)
def test_a_mutant_is_caught(mutant: Callable[[], ExpertPlacer], law: str) -> None:
    class Kit(ExpertPlacerConformance):
        trials = settings(ExpertPlacerConformance.trials, phases=[Phase.generate], derandomize=True)

        def make(self) -> ExpertPlacer:
            return mutant()

    with pytest.raises((AssertionError, IndexError, ExceptionGroup)):
        getattr(Kit(), law)()
