"""Which staging slot is used for what: the bounded host memory between device and store."""

from __future__ import annotations

__all__ = ("Slots",)


class Slots:
    """Free list over `KVMemory` slots; loads leave one for saves when there are several, and saves one for loads."""

    def __init__(self, num_slots: int) -> None:
        self._free = list(range(num_slots))
        self.num_slots = num_slots

    @property
    def free(self) -> int:
        """Slots in nobody's hands."""
        return len(self._free)

    def take(self, count: int, *, leave: int = 0) -> list[int]:
        """Up to `count` slots, leaving `leave` of the free ones; may be none."""
        count = max(0, min(count, len(self._free) - leave))
        return [self._free.pop() for _ in range(count)]

    def give(self, slots: list[int] | tuple[int, ...]) -> None:
        """Return slots."""
        self._free.extend(slots)
