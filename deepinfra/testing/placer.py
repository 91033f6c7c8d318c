"""Laws that every ExpertPlacer keeps.

Example::

    class TestMine(ExpertPlacerConformance):
        def make(self) -> ExpertPlacer:
            return Mine()
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from typing import ClassVar

from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfra.core.experts import ExpertLoad, Placement, Topology
from deepinfra.interfaces.placer import ExpertPlacer

__all__ = ("ExpertPlacerConformance", "peak_tokens", "random_load")


def random_load(seed: int, *, steps: int, layers: int, experts: int, skew: float = 1.0) -> ExpertLoad:
    """A load in which some experts are hot; the larger `skew`, the hotter."""
    draw = random.Random(seed)
    heat = [[draw.lognormvariate(2.0, skew) for _ in range(experts)] for _ in range(layers)]
    return ExpertLoad(
        tuple(tuple(tuple(int(h * draw.uniform(0.5, 1.5)) for h in layer) for layer in heat) for _ in range(steps))
    )


def peak_tokens(load: ExpertLoad, placement: Placement, topology: Topology) -> float:
    """Tokens of the busiest device, summed over steps and layers; an expert's tokens are shared by its replicas."""
    total = 0.0
    for step in load.tokens:
        for layer, tokens in enumerate(step):
            devices = [0.0] * topology.devices
            for expert, slots in enumerate(placement.replicas(layer, len(tokens))):
                for slot in slots:
                    devices[slot // topology.slots_per_device] += tokens[expert] / len(slots)
            total += max(devices)
    return total


_Case = tuple[ExpertLoad, Topology]


@st.composite
def _cases(draw: st.DrawFn) -> tuple[ExpertLoad, Topology]:
    experts = draw(st.integers(1, 12))
    devices = draw(st.integers(1, 6))
    least = -(-experts // devices)
    topology = Topology(devices, draw(st.integers(least, least + 3)))
    steps, layers = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    if draw(st.booleans()):
        row = st.tuples(*[st.integers(0, 9)] * experts)
        tokens = draw(st.tuples(*[st.tuples(*[row] * layers)] * steps))
        return ExpertLoad(tokens), topology
    return random_load(draw(st.integers(0, 10**6)), steps=steps, layers=layers, experts=experts), topology


class ExpertPlacerConformance(ABC):
    """Subclass it in a test module with a name that begins with `Test`.

    Attributes:
        trials: How many random cases each law is tried on.
    """

    trials: ClassVar[settings] = settings(deadline=None)

    @abstractmethod
    def make(self) -> ExpertPlacer:
        """A new placer, always with the same settings."""

    def check(self, load: ExpertLoad, topology: Topology, placement: Placement) -> None:
        """One placement against everything that holds without knowing the load."""
        _, layers, experts = load.shape
        assert len(placement.experts) == layers, "every layer is placed"
        for layer, slots in enumerate(placement.experts):
            assert len(slots) == topology.slots, "every device has all of its slots filled"
            assert all(0 <= expert < experts for expert in slots), "only experts that exist are placed"
            replicas = placement.replicas(layer, experts)
            assert all(replicas), f"experts {[e for e, r in enumerate(replicas) if not r]} are nowhere"
            inverse = sorted((slot, expert) for expert, places in enumerate(replicas) for slot in places)
            assert [expert for _, expert in inverse] == list(slots), "the two maps are not inverses"
            if experts >= topology.slots_per_device:
                for expert, places in enumerate(replicas):
                    devices = {slot // topology.slots_per_device for slot in places}
                    apart = len(devices) == len(places) or len(devices) == topology.devices
                    assert apart, f"replicas of expert {expert} share a device while others have none"

    def test_every_expert_is_placed_and_replicas_are_apart(self) -> None:
        def law(case: _Case) -> None:
            load, topology = case
            self.check(load, topology, self.make().place(load, topology, None))

        self.trials(given(_cases())(law))()

    def test_a_move_keeps_the_laws(self) -> None:
        def law(case: _Case, seed: int) -> None:
            load, topology = case
            steps, layers, experts = load.shape
            other = random_load(seed, steps=steps, layers=layers, experts=experts)
            before = self.make().place(other, topology, None)
            self.check(load, topology, self.make().place(load, topology, before))

        self.trials(given(_cases(), st.integers(0, 99))(law))()

    def test_equal_loads_give_equal_placements(self) -> None:
        def law(case: _Case) -> None:
            load, topology = case
            placer = self.make()
            first = placer.place(load, topology, None)
            assert placer.place(load, topology, None) == first, "the placer remembers"
            assert self.make().place(load, topology, None) == first

        self.trials(given(_cases())(law))()

    def test_no_peak_is_higher_than_round_robins(self) -> None:
        def law(case: _Case) -> None:
            load, topology = case
            _, layers, experts = load.shape
            plain = Placement((tuple(slot % experts for slot in range(topology.slots)),) * layers)
            mine = peak_tokens(load, self.make().place(load, topology, None), topology)
            assert mine <= peak_tokens(load, plain, topology) * (1.0 + 1e-9)

        self.trials(given(_cases())(law))()

    def test_hot_experts_are_spread(self) -> None:
        """Two hot experts that round-robin puts on one device, and two slots to spare."""
        if not self.make().balances:
            return
        load = ExpertLoad((((90, 90, 10, 10, 10, 10),),) * 3)
        topology = Topology(devices=4, slots_per_device=2)
        mine = peak_tokens(load, self.make().place(load, topology, None), topology)
        plain = Placement((tuple(slot % 6 for slot in range(8)),))
        assert mine < 0.8 * peak_tokens(load, plain, topology)

    def test_fewer_slots_than_experts_are_refused(self) -> None:
        load = random_load(0, steps=1, layers=1, experts=5)
        try:
            placement = self.make().place(load, Topology(2, 2), None)
        except ValueError:
            return
        raise AssertionError(f"5 experts were placed in 4 slots: {placement}")
