"""Predicts how long it takes until less waits, if nobody else comes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import inf
from typing import TYPE_CHECKING

from deepinfra.core.step import Job, StepReport, StepView
from deepinfra.schedulers.admission import Amount, OutputGuess
from deepinfra.schedulers.entry import Entry
from deepinfra.schedulers.forecast import Credit, Drain, Load, Point, drain
from deepinfra.schedulers.tenants import Account, Tenant

if TYPE_CHECKING:
    from deepinfra.schedulers.queue import Queue
    from deepinfra.schedulers.turns import OutOfOrder

__all__ = ("Waits",)


class Waits:
    """Predicts how long a queue takes to empty, at most once for every change of what runs."""

    def __init__(
        self,
        queue: Queue,
        allowance: Callable[[float, bool], float],
        patience: Callable[[Entry], float],
        out_of_order: OutOfOrder | None,
    ) -> None:
        self.outputs = OutputGuess()
        self._queue, self._allowance, self._patience, self._out_of_order = queue, allowance, patience, out_of_order
        self._view: StepView | None = None
        self._in_flight = False
        self._seconds, self._step_s = 0.0, 0.0
        self._pace = 1.0
        self._drain: Drain | None = None
        self._drained = Amount()
        self._drained_of: dict[str, Amount] = {}
        self._began = 0.0

    def work_s(self, job: Job, amount: Amount) -> float:
        """Predicted seconds of a sequence's prompt and of its expected answer, with its seat's part of the steps."""
        cost = self._queue.predictor.guess
        each_s = cost.decode_row + cost.decode_read * job.tokens
        if self._view is not None:
            each_s += cost.step / max(1, self._view.max_seqs)
        return max(1e-9, amount.seconds(cost) + self.outputs.left(job, 0) * each_s)

    def planning(self, view: StepView) -> None:
        """A step is about to be chosen."""
        if self._view is not None and self._seconds > 0.0 and self._queue.waiting:
            # Steps are predicted as seconds of the executor; what comes between them takes time too.
            ratio = (view.now - self._view.now) / self._seconds
            self._pace += 0.05 * (min(3.0, max(1.0, ratio)) - self._pace)
        self._view, self._in_flight, self._seconds, self._drain = view, True, 0.0, None

    def committed(self, report: StepReport) -> None:
        """A step is over."""
        self._in_flight, self._drain = False, None
        self._seconds += report.seconds
        self._step_s = max(report.seconds, 0.5 * self._step_s)

    def until(self, now: float, requests: float, tokens: float, work_s: float) -> float:
        """Seconds until no more than so many sequences, tokens and seconds of work wait, if nobody else comes."""
        flow, cost = self._forecast(now), self._queue.predictor.guess
        if flow is None:
            return 1.0
        # Who came since the forecast waits behind all others, so that less of those may be left.
        more = self._queue.door.backlog.plus(self._drained, -1)
        seconds = flow.until(
            max(0.0, requests - more.requests), max(0.0, tokens - more.tokens), max(0.0, work_s - more.seconds(cost))
        )
        return self._told(seconds, now)

    def until_of(self, account: Account, now: float, requests: float, tokens: float) -> float:
        """Seconds until no more than so many sequences and tokens of one tenant wait."""
        flow = self._forecast(now)
        if flow is None:
            return 1.0
        waits = account.door.backlog
        more = waits.plus(self._drained_of.get(account.name, Amount()), -1)
        seconds = flow.until_of(
            account.name,
            (waits.requests - more.requests, waits.tokens - more.tokens),
            (max(0.0, requests - more.requests), max(0.0, tokens - more.tokens)),
        )
        return self._told(seconds, now)

    def _told(self, seconds: float, now: float) -> float:
        """Whatever happens is known when a step is over, this one or the next."""
        least = max(self._queue.predictor.guess.step, self._step_s)
        return max(least, self._pace * seconds - (now - self._began))

    def _forecast(self, now: float) -> Drain | None:
        queue, view = self._queue, self._view
        if self._drain is None and view is not None:
            # A step that runs has opened whom it opens as of its beginning, though nobody knows yet.
            self._began = view.now if self._in_flight else now
            self._drained = waits = queue.door.backlog
            limited = [account for account in queue.tenants.all() if account.limits != Tenant()]
            self._drained_of = {account.name: account.door.backlog for account in limited}
            cost = queue.predictor.guess
            point = Point(0.0, waits.requests, waits.tokens, waits.seconds(cost))
            lines = [(load for _, load in self._loads(line)) for line in queue.lines]
            parked = {account.name: self._loads(account.parked) for account in queue.tenants.parking()}
            self._drain = drain(view, cost, self._allowance, lines, self._running(), point, parked, self._credit())
        return self._drain

    def _credit(self) -> list[Credit]:
        """What lines may have done out of order, in seconds."""
        each_s, kept = self._queue.predictor.guess.chunk_token, self._out_of_order
        if kept is None:
            return []
        return [Credit(part, saved * each_s) for part, saved in zip(kept.parts, kept.saved, strict=True)]

    def _loads(self, entries: list[Entry]) -> Iterator[tuple[int, Load]]:
        for entry in entries:
            patience = inf if entry.parked else self._patience(entry)
            yield entry.line, self._load(entry, entry.tokens - entry.uncached, patience)

    def _running(self) -> list[tuple[int, Load]]:
        return [(e.line, self._load(e, e.computed)) for e in self._queue.entries.values() if e.running]

    def _load(self, entry: Entry, start: int, patience: float = inf) -> Load:
        assert self._view is not None
        out = self.outputs.left(entry.job, entry.tokens - entry.job.tokens)
        blocks = (entry.tokens + 0.5 * out) / self._view.block_size + 1.0
        return Load(min(start, entry.tokens - 1), entry.tokens, out, blocks, entry.rank, patience, entry.job.tenant)
