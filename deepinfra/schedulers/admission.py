"""The door of a queue: how much may wait, who makes room for whom, and when it is worth asking again.

Three limits: sequences, prompt tokens, and predicted seconds of prompts that wait. What is larger than a limit alone is
let in when nothing waits. When a limit is reached the door closes until no more than `REOPEN` of each limit is used:
then one who was told to come back finds room and not a race for a single place, and the time told is that of many
openings, which can be predicted, and not of one, which cannot.

Whoever has a higher priority than somebody who waits is let in all the same: as many of the lowest priority make room
as it takes, the newest first. Sequences that were ever started make room for nobody.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

from deepinfra.core.cost import StepCost, StepWork
from deepinfra.core.ids import SeqId
from deepinfra.core.step import Job
from deepinfra.errors import Overloaded

__all__ = ("REOPEN", "Admission", "Amount", "Ask", "Limits", "OutputGuess")

REOPEN = 0.75
"""Share of each limit that may be used when a closed door opens again."""

MARGIN = 1.1
"""A wait is told so many times as long as predicted: coming too early costs a second refusal, too late only time."""

UNKNOWN_OUT = 256
"""Tokens expected of an answer before any has ended, at most."""


class Limits(NamedTuple):
    """How much may wait: sequences, prompt tokens without cache, predicted seconds of these; `None` is no limit."""

    requests: int
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


class OutputGuess:
    """Which share of `max_new` answers use, from those that ended, the latest counting most."""

    def __init__(self) -> None:
        self._count, self._sum, self._squares = 0.0, 0.0, 0.0

    def ended(self, used: int, allowed: int) -> None:
        """An answer ended after `used` of the `allowed` tokens."""
        share = min(1.0, used / max(1, allowed))
        self._count = 0.98 * self._count + 1.0
        self._sum = 0.98 * self._sum + share
        self._squares = 0.98 * self._squares + share * share

    def left(self, job: Job, used: int) -> float:
        """Tokens still expected of a sequence that has `used` so far.

        If all answers are equally long, what is left is the rest; if they end at random, it is as much as ever.
        """
        most = max(1.0, float(job.max_new - used))
        if not self._sum:
            return min(most, UNKNOWN_OUT)
        mean = self._sum / self._count
        random = min(1.0, max(0.0, self._squares / self._count / (mean * mean) - 1.0))
        return max(1.0, min(most, mean * job.max_new - (1.0 - random) * used))


class Admission:
    """Counts what waits, and decides who may wait.

    Args:
        limits: How much may wait.
    """

    def __init__(self, limits: Limits) -> None:
        self.backlog = Amount()
        self.refused = 0
        self._limits, self._closed = limits, False
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
        waiting: Callable[[], Iterable[Ask]],
        wait_s: Callable[[float, float, float], float],
    ) -> list[Ask]:
        """Let a sequence in; returns those that make room for it.

        Args:
            amount: What it adds.
            priority: Its own.
            cost: Of steps, if known.
            waiting: Those that could make room.
            wait_s: Seconds until no more than so many sequences, tokens and seconds wait.

        Raises:
            Overloaded: There is no room.
        """
        now, cost = cost, self._then if self._closed else cost
        if self._closed and self._fits(Amount(), cost, REOPEN):
            self._closed = False
        outranks = any(count and other < priority for other, count in self._priorities.items())
        fits = not self.backlog.requests or self._fits(amount, cost)
        if fits and (outranks or not self._closed):
            return []
        if outranks:
            leaving = self._make_room(amount, priority, cost, waiting())
            if leaving is not None:
                return leaving
        # While it is closed seconds are those predicted when it closed: who was told a time finds the door as foretold.
        self._closed, self._then = self._closed or not self._fits(Amount(), cost, REOPEN), cost
        self.refused += 1
        requests, tokens, seconds = self._target(amount, cost)
        if then_s := self.backlog.seconds(cost):
            seconds *= self.backlog.seconds(now) / then_s
        raise Overloaded(self._why(now), MARGIN * wait_s(requests, tokens, seconds))

    def _fits(self, amount: Amount, cost: StepCost | None, share: float = 1.0) -> bool:
        """Whether the backlog and `amount` stay within a share of the limits."""
        total, limits = self.backlog.plus(amount), self._limits
        return (
            total.requests <= max(1, int(share * limits.requests))
            and (limits.tokens is None or total.tokens <= share * limits.tokens)
            and (limits.seconds is None or total.seconds(cost) <= share * limits.seconds)
        )

    def _target(self, amount: Amount, cost: StepCost | None) -> tuple[float, float, float]:
        """How little must wait before it is let in."""
        limits, share = self._limits, REOPEN if self._closed else 1.0
        requests = max(1, int(share * limits.requests)) if self._closed else limits.requests - 1
        tokens = inf if limits.tokens is None else min(share * limits.tokens, limits.tokens - amount.tokens)
        seconds = inf if limits.seconds is None else min(share * limits.seconds, limits.seconds - amount.seconds(cost))
        if tokens < 0 or seconds < 0.0:
            return 0.0, inf, inf
        return min(requests, limits.requests - 1), tokens, seconds

    def _make_room(
        self, amount: Amount, priority: int, cost: StepCost | None, waiting: Iterable[Ask]
    ) -> list[Ask] | None:
        """Those of lower priority, lowest and then newest first, without whom it fits; `None` if it never does."""
        lower = sorted((ask for ask in waiting if ask.priority < priority), key=lambda ask: (ask.priority, -ask.order))
        before, leaving = self.backlog, []
        for ask in lower:
            self.backlog = self.backlog.plus(ask.amount, -1)
            leaving.append(ask)
            if self._fits(amount, cost) or not self.backlog.requests:
                self.backlog = before
                return leaving
        self.backlog = before
        return None

    def _why(self, cost: StepCost | None) -> str:
        waits = self.backlog
        seconds = waits.seconds(cost)
        told = f"{waits.requests} sequences with {waits.tokens} prompt tokens are waiting"
        return f"{told}, about {seconds:.0f} s of work" if seconds >= 1.0 else told
