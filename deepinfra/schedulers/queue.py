"""What every scheduler here shares: who waits in which line and who runs.

A sequence has one rank for life, so that a preempted one returns to the place it had. Lines are sorted lists: finding
a place is O(log n), and moving 10,000 pointers to make room takes less time than one comparison in a tree of objects.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush, merge
from itertools import islice
from math import inf
from types import MappingProxyType
from typing import TYPE_CHECKING

from deepinfra.core.ids import SeqId
from deepinfra.core.step import Backlog, BucketStats, Job, RunRow, SchedulerStats, StepReport, StepView
from deepinfra.schedulers.admission import Admission, Amount, Ask, Limits
from deepinfra.schedulers.doors import admit
from deepinfra.schedulers.entry import Entry, Rank, rank_of
from deepinfra.schedulers.predictor import StepPredictor, percentile
from deepinfra.schedulers.promises import Promises
from deepinfra.schedulers.sharing import Sharing
from deepinfra.schedulers.tenants import FAIR_STEPS, Account, HasLimits, Tenants
from deepinfra.schedulers.waits import Waits

if TYPE_CHECKING:
    from deepinfra.schedulers.turns import OutOfOrder

__all__ = ("MAX_LOADS", "SCAN", "Queue")

MAX_LOADS = 8
"""Loads from the store in flight at once; more would hold staging for sequences that cannot run yet."""

SCAN = 64
"""How far behind a line's head to look past sequences that are left alone."""

_FEW = 64
"""Deadlines that may be kept in vain."""

_HEADS, _SWEEP = 2, 4
"""Sequences at a line's head, and in turn of all the others, that are counted anew for each step: 10 us for a line."""


@dataclass(slots=True)
class _Line:
    """What one line counts."""

    backlog: Amount = Amount()
    opened: int = 0
    tokens: int = 0
    predicted_s: float = 0.0


