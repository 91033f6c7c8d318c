"""Where length buckets begin: as configured, or learned from the prompts that came lately."""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from itertools import accumulate

from deepinfra.core.buckets import DEFAULT_EDGES, bucket_of

__all__ = ("SHARES", "Edges")

SHARES = (0.02, 0.1, 0.5)
"""Share of all prompt tokens that is in prompts shorter than the second, third and last bucket's.

Whoever may pass others delays them by what it brings. So the two short buckets together hold a tenth of the work, less
than may be done out of order in a burst of five times what can be served, and in traces of conversations and of code a
third to a half of all requests.
"""

APART = 2.0
"""An edge is at least so many times the one before: among prompts of about one length order of arrival is best."""

_RECENT, _EVERY, _STEADY = 4096, 64, 256
"""Prompts that are remembered; after how many each the edges move; and up to how many they move as far as they must.

Those that came into the second bucket in bursts of a code trace waited 1.8 s at p99, and 4.5 s when nothing was learned
from fewer than 256: many that came before were moved to longer buckets then.
"""

_STRIDE = 1.1
"""How far an edge moves at once, so that a burst does not turn the buckets over: from 512 to 4096 in 1,400 prompts."""


class Edges:
    """The first lengths of buckets 1, 2, ...: given ones, or those that divide the work of recent prompts by `SHARES`.

    Args:
        given: Ascending; `None` to learn, from `DEFAULT_EDGES` on.
    """

    def __init__(self, given: Sequence[int] | None) -> None:
        self.now = DEFAULT_EDGES if given is None else tuple(given)
        self._recent: deque[int] | None = deque(maxlen=_RECENT) if given is None else None
        self._count = 0

    def __len__(self) -> int:
        return len(self.now)

    def bucket(self, uncached: int) -> int:
        """Index of the bucket for so many tokens to compute."""
        return bucket_of(uncached, self.now)

    def saw(self, uncached: int) -> None:
        """A prompt with so many tokens to compute came."""
        recent = self._recent
        if recent is None:
            return
        recent.append(uncached)
        self._count += 1
        if self._count % _EVERY == 0:
            targets = _divided(sorted(recent))
            self.now = self._nearer(targets) if self._count > _STEADY else tuple(map(round, targets))

    def _nearer(self, targets: Sequence[float]) -> tuple[int, ...]:
        """One stride towards them."""
        edges: list[int] = []
        for edge, target in zip(self.now, targets, strict=True):
            moved = round(min(max(target, edge / _STRIDE), max(edge * _STRIDE, edge + 1.0)))
            edges.append(max(moved, edges[-1] + 1 if edges else 1))
        return tuple(edges)


def _divided(lengths: Sequence[int]) -> list[float]:
    """Lengths at which the work of ascending lengths reaches each of `SHARES`."""
    targets: list[float] = []
    done = list(accumulate(lengths))
    for share in SHARES:
        length = lengths[bisect_right(done, share * done[-1])]
        targets.append(max(length, APART * targets[-1] if targets else 2.0))
    return targets
