"""Who was told when to come again, how many of these do, and that they find room.

Whoever was refused is in a queue outside: told a time behind all those who were told before and are expected to come,
and let in at that time before newcomers. How many come is learned from those whose time is over, so that a crowd that
never comes again keeps nobody waiting.
"""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heappop, heappush

from deepinfra.core.step import Job
from deepinfra.schedulers.admission import Amount

__all__ = ("MAX_PROMISES", "Promises")

MAX_PROMISES = 16_384
"""Kept at once; whoever is refused beyond is told a time like all others, and comes again as a newcomer."""

_GRACE, _GRACE_S = 0.25, 2.0
"""Whoever is later than told by this part of the wait and these seconds is a newcomer; `Retry-After` is rounded up."""

_Key = tuple[str, int, int]


@dataclass(slots=True)
class _Promise:
    key: _Key
    due: float
    amount: Amount
    came: bool = False


class Promises:
    """What was promised to whom; all times are the scheduler's."""

    def __init__(self) -> None:
        self._open: dict[_Key, _Promise] = {}
        self._ends: list[tuple[float, int, _Promise]] = []
        self._made = 0
        self._outside = Amount()
        self._came, self._over = 1.0, 1.0  # all come, until one did not

    def expected(self, now: float) -> Amount:
        """What those will add that are outside and expected to come."""
        while self._ends and self._ends[0][0] <= now:
            promise = heappop(self._ends)[2]
            self._over, self._came = 0.98 * self._over + 1.0, 0.98 * self._came + promise.came
            self._close(promise)
        return self._outside.part(self._came / self._over)

    def due(self, job: Job) -> float | None:
        """When a sequence was told to come, if it was; ask `expected` first."""
        promise = self._open.get(_key(job))
        return None if promise is None else promise.due

    def make(self, job: Job, amount: Amount, now: float, wait_s: float) -> None:
        """It is told to wait so long."""
        if not job.prompt or _key(job) in self._open or len(self._ends) >= MAX_PROMISES:
            return
        promise = _Promise(_key(job), now + wait_s, amount)
        self._open[promise.key] = promise
        self._outside = self._outside.plus(amount)
        self._made += 1
        heappush(self._ends, (promise.due + _GRACE * wait_s + _GRACE_S, self._made, promise))

    def came(self, job: Job) -> None:
        """It came when it was told to, or was let in before."""
        promise = self._open.get(_key(job))
        if promise is not None:
            promise.came = True
            self._close(promise)

    def _close(self, promise: _Promise) -> None:
        if self._open.get(promise.key) is promise:
            del self._open[promise.key]
            self._outside = self._outside.plus(promise.amount, -1)


def _key(job: Job) -> _Key:
    return job.tenant, job.tokens, job.prompt
