"""Expert load balancing with redundant slots: copy the experts that make peaks, then spread the copies.

A step lasts as long as its busiest device, so both halves minimise the sum over recorded steps of each step's peak,
not the peak of the summed load.

Source: DeepInfer's balancer (facts 3.5, `eplb/`; its public predecessor is deepseek-ai/EPLB). What changed: copies of
one expert are kept on different devices, with a swap when the greedy order leaves no other place; ties go to the
expert with the most load, then the lowest index; a layer that would not get better than round-robin, or than it is
now, is left so; experts that stay on their device keep their slot (the last as in vLLM).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from deepinfra.core.experts import ExpertLoad, Placement, Topology
from deepinfra.interfaces.placer import ExpertPlacer
from deepinfra.placers.static import check_shape, round_robin

__all__ = ("Eplb", "keep_slots", "peak", "replicate", "spread")

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


class Eplb(ExpertPlacer):
    """Places experts by the load of recent steps; 384 experts x 40 layers on 64 devices take about one second.

    Args:
        window: Most recent recorded steps that count.
    """

    def __init__(self, *, window: int = 100) -> None:
        self._window = window

    def place(self, load: ExpertLoad, topology: Topology, current: Placement | None) -> Placement:
        """See `ExpertPlacer.place`; `topology.nodes` is not looked at."""
        _, layers, num_experts = check_shape(load, topology)
        tokens: Floats = np.array(load.tokens[-self._window :], dtype=np.float64).transpose(1, 0, 2)
        counts = replicate(tokens, topology)
        plain = round_robin(num_experts, topology)
        placed: list[tuple[int, ...]] = []
        for layer in range(layers):
            old = current.experts[layer] if current is not None and layer < len(current.experts) else ()
            if not _usable(old, num_experts, topology):
                old = plain
            new = keep_slots(spread(tokens[layer], counts[layer], topology), old, topology)
            choices = (old, plain, new)
            placed.append(min(choices, key=lambda experts: peak(tokens[layer], experts, topology)))
        return Placement(tuple(placed))


def replicate(tokens: Floats, topology: Topology) -> Ints:
    """How many copies of each expert: each redundant slot goes where it lowers the sum of per-step peaks most.

    Args:
        tokens: `[layers, steps, experts]`.
        topology: Slots to be filled; no expert gets more copies than there are devices unless all have that many.

    Returns:
        `[layers, experts]`, at least 1 each; every row sums to `topology.slots`.
    """
    layers, _, num_experts = tokens.shape
    rows = np.arange(layers)
    counts: Ints = np.ones((layers, num_experts), dtype=np.int64)
    share = tokens.copy()  # [layers, steps, experts], per copy
    total = tokens.sum(axis=1)
    for _ in range(topology.slots - num_experts):
        top = share.argmax(axis=2)[..., None]
        first = np.take_along_axis(share, top, axis=2)
        np.put_along_axis(share, top, -1.0, axis=2)
        second = share.max(axis=2, keepdims=True)
        np.put_along_axis(share, top, first, axis=2)
        # One more copy of an expert changes only the steps in which it is the peak.
        copies = np.take_along_axis(counts[:, None, :], top, axis=2)
        gain = first - np.maximum(second, first * copies / (copies + 1))
        gains = np.zeros((layers, num_experts))
        np.add.at(gains, (rows[:, None], top[..., 0]), gain[..., 0])
        open_ = counts < topology.devices
        open_ |= ~open_.any(axis=1, keepdims=True)
        gains[~open_] = -1.0
        # Of equal gains the most loaded expert wins: peaks that tie have to be lowered one after the other.
        best = gains.max(axis=1, keepdims=True)
        chosen = np.where(gains >= best, total / counts, -1.0).argmax(axis=1)
        counts[rows, chosen] += 1
        share[rows, :, chosen] = tokens[rows, :, chosen] / counts[rows, chosen, None]
    return counts


def spread(tokens: Floats, counts: Ints, topology: Topology) -> list[list[int]]:
    """Which copies each device holds: the heaviest first, each where the sum of per-step peaks grows least.

    Args:
        tokens: `[steps, experts]` of one layer.
        counts: `[experts]` copies, summing to `topology.slots`.
        topology: Devices with equal numbers of slots.

    Returns:
        `[devices][slots_per_device]` experts.
    """
    devices, capacity = topology.devices, topology.slots_per_device
    share = tokens / counts  # [steps, experts]
    copies = np.repeat(np.arange(len(counts)), counts)
    order = copies[np.argsort(-share.sum(axis=0)[copies], kind="stable")]
    held: list[list[int]] = [[] for _ in range(devices)]
    loads: Floats = np.zeros((devices, tokens.shape[0]))
    peaks: Floats = np.zeros(tokens.shape[0])
    full = np.zeros(devices, dtype=bool)
    holds = np.zeros((devices, len(counts)), dtype=bool)
    for expert in order.tolist():
        column = share[:, expert]
        cost = np.maximum(loads + column, peaks).sum(axis=1)
        cost[full] = np.inf
        apart = np.where(holds[:, expert], np.inf, cost)
        device = int(apart.argmin())
        if apart[device] == np.inf:
            device = int(cost.argmin())
            swap = _swap(expert, device, held, holds, full)
            if swap is not None:
                # `other` gives a copy to `device` and takes this one.
                other, moved = swap
                held[other].remove(moved)
                held[device].append(moved)
                holds[other, moved], holds[device, moved] = False, True
                loads[other] -= share[:, moved]
                loads[device] += share[:, moved]
                full[device] = len(held[device]) == capacity
                device = other
        held[device].append(expert)
        holds[device, expert] = True
        loads[device] += column
        full[device] = len(held[device]) == capacity
        peaks = loads.max(axis=0)
    return held


def _swap(
    expert: int, device: int, held: list[list[int]], holds: NDArray[np.bool_], full: NDArray[np.bool_]
) -> tuple[int, int] | None:
    """A full device without `expert` and a copy on it that `device` lacks; `None` if every device has the expert."""
    for other in np.flatnonzero(full & ~holds[:, expert]).tolist():
        for moved in reversed(held[other]):  # the lightest came last
            if not holds[device, moved]:
                return other, moved
    return None


def keep_slots(held: list[list[int]], old: tuple[int, ...], topology: Topology) -> tuple[int, ...]:
    """Give each device's experts their old slots where they had one there, and the rest the free slots in order.

    Args:
        held: `[devices][slots_per_device]` experts.
        old: `[slots]` experts before.
        topology: Where device boundaries are.

    Returns:
        `[slots]` experts.
    """
    size = topology.slots_per_device
    experts: list[int] = []
    for device, mine in enumerate(held):
        rest = list(mine)
        slots: list[int | None] = [None] * size
        for i, expert in enumerate(old[device * size : (device + 1) * size]):
            if expert in rest:
                rest.remove(expert)
                slots[i] = expert
        experts.extend(rest.pop(0) if expert is None else expert for expert in slots)
    return tuple(experts)


def peak(tokens: Floats, experts: tuple[int, ...], topology: Topology) -> float:
    """Sum over steps of the busiest device's tokens, when an expert's tokens are shared evenly by its copies.

    Args:
        tokens: `[steps, experts]`.
        experts: `[slots]`.
        topology: Where device boundaries are.
    """
    slots = np.array(experts)
    counts = np.bincount(slots, minlength=tokens.shape[1])
    per_slot = tokens[:, slots] / counts[slots]  # [steps, slots]
    per_device = per_slot.reshape(len(tokens), topology.devices, topology.slots_per_device).sum(axis=2)
    return float(per_device.max(axis=1).sum())


def _usable(experts: tuple[int, ...], num_experts: int, topology: Topology) -> bool:
    """Whether a placement made elsewhere fits these experts and slots, with copies apart."""
    if len(experts) != topology.slots or set(experts) != set(range(num_experts)):
        return False
    size = topology.slots_per_device
    return all(len(set(experts[i : i + size])) == size for i in range(0, len(experts), size))
