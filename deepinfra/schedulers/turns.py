"""Prompt chunks of one step: in order, but for a part of the work, until time, tokens or seats are used up.

Source: that what passes must be paid for by those passed is Kleinrock's conservation law (Queueing Systems II, 1976);
the account is a token bucket over work instead of packets.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import inf

from deepinfra.core.cost import StepCost
from deepinfra.core.step import StepView
from deepinfra.schedulers.entry import Entry
from deepinfra.schedulers.grants import Grants
from deepinfra.schedulers.overtaking import Overtakes
from deepinfra.schedulers.pacing import Allowance

__all__ = ("PART", "Chunk", "Lane", "OutOfOrder", "Turns")


PART, MIDDLE = 1 / 2, 1 / 8
"""Parts of the work that may be done out of order: by the short buckets, and by all together.

All but the last two buckets are short. As learned they bring a tenth of the work, which makes it 1.1 times as long for
the others; half of it are they in a burst of five times what can be served. Then a quarter was too little: in bursts of
a code trace those of the second bucket waited 5.1 s at p99, with a third 3.3 and with a half 1.7, the longest 20.6 s
each time and 20.1 in order of arrival. Whom a half passes for long, as given edges may have it, waits twice as long.
Whom an eighth passes waits 1.14 times as long; in a conversation trace a quarter for all cost the longest too much.
"""


def _chunk_work(cost: StepCost, start: int, length: int) -> float:
    """Work of a chunk in tokens without context: how much longer it takes than those is what its context adds."""
    if cost.chunk_token <= 0.0:
        return float(length)
    return length * (1.0 + cost.chunk_read / cost.chunk_token * (start + 0.5 * length))


class OutOfOrder:
    """How much more work may be done for sequences before which others wait or are under way: parts of all work.

    A lane is charged for itself and all shorter ones, so that nobody waits longer than `1 / (1 - part)` times as long
    as in order, but for what was saved: at most what one step may hold.
    """

    def __init__(self, lanes: int) -> None:
        self.parts = [PART if lane < max(1, lanes - 2) else MIDDLE for lane in range(lanes)]
        self.saved = [0.0] * lanes

    def may(self, line: int) -> bool:
        """Whether a lane may have something done out of order."""
        return self.saved[line] >= 0.0

    def did(self, work: float, most: float, line: int, *, in_order: bool) -> None:
        """Work of a lane is chosen; at most `most` is saved, or owed."""
        for lane, part in enumerate(self.parts):
            spent = 0.0 if in_order or lane < line else work
            self.saved[lane] = max(-most, min(most, self.saved[lane] + part * work - spent))


@dataclass(slots=True, eq=False)
class Chunk:
    """What a sequence could compute: `todo` tokens from `start`."""

    entry: Entry
    start: int
    todo: int

    @classmethod
    def first(cls, entry: Entry) -> Chunk:
        """Of a waiting sequence."""
        return cls(entry, entry.tokens - entry.uncached, entry.uncached)


class Lane:
    """One bucket during one plan: prefills under way, then waiting sequences, of which `head` is the first."""

    def __init__(self, waiting: Iterator[Entry]) -> None:
        self.begun: deque[Chunk] = deque()
        self._waiting = waiting
        self.head = next(waiting, None)

    def next(self, ready: Callable[[Entry], bool]) -> Entry | None:
        """Whose turn it is, if that passes nobody."""
        return self.begun[0].entry if self.begun else self.first(ready)

    def first(self, ready: Callable[[Entry], bool]) -> Entry | None:
        """The first waiting sequence that still is ready, after others were chosen."""
        while self.head is not None and not ready(self.head):
            self.head = next(self._waiting, None)
        return self.head

    def open(self, chunk: Chunk) -> None:
        """A waiting sequence is chosen; its chunk is now under way."""
        self.begun.append(chunk)
        if self.head is chunk.entry:
            self.head = next(self._waiting, None)


class Turns:
    """Gives chunks to lanes until nothing more fits.

    In order of arrival, priority included, but for a part of the work, that the shortest have before all others; see
    `OutOfOrder`.

    Args:
        view: The step's limits.
        grants: Where chunks are granted.
        allowance: What prompts may have of the step.
        lanes: One per bucket.
        out_of_order: How much may be done out of order.
        room: Blocks that sequences to be opened may use.
        overtakes: Who must be opened next.
        ready: Whether a waiting sequence could be opened, room aside.
        choose: Told of each that is chosen to be opened; others may not be ready after that.
    """

    def __init__(
        self,
        *,
        view: StepView,
        grants: Grants,
        allowance: Allowance,
        lanes: list[Lane],
        out_of_order: OutOfOrder,
        room: int,
        overtakes: Overtakes,
        ready: Callable[[Entry], bool],
        choose: Callable[[Entry], None],
    ) -> None:
        self._view, self._grants, self._allowance, self._lanes = view, grants, allowance, lanes
        self._seats = view.max_seqs - len(view.running)
        self._room, self._overtakes, self._ready, self._choose = room, overtakes, ready, choose
        self._out_of_order = out_of_order
        self._opened: set[Entry] = set()
        self._first: tuple[Entry | None, Entry | None] | None = None

    def take(self) -> None:
        """Give chunks until nothing more fits."""
        active = set(range(len(self._lanes)))
        while self._grants.tokens:
            ranks = {line: entry.rank for line in active if (entry := self._lanes[line].next(self._ready)) is not None}
            if not ranks:
                return
            oldest = min(ranks, key=ranks.__getitem__)
            line = min(filter(self._out_of_order.may, ranks), default=oldest)
            if not self._turn(line, in_order=line == oldest):
                active.remove(line)

    def _turn(self, line: int, *, in_order: bool) -> bool:
        """Give a lane's next sequence a chunk."""
        lane = self._lanes[line]
        newcomer = self._newcomer(line)
        chunk = newcomer or (lane.begun[0] if lane.begun else None)
        if chunk is None:
            return False
        length = self._allowance.give(self._grants, chunk.entry.job.seq, chunk.start, chunk.todo)
        if not length:
            return False
        if newcomer is not None:
            self._open(lane, newcomer)
        work = _chunk_work(self._allowance.cost, chunk.start, length)
        self._out_of_order.did(work, self._view.max_step_tokens, line, in_order=in_order)
        chunk.start, chunk.todo = chunk.start + length, chunk.todo - length
        if not chunk.todo:
            lane.begun.remove(chunk)
        return True

    def _newcomer(self, line: int) -> Chunk | None:
        """Whom a lane may open now, if that passes nobody it must not: one that must be next, or else its first.

        One that must be next is opened beside the prefill under way in its lane, or all would wait for that.
        """
        if not self._seats:
            return None
        overdue, due = self._first_to_hold_back()
        if overdue is not None:
            return Chunk.first(overdue) if overdue.line == line and self._fits(overdue) else None
        lane = self._lanes[line]
        head = lane.first(self._ready)
        if head is None or not self._fits(head) or (lane.begun and (due is None or due.line != line)):
            return None
        return None if due is not None and due.rank < head.rank else Chunk.first(head)

    def _first_to_hold_back(self) -> tuple[Entry | None, Entry | None]:
        """The oldest that nothing that came later may be opened before, and the first that nothing behind may.

        They are the same until somebody is opened; looking through all that wait takes up to a millisecond.
        """
        if self._first is None:
            overtakes, room = self._overtakes, self._room_tokens
            overdue = next(filter(self._holds_back, overtakes.overdue(room)), None)
            due = None if overdue is not None else next(filter(self._holds_back, overtakes.due(room)), None)
            self._first = overdue, due
        return self._first

    def _holds_back(self, entry: Entry) -> bool:
        """Whether others wait for a sequence: one without room is no reason, until it is starved."""
        return (
            (self._fits(entry) or self._overtakes.starved(entry)) and entry not in self._opened and self._ready(entry)
        )

    def _open(self, lane: Lane, chunk: Chunk) -> None:
        entry, size = chunk.entry, self._view.block_size
        self._overtakes.passing(entry, self._room_tokens)
        self._seats -= 1
        self._room -= entry.blocks(size)
        self._choose(entry)
        self._opened.add(entry)
        lane.open(chunk)
        self._first = None

    @property
    def _room_tokens(self) -> float:
        """Uncached tokens of a sequence that would just find room."""
        return inf if self._alone else (self._room - 1) * self._view.block_size

    @property
    def _alone(self) -> bool:
        return self._seats == self._view.max_seqs

    def _fits(self, entry: Entry) -> bool:
        return self._alone or entry.blocks(self._view.block_size) <= self._room
