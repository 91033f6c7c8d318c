"""ExpertPlacer: which device holds which expert."""

from __future__ import annotations

from abc import abstractmethod

from deepinfra.core.experts import ExpertLoad, Placement, Topology
from deepinfra.interfaces.component import Component

__all__ = ("ExpertPlacer",)


class ExpertPlacer(Component):
    """Pure and deterministic; runs off the loop."""

    balances: bool = True
    """Whether placements follow the load; one that does not is a baseline."""

    @abstractmethod
    def place(self, load: ExpertLoad, topology: Topology, current: Placement | None) -> Placement:
        """Assign a logical expert to every physical slot.

        Every expert is somewhere; replicas of one expert are on different devices while there are enough devices;
        every slot is used. `current` lets an implementation move little.

        Raises:
            ValueError: `topology.slots` is less than the number of experts.
        """
