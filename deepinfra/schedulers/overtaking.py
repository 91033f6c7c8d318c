"""Counts how often waiting sequences are passed, and says whose turn it is when the bound is reached."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Sequence

from deepinfra.schedulers.entry import Entry, rank_of

__all__ = ("STARVED", "Overtakes")


STARVED = 8
"""A sequence without room lets this many times `limit` others pass before all behind it wait for room to appear."""


class Overtakes:
    """Keeps every waiting sequence that has room from being passed more than `limit` times.

    B passes A when B is opened while A, which is before B in rank, waits. One counter serves all: a sequence notes it
    on arrival, so the difference is never less than the times it was passed, and the earliest arrivals are the first
    to be *due*. Nothing behind a due sequence may be opened before it.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.count = 0
        self._marks: dict[Entry, int] = {}
        self._fresh: OrderedDict[Entry, None] = OrderedDict()
        self._due: list[Entry] = []

    def wait(self, entry: Entry) -> None:
        """A sequence begins to wait."""
        self._marks[entry] = self.count
        self._fresh[entry] = None

    def leave(self, entry: Entry) -> None:
        """A sequence no longer waits."""
        del self._marks[entry]
        if entry in self._fresh:
            del self._fresh[entry]
        else:
            del self._due[bisect_left(self._due, entry.rank, key=rank_of)]

    def due(self, more: int) -> Sequence[Entry]:
        """Sequences that nothing behind them may pass, by rank, once `more` passes have happened."""
        while self._fresh:
            entry = next(iter(self._fresh))
            if self.count + more - self._marks[entry] < self.limit:
                break
            del self._fresh[entry]
            insort(self._due, entry, key=rank_of)
        return self._due

    def patience(self, entry: Entry) -> int:
        """How many may still pass a waiting sequence before it is due."""
        return self.limit - (self.count - self._marks[entry])

    def starved(self, entry: Entry) -> bool:
        """Whether a due sequence has waited so long that room must be made for it."""
        return self.count - self._marks[entry] >= STARVED * self.limit
