"""Counts how often each waiting sequence is passed, and says who must be opened next."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Iterator

from deepinfra.schedulers.entry import Entry, Rank, rank_of

__all__ = ("STARVED", "Overtakes")


STARVED = 16
"""A sequence that so many others were opened before for want of room has all behind it wait for room to appear.

`limit` if that is less. A conversation trace whose prompts hardly fit beside each other, in a simulation: with 64 the
longest waited 1.9 times as long as in order of arrival at p99, with 16 1.5 times, and half of the short ones still
less than 2 s instead of 18.
"""

_SPLIT = 128
"""Sequences in a part of the order beyond which it is split: passing 4,096 takes about 15 us."""


class _Part:
    """Neighbours in rank, with what was added to all of them, and the most that any was passed, denied or needs."""

    __slots__ = ("add", "denied", "entries", "most", "needs")

    def __init__(self, entries: list[Entry], add: int = 0) -> None:
        self.entries, self.add = entries, add
        self.look()

    def look(self) -> None:
        """Find the most again."""
        most, denied, needs = -self.add, 0, 1
        for entry in self.entries:  # once for each that is opened; as three `max` it took 60 us instead of 15
            if entry.passed > most:
                most = entry.passed
            if entry.denied > denied:
                denied = entry.denied
            if (uncached := entry.tokens - entry.cached) > needs:
                needs = uncached
        self.most, self.denied, self.needs = most, denied, needs


class Overtakes:
    """Keeps every waiting sequence that has room from being passed more than `limit` times, and from waiting for ever.

    B passes A when B is first chosen to be opened while A, which is before B in rank and would have room, waits and is
    left alone for no load's sake. A that was passed `limit` times is *due*: nothing behind it in rank is opened before
    it while it has room. One that waited for `patience` steps is *overdue*: nothing that came later is, whatever its
    rank. What is chosen counts, even if its opening then comes to nothing.
    """

    def __init__(self, limit: int, patience: int) -> None:
        self.limit, self._patience = limit, patience
        self._parts: list[_Part] = []
        self._since: OrderedDict[Entry, int] = OrderedDict()
        self._told: dict[int, tuple[int, int]] = {}
        self.step = 0

    # -- who waits --------------------------------------------------------------------------------

    def wait(self, entry: Entry) -> None:
        """A sequence begins to wait."""
        entry.passed = entry.denied = 0
        self._since[entry] = self.step
        self._insert(entry)

    def leave(self, entry: Entry) -> None:
        """A sequence no longer waits."""
        del self._since[entry]
        if entry.counted:
            self._remove(entry)
        (times, most), passed = self._told.get(entry.line, (0, 0)), self.passed(entry)
        self._told[entry.line] = times + passed, max(most, passed)

    def count(self, entry: Entry, *, ready: bool) -> None:
        """Whether passing a waiting sequence counts from now on: not while it is left alone for a load's sake."""
        if ready != entry.counted:
            if ready:
                self._insert(entry)
            else:
                self._remove(entry)

    def _insert(self, entry: Entry) -> None:
        index = self._find(entry.rank)
        if index == len(self._parts):
            if not index or len(self._parts[-1].entries) >= _SPLIT:
                self._parts.append(_Part([]))
            index = len(self._parts) - 1
        part = self._parts[index]
        entry.counted = True
        entry.passed -= part.add
        insort(part.entries, entry, key=rank_of)
        part.most, part.denied = max(part.most, entry.passed), max(part.denied, entry.denied)
        part.needs = max(part.needs, entry.uncached)
        if len(part.entries) > _SPLIT:
            half = len(part.entries) // 2
            self._parts.insert(index + 1, _Part(part.entries[half:], part.add))
            del part.entries[half:]
            part.look()

    def _remove(self, entry: Entry) -> None:
        index = self._find(entry.rank)
        part = self._parts[index]
        del part.entries[bisect_left(part.entries, entry.rank, key=rank_of)]
        entry.counted = False
        entry.passed += part.add
        if part.entries:
            part.look()
        else:
            del self._parts[index]

    def _find(self, rank: Rank) -> int:
        """Index of the first part that ends at or behind a rank."""
        return bisect_left(self._parts, rank, key=lambda part: part.entries[-1].rank)

    def told(self, lines: int) -> list[tuple[int, int]]:
        """How often sequences of each line were passed, and the most of one; 0.2 ms while 4,096 wait."""
        told = [self._told.get(line, (0, 0)) for line in range(lines)]
        times, most = [one for one, _ in told], [one for _, one in told]

        for part in self._parts:
            for entry in part.entries:  # without a call for each, or it takes twice as long
                if passed := entry.passed + part.add:
                    times[entry.line] += passed
                    if passed > most[entry.line]:
                        most[entry.line] = passed
        for entry in self._since:
            if not entry.counted and (passed := entry.passed):
                times[entry.line] += passed
                if passed > most[entry.line]:
                    most[entry.line] = passed
        return list(zip(times, most, strict=True))

    # -- who passes whom --------------------------------------------------------------------------

    def passing(self, entry: Entry, room: float) -> None:
        """A sequence is chosen to be opened while `room` more tokens would have found room; it waits no longer."""
        self.count(entry, ready=False)
        for part in self._parts:
            last = part.entries[-1].rank < entry.rank
            if last and part.needs <= room:
                part.add += 1
            else:
                for other in part.entries:
                    if other.rank < entry.rank:
                        fits = other.uncached <= room
                        other.passed += fits
                        other.denied += not fits
                part.look()
            if not last:
                break

    def passed(self, entry: Entry) -> int:
        """How often a sequence was passed while it waited."""
        return entry.passed + (self._parts[self._find(entry.rank)].add if entry.counted else 0)

    def left(self, entry: Entry) -> int:
        """How many may still pass a waiting sequence before it is due."""
        return self.limit - self.passed(entry)

    def due(self, room: float) -> Iterator[Entry]:
        """Sequences that nothing behind may pass, by rank: those of up to `room` tokens, and starved ones."""
        denied = min(self.limit, STARVED)
        for part in tuple(self._parts):
            least = self.limit - part.add
            if part.most >= least or part.denied >= denied:
                # All of a part at once: whoever is looked at may be counted no longer and taken out of it.
                yield from [
                    entry
                    for entry in part.entries
                    if entry.denied >= denied or (entry.passed >= least and entry.uncached <= room)
                ]

    def overdue(self, room: float) -> Iterator[Entry]:
        """Sequences that nothing that came later may pass, by arrival: of up to `room` tokens, and starved ones."""
        denied = min(self.limit, STARVED)
        for entry, since in self._since.items():
            if self.step - since < self._patience:
                return
            if entry.denied >= denied or entry.tokens - entry.cached <= room:
                yield entry

    def starved(self, entry: Entry) -> bool:
        """Whether a sequence was denied room so often that it must be made."""
        return entry.denied >= min(self.limit, STARVED)
