"""What every scheduler here shares: who waits in which line and who runs, and the grants of one step.

A sequence has one rank for life, so that a preempted one returns to the place it had. Lines are sorted lists: finding
a place is O(log n), and moving 10,000 pointers to make room takes less time than one comparison in a tree of objects.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from heapq import heappop, heappush, merge
from itertools import islice
from math import inf
from typing import NamedTuple

from deepinfra.core.ids import SeqId
from deepinfra.core.step import Grant, Job, RunRow, SchedulerStats, StepReport, StepView
from deepinfra.schedulers.admission import Admission, Amount, Ask, Limits, OutputGuess
from deepinfra.schedulers.forecast import Drain, Load, Point, drain
from deepinfra.schedulers.predictor import StepPredictor, percentile

__all__ = ("LOAD_PATIENCE_S", "MAX_LOADS", "SCAN", "Entry", "Grants", "Queue", "Rank", "give_decode", "rank_of")

MAX_LOADS = 8
"""Loads from the store in flight at once; more would hold staging for sequences that cannot run yet."""

LOAD_PATIENCE_S = 5.0
"""How long a sequence is left alone for a load's sake; after that it computes those tokens instead."""

SCAN = 64
"""How far behind a line's head to look past sequences that wait for a load."""


class Rank(NamedTuple):
    """Place in the total order, smallest first: `key` says how urgent, `order` counts arrivals."""

    key: float
    order: int


