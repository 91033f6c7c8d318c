"""Prompt chunks of one step: buckets take turns until the time, the tokens or the seats are used up."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import isinf

from deepinfra.core.cost import StepCost
from deepinfra.core.step import StepView
from deepinfra.schedulers.overtaking import Overtakes
from deepinfra.schedulers.entry import Entry
from deepinfra.schedulers.grants import Grants

__all__ = ("MIN_CHUNK", "Chunk", "Lane", "Turns", "chunk_work")

MIN_CHUNK = 16
"""Prompt tokens that a step with a prompt computes at least, however late it is: prefill never stops."""

_BY_TOKENS = StepCost(chunk_token=1.0)
"""Stands in for a cost that is not known: a second is a token."""


def chunk_work(cost: StepCost | None, start: int, length: int) -> float:
    """Work of a chunk in tokens without context: how much longer it takes than those is what its context adds."""
    if cost is None or cost.chunk_token <= 0.0:
        return float(length)
    return length * (1.0 + cost.chunk_read / cost.chunk_token * (start + 0.5 * length))


@dataclass(slots=True, eq=False)
class Chunk:
    """What a sequence could compute: `todo` tokens from `start`."""

    entry: Entry
    start: int
    todo: int


class Lane:
    """One bucket during one plan: prefills under way, then waiting sequences, of which `head` is the first."""

    def __init__(self, waiting: Iterator[Entry]) -> None:
        self.begun: deque[Chunk] = deque()
        self._waiting = waiting
        self.head = next(waiting, None)

    def open(self, chunk: Chunk) -> None:
        """The head is chosen; its chunk is now under way."""
        self.begun.append(chunk)
        self.head = next(self._waiting, None)


class Turns:
    """Gives chunks to the lane with the least work so far, again and again.

    Args:
        view: The step's limits.
        grants: Where chunks are granted.
        lanes: One per bucket.
        work: Work that each lane has had; counted on here.
        cost: Predicted cost of tokens, if known.
        seconds: What all chunks together may add to the step.
        room: Blocks that sequences to be opened may use.
        overtakes: Who must be opened next.
        in_flight: Sequences opened in steps whose report has not come: each may have passed someone.
        ready: Whether a waiting sequence could be opened, room aside.
    """

    def __init__(
        self,
        *,
        view: StepView,
        grants: Grants,
        lanes: list[Lane],
        work: list[float],
        cost: StepCost | None,
        seconds: float,
        room: int,
        overtakes: Overtakes,
        in_flight: int,
        ready: Callable[[Entry], bool],
    ) -> None:
        known = cost is not None and (cost.chunk_token > 0.0 or cost.chunk_read > 0.0) and not isinf(seconds)
        self._cost = cost if known and cost is not None else _BY_TOKENS
        self._left = seconds if known else float(grants.tokens)
        self._view, self._grants, self._lanes, self._work = view, grants, lanes, work
        self._seats = view.max_seqs - len(view.running)
        self._room, self._overtakes, self._ready = room, overtakes, ready
        self._passes = in_flight
        self._opened: set[Entry] = set()
        self._must = True

    def take(self) -> None:
        """Give chunks until nothing more fits."""
        active = [line for line, lane in enumerate(self._lanes) if lane.begun or lane.head]
        while active and self._grants.tokens:
            line = min(active, key=lambda i: (self._work[i], i))
            if not self._turn(line, self._left / len(active)):
                active.remove(line)

    def _turn(self, line: int, seconds: float) -> bool:
        """Give a lane's next sequence a chunk of about `seconds`."""
        lane = self._lanes[line]
        due = self._first_due()
        # One that is due is opened beside the prefill under way in its lane, or all lanes would wait for that.
        begun = lane.begun[0] if lane.begun else None
        newcomer = self._newcomer(lane, due) if begun is None or (due is not None and due.line == line) else None
        chunk = newcomer or begun
        if chunk is None:
            return False
        length = self._length(chunk, seconds)
        length = self._grants.give(chunk.entry.job.seq, length) if length else 0
        if not length:
            return False
        if newcomer is not None:
            self._open(lane, newcomer)
        spent = self._cost.chunk_token * length + self._cost.chunk_read * length * (chunk.start + 0.5 * length)
        self._left = max(0.0, self._left - spent)
        self._work[line] += chunk_work(self._cost, chunk.start, length)
        self._must = False
        chunk.start, chunk.todo = chunk.start + length, chunk.todo - length
        if not chunk.todo:
            lane.begun.remove(chunk)
        return True

    def _length(self, chunk: Chunk, seconds: float) -> int:
        """Tokens for one turn: what fits into it, at least `MIN_CHUNK` if the step has room or none was given yet."""
        length = min(chunk.todo, self._cost.tokens_within(seconds, chunk.start))
        least = min(chunk.todo, max(MIN_CHUNK, self._view.grid))
        if length >= least:
            return length if length == chunk.todo else length - length % self._view.grid
        fits = self._cost.tokens_within(self._left, chunk.start) >= least
        return least if fits or self._must else 0

    def _first_due(self) -> Entry | None:
        """The waiting sequence that nothing behind it may be opened before, if any.

        One without room is no reason to hold the others back, until it is starved.
        """
        for entry in self._overtakes.due(self._passes):
            if entry in self._opened or not self._ready(entry):
                continue
            if self._fits(entry) or self._overtakes.starved(entry):
                return entry
        return None

    def _newcomer(self, lane: Lane, due: Entry | None) -> Chunk | None:
        """The first waiting sequence of a lane, if there is a seat and room for it and it passes nobody it must not."""
        entry = lane.head
        if entry is None or not self._seats or not self._fits(entry):
            return None
        if due is not None and due.rank < entry.rank:
            return None
        return Chunk(entry, entry.tokens - entry.uncached, entry.uncached)

    def _open(self, lane: Lane, chunk: Chunk) -> None:
        self._seats -= 1
        self._room -= chunk.entry.blocks(self._view.block_size)
        chunk.entry.asked = True
        self._opened.add(chunk.entry)
        lane.open(chunk)
        first = min((other.head.rank for other in self._lanes if other.head), default=None)
        self._passes += first is not None and first < chunk.entry.rank

    def _fits(self, entry: Entry) -> bool:
        alone = self._seats == self._view.max_seqs
        return alone or entry.blocks(self._view.block_size) <= self._room
