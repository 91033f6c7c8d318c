"""Which staging slot is used for what: the bounded host memory between device and store."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ("Slots",)


class Slots:
    """Free list over `KVMemory` slots; loads leave one for saves when there are several, and saves one for loads.

    Blocks pass through a slot within a few steps. Snapshots may stay longer, until their sequence begins or their
    block is saved, so they have fewer than half of the slots: with one or two there are no snapshots.
    """

    def __init__(self, num_slots: int) -> None:
        self._free = list(range(num_slots))
        self._held: set[int] = set()
        self.num_slots = num_slots

    @property
    def free(self) -> int:
        """Slots in nobody's hands."""
        return len(self._free)

    @property
    def most_held(self) -> int:
        """Most slots that snapshots may have."""
        return (self.num_slots - 1) // 2

    def take(self, count: int, *, leave: int = 0) -> list[int]:
        """Up to `count` slots, leaving `leave` of the free ones; may be none."""
        count = max(0, min(count, len(self._free) - leave))
        return [self._free.pop() for _ in range(count)]

    def hold(self) -> int | None:
        """One slot for a snapshot, if one is free and they have not too many."""
        if not self._free or not self.keep(self._free[-1]):
            return None
        return self._free.pop()

    def keep(self, slot: int) -> bool:
        """Let a slot be a snapshot's from now on, if they have not too many."""
        if slot not in self._held and len(self._held) >= self.most_held:
            return False
        self._held.add(slot)
        return True

    def give(self, slots: Sequence[int]) -> None:
        """Return slots, however they were taken."""
        self._held.difference_update(slots)
        self._free.extend(slots)
