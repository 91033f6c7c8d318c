"""What a step's result means: tokens to their sequences, verified positions to the prefix index, a report to policy."""

from __future__ import annotations

from deepinfra.core.drafts import DraftOutcome
from deepinfra.core.step import DoneRow, RunRow, SeqOutput, StepReport, StepResult, WorkItem
from deepinfra.engine.blocks import BlockPool
from deepinfra.engine.drafting import Drafting
from deepinfra.engine.live import Ending, Live
from deepinfra.engine.planner import Planned
from deepinfra.engine.saver import Saver
from deepinfra.engine.snapshots import Snapshots
from deepinfra.errors import ConstraintFailedError, StepFailed
from deepinfra.interfaces.scheduler import Scheduler

__all__ = ("Committer",)


def _stuck(why: str) -> Ending:
    """The end of an answer that no token can follow; `why` is empty if that is because its constraint is met."""
    return Ending(ConstraintFailedError.code, str(ConstraintFailedError(why))) if why else Ending("stop")


class Committer:
    """Applies results to the sequences of one pool, between steps."""

    def __init__(
        self, scheduler: Scheduler, saver: Saver | None, drafting: Drafting | None, snapshots: Snapshots
    ) -> None:
        self._scheduler, self._saver, self._drafting, self._snapshots = scheduler, saver, drafting, snapshots

    def row(self, live: Live) -> RunRow:
        """How a running sequence looks to the Scheduler."""
        drafts = len(live.drafts.tokens) if live.drafts is not None else 0
        return RunRow(live.spec.seq, live.todo, len(live.tokens), len(live.table), drafts)

    def step(self, blocks: BlockPool, planned: Planned, result: StepResult) -> None:
        """Apply a good step."""
        outputs = {output.seq: output for output in result.outputs}
        failed = {failure.seq: failure.why for failure in result.failed}
        rows: list[DoneRow] = []
        outcomes: list[DraftOutcome] = []
        for item in planned.plan.items:
            live = planned.lives[item.seq]
            sampled = 0
            if item.epoch == live.epoch:  # those that left meanwhile, too: their windows have moved on
                live.reached = max(live.reached, item.start + item.length)
            if item.seq in failed:
                self._fail(live, failed[item.seq])
            elif not live.over and (output := outputs.get(item.seq)) is not None and output.epoch == live.epoch:
                sampled = self._apply(blocks, live, item, output)
                if item.drafts:
                    outcomes.append(DraftOutcome(item.seq, len(item.drafts), max(0, len(output.tokens) - 1)))
            live.drafts = None
            opened = item.seq in planned.opened
            rows.append(DoneRow(item.seq, item.start, item.length, len(item.drafts), sampled, opened))
        if self._drafting is not None:
            self._drafting.observe(outcomes)
        self._scheduler.commit(
            StepReport(step=planned.plan.step, seconds=result.seconds, rows=tuple(rows), preempted=planned.preempted)
        )

    def repeated(self, blocks: BlockPool, planned: Planned, result: StepResult, ends: tuple[float, ...]) -> None:
        """Apply the times that a repeated step was computed, until `ends`; for policy each of them is a step."""
        outputs = {output.seq: output for output in result.outputs}
        failed = {failure.seq: failure.why for failure in result.failed}
        times, step = len(ends), planned.plan.step
        rows: list[tuple[WorkItem, int]] = []
        for item in planned.plan.items:
            live, sampled = planned.lives[item.seq], 0
            if item.epoch == live.epoch:
                live.reached = max(live.reached, item.start + times)
            if item.seq in failed:
                self._fail(live, failed[item.seq])
            elif not live.over and (output := outputs.get(item.seq)) is not None and output.epoch == live.epoch:
                sampled = 1
                live.tokens.extend(output.tokens)
                live.computed = len(live.tokens) - 1
                self._publish(blocks, live)
                live.push(output.tokens, output.probs, None if live.room else Ending("length"), ends)
            rows.append((item, sampled))
        for time, seconds in enumerate(result.each_s):
            done = tuple(DoneRow(item.seq, item.start + time, 1, 0, sampled, False) for item, sampled in rows)
            self._scheduler.commit(StepReport(step + time, seconds, done))

    def failed(self, blocks: BlockPool, planned: Planned, error: StepFailed, *, astray: bool = False) -> None:
        """Apply a failed step: named sequences end, what the step wrote is not trusted, the others try again.

        With `astray` all try again: it failed because a step before it had.
        """
        for fill in planned.plan.fills:
            blocks.unpublish(fill.block)
        named = set() if astray else set(error.seqs) or {item.seq for item in planned.plan.items}
        rows: list[DoneRow] = []
        for item in planned.plan.items:
            live = planned.lives[item.seq]
            live.drafts = None
            if item.seq in named:
                self._fail(live, error.why)
            rows.append(DoneRow(item.seq, item.start, 0, len(item.drafts), 0, item.seq in planned.opened))
        self._scheduler.commit(
            StepReport(step=planned.plan.step, seconds=0.0, rows=tuple(rows), preempted=planned.preempted)
        )

    def lost(self, planned: Planned) -> None:
        """Tell policy which sequences a lost step had opened, before it learns that all running ones are preempted."""
        rows = tuple(
            DoneRow(item.seq, item.start, 0, len(item.drafts), 0, item.seq in planned.opened)
            for item in planned.plan.items
        )
        self._scheduler.commit(StepReport(step=planned.plan.step, seconds=0.0, rows=rows, preempted=planned.preempted))

    def _fail(self, live: Live, why: str) -> None:
        live.push((), (), Ending(StepFailed.code, f"the step failed: {why}"))

    def _apply(self, blocks: BlockPool, live: Live, item: WorkItem, output: SeqOutput) -> int:
        """Take a sequence's output; returns the number of tokens kept."""
        if not item.samples:
            live.computed = item.start + item.length
            self._publish(blocks, live)
            return 0
        known = len(live.tokens)
        tokens, ending = self._cut(live, output.tokens)
        live.tokens.extend(tokens)
        # Accepted drafts have KV, the last token has none; a cut inside accepted drafts leaves only verified rows.
        live.computed = min(known + len(output.tokens) - 1, len(live.tokens))
        self._publish(blocks, live)
        if known == live.spec.prompt_len:
            self._snapshots.prompt_done(live)
        if ending is None and live.prefill_only:
            ending = Ending("handoff")
        live.push(tokens, output.probs[: len(tokens)], ending)
        return len(tokens)

    def _cut(self, live: Live, tokens: tuple[int, ...]) -> tuple[tuple[int, ...], Ending | None]:
        """Cut at the token limit, behind the first stop id, and where the constraint ends."""
        room, matcher = live.room, live.matcher
        if matcher is None and not live.spec.stop_ids:
            return (tokens, None) if len(tokens) < room else (tokens[:room], Ending("length"))
        for index, token in enumerate(tokens[:room]):
            if matcher is not None and (why := matcher.why_stuck) is not None:
                return tokens[:index], _stuck(why)
            if token in live.spec.stop_ids:
                return tokens[: index + 1], Ending("stop")
            if matcher is not None:
                if not matcher.take(token):
                    return tokens[:index], _stuck(f"the executor chose token {token}, which its mask forbids")
                if matcher.complete:
                    return tokens[: index + 1], Ending("stop")
        if len(tokens) >= room:
            return tokens[:room], Ending("length")
        return tokens, None

    def _publish(self, blocks: BlockPool, live: Live) -> None:
        """Put blocks that are full and verified into the prefix index, and queue them to be saved."""
        size = blocks.block_size
        full = live.computed // size
        if full <= live.published:
            return
        keys = live.extend_keys(size)
        for index in range(live.published, full):
            blocks.publish(live.table[index], keys[index])
        if self._saver is not None:
            self._saver.offer(live, range(live.published, full))
        live.published = full
