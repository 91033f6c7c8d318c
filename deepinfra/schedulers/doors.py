"""The two doors that a newcomer passes, and who would make room for it at either."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from heapq import merge
from typing import TYPE_CHECKING

from deepinfra.core.step import Job
from deepinfra.errors import Overloaded, TenantFullError
from deepinfra.schedulers.admission import Amount, Ask
from deepinfra.schedulers.entry import Rank, rank_of
from deepinfra.schedulers.tenants import Account

if TYPE_CHECKING:
    from deepinfra.schedulers.queue import Queue

__all__ = ("admit",)

_EARLY_S = 0.05
"""Who comes so much before the time told comes in time."""


def admit(queue: Queue, job: Job, rank: Rank, amount: Amount, work_s: float, priority: int, now: float) -> list[Ask]:
    """Ask at a tenant's own door, then at the one for all; returns those that make room.

    Raises:
        TenantFullError: As much of the tenant waits as may.
        Overloaded: As much of all does.
    """
    cost, account = queue.predictor.cost, queue.tenants.account(job.tenant)

    def could_leave() -> Iterator[Ask]:
        for entries in queue.all_waiting():
            yield from (e.ask for e in entries if e.served < 0 and not e.asked and e.rank.key >= rank.key)

    def own() -> Iterator[Ask]:
        return (ask for ask in could_leave() if queue.entries[ask.seq].job.tenant == job.tenant)

    def heavier() -> Iterator[Ask]:
        return _heavier(queue, account, rank, work_s, priority)

    def wait_s(requests: float, tokens: float, work_s: float) -> float:
        return queue.waits.until(now, requests, tokens, work_s)

    def own_wait_s(requests: float, tokens: float, work_s: float) -> float:
        return queue.waits.until_of(account, now, requests, tokens)

    def nobody() -> Sequence[Ask]:
        return ()

    leaving: list[Ask] = []
    mine: TenantFullError | None = None
    try:
        leaving += account.door.admit(amount, priority, cost, own, nobody, own_wait_s)
    except TenantFullError as error:
        mine = error
    before = queue.door.backlog
    for ask in leaving:
        queue.door.backlog = queue.door.backlog.plus(ask.amount, -1)
    expected, told = queue.promises.expected(now), queue.promises.due(job)
    due = told is not None and told <= now + _EARLY_S
    try:
        leaving += queue.door.admit(amount, priority, cost, could_leave, heavier, wait_s, expected, due)
        queue.promises.came(job)
    except Overloaded as full:
        queue.tenants.refuse(account, own=mine is not None)
        if mine is None:
            if told is not None and not due:  # it is told the same again
                raise Overloaded(full.why, told - now) from None
            queue.promises.came(job)
            queue.promises.make(job, amount, now, full.retry_after_s)
            raise
        queue.door.refused -= 1
        raise TenantFullError(mine.why, max(mine.retry_after_s, full.retry_after_s)) from None
    finally:
        queue.door.backlog = before
    if mine is not None:
        queue.tenants.refuse(account, own=True)
        raise mine
    return list({ask.seq: ask for ask in leaving}.values())


def _heavier(queue: Queue, mine: Account, rank: Rank, work_s: float, priority: int) -> Iterator[Ask]:
    """Those that would run last of the tenant with most waiting for its weight, while that is more than mine."""
    other = queue.tenants.heaviest()
    if other is None or other is mine:
        return
    load, most = (mine.work_s + work_s) / mine.limits.weight, other.load
    for entry in merge(*map(reversed, queue.all_waiting()), key=rank_of, reverse=True):
        if entry.rank < rank or most <= load:
            return
        if entry.job.tenant == other.name and entry.served < 0 and not entry.asked and entry.ask.priority <= priority:
            most -= entry.work_s / other.limits.weight
            yield entry.ask
