"""Tenants: what each may have here, and whose turn it is.

Whose turn: start-time fair queueing. Every sequence has a *tag*, the place in virtual time at which its turn begins:
where the tenant's sequence before it ended, and never before the tag that was opened last. So a tenant that sends a
thousand sequences at once has a thousand turns one after another, and the one sequence of another tenant begins where
time is now, before all of those but the first.

Tags alone would let tenants that come and go pass others for ever. So they only say *which step's* arrival a newcomer
counts as: that of the first one that waits with a later tag, but at most `bound` steps ago. The schedulers order by
that step, by priority and aging as ever, and by tags among equals. Of one tenant no tag is ever behind a later one's,
and nothing changes.

Source: Goyal, Vin, Cheng, "Start-time Fair Queueing" (SIGCOMM '96), for tags; Sheng et al., "Fairness in Serving Large
Language Models" (OSDI '24), whose virtual token counter serves the tenant with the least work in tokens and lifts one
that comes back to the least of those present. Here work is predicted seconds on this machine, of a prompt and of the
answer that is expected; a place is fixed when a sequence arrives instead of chosen in each step, so that priorities,
aging and the bound on overtaking stay as they are. For whom a full queue drops: McKenney, "Stochastic Fairness
Queueing" (INFOCOM '90), the longest queue's.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from math import inf
from typing import NamedTuple, Protocol

from deepinfra.core.step import TenantStats
from deepinfra.schedulers.admission import Admission, Limits
from deepinfra.schedulers.entry import Entry

__all__ = ("FAIR_STEPS", "MAX_RESTING", "MAX_TOLD", "OTHERS", "Account", "HasLimits", "Tenant", "Tenants")

FAIR_STEPS = 16_384
"""Steps before its arrival that a newcomer may count as having come, where no aging says otherwise.

300 s of queue, which is what is let in by default, are 12,000 steps of 25 ms: a flood of that age is still stepped
before.
"""

OTHERS = "*"
"""Name of the limits, and of the numbers, of all tenants that are not named."""

MAX_TOLD = 64
"""Tenants not named whose numbers are told one by one; those of further ones are told as `OTHERS`."""

MAX_RESTING = 1024
"""Tenants without anything here whose turn is not over that are remembered; of further ones some begin anew.

