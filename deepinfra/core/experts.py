"""Experts of a mixture: how loaded they were, what devices there are, which device holds which."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ("ExpertLoad", "Placement", "Topology")


class ExpertLoad(NamedTuple):
    """Tokens routed to each logical expert in recent steps.

    `tokens[step][layer][expert]`, oldest step first; every layer has the same number of experts.
    """

    tokens: tuple[tuple[tuple[int, ...], ...], ...]

    @property
    def shape(self) -> tuple[int, int, int]:
        """[steps, layers, experts]."""
        steps = len(self.tokens)
        layers = len(self.tokens[0]) if steps else 0
        return steps, layers, len(self.tokens[0][0]) if layers else 0


class Topology(NamedTuple):
    """`devices` in order, each with `slots_per_device` places for an expert; `nodes` groups equal runs of devices."""

    devices: int
    slots_per_device: int
    nodes: int = 1

    @property
    def slots(self) -> int:
        """Physical slots over all devices."""
        return self.devices * self.slots_per_device


class Placement(NamedTuple):
    """Which logical expert each physical slot holds: `experts[layer][slot]`, slot = device * slots_per_device + i."""

    experts: tuple[tuple[int, ...], ...]

    def replicas(self, layer: int, num_experts: int) -> tuple[tuple[int, ...], ...]:
        """The inverse map `[expert] -> slots`, ascending."""
        slots: list[list[int]] = [[] for _ in range(num_experts)]
        for slot, expert in enumerate(self.experts[layer]):
            slots[expert].append(slot)
        return tuple(tuple(s) for s in slots)
