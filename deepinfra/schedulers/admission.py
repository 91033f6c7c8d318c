"""The door of a queue: how much may wait, who makes room for whom, and when it is worth asking again.

Three limits: sequences, prompt tokens, and predicted seconds of prompts that wait. What is larger than a limit alone is
let in when nothing waits. When a limit is reached the door closes until no more than `REOPEN` of each limit is used:
then one who was told to come back finds room and not a race for a single place, and the time told is that of many
openings, which can be predicted, and not of one, which cannot.

Whoever has a higher priority than somebody who waits is let in all the same: as many of the lowest priority make room
as it takes, the newest first. So is one of a tenant that has less waiting than another: of the tenant with most make
room those that would run last. Sequences that were ever started make room for nobody.

A tenant with limits of its own has a door of its own before the one for all.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

from deepinfra.core.cost import StepCost, StepWork
from deepinfra.core.ids import SeqId
from deepinfra.core.step import Job
from deepinfra.errors import Overloaded, TenantFullError

__all__ = ("REOPEN", "Admission", "Amount", "Ask", "Limits", "OutputGuess")

REOPEN = 0.75
"""Share of each limit that may be used when a closed door opens again."""

SPARE = 0.5
"""Share of each limit up to which anybody is let in, whoever else is expected: so the server never waits for them."""

MARGIN = 1.1
"""A wait is told so many times as long as predicted: coming too early costs a second refusal, too late only time."""

UNKNOWN_OUT = 256
"""Tokens expected of an answer before any has ended, at most."""


class Limits(NamedTuple):
    """How much may wait: sequences, prompt tokens without cache, predicted seconds of these; `None` is no limit."""

    requests: int | None = None
    tokens: int | None = None
    seconds: float | None = None


class Amount(NamedTuple):
    """What waits, or what one sequence adds to it."""

    requests: int = 0
    tokens: int = 0
    reads: float = 0.0

    @classmethod
    def of(cls, start: int, tokens: int) -> Amount:
        """Of one sequence with `tokens` to compute from `start`."""
        return cls(1, tokens, tokens * (start + 0.5 * tokens))

    def plus(self, other: Amount, times: int = 1) -> Amount:
        """Together with another; `times` is -1 to take it away."""
        return Amount(
            self.requests + times * other.requests,
            self.tokens + times * other.tokens,
            self.reads + times * other.reads,
        )

    def part(self, share: float) -> Amount:
        """A share of it."""
        return Amount(round(share * self.requests), int(share * self.tokens), share * self.reads)

    def seconds(self, cost: StepCost | None) -> float:
        """Predicted seconds of these prompts; 0 while nothing is known."""
        return 0.0 if cost is None else cost.seconds(StepWork(self.tokens, self.reads)) - cost.step


@dataclass(frozen=True, slots=True)
class Ask:
    """Who could make room: what it adds, its priority and its place; the highest place is the newest."""

    seq: SeqId
    amount: Amount
    priority: int
    order: int


NOTHING = Amount()


@dataclass(slots=True)
class _Shares:
    """Sums over shares of `max_new` that answers used, of the latest about 50."""

    count: float = 0.0
    total: float = 0.0
    squares: float = 0.0

    def add(self, share: float) -> None:
        self.count = 0.98 * self.count + 1.0
        self.total = 0.98 * self.total + share
        self.squares = 0.98 * self.squares + share * share


class OutputGuess:
    """How long answers get, from those that ended, the latest counting most.

    Kept is which share of `max_new` they used, for each magnitude of `max_new` by itself: who does not limit an answer
    is allowed all that fits, and uses a thousandth of it. For a magnitude of which none has ended, it is tokens.
    """

    def __init__(self) -> None:
        self._shares: defaultdict[int, _Shares] = defaultdict(_Shares)
        self._count, self._tokens = 0.0, 0.0

    def ended(self, used: int, allowed: int) -> None:
        """An answer ended after `used` of the `allowed` tokens."""
        self._shares[_magnitude(allowed)].add(min(1.0, used / max(1, allowed)))
        self._count = 0.98 * self._count + 1.0
        self._tokens = 0.98 * self._tokens + used

    def left(self, job: Job, used: int) -> float:
        """Tokens still expected of a sequence that has `used` so far.

        If all answers are equally long, what is left is the rest; if they end at random, it is as much as ever.
        """
        most = max(1.0, float(job.max_new - used))
        shares = self._shares.get(_magnitude(job.max_new))
        if shares is None or not shares.total:
            return max(1.0, min(most, self._tokens / self._count if self._tokens else UNKNOWN_OUT))
        mean = shares.total / shares.count
        random = min(1.0, max(0.0, shares.squares / shares.count / (mean * mean) - 1.0))
        return max(1.0, min(most, mean * job.max_new - (1.0 - random) * used))


def _magnitude(max_new: int) -> int:
    """The same for numbers that differ by less than a factor of about 4; 16 in all."""
    return min(15, max_new.bit_length() // 2)


class Admission:
    """Counts what waits, and decides who may wait.

    Args:
        limits: How much may wait.
        tenant: Whose door it is, if not everybody's.
    """

    def __init__(self, limits: Limits, tenant: str | None = None) -> None:
        self.backlog = Amount()
        self.refused = 0
        self._limits, self._tenant, self._closed = limits, tenant, False
        self._then: StepCost | None = None
        self._priorities: Counter[int] = Counter()

    def enter(self, ask: Ask, *, started: bool) -> None:
        """A sequence begins to wait; one that was ever started makes room for nobody."""
        self.backlog = self.backlog.plus(ask.amount)
        if not started:
            self._priorities[ask.priority] += 1

    def leave(self, ask: Ask, *, started: bool) -> None:
        """A sequence no longer waits."""
        self.backlog = self.backlog.plus(ask.amount, -1)
        if not started:
            self._priorities[ask.priority] -= 1

    def admit(
        self,
        amount: Amount,
        priority: int,
        cost: StepCost | None,
        could_leave: Callable[[], Iterable[Ask]],
        heavier: Callable[[], Iterable[Ask]],
        wait_s: Callable[[float, float, float], float],
        expected: Amount = NOTHING,
        due: bool = False,
    ) -> list[Ask]:
        """Let a sequence in; returns those that make room for it.

        Args:
            amount: What it adds.
            priority: Its own.
            cost: Of steps, if known.
            could_leave: Those that make room for higher priorities than their own.
            heavier: Those that make room because their tenant has more waiting, in this order.
            wait_s: Seconds until no more than so many sequences, tokens and seconds wait.
            expected: What those will add who were told to come again, and are before it.
            due: Whether it was told to come now.

        Raises:
            Overloaded: There is no room.
        """
        now, cost = cost, self._then if self._closed else cost
        if self._closed and self._fits(expected, cost, REOPEN):
            self._closed = False
        fits = not self.backlog.requests or self._fits(amount.plus(expected), cost)
        if (fits and not self._closed) or self._fits(amount, cost, SPARE) or (due and self._fits(amount, cost)):
            return []
        outranks = any(count and other < priority for other, count in self._priorities.items())
        pushes = outranks or any(True for _ in heavier())
        if fits and pushes:
            return []
        if outranks:
            lower = [ask for ask in could_leave() if ask.priority < priority]
            if self._fits_without(lower, amount, cost):  # or 4,096 are put in order in vain: 10 ms
                lower.sort(key=lambda ask: (ask.priority, -ask.order))
                if (leaving := self._make_room(amount, cost, lower)) is not None:
                    return leaving
        if (leaving := self._make_room(amount, cost, heavier())) is not None:
            return leaving
        # While it is closed seconds are those predicted when it closed: who was told a time finds the door as foretold.
        self._closed, self._then = self._closed or not self._fits(expected, cost, REOPEN), cost
        self.refused += 1
        requests, tokens, seconds = self._target(amount, cost, REOPEN if self._closed and not pushes else 1.0)
        if then_s := self.backlog.seconds(cost):
            seconds *= self.backlog.seconds(now) / then_s
        kind = Overloaded if self._tenant is None else TenantFullError
        raise kind(self._why(now), MARGIN * self._wait_s((requests, tokens, seconds), expected, now, wait_s))

    def _wait_s(
        self,
        target: tuple[float, float, float],
        expected: Amount,
        cost: StepCost | None,
        wait_s: Callable[[float, float, float], float],
    ) -> float:
        """Seconds until no more than the target waits, of those here and those expected before."""
        outside = (expected.requests, expected.tokens, expected.seconds(cost))
        left = [most - more for most, more in zip(target, outside, strict=True)]
        if not any(outside) or min(left) >= 0.0:
            return wait_s(left[0], left[1], left[2])
        # When all are gone that are here, and then as long again as those take that come.
        here = (self.backlog.requests, self.backlog.tokens, self.backlog.seconds(cost))
        return wait_s(0.0, 0.0, 0.0) * (1.0 + max(-n / waits for n, waits in zip(left, here, strict=True) if waits))

    def _fits(self, amount: Amount, cost: StepCost | None, share: float = 1.0) -> bool:
        """Whether the backlog and `amount` stay within a share of the limits."""
        total, limits = self.backlog.plus(amount), self._limits
        return (
            (limits.requests is None or total.requests <= max(1, int(share * limits.requests)))
            and (limits.tokens is None or total.tokens <= share * limits.tokens)
            and (limits.seconds is None or total.seconds(cost) <= share * limits.seconds)
        )

    def _fits_without(self, asks: Sequence[Ask], amount: Amount, cost: StepCost | None) -> bool:
        """Whether an amount fits, or is alone, once none of these waits."""
        tokens, reads = sum(ask.amount.tokens for ask in asks), sum(ask.amount.reads for ask in asks)
        rest = amount.plus(Amount(len(asks), tokens, reads), -1)
        return len(asks) == self.backlog.requests or self._fits(rest, cost)

    def _target(self, amount: Amount, cost: StepCost | None, share: float) -> tuple[float, float, float]:
        """How little must wait before it is let in, of so much of each limit."""
        limits = self._limits
        most = inf if limits.requests is None else limits.requests - 1
        requests = most if limits.requests is None else max(1, int(share * limits.requests))
        tokens = inf if limits.tokens is None else min(share * limits.tokens, limits.tokens - amount.tokens)
        seconds = inf if limits.seconds is None else min(share * limits.seconds, limits.seconds - amount.seconds(cost))
        if tokens < 0 or seconds < 0.0:
            return 0.0, inf, inf
        return min(requests, most), tokens, seconds

    def _make_room(self, amount: Amount, cost: StepCost | None, makers: Iterable[Ask]) -> list[Ask] | None:
        """The first of these without whom it fits; `None` if it never does."""
        before, leaving = self.backlog, []
        try:
            for ask in makers:
                self.backlog = self.backlog.plus(ask.amount, -1)
                leaving.append(ask)
                if self._fits(amount, cost) or not self.backlog.requests:
                    return leaving
        finally:
            self.backlog = before
        return None

    def _why(self, cost: StepCost | None) -> str:
        waits = self.backlog
        told = f"{waits.requests} sequence{'s' * (waits.requests != 1)} with {waits.tokens} prompt tokens"
        if self._tenant is not None:
            limits = (("max_queue", self._limits.requests), ("max_queue_tokens", self._limits.tokens))
            which = " and ".join(f"{name} = {limit}" for name, limit in limits if limit is not None)
            return f"tenant {self._tenant!r} has {told} waiting, and may have {which}"
        seconds = waits.seconds(cost)
        told = f"{told} {'is' if waits.requests == 1 else 'are'} waiting"
        return f"{told}, about {seconds:.0f} s of work" if seconds >= 1.0 else told