Time only goes on when a later turn begins: while each request comes under a new name it stands still.
"""


class Tenant(NamedTuple):
    """What a tenant may have.

    Attributes:
        weight: Its share of the work, beside others' weights, while they have something waiting.
        max_queue: Sequences that may wait; `None` is no limit of its own.
        max_queue_tokens: Prompt tokens without cache that may wait.
        max_running: Sequences that may run; further ones are left waiting.
        max_priority: Priorities of its sequences beyond this count as this.
    """

    weight: float = 1.0
    max_queue: int | None = None
    max_queue_tokens: int | None = None
    max_running: int | None = None
    max_priority: int | None = None


class HasLimits(Protocol):
    """A `Tenant`, or settings of the same names; see there."""

    @property
    def weight(self) -> float:
        """See `Tenant`."""

    @property
    def max_queue(self) -> int | None:
        """See `Tenant`."""

    @property
    def max_queue_tokens(self) -> int | None:
        """See `Tenant`."""

    @property
    def max_running(self) -> int | None:
        """See `Tenant`."""

    @property
    def max_priority(self) -> int | None:
        """See `Tenant`."""


@dataclass(slots=True, eq=False)
class Account:
    """A tenant that has something here, or whose turn is not over.

    Attributes:
        door: Counts what waits of it, against its own limits.
        work_s: Predicted seconds of what waits of it.
        next_tag: Where the turn of its next sequence begins, unless time has gone beyond.
        served_tag: The same, counting only those that were opened.
        waiting: How many wait.
        running: How many run.
        ready: Those in line to be opened, by rank; kept only if it has a limit of running ones.
        parked: Those kept out of line by that limit, by rank.
    """

    name: str
    limits: Tenant
    door: Admission
    work_s: float = 0.0
    next_tag: float = 0.0
    served_tag: float = 0.0
    waiting: int = 0
    running: int = 0
    ready: list[Entry] = field(default_factory=list)
    parked: list[Entry] = field(default_factory=list)

    @property
    def load(self) -> float:
        """Predicted seconds of what waits of it, for its weight."""
        return self.work_s / self.limits.weight


@dataclass(slots=True)
class _Told:
    """What counted of a tenant since the beginning."""

    opened: int = 0
    refused: int = 0
    shed: int = 0
    served_s: float = 0.0


class Tenants:
    """All tenants' accounts, and virtual time.

    Args:
        named: Limits by tenant; those of `OTHERS` are each other one's.
        bound: See the module.
    """

    def __init__(self, named: Mapping[str, HasLimits], bound: float) -> None:
        self._limits = {name: Tenant(**{f: getattr(t, f) for f in Tenant._fields}) for name, t in named.items()}
        self._others = self._limits.pop(OTHERS, Tenant())
        self._bound = bound
        self._accounts: dict[str, Account] = {}
        self._now = 0.0
        self._last = 0.0
        self._tags: list[tuple[float, int, float]] = []
        self._resting: dict[str, None] = {}
        self._told: dict[str, _Told] = {name: _Told() for name in self._limits}
        self.refused = 0

    # -- accounts ---------------------------------------------------------------------------------

    def limits(self, name: str) -> Tenant:
        """What a tenant may have."""
        return self._limits.get(name, self._others)

    def account(self, name: str) -> Account:
        """A tenant's account, a new one if it has none."""
        account = self._accounts.get(name)
        if account is None:
            limits = self.limits(name)
            door = Admission(Limits(limits.max_queue, limits.max_queue_tokens), tenant=name)
            account = self._accounts[name] = Account(name, limits, door, self._now, self._now)
        return account

    def heaviest(self) -> Account | None:
        """Of those with something waiting the one with the most work for its weight; by name among equals."""
        waiting = (account for account in self._accounts.values() if account.waiting)
        return max(waiting, key=lambda account: (account.load, account.name), default=None)

    def all(self) -> Iterable[Account]:
        """Those that have something here, or whose turn is not over."""
        return self._accounts.values()

    def parking(self) -> Iterator[Account]:
        """Those that keep sequences out of line."""
        return (account for account in self._accounts.values() if account.parked)

    def told(self, name: str) -> _Told:
        """Where a tenant's numbers are counted."""
        told = self._told.get(name)
        if told is None:
            if len(self._told) >= len(self._limits) + MAX_TOLD:
                name = OTHERS
            told = self._told.setdefault(name, _Told())
        return told

    def refuse(self, account: Account, *, own: bool) -> None:
        """One of a tenant was not admitted, by its own limit or by that of all."""
        self.refused += own
        self.told(account.name).refused += 1
        self.rest(account)

    def stats(self) -> tuple[TenantStats, ...]:
        """Numbers, of each that is told alone and of the others together, by name."""
        stats = {
            name: TenantStats(name, 0, 0, 0, t.opened, t.refused, t.shed, t.served_s) for name, t in self._told.items()
        }
        waiting = tokens = running = 0
        for name, account in self._accounts.items():  # there may be thousands
            mine = stats.get(name)
            if mine is not None and name != OTHERS:
                stats[name] = mine._replace(
                    waiting=account.waiting, waiting_tokens=account.door.backlog.tokens, running=account.running
                )
            else:
                waiting += account.waiting
                tokens += account.door.backlog.tokens
                running += account.running
        if others := stats.get(OTHERS):
            stats[OTHERS] = others._replace(waiting=waiting, waiting_tokens=tokens, running=running)
        elif waiting or running:
            stats[OTHERS] = TenantStats(OTHERS, waiting, tokens, running)
        return tuple(stats[name] for name in sorted(stats))

    # -- virtual time -----------------------------------------------------------------------------

    def place(self, name: str, step: float) -> tuple[float, float]:
        """The step as whose a newcomer's arrival counts, and its tag."""
        if not self._tags:
            self._now = self._last  # whoever was served while nobody waited owes nothing
        account = self._accounts.get(name)
        tag = self._now if account is None else max(self._now, account.next_tag)
        later = bisect_right(self._tags, (tag, inf, inf))
        if later < len(self._tags):
            step = max(step - self._bound, min(step, self._tags[later][2]))
        return step, tag

    def wait(self, account: Account, entry: Entry) -> None:
        """A sequence begins to wait."""
        account.waiting += 1
        account.work_s += entry.work_s
        insort(self._tags, (entry.rank.tag, entry.rank.order, entry.counts_as))
        end = entry.rank.tag + entry.work_s / account.limits.weight
        account.next_tag = max(account.next_tag, end)
        self._last = max(self._last, end)

    def leave(self, account: Account, entry: Entry, *, opened: bool) -> None:
        """A sequence no longer waits."""
        rank = entry.rank
        del self._tags[bisect_left(self._tags, (rank.tag, rank.order, entry.counts_as))]
        account.waiting -= 1
        account.work_s = account.work_s - entry.work_s if account.waiting else 0.0
        if opened:
            account.served_tag = max(account.served_tag, rank.tag + entry.work_s / account.limits.weight)
            if rank.tag > self._now:
                self._now = rank.tag
                self._forget_resting()
        if not account.waiting:
            account.next_tag = account.served_tag  # what left without being opened was no turn
            self.rest(account)

    def rest(self, account: Account) -> None:
        """Forget a tenant that has nothing here, once its turn is over."""
        if not account.waiting and not account.running:
            self._resting[account.name] = None
            self._forget_resting()

    def _forget_resting(self) -> None:
        """Look at the two that rest longest: they come to rest one by one, so that none is kept for ever."""
        for name in tuple(islice(self._resting, 2)):
            del self._resting[name]
            account = self._accounts.get(name)
            if account is None or account.waiting or account.running:
                continue
            if account.next_tag <= self._now or not self._tags:
                del self._accounts[name]
            else:
                self._resting[name] = None
        if len(self._resting) > MAX_RESTING:
            name = next(iter(self._resting))
            del self._resting[name]
            account = self._accounts[name]
            if not account.waiting and not account.running:
                del self._accounts[name]
