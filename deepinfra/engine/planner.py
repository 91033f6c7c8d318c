"""The planner: fits a Scheduler's choice to blocks, limits and the chunk grid, and emits the step.

Written once for every Scheduler: positions, prefix hits, block reservation, preemption, drafts and epochs are decided
here. What it guarantees: limits are respected; positions tile a sequence without gap or overlap; nothing is reserved
that the step does not use; published blocks are never written; a sequence that runs alone always advances.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from deepinfra.core.ids import BlockId, BlockKey, Epoch, SeqId
from deepinfra.core.model import ExecutorLimits
from deepinfra.core.request import CachedTokens
from deepinfra.core.step import Choice, Fill, SeqOpen, Snapshot, StepPlan, WorkItem
from deepinfra.engine.blocks import BlockPool
from deepinfra.engine.live import Live
from deepinfra.engine.snapshots import Snapshots

__all__ = ("Arrived", "Planned", "Planner")


@dataclass(frozen=True, slots=True)
class Arrived:
    """A loaded record in a staging slot, waiting to be filled into a device block.

    Attributes:
        slot: Where it is.
        key: Of its block.
        tier: Where it came from.
        live: For whom it was loaded: block `index` of its prompt.
    """

    slot: int
    key: BlockKey
    tier: str
    live: Live
    index: int


@dataclass(slots=True)
class Planned:
    """A step ready to submit, and what the pool must do around it."""

    plan: StepPlan
    lives: dict[SeqId, Live]
    opened: frozenset[SeqId]
    preempted: tuple[SeqId, ...]
    slots: tuple[int, ...]
    fills: tuple[Fill, ...] = ()
    filled: tuple[Arrived, ...] = ()


@dataclass(slots=True)
class _Draft:
    """A step under construction."""

    budget: int
    items: list[WorkItem] = field(default_factory=list)
    opened: list[SeqOpen] = field(default_factory=list)
    preempted: list[SeqId] = field(default_factory=list)
    restored: list[int] = field(default_factory=list)
    planned: set[SeqId] = field(default_factory=set)


class Planner:
    """Plans steps over one block pool and one executor's limits; `running` are the sequences that hold blocks."""

    def __init__(self, blocks: BlockPool, limits: ExecutorLimits, snapshots: Snapshots) -> None:
        self._blocks, self._limits, self._snapshots = blocks, limits, snapshots
        # Windows are rolled back by rejected drafts, and keep no more rows for that than they say.
        self._most_drafts = snapshots.plan.reach if snapshots.plan.rows else limits.max_step_tokens
        self._step = 0
        self._closed: list[SeqId] = []
        self.running: dict[SeqId, Live] = {}

    def close(self, live: Live) -> None:
        """Give a sequence's blocks back and tell the executor in the next step; call at a step boundary only."""
        self._blocks.release(live.table)
        if live.running:
            self._closed.append(live.spec.seq)
            del self.running[live.spec.seq]
        live.reset()

    def plan(
        self,
        choice: Choice,
        lives: Mapping[SeqId, Live],
        arrived: Sequence[Arrived],
        snapshots: tuple[Snapshot, ...] = (),
    ) -> Planned | None:
        """Fit a choice.

        Args:
            choice: The Scheduler's decision; unknown or finished sequences in it are left out.
            lives: Sequences of the pool that are not over.
            arrived: Loaded records; all of their slots are free again after the step.
            snapshots: What the step is to take before anything else; with any, there is a step.

        Returns:
            The step, or `None` if nothing was decided. A step without items, fills and snapshots is not for the
            executor: it only says who was preempted.
        """
        fills, filled = self._fill(arrived)
        draft = _Draft(budget=self._limits.max_step_tokens)
        victims = [lives[seq] for seq in choice.preempt if seq in lives and lives[seq].running]
        for grant in choice.run:
            live = lives.get(grant.seq)
            if live is None or live.over or grant.seq in draft.planned or draft.budget <= 0:
                continue
            if live.running:
                self._advance(live, min(grant.max_tokens, draft.budget), draft, victims)
            elif len(self.running) + len(draft.preempted) < self._limits.max_seqs and grant.seq not in draft.preempted:
                self._open(live, min(grant.max_tokens, draft.budget), draft, alone=not self.running)
        if not draft.items:
            self._break_deadlock(draft)
        work = bool(draft.items or fills or snapshots)
        if not work and not draft.preempted:
            return None
        closed: tuple[SeqId, ...] = ()
        if work:
            closed, self._closed = tuple(self._closed), []
        self._step += 1
        plan = StepPlan(
            step=self._step,
            items=tuple(draft.items),
            opened=tuple(draft.opened),
            closed=closed,
            fills=tuple(fills),
            masked=any(item.samples and lives[item.seq].matcher is not None for item in draft.items),
            snapshots=snapshots,
        )
        return Planned(
            plan=plan,
            lives={item.seq: lives[item.seq] for item in draft.items},
            opened=frozenset(opened.seq for opened in draft.opened),
            preempted=tuple(draft.preempted),
            slots=(*(record.slot for record in arrived), *draft.restored),
            fills=tuple(fills),
            filled=tuple(filled),
        )

    def computed(self, planned: Planned, times: int) -> None:
        """A repeated step was computed so many times, each of them a step; what is left of it begins behind them."""
        plan = planned.plan
        self._step = plan.step + times - 1
        items = tuple(item._replace(start=item.start + times, blocks=()) for item in plan.items)
        planned.plan = plan._replace(step=plan.step + times, items=items)

    def follow(self, planned: Planned) -> Planned | None:
        """The step after one whose result is not known yet, if all of its sequences decode and nothing else happens.

        Each goes on one position further, but for those that end by their length. It is what a plan made behind the
        result would be, unless a sequence ends by what it samples: then its row is computed in vain.

        Returns:
            The step, or `None` if there is none, or not without taking blocks from others.
        """
        size, items = self._blocks.block_size, list[WorkItem]()
        lacking: list[Live] = []
        for item in planned.plan.items:
            live, at = planned.lives[item.seq], item.start + 1
            if live.over or at + 1 >= live.spec.prompt_len + live.spec.max_tokens:
                continue
            items.append(WorkItem(item.seq, item.epoch, at, 1, at, samples=True))
            if at >= len(live.table) * size:
                lacking.append(live)
        if not items or (fresh := self._blocks.take(len(lacking))) is None:
            return None
        if lacking:
            blocks = {live.spec.seq: (block,) for live, block in zip(lacking, fresh, strict=True)}
            for live, block in zip(lacking, fresh, strict=True):
                live.table.append(block)
            items = [item._replace(blocks=blocks.get(item.seq, ())) for item in items]
        self._step += 1
        return Planned(
            plan=StepPlan(step=self._step, items=tuple(items)),
            lives=planned.lives,
            opened=frozenset(),
            preempted=(),
            slots=(),
        )

    # -- loaded records ----------------------------------------------------------------------------

    def _fill(self, arrived: Sequence[Arrived]) -> tuple[list[Fill], list[Arrived]]:
        """Put loaded records into free blocks and publish them; what does not fit is dropped (it will be computed)."""
        fills: list[Fill] = []
        filled: list[Arrived] = []
        for record in arrived:
            if self._blocks.find(record.key) is not None:
                continue
            taken = self._blocks.take(1)
            if taken is None:
                break
            self._blocks.publish(taken[0], record.key)
            fills.append(Fill(record.slot, taken[0]))
            filled.append(record)
        # Released only now: a block freed inside the loop could be taken again for the next record.
        self._blocks.release([fill.block for fill in fills])
        return fills, filled

    # -- sequences ---------------------------------------------------------------------------------

    def _open(self, live: Live, most: int, draft: _Draft, alone: bool) -> None:
        """Open a waiting sequence behind its prefix hit, if its chunk fits; `alone` it may begin with a shorter one.

        Where windows are to be rebuilt first, it begins in the hit: those rows write no block.
        """
        size = self._blocks.block_size
        keys = live.extend_keys(size)
        hit = self._blocks.match(keys)
        live.found = len(hit)
        grid = self._limits.grid
        while hit and (len(hit) * size) % grid:
            hit.pop()
        cached = len(hit) * size
        resume = self._snapshots.resume(live, cached)
        start = resume.start
        self._blocks.share(hit)
        live.table, live.computed, live.published = hit, start, len(hit)
        length = self._fit(live, start, min(most, len(live.tokens) - start))
        fresh = self._reserve(live, start + length) if length else None
        if fresh is None and alone:
            length = self._affordable(live, start, length)
            fresh = self._reserve(live, start + length) if length else None
        if fresh is None:
            self._blocks.release(live.table)
            live.reset()
            return
        live.epoch = Epoch(live.epoch + 1)
        live.running = True
        self.running[live.spec.seq] = live
        self._snapshots.resumed(live, resume, cached)
        if resume.slot >= 0:
            draft.restored.append(resume.slot)
        if start > 0 and self._snapshots.plan.mode == "bounded" and (live.opened_before or resume.slot < 0):
            live.approximate = True
        if not live.opened_before:
            live.opened_before = True
            live.cached = self._cached(live, keys, start)
            live.written = max(0, live.spec.prompt_len // size * size - cached)
        draft.opened.append(
            SeqOpen(
                seq=live.spec.seq,
                epoch=live.epoch,
                tokens=tuple(live.tokens),
                prompt_len=live.spec.prompt_len,
                blocks=tuple(hit),
                seed=live.spec.seed,
                choice=live.spec.choice,
                sampling=live.spec.sampling,
                restore=resume.slot,
            )
        )
        self._add(live, start, length, cached, (), fresh, draft)

    def _cached(self, live: Live, keys: Sequence[BlockKey], start: int) -> CachedTokens:
        """Prompt tokens not computed, by tier; the recomputed last token of a full hit does not count."""
        size = self._blocks.block_size
        store: dict[str, int] = {}
        device = 0
        for index in range(-(-start // size)):
            tokens = min(size, start - index * size)
            tier = live.loaded_tiers.get(keys[index])
            if tier is None:
                device += tokens
            else:
                store[tier] = store.get(tier, 0) + tokens
        ages_s = {} if live.source is None else live.source.ages_s
        return CachedTokens(
            device=device,
            store=store,
            age_s={tier: ages_s[tier] for tier in store if tier in ages_s},
            approximate=start > 0 and self._snapshots.plan.mode == "bounded",
        )

    def _advance(self, live: Live, most: int, draft: _Draft, victims: list[Live]) -> None:
        """Give a running sequence its next chunk, or its next token with drafts."""
        start = live.computed
        drafts: tuple[int, ...] = ()
        if live.todo == 1 and live.drafts is not None:
            drafts = live.drafts.tokens[: max(0, min(most - 1, live.room - 1, self._most_drafts))]
        length = self._fit(live, start, min(most, live.todo)) + len(drafts)
        if length <= len(drafts):
            return
        fresh = self._reserve(live, start + length)
        if fresh is None and drafts:
            length, drafts = length - len(drafts), ()
            fresh = self._reserve(live, start + length)
        while fresh is None and (victim := self._victim(victims, live, draft)) is not None:
            self.close(victim)
            draft.preempted.append(victim.spec.seq)
            fresh = self._reserve(live, start + length)
        if fresh is None:
            length = self._affordable(live, start, length)
            fresh = self._reserve(live, start + length) if length else None
        if fresh is None:
            return
        self._add(live, start, length, live.published * self._blocks.block_size, drafts, fresh, draft)

    def _victim(self, victims: list[Live], live: Live, draft: _Draft) -> Live | None:
        while victims:
            victim = victims.pop(0)
            if victim is not live and victim.running and victim.spec.seq not in draft.planned:
                return victim
        return None

    def _break_deadlock(self, draft: _Draft) -> None:
        """With nothing planned because everything running lacks blocks, preempt until the oldest one advances."""
        stuck = sorted((live for live in self.running.values() if not live.over), key=lambda live: live.spec.seq)
        if len(stuck) < 2 or self._blocks.free_blocks or draft.budget <= 0:
            return
        self._advance(stuck[0], 1, draft, list(reversed(stuck)))

    def _fit(self, live: Live, start: int, most: int) -> int:
        """Longest chunk of at most `most` rows that ends on the grid, or at the end of the known tokens."""
        if most <= 0:
            return 0
        end = start + most
        grid = self._limits.grid
        if end >= len(live.tokens) or grid == 1:
            return most
        return max(0, end // grid * grid - start)

    def _affordable(self, live: Live, start: int, length: int) -> int:
        """The part of a chunk that owned and free blocks can hold."""
        held = len(live.table) + self._blocks.free_blocks
        return self._fit(live, start, min(length, held * self._blocks.block_size - start))

    def _reserve(self, live: Live, positions: int) -> list[BlockId] | None:
        """Blocks to add so that the table covers `positions`."""
        need = -(-positions // self._blocks.block_size) - len(live.table)
        return self._blocks.take(max(0, need))

    def _add(
        self,
        live: Live,
        start: int,
        length: int,
        write_from: int,
        drafts: tuple[int, ...],
        fresh: Sequence[BlockId],
        draft: _Draft,
    ) -> None:
        live.table.extend(fresh)
        known = length - len(drafts)
        draft.items.append(
            WorkItem(
                seq=live.spec.seq,
                epoch=live.epoch,
                start=start,
                length=length,
                write_from=max(start, write_from),
                samples=start + known >= len(live.tokens),
                blocks=tuple(fresh),
                drafts=drafts,
            )
        )
        draft.planned.add(live.spec.seq)
        draft.budget -= length
