"""A sequence as a scheduler keeps it, and its place in the order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from deepinfra.core.step import Job
from deepinfra.schedulers.admission import Ask

__all__ = ("PATIENCE_S", "Entry", "Rank", "rank_of")

PATIENCE_S = 5.0
"""How long a sequence is left alone in all while nothing more of it gets ready; then it computes what it lacks."""


class Rank(NamedTuple):
    """Place in the total order, smallest first: `key` says how urgent, `order` counts arrivals.

    `key` is a step: the one as of which it counts as having come, earlier by what its priority is worth. `tag` is
    whose turn it is among tenants; see `tenants`.
    """

    key: float
    tag: float
    order: int


@dataclass(slots=True, eq=False)
class Entry:
    """A sequence that is waiting or running.

    Attributes:
        tokens: Known tokens now, the generated ones included.
        ask: What it adds to the queue while it waits.
        line: Index of the line it waits in.
        work_s: Predicted seconds of its prompt and of the answer that is expected, for its tenant's share.
        counts_as: Step as of which it counts as having come, before its priority.
        served: Step in which it last computed something; -1 if it was never started.
        asked: Whether it was chosen to be opened, and it is not known what came of it.
        in_vain: Whether an opening of it came to nothing, since it last ran.
        computed: Positions whose KV it has.
        leaving: Whether it made room for another and has not been told.
        cached: Tokens that need not be computed, as last seen.
        left_alone_since: Clock since when it is passed over for its own good; see `sharing`,
        patience_s: for how long that may go on,
        most_cached: unless more of it gets ready than ever was.
        parked: Whether it waits for its tenant's limit of running sequences, in no line.
        passed: How often it was passed while it waited, this time or the last; kept by `Overtakes`,
        denied: as is how often others were opened before it because it had no room,
        counted: and whether passing it counts now.
    """

    job: Job
    rank: Rank
    tokens: int
    ask: Ask
    line: int
    work_s: float = 0.0
    counts_as: float = 0.0
    running: bool = False
    served: int = -1
    asked: bool = False
    in_vain: bool = False
    computed: int = 0
    leaving: bool = False
    cached: int = 0
    left_alone_since: float | None = None
    patience_s: float = PATIENCE_S
    most_cached: int = 0
    parked: bool = False
    passed: int = 0
    denied: int = 0
    counted: bool = False

    @property
    def uncached(self) -> int:
        """Tokens to compute if nothing is left of it on the device."""
        return max(1, self.tokens - self.cached)

    def blocks(self, block_size: int) -> int:
        """Blocks to be free before it is opened.

        Cached tokens count as shared with others until an opening came to nothing: the choice would be the same in
        every step, and its tokens lost to those that do run.
        """
        return -(-(self.tokens if self.in_vain else self.uncached) // block_size) + 1


def rank_of(entry: Entry) -> Rank:
    """Key of sorted lists of entries."""
    return entry.rank
