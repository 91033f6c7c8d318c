"""The plain layout: experts in order, redundant slots begin again from the first."""

from __future__ import annotations

from deepinfra.core.experts import ExpertLoad, Placement, Topology
from deepinfra.interfaces.placer import ExpertPlacer

__all__ = ("StaticPlacer", "check_shape", "round_robin")


class StaticPlacer(ExpertPlacer):
    """The same placement whatever the load; where every balancer begins."""

    balances = False

    def place(self, load: ExpertLoad, topology: Topology, current: Placement | None) -> Placement:
        """See `ExpertPlacer.place`; of `load` only the shape counts, `current` is not looked at."""
        _, layers, num_experts = check_shape(load, topology)
        return Placement((round_robin(num_experts, topology),) * layers)


def check_shape(load: ExpertLoad, topology: Topology) -> tuple[int, int, int]:
    """[steps, layers, experts] of a load that can be placed.

    Raises:
        ValueError: There are fewer slots than experts, or the load has no step to tell how many experts there are.
    """
    steps, layers, num_experts = load.shape
    if not num_experts:
        raise ValueError("the load has no steps, layers or experts")
    if topology.slots < num_experts:
        raise ValueError(f"{topology.slots} slots cannot hold {num_experts} experts")
    return steps, layers, num_experts


def round_robin(num_experts: int, topology: Topology) -> tuple[int, ...]:
    """`[slots] -> expert`: slot i holds expert i modulo the number of experts."""
    return tuple(slot % num_experts for slot in range(topology.slots))
