"""Plays planner and executor for a Scheduler under test, honestly or not, and checks every choice it gets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from deepinfra.core.ids import BlockKey, SeqId
from deepinfra.core.request import PUBLIC
from deepinfra.core.step import Choice, DoneRow, Grant, Job, Prefix, RunRow, StepReport, StepView
from deepinfra.errors import Overloaded
from deepinfra.interfaces.given import InlineOffload
from deepinfra.interfaces.scheduler import Scheduler
from deepinfra.testing.clock import ManualClock

__all__ = ("MiniPool", "PoolSeq")


@dataclass(slots=True, eq=False)
class PoolSeq:
    """A sequence as the pool knows it; `left` tokens are still to be generated.

    The first `common` tokens are those of all sequences that begin `like` it.
    """

    job: Job
    tokens: int
    left: int
    computed: int = 0
    blocks: int = 0
    drafts: int = 0
    running: bool = False
    begun: bool = False
    stored: bool = False
    loading: bool = False
    hungry: int = 0
    overtaken: int = 0
    since: int = 0
    like: str = ""
    common: int = 0

    @property
    def todo(self) -> int:
        """Known tokens without KV."""
        return self.tokens - self.computed


def _honest(seq: SeqId, tokens: int) -> int:
    return tokens


class MiniPool:
    """Few blocks, few seats: everything that goes wrong in a large pool goes wrong here sooner.

    The scheduler is made twice and told everything twice: equal calls must give equal choices. What it publishes of
    itself, `SchedulerStats.max_overtakes` and `max_wait_steps`, it is held to.

    Args:
        make: Makes the scheduler under test.
        depth: Plans that may be made before the first one's report.
        drafts: Whether decoding sequences have drafts to verify now and then.
    """

    def __init__(
        self,
        make: Callable[[], Scheduler],
        *,
        depth: int = 1,
        max_step_tokens: int = 12,
        max_seqs: int = 4,
        num_blocks: int = 24,
        block_size: int = 2,
        grid: int = 1,
        drafts: bool = True,
    ) -> None:
        self.clock = ManualClock()
        self.schedulers = (make(), make())
        for scheduler in self.schedulers:
            scheduler.give(self.clock, InlineOffload())
        self.seqs: dict[SeqId, PoolSeq] = {}
        self.over: list[SeqId] = []
        self.refused, self.told_s = 0, 0.0
        self._admitted: list[Job] = []
        self.steps = 0
        self.block_size, self.num_blocks, self.grid = block_size, num_blocks, grid
        self._max_step_tokens, self._max_seqs, self._depth = max_step_tokens, max_seqs, depth
        self._drafts = drafts
        stats = self.schedulers[0].stats()
        self.max_overtakes, self.max_wait_steps = stats.max_overtakes, stats.max_wait_steps
        self._repeats: tuple[StepView, Choice] | None = None
        self._reports: list[StepReport] = []
        self._loaded: list[SeqId] = []
        self._next = 0
        self._room = num_blocks
        self._ready: dict[str, int] = {}
        self._following: set[SeqId] = set()

    # -- what happens to sequences ----------------------------------------------------------------

    def add(
        self,
        tokens: int,
        max_new: int = 1,
        *,
        cached: int = 0,
        priority: int = 0,
        tenant: str = PUBLIC,
        deadline: float | None = None,
        stored: bool = False,
        like: str = "",
        common: int = 0,
        prompt: int = 0,
    ) -> SeqId | None:
        """A sequence arrives; `None` if the scheduler refuses it, and `told_s` is when it is worth asking again.

        Its first `common` tokens are those of all that begin `like` it; they are computed once, unless the scheduler
        opens sequences side by side, and then found by all.
        """
        seq = SeqId(self._next)
        self._next += 1
        cached = max(cached, min(self._ready.get(like, 0), common // self.block_size) * self.block_size)
        job = Job(seq, tokens, cached, max_new, self.clock.now(), tenant, priority, deadline, prompt=prompt)
        refusals = [_refusal(scheduler, job) for scheduler in self.schedulers]
        assert refusals[0] == refusals[-1], "equal calls of add must be refused equally"
        if refusals[0] is not None:
            assert refusals[0] > 0.0, "retry_after_s must be positive"
            self.refused, self.told_s = self.refused + 1, refusals[0]
            return None
        self._admitted.append(job)
        self.seqs[seq] = PoolSeq(job, tokens, max_new, stored=stored, since=self.steps)
        self.seqs[seq].like, self.seqs[seq].common = like, min(common, tokens)
        self._repeats = None
        return seq

    def finish(self, seq: SeqId) -> None:
        """A sequence is over, whatever it was doing."""
        self.seqs.pop(seq, None)
        self.over.append(seq)
        self._repeats = None
        for scheduler in self.schedulers:
            scheduler.finish(seq)

    def arrive(self, seq: SeqId) -> None:
        """A load that was asked for is there."""
        self.seqs[seq].loading = False
        self._loaded.append(seq)

    def forget(self, like: str) -> None:
        """What was computed for those that begin alike is not on the device any more."""
        self._ready.pop(like, None)

    # -- steps ------------------------------------------------------------------------------------

    @property
    def free_blocks(self) -> int:
        """Blocks that no sequence holds."""
        return self.num_blocks - sum(s.blocks for s in self.seqs.values())

    def view(self) -> StepView:
        """What the scheduler is shown."""
        return StepView(
            now=self.clock.now(),
            step=self.steps,
            max_step_tokens=self._max_step_tokens,
            max_seqs=self._max_seqs,
            block_size=self.block_size,
            num_blocks=self.num_blocks,
            free_blocks=self.free_blocks,
            running=tuple(
                RunRow(seq, s.todo, s.tokens, s.blocks, s.drafts) for seq, s in self.seqs.items() if s.running
            ),
            fetchable=frozenset(q for q, s in self.seqs.items() if s.stored and not s.loading and not s.running),
            loading=frozenset(q for q, s in self.seqs.items() if s.loading and not s.running),
            grid=self.grid,
            waiting={seq: self._prefix(s) for seq, s in self.seqs.items() if s.like and not s.running},
        )

    def _prefix(self, s: PoolSeq) -> Prefix:
        """What a waiting sequence would find."""
        found, size = self._found(s), self.block_size
        if (found + 1) * size > s.common:
            return Prefix(found * size)
        under_way = any(
            other.running and other.todo > 1 and other.like == s.like and other.computed // size == found
            for other in self.seqs.values()
            if (found + 1) * size <= other.common
        )
        return Prefix(found * size, BlockKey(f"{s.like}:{found}".encode()), under_way)

    def _found(self, s: PoolSeq) -> int:
        """Leading blocks of it that are on the device."""
        return min(self._ready.get(s.like, 0), s.common // self.block_size)

    def step(self, cut: Callable[[SeqId, int], int] = _honest, *, fails: bool = False) -> Choice:
        """One step. `cut` may lower any grant, to 0 too; with `fails` it runs and comes to nothing."""
        view = self.view()
        needed = sum(max(0, self._blocks_for(s.tokens + 1) - s.blocks) for s in self.seqs.values() if s.running)
        self._room = self.free_blocks - needed
        choices = [scheduler.plan(view) for scheduler in self.schedulers]
        assert choices[0] == choices[-1], "equal calls of plan must give equal choices"
        choice = choices[0]
        self._check(view, choice)
        honest = cut is _honest and not fails
        if honest:
            self._check_decoding(view, choice)
        self._check_repeats(view, choice, honest=honest)
        following = {view.waiting[g.seq].next for g in choice.run if g.seq in view.waiting}
        self._following = {q for q, p in view.waiting.items() if p.next and (p.under_way or p.next in following)}
        for seq in choice.fetch:
            self.seqs[seq].stored, self.seqs[seq].loading = False, True
        ran = self._apply(choice, cut, fails)
        for seq in choice.shed:
            if seq in self.seqs and not self.seqs[seq].running:
                self.finish(seq)
        self.steps += 1
        self.elapse(self.seconds(self._reports[-1].rows) if ran else 0.0)
        # With nothing to submit a pool waits for what is in flight.
        self.flush(self._depth - 1 if ran else 0)
        for seq in [q for q, s in self.seqs.items() if s.running and s.left <= 0]:
            self.finish(seq)
        return choice

    def flush(self, keep: int = 0) -> None:
        """Report all steps but the last `keep`."""
        while len(self._reports) > keep:
            report = self._reports.pop(0)
            for scheduler in self.schedulers:
                scheduler.commit(report)

    def drain(self, max_steps: int) -> int:
        """Honest steps until every sequence is over; returns how many it took."""
        for count in range(max_steps):
            if not self.seqs:
                return count
            for seq in [q for q, s in self.seqs.items() if s.loading]:
                self.arrive(seq)
            self.step()
        left = sorted(self.seqs)
        assert not left, f"sequences {left} are not over after {max_steps} steps in which nothing stood in their way"
        return max_steps

    # -- time -------------------------------------------------------------------------------------

    def seconds(self, rows: Sequence[DoneRow]) -> float:
        """How long a step of these rows takes; a subclass may know better."""
        return 0.001 + 0.0001 * sum(row.length for row in rows)

    def elapse(self, seconds: float) -> None:
        """A step that takes `seconds` runs, and is reported after; a subclass may let sequences arrive meanwhile."""
        self.clock.advance(0.01)

    # -- the planner's part -----------------------------------------------------------------------

    def _apply(self, choice: Choice, cut: Callable[[SeqId, int], int], fails: bool) -> bool:
        """Play a choice; whether there was anything to report."""
        rows: list[DoneRow] = []
        preempted: list[SeqId] = []
        budget = self._max_step_tokens
        victims = list(choice.preempt)
        for place, grant in enumerate(choice.run):
            s = self.seqs[grant.seq]
            most = min(grant.max_tokens, budget, cut(grant.seq, grant.max_tokens))
            if most <= 0 or grant.seq in preempted:
                continue
            running = sum(x.running for x in self.seqs.values())
            if not s.running and running >= self._max_seqs:
                continue
            start = s.computed if s.running else min(self._cached(s), s.tokens - 1)
            drafts = min(s.drafts, most - 1) if s.running and s.todo == 1 else 0
            length = self._fit(s, start, min(most, s.tokens - start)) + drafts
            if not self._reserve(s, start + length, victims, preempted, rows, alone=not running):
                length, drafts = self._fit(s, start, (s.blocks + self.free_blocks) * self.block_size - start), 0
                length = min(length, most, s.tokens - start) if s.running or not running else 0
                if length <= 0:
                    continue
                s.blocks += max(0, self._blocks_for(start + length) - s.blocks)
            budget -= length
            if not s.running and not s.begun:
                self._count_overtaken(grant.seq, choice.run[:place])
            rows.append(self._done(grant.seq, s, start, length, drafts))
        something = bool(rows or preempted)
        if something:
            seconds = self.seconds(rows)
            loaded, self._loaded = tuple(self._loaded), []
            if fails:
                self._undo(rows)
                rows = []
            self._reports.append(StepReport(self.steps, seconds, tuple(rows), tuple(preempted), loaded))
        return something

    def _cached(self, s: PoolSeq) -> int:
        return self._found(s) * self.block_size if s.like else s.job.cached

    def _fit(self, s: PoolSeq, start: int, most: int) -> int:
        end = start + most
        return most if end >= s.tokens or self.grid == 1 else max(0, end // self.grid * self.grid - start)

    def _blocks_for(self, positions: int) -> int:
        return -(-positions // self.block_size)

    def _reserve(
        self,
        s: PoolSeq,
        positions: int,
        victims: list[SeqId],
        preempted: list[SeqId],
        rows: list[DoneRow],
        *,
        alone: bool,
    ) -> bool:
        """Find blocks; a running sequence may take those of victims that have not computed in this step."""
        need = self._blocks_for(positions) - s.blocks
        if positions <= (s.computed if s.running else 0):
            return False
        planned = {row.seq for row in rows}
        while need > self.free_blocks and s.running:
            victim = next((q for q in victims if q not in planned and self.seqs[q] is not s), None)
            if victim is None:
                break
            victims.remove(victim)
            v = self.seqs[victim]
            v.running, v.computed, v.blocks, v.drafts = False, 0, 0, 0
            preempted.append(victim)
        if need > self.free_blocks:
            return False
        s.blocks += max(0, need)
        return True

    def _done(self, seq: SeqId, s: PoolSeq, start: int, length: int, drafts: int) -> DoneRow:
        opened = not s.running
        s.running = s.begun = True
        s.stored = s.loading = False
        known = length - drafts
        sampled = 0
        if start + known >= s.tokens:
            sampled = min(1 + drafts // 2, s.left)
            s.tokens, s.left = s.tokens + sampled, s.left - sampled
            s.computed, s.drafts = s.tokens - 1, s.tokens % 3 if self._drafts else 0
        else:
            s.computed = start + known
        if s.like:
            full = min(s.computed, s.common) // self.block_size
            self._ready[s.like] = max(full, self._ready.get(s.like, 0))
        return DoneRow(seq, start, length, drafts, sampled, opened)

    def _undo(self, rows: list[DoneRow]) -> None:
        """A failed step's sequences are over, as the engine's are."""
        for row in rows:
            self.finish(row.seq)

    # -- laws -------------------------------------------------------------------------------------

    def _check(self, view: StepView, choice: Choice) -> None:
        running = {row.seq for row in view.running}
        run = [grant.seq for grant in choice.run]
        assert all(grant.max_tokens >= 1 for grant in choice.run), "a grant is at least one token"
        assert len(set(run)) == len(run), "a sequence is granted once"
        for name, seqs in (("run", run), ("preempt", choice.preempt), ("fetch", choice.fetch), ("shed", choice.shed)):
            unknown = [seq for seq in seqs if seq not in self.seqs]
            assert not unknown, f"{name} names sequences {unknown} that are unknown or over"
        assert running.issuperset(choice.preempt), "only running sequences are preempted"
        assert len(set(choice.preempt)) == len(choice.preempt), "a victim is named once"
        assert view.fetchable >= set(choice.fetch), "only fetchable sequences are fetched"
        assert running.isdisjoint(choice.shed), "a running sequence is never shed"
        assert not set(run).intersection(choice.shed), "nothing is run and shed at once"
        for seq in choice.shed:
            job = self.seqs[seq].job
            assert not self.seqs[seq].begun, f"sequence {seq} was shed though it had been started"
            late = job.deadline is not None and job.deadline <= view.now
            outranked = any(
                other.seq > seq and (other.priority > job.priority or other.tenant != job.tenant)
                for other in self._admitted
            )
            assert late or outranked, f"sequence {seq} was shed before any deadline, and for nobody who may ask that"

    def _check_decoding(self, view: StepView, choice: Choice) -> None:
        """Decoding sequences get a token in turn: at the latest when all others have had one."""
        granted = {grant.seq for grant in choice.run}
        budget = min(self._max_step_tokens, self._max_seqs)
        bound = -(-self._max_seqs // budget) + self._depth
        for row in view.running:
            s = self.seqs[row.seq]
            s.hungry = s.hungry + 1 if row.todo == 1 and row.seq not in granted else 0
            assert s.hungry < bound, f"sequence {row.seq} was ready to decode in {s.hungry} steps and got nothing"

    def _check_repeats(self, view: StepView, choice: Choice, *, honest: bool) -> None:
        """What was said to be chosen again is, if every sequence decoded one token and nothing else happened."""
        assert choice.repeat >= 1, "a choice is made once at least"
        before, self._repeats = self._repeats, None
        if before is not None and all(row.todo == 1 and not row.drafts for row in view.running):
            then, said = before
            grown = tuple((row.seq, row.length + 1) for row in then.running)
            if grown == tuple((row.seq, row.length) for row in view.running):
                assert choice == said, f"{said} was to be chosen again, but {choice} was"
        if honest and choice.repeat > 1:
            assert all(row.todo == 1 for row in view.running), "only a step in which everything decodes is repeated"
            self._repeats = (view, choice)

    def _count_overtaken(self, seq: SeqId, before: tuple[Grant, ...]) -> None:
        """`seq` is opened: it overtakes earlier arrivals of no lower priority that were not chosen before it.

        Those whose prompt would not have found room beside what running sequences need are not overtaken, nor those
        left alone for a load, or for what another computes that they would compute too. Of other tenants it may be
        the turn, until one has waited for `max_wait_steps`: then it is passed no more at all.
        """
        room = self._room
        self._room -= self._blocks_for(self.seqs[seq].tokens) + 1
        chosen = {grant.seq for grant in before}
        job = self.seqs[seq].job
        for other, s in self.seqs.items():
            if other >= seq or s.begun or other in chosen or s.stored or s.loading or other in self._following:
                continue
            expired = s.job.deadline is not None and s.job.deadline <= self.clock.now()
            if expired or self._blocks_for(s.tokens) + 1 > room:
                continue
            waited = self.steps - s.since
            assert self.max_wait_steps is None or waited < self.max_wait_steps, (
                f"sequence {other} waits for {waited} steps, and {seq} that came later is opened before it"
            )
            s.overtaken += s.job.priority >= job.priority and s.job.tenant == job.tenant
            assert self.max_overtakes is None or s.overtaken <= self.max_overtakes, (
                f"sequence {other} was overtaken {s.overtaken} times; at most {self.max_overtakes} are promised"
            )


def _refusal(scheduler: Scheduler, job: Job) -> float | None:
    try:
        scheduler.add(job)
    except Overloaded as error:
        return error.retry_after_s
    return None