@dataclass(slots=True, eq=False)
class Entry:
    """A sequence that is waiting or running.

    Attributes:
        tokens: Known tokens now, the generated ones included.
        ask: What it adds to the queue while it waits.
        line: Index of the line it waits in.
        served: Step in which it last computed something; -1 if it was never started.
        asked: Whether it was chosen to be opened and has not been.
        computed: Positions whose KV it has.
        leaving: Whether it made room for another and has not been told.
        left_alone_since: Clock when it was first passed over for a load's sake.
    """

    job: Job
    rank: Rank
    tokens: int
    ask: Ask
    line: int
    running: bool = False
    served: int = -1
    asked: bool = False
    computed: int = 0
    leaving: bool = False
    left_alone_since: float | None = None

    @property
    def uncached(self) -> int:
        """Tokens to compute if nothing is left of it on the device."""
        return max(1, self.tokens - self.job.cached)

    def blocks(self, block_size: int) -> int:
        """Blocks to be free before it is opened.

        Cached tokens count as shared with others until an opening came to nothing: the choice would be the same in
        every step, and its tokens lost to those that do run.
        """
        return -(-(self.tokens if self.asked else self.uncached) // block_size) + 1


def rank_of(entry: Entry) -> Rank:
    """Key of sorted lists of entries."""
    return entry.rank


class Grants:
    """The grants of one step, within its limits, in order of claim."""

    def __init__(self, view: StepView) -> None:
        self.tokens, self.seats = view.max_step_tokens, view.max_seqs
        self._given: dict[SeqId, int] = {}

    def give(self, seq: SeqId, tokens: int) -> int:
        """Grant up to `tokens` more to a sequence; returns how many there were room for."""
        if seq not in self._given and not self.seats:
            return 0
        tokens = min(tokens, self.tokens)
        if tokens > 0:
            self.seats -= seq not in self._given
            self.tokens -= tokens
            self._given[seq] = self._given.get(seq, 0) + tokens
        return tokens

    def of(self, seq: SeqId) -> int:
        """Tokens granted to a sequence so far."""
        return self._given.get(seq, 0)

    def take(self) -> tuple[Grant, ...]:
        """All grants."""
        return tuple(Grant(seq, tokens) for seq, tokens in self._given.items())


class Queue:
    """Sequences from `add` to `finish`, and what their steps take.

    Args:
        lines: How many lines there are to wait in.
        limits: How much may wait.
        allowance: Seconds that prompts may add to a step whose decoding takes so long, and whether any decodes; asked
            to predict waits.
        patience: How many may still pass a waiting sequence.
    """

    def __init__(
        self,
        *,
        lines: int,
        limits: Limits,
        allowance: Callable[[float, bool], float],
        patience: Callable[[Entry], float] = lambda entry: inf,
    ) -> None:
        self.lines: tuple[list[Entry], ...] = tuple([] for _ in range(lines))
        self.entries: dict[SeqId, Entry] = {}
        self.predictor = StepPredictor()
        self.door = Admission(limits)
        self.shed = 0
        self._waits = Waits(self, allowance, patience)
        self._leaving: dict[SeqId, Entry] = {}
        self._arrivals = 0
        self._deadlines: list[tuple[float, int, SeqId]] = []

    # -- arrivals and departures ------------------------------------------------------------------

    @property
    def waiting(self) -> int:
        """How many sequences wait."""
        return sum(map(len, self.lines))

    def add(
        self, job: Job, *, now: float, line: int = 0, key: float = 0.0, priority: int = 0
    ) -> tuple[Entry, list[Entry]]:
        """Put a new sequence behind all others of the same key; returns it, and those that left to make room for it.

        Those are of a lower priority and behind it in rank, were never started, and are not about to be.

        Raises:
            Overloaded: The queue is full.
        """
        if job.seq in self.entries:
            raise ValueError(f"sequence {job.seq} was added twice")
        cost, amount = self.predictor.cost, Amount.of(job.tokens - job.uncached, job.uncached)

        def could_leave() -> Iterator[Ask]:
            for entries in self.lines:
                yield from (e.ask for e in entries if e.served < 0 and not e.asked and e.rank.key >= key)

        def wait_s(requests: float, tokens: float, work_s: float) -> float:
            return self._waits.until(now, requests, tokens, work_s)

        leaving = [self.entries[ask.seq] for ask in self.door.admit(amount, priority, cost, could_leave, wait_s)]
        for entry in leaving:
            self._leave(entry)
            entry.leaving = True
            self._leaving[entry.job.seq] = entry
        self.shed += len(leaving)
        self._arrivals += 1
        entry = Entry(job, Rank(key, self._arrivals), job.tokens, Ask(job.seq, amount, priority, self._arrivals), line)
        self.entries[job.seq] = entry
        self._enter(entry)
        if job.deadline is not None:
            heappush(self._deadlines, (job.deadline, self._arrivals, job.seq))
        return entry, leaving

    def finish(self, seq: SeqId) -> Entry | None:
        """Forget a sequence; `None` if it is unknown, or had left to make room for another."""
        entry = self.entries.pop(seq, None)
        if entry is None:
            return None
        if entry.served >= 0:
            self._waits.outputs.ended(entry.tokens - entry.job.tokens, entry.job.max_new)
        if entry.leaving:
            del self._leaving[seq]
            return None
        if not entry.running:
            self._leave(entry)
        return entry

    def commit(self, report: StepReport) -> tuple[list[Entry], list[Entry]]:
        """Apply what a step did and learn from it; returns the sequences that were opened and those that wait again."""
        self.predictor.observe(report)
        self._waits.committed(report)
        opened: list[Entry] = []
        preempted: list[Entry] = []
        for row in report.rows:
            entry = self.entries.get(row.seq)
            if entry is None:
                continue
            if row.opened and not entry.running:
                self._leave(entry)
            entry.served = report.step
            entry.computed = row.start + row.length - row.drafts
            if row.sampled:
                entry.tokens = entry.computed + row.sampled
                entry.computed = entry.tokens - 1
            if row.opened and not entry.running:
                entry.running, entry.asked, entry.left_alone_since = True, False, None
                opened.append(entry)
        for seq in report.preempted:
            entry = self.entries.get(seq)
            if entry is not None and entry.running:
                entry.running, entry.computed = False, 0
                self._enter(entry)
                preempted.append(entry)
        return opened, preempted

    def _enter(self, entry: Entry) -> None:
        insort(self.lines[entry.line], entry, key=rank_of)
        self.door.enter(entry.ask, started=entry.served >= 0)

    def _leave(self, entry: Entry) -> None:
        line = self.lines[entry.line]
        del line[bisect_left(line, entry.rank, key=rank_of)]
        self.door.leave(entry.ask, started=entry.served >= 0)

    # -- what a plan asks -------------------------------------------------------------------------

    def first_waiting(self) -> Rank | None:
        """Rank of the first sequence of all lines."""
        return min((line[0].rank for line in self.lines if line), default=None)

    def planning(self, view: StepView) -> None:
        """A step is about to be chosen."""
        self._waits.planning(view)

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
            if entry.job.seq not in held and not self.left_alone(entry, view):
                yield entry

    def left_alone(self, entry: Entry, view: StepView) -> bool:
        """Whether a waiting sequence's KV is on its way, or about to be, and not for longer than `LOAD_PATIENCE_S`."""
        if entry.job.seq not in view.loading and entry.job.seq not in view.fetchable:
            return False
        if entry.left_alone_since is None:
            entry.left_alone_since = view.now
        return view.now < entry.left_alone_since + LOAD_PATIENCE_S

    def fetches(self, view: StepView, held: frozenset[SeqId]) -> tuple[SeqId, ...]:
        """Loads to start, by rank, so that no more than `MAX_LOADS` are in flight."""
        room = MAX_LOADS - len(view.loading)
        if room <= 0 or not view.fetchable:
            return ()
        front = merge(*(line[:SCAN] for line in self.lines), key=rank_of)
        wanted = (e.job.seq for e in front if e.job.seq in view.fetchable and e.job.seq not in held)
        return tuple(islice(wanted, room))

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
            times += (e.left_alone_since + LOAD_PATIENCE_S for e in line[:SCAN] if e.left_alone_since is not None)
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

    def stats(self) -> SchedulerStats:
        """Numbers so far."""
        errors, door = self.predictor.errors, self.door
        return SchedulerStats(
            learned=self.predictor.learned,
            error_median=percentile(errors, 0.5) if errors else None,
            error_p95=percentile(errors, 0.95) if errors else None,
            backlog_tokens=door.backlog.tokens,
            backlog_s=door.backlog.seconds(self.predictor.cost),
            refused=door.refused,
            shed=self.shed,
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


class Waits:
    """Predicts how long a queue takes to empty, at most once for every change of what runs."""

    def __init__(
        self, queue: Queue, allowance: Callable[[float, bool], float], patience: Callable[[Entry], float]
    ) -> None:
        self.outputs = OutputGuess()
        self._queue, self._allowance, self._patience = queue, allowance, patience
        self._view: StepView | None = None
        self._in_flight = False
        self._seconds, self._step_s = 0.0, 0.0
        self._pace = 1.0
        self._drain: Drain | None = None
        self._drained = Amount()
        self._began = 0.0

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
        queue, cost = self._queue, self._queue.predictor.guess
        if self._view is None:
            return 1.0
        waits = queue.door.backlog
        if self._drain is None:
            # A step that runs has opened whom it opens as of its beginning, though nobody knows yet.
            self._began = self._view.now if self._in_flight else now
            self._drained = waits
            point = Point(0.0, waits.requests, waits.tokens, waits.seconds(cost))
            lines = [self._loads(line) for line in queue.lines]
            self._drain = drain(self._view, cost, self._allowance, lines, self._running(), point)
        # Who came since then waits behind all others, so that less of those may be left.
        more = waits.plus(self._drained, -1)
        seconds = self._drain.until(
            max(0.0, requests - more.requests), max(0.0, tokens - more.tokens), max(0.0, work_s - more.seconds(cost))
        )
        # Whatever happens is known when a step is over, this one or the next.
        return max(cost.step, self._step_s, self._pace * seconds - (now - self._began))

    def _loads(self, line: list[Entry]) -> Iterator[Load]:
        for entry in line:
            load = self._load(entry, entry.tokens - entry.uncached)
            yield load._replace(place=entry.rank, patience=self._patience(entry))

    def _running(self) -> list[tuple[int, Load]]:
        return [(e.line, self._load(e, e.computed)) for e in self._queue.entries.values() if e.running]

    def _load(self, entry: Entry, start: int) -> Load:
        assert self._view is not None
        out = self.outputs.left(entry.job, entry.tokens - entry.job.tokens)
        blocks = (entry.tokens + 0.5 * out) / self._view.block_size + 1.0
        return Load(min(start, entry.tokens - 1), entry.tokens, out, blocks)


def give_decode(grants: Grants, rows: list[tuple[Entry, RunRow]], *, prefill_waits: bool) -> None:
    """Grant every sequence that decodes its token, then drafts from what is left.

    If they are more than the step has room for, those served longest ago come first. Drafts get at most half of the
    rest while a prefill waits: a draft may be wrong, a prompt token is not.
    """
    decoding = [(entry, row) for entry, row in rows if row.todo == 1]
    room = min(grants.tokens, grants.seats)
    if len(decoding) > room:
        chosen = sorted(decoding, key=lambda pair: (pair[0].served, pair[0].rank))[:room]
        decoding = sorted(chosen, key=lambda pair: pair[0].rank)
    for entry, _ in decoding:
        grants.give(entry.job.seq, 1)
    spare = grants.tokens // 2 if prefill_waits else grants.tokens
    for entry, row in decoding:
        spare -= grants.give(entry.job.seq, min(row.drafts, spare))