class Queue:
    """Sequences from `add` to `finish`, and what their steps take.

    Args:
        lines: How many lines there are to wait in.
        place: In which of them one with so many tokens to compute waits.
        limits: How much may wait.
        allowance: Seconds that prompts may add to a step whose decoding takes so long, and whether any decodes; asked
            to predict waits.
        patience: How many may still pass a waiting sequence.
        tenants: Limits by tenant; see `Tenants`.
        aging: Steps of waiting that weigh as much as one point of priority.
        fair_steps: How many steps before its arrival a modest tenant's sequence may count as having come.
        entered: Told of each sequence that gets into a line;
        left: and of each that leaves one, after it did.
        out_of_order: How much is done for which line whatever the order, if anything is.
    """

    def __init__(
        self,
        *,
        lines: int,
        place: Callable[[int], int] = lambda uncached: 0,
        limits: Limits,
        allowance: Callable[[float, bool], float],
        patience: Callable[[Entry], float] = lambda entry: inf,
        tenants: Mapping[str, HasLimits] = MappingProxyType({}),
        aging: float = 0.0,
        fair_steps: float = FAIR_STEPS,
        entered: Callable[[Entry], None] = lambda entry: None,
        left: Callable[[Entry], None] = lambda entry: None,
        out_of_order: OutOfOrder | None = None,
    ) -> None:
        self.lines: tuple[list[Entry], ...] = tuple([] for _ in range(lines))
        self.entries: dict[SeqId, Entry] = {}
        self.predictor = StepPredictor()
        self.door = Admission(limits)
        self.promises = Promises()
        self.tenants = Tenants(tenants, fair_steps)
        self.shed = 0
        self.expired_count = 0
        self.budget_s = self.predicted_s = self.measured_s = 0.0
        self.aim: float | None = None
        self._aging = aging
        self._entered, self._left = entered, left
        self.waits = Waits(self, allowance, patience, out_of_order)
        self._place, self.sharing = place, Sharing(self._recount)
        self._cursors = [0] * lines
        self._leaving: dict[SeqId, Entry] = {}
        self._asked: list[Entry] = []
        self._arrivals = 0
        self._now = 0.0
        self._deadlines: list[tuple[float, int, SeqId]] = []
        self._counts = tuple(_Line() for _ in range(lines))
        self._since: tuple[OrderedDict[SeqId, float], ...] = tuple(OrderedDict() for _ in range(lines))
        self._errors: tuple[int, float | None, float | None] = (-1, None, None)

    # -- arrivals and departures ------------------------------------------------------------------

    @property
    def waiting(self) -> int:
        """How many sequences wait."""
        return self.door.backlog.requests

    def add(self, job: Job, *, now: float, step: float, priority: int = 0) -> Entry:
        """Put a new sequence behind all others that count as having come by this step.

        Those that make room for it are of a lower priority and behind it in rank, or of a tenant with more waiting;
        were never started; and are not about to be.

        Raises:
            Overloaded: The queue is full, or its tenant's part of it.
        """
        if job.seq in self.entries:
            raise ValueError(f"sequence {job.seq} was added twice")
        limits = self.tenants.limits(job.tenant)
        if limits.max_priority is not None:
            priority = min(priority, limits.max_priority)
        counts_as, tag = self.tenants.place(job.tenant, step)
        rank = Rank(counts_as - priority * self._aging, tag, self._arrivals + 1)
        amount = Amount.of(job.tokens - job.uncached, job.uncached)
        work_s = self.waits.work_s(job, amount)
        makers = () if job.begun else admit(self, job, rank, amount, work_s, priority, now)
        leaving = [self.entries[ask.seq] for ask in makers]
        for entry in leaving:
            self._leave(entry)
            entry.leaving = True
            self._leaving[entry.job.seq] = entry
            self.tenants.told(entry.job.tenant).shed += 1
        self.shed += len(leaving)
        self.tenants.told(job.tenant)
        self._arrivals += 1
        ask = Ask(job.seq, amount, priority, self._arrivals)
        line = self._place(job.uncached)
        entry = Entry(job, rank, job.tokens, ask, line, work_s, counts_as, cached=job.cached)
        entry.served = 0 if job.begun else -1
        self.entries[job.seq] = entry
        self._now = now
        self._enter(entry)
        if job.deadline is not None:
            heappush(self._deadlines, (job.deadline, self._arrivals, job.seq))
            if len(self._deadlines) > 2 * len(self.entries) + _FEW:  # those of sequences that are over
                self._deadlines = [item for item in self._deadlines if item[2] in self.entries]
                heapify(self._deadlines)
        return entry

    def all_waiting(self) -> Iterator[list[Entry]]:
        """Those that wait, each list by rank: the lines, and what tenants have out of line."""
        yield from self.lines
        yield from (account.parked for account in self.tenants.parking())

    def finish(self, seq: SeqId, now: float) -> Entry | None:
        """Forget a sequence; `None` if it is unknown, or had left to make room for another."""
        entry = self.entries.pop(seq, None)
        if entry is None:
            return None
        if entry.served < 0:
            self.expired_count += entry.job.deadline is not None and entry.job.deadline <= now
        else:
            self.waits.outputs.ended(entry.tokens - entry.job.tokens, entry.job.max_new)
        if entry.leaving:
            del self._leaving[seq]
            return None
        if entry.running:
            account = self.tenants.account(entry.job.tenant)
            account.running -= 1
            self._fill_up(account)
            self.tenants.rest(account)
        else:
            self._leave(entry)
        return entry

    def commit(self, report: StepReport) -> tuple[list[Entry], list[Entry]]:
        """Apply what a step did and learn from it; returns the sequences that were opened and those that wait again."""
        cost = self.predictor.cost
        predicted_s = self.predictor.observe(report)
        if self.aim is not None and predicted_s is not None:
            self.budget_s += self.aim
            self.predicted_s += predicted_s
            self.measured_s += report.seconds
        self.waits.committed(report)
        opened: list[Entry] = []
        preempted: list[Entry] = []
        for row in report.rows:
            entry = self.entries.get(row.seq)
            if entry is None:
                continue
            if row.opened and not entry.running:
                self._open(entry)
                opened.append(entry)
            entry.served = report.step
            entry.computed = row.start + row.length - row.drafts
            if row.length - row.drafts > 1:
                line = self._counts[entry.line]
                line.tokens += row.length
                if cost is not None:
                    reads = row.length * (row.start + 0.5 * row.length)
                    line.predicted_s += cost.chunk_token * row.length + cost.chunk_read * reads
            if row.sampled:
                entry.tokens = entry.computed + row.sampled
                entry.computed = entry.tokens - 1
        for seq in report.preempted:
            entry = self.entries.get(seq)
            if entry is not None and entry.running:
                entry.running, entry.computed = False, 0
                self.tenants.account(entry.job.tenant).running -= 1
                self._enter(entry)
                preempted.append(entry)
        return opened, preempted

    def _open(self, entry: Entry) -> None:
        """A waiting sequence runs from now on."""
        first = entry.served < 0
        self._leave(entry, opened=True)
        entry.running, entry.left_alone_since = True, None
        entry.asked = entry.in_vain = False
        if first:
            self._counts[entry.line].opened += 1
            told = self.tenants.told(entry.job.tenant)
            told.opened += 1
            told.served_s += entry.work_s

    def _enter(self, entry: Entry) -> None:
        """A sequence begins to wait: in its line, unless its tenant may not run more."""
        account, started = self.tenants.account(entry.job.tenant), entry.served >= 0
        self.door.enter(entry.ask, started=started)
        account.door.enter(entry.ask, started=started)
        self.tenants.wait(account, entry)
        counts = self._counts[entry.line]
        counts.backlog = counts.backlog.plus(entry.ask.amount)
        self._since[entry.line][entry.job.seq] = self._now
        most = account.limits.max_running
        if most is None:
            self._into_line(entry)
            return
        insort(account.parked, entry, key=rank_of)
        entry.parked = True
        if account.running + len(account.ready) >= most:
            # The last of those in line makes way for one before it; one that is about to be opened keeps its place.
            last = next((other for other in reversed(account.ready) if not other.asked), None)
            if last is None or last.rank < entry.rank:
                return
            self._out_of_line(last)
            account.ready.remove(last)
            insort(account.parked, last, key=rank_of)
            last.parked = True
        self._fill_up(account)

    def _leave(self, entry: Entry, *, opened: bool = False) -> None:
        """A sequence no longer waits."""
        account, started = self.tenants.account(entry.job.tenant), entry.served >= 0
        self.door.leave(entry.ask, started=started)
        account.door.leave(entry.ask, started=started)
        counts = self._counts[entry.line]
        counts.backlog = counts.backlog.plus(entry.ask.amount, -1)
        del self._since[entry.line][entry.job.seq]
        if opened:
            account.running += 1
        self.tenants.leave(account, entry, opened=opened)
        if entry.parked:
            del account.parked[bisect_left(account.parked, entry.rank, key=rank_of)]
            entry.parked = False
            return
        self._out_of_line(entry)
        if account.limits.max_running is not None:
            del account.ready[bisect_left(account.ready, entry.rank, key=rank_of)]
            self._fill_up(account)

    def _fill_up(self, account: Account) -> None:
        """Put into line as many of a tenant's as it may run."""
        most = account.limits.max_running
        while most is not None and account.parked and account.running + len(account.ready) < most:
            entry = account.parked.pop(0)
            entry.parked = False
            insort(account.ready, entry, key=rank_of)
            self._into_line(entry)

    def _into_line(self, entry: Entry) -> None:
        insort(self.lines[entry.line], entry, key=rank_of)
        self._entered(entry)

    def _out_of_line(self, entry: Entry) -> None:
        line = self.lines[entry.line]
        del line[bisect_left(line, entry.rank, key=rank_of)]
        self._left(entry)

    # -- what waiting sequences have left to compute ---------------------------------------------

    def _count_anew(self) -> None:
        """Look at those next in line and at some of the others; whose length is not what it was may change lines."""
        for index, line in enumerate(self.lines):
            at = self._cursors[index] if self._cursors[index] < len(line) else 0
            before = len(line)
            for entry in (*line[:_HEADS], *line[max(_HEADS, at) : at + _SWEEP]):
                self.sharing.look(entry)
                if (to := self._place(entry.uncached)) != index:
                    self._move(entry, to)
            self._cursors[index] = at + _SWEEP + min(0, len(line) - before)

    def _recount(self, entry: Entry, cached: int) -> None:
        """A waiting sequence has more or less cached than it had."""
        doors, started = (self.door, self.tenants.account(entry.job.tenant).door), entry.served >= 0
        counts, before, entry.cached = self._counts[entry.line], entry.ask, cached
        entry.ask = replace(before, amount=Amount.of(entry.tokens - entry.uncached, entry.uncached))
        for door in doors:
            door.leave(before, started=started)
            door.enter(entry.ask, started=started)
        counts.backlog = counts.backlog.plus(before.amount, -1).plus(entry.ask.amount)

    def _move(self, entry: Entry, to: int) -> None:
        """Move a waiting sequence into another line, to the same place in the order."""
        line, seq = self.lines[entry.line], entry.job.seq
        del line[bisect_left(line, entry.rank, key=rank_of)]
        for index, times in ((entry.line, -1), (to, 1)):
            self._counts[index].backlog = self._counts[index].backlog.plus(entry.ask.amount, times)
        since = self._since[entry.line].pop(seq)
        oldest = next(iter(self._since[to].values()), since)
        self._since[to][seq] = since
        if since < oldest:
            self._since[to].move_to_end(seq, last=False)
        entry.line = to
        insort(self.lines[to], entry, key=rank_of)

    # -- what a plan asks -------------------------------------------------------------------------

    def first_waiting(self) -> Rank | None:
        """Rank of the first sequence of all lines."""
        return min((line[0].rank for line in self.lines if line), default=None)

    def planning(self, view: StepView) -> None:
        """A step is about to be chosen."""
        self._now, self.aim = view.now, None
        self._see_what_came_of_openings(view)
        self.waits.planning(view)
        self.sharing.planning(view)
        self._count_anew()

    def running(self, view: StepView) -> list[tuple[Entry, RunRow]]:
        """Rows of known sequences that have something to compute, by rank."""
        rows = [(self.entries[row.seq], row) for row in view.running if row.seq in self.entries and row.todo > 0]
        rows.sort(key=lambda pair: pair[0].rank)
        return rows

    def candidates(self, line: int, view: StepView, held: frozenset[SeqId]) -> Iterator[Entry]:
        """Waiting sequences of one line that may be opened now, by rank.

        Left out are those in `held` (in flight already, or shed) and those left alone: nobody behind waits for a load.
        """
        for entry in islice(self.lines[line], SCAN):
            if entry.job.seq not in held and not self.sharing.left_alone(entry):
                yield entry

    def choose(self, entry: Entry) -> None:
        """A waiting sequence is chosen to be opened."""
        entry.asked = True
        self._asked.append(entry)
        self.sharing.choose(entry)

    def _see_what_came_of_openings(self, view: StepView) -> None:
        """Who was chosen by the last plan and holds nothing now makes room for others again."""
        if self._asked:
            opened = {row.seq for row in view.running}
            for entry in self._asked:
                if not entry.running and entry.job.seq not in opened:
                    entry.asked, entry.in_vain = False, True
            self._asked = []

    def fetches(self, view: StepView, held: frozenset[SeqId]) -> tuple[SeqId, ...]:
        """Loads to start, by rank, so that no more than `MAX_LOADS` are in flight, and no two bring the same."""
        room = MAX_LOADS - len(view.loading)
        if room <= 0 or not view.fetchable:
            return ()
        front = merge(*(line[:SCAN] for line in self.lines), key=rank_of)
        return tuple(islice((e.job.seq for e in self.sharing.loads(front) if e.job.seq not in held), room))

    def leaving(self, held: frozenset[SeqId]) -> tuple[SeqId, ...]:
        """Sequences that made room for others; named again until they finish."""
        return tuple(seq for seq in self._leaving if seq not in held)

    def expired(self, view: StepView, held: frozenset[SeqId]) -> tuple[SeqId, ...]:
        """Sequences never started whose deadline has passed, earliest first; named again until they finish."""
        late: list[tuple[float, int, SeqId]] = []
        while self._next_deadline() <= view.now:
            late.append(heappop(self._deadlines))
        for item in late:
            heappush(self._deadlines, item)
        return tuple(seq for _, _, seq in late if seq not in held)

    def wake_at(self, now: float) -> float | None:
        """The next deadline or end of patience after `now`, if any."""
        times = [time for time, _, _ in self._deadlines[:1]]
        for line in self.lines:
            times += (e.left_alone_since + e.patience_s for e in line[:SCAN] if e.left_alone_since is not None)
        later = [time for time in times if time > now]
        return min(later, default=None)

    def _next_deadline(self) -> float:
        while self._deadlines:
            deadline, _, seq = self._deadlines[0]
            entry = self.entries.get(seq)
            if entry is not None and entry.served < 0 and not entry.leaving:
                return deadline
            heappop(self._deadlines)
        return float("inf")

    def backlog(self) -> Backlog:
        """What waits."""
        waits = self.door.backlog
        return Backlog(waits.tokens, waits.seconds(self.predictor.cost))

    def stats(self, edges: Sequence[int] = ()) -> SchedulerStats:
        """Numbers so far; `edges` are the lengths at which the further lines' sequences begin."""
        predictor, door = self.predictor, self.door
        if self._errors[0] != predictor.learned:
            errors = sorted(predictor.errors)
            told = (percentile(errors, 0.5), percentile(errors, 0.95)) if errors else (None, None)
            self._errors = (predictor.learned, *told)
        return SchedulerStats(
            learned=predictor.learned,
            error_median=self._errors[1],
            error_p95=self._errors[2],
            backlog_tokens=door.backlog.tokens,
            backlog_s=door.backlog.seconds(predictor.cost),
            refused=door.refused + self.tenants.refused,
            shed=self.shed,
            buckets=tuple(self._bucket(line, least) for line, least in enumerate((0, *edges))),
            budget_s=self.budget_s,
            predicted_s=self.predicted_s,
            measured_s=self.measured_s,
            tenants=self.tenants.stats(),
            refused_by_tenant=self.tenants.refused,
            expired=self.expired_count,
        )

    def _bucket(self, line: int, least: int) -> BucketStats:
        counts, since = self._counts[line], self._since[line]
        oldest = next(iter(since.values()), self._now)
        return BucketStats(
            least=least,
            waiting=counts.backlog.requests,
            waiting_tokens=counts.backlog.tokens,
            oldest_s=max(0.0, self._now - oldest),
            opened=counts.opened,
            tokens=counts.tokens,
            predicted_s=counts.predicted_s,
        )

    def headroom(self, view: StepView, rows: list[tuple[Entry, RunRow]]) -> int:
        """Free blocks that running sequences will not need for the tokens they have and one more.

        Opening only into this room keeps a newcomer from taking the blocks of a prefill that has begun, which would
        end in preempting one of the two.
        """
        size = view.block_size
        claimed = sum(max(0, -(-(entry.tokens + 1) // size) - row.blocks) for entry, row in rows)
        return view.free_blocks - claimed

    def victims(self, rows: list[tuple[Entry, RunRow]]) -> tuple[SeqId, ...]:
        """Running sequences, last in rank first."""
        return tuple(entry.job.seq for entry, _ in reversed(rows))
