"""Broken engines, one mistake each: the whole-engine law must catch every one."""

from __future__ import annotations

import random
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import anyio
import pytest

from deepinfra.core.ids import BlockKey
from deepinfra.core.kv import block_keys
from deepinfra.engine import loader, planner, stepper
from deepinfra.engine import pool as pool_module
from deepinfra.engine.blocks import BlockPool
from deepinfra.engine.committing import Committer
from deepinfra.engine.constraints import Constraints
from deepinfra.engine.live import Live
from deepinfra.engine.matcher import Matcher
from deepinfra.engine.planner import Planner
from deepinfra.engine.pool import Pool
from deepinfra.engine.snapshots import Snapshots
from deepinfra.engine.staging import Slots
from deepinfra.engine.windows import WindowPlan
from deepinfra.executors.toy import ToyExecutor
from deepinfra.testing.engine import Scenario, random_scenario, run_scenario

Patch = pytest.MonkeyPatch


def release_inside_a_step(patch: Patch) -> None:
    original = Pool.run

    @asynccontextmanager
    async def run(self: Pool, *args: Any, **kwargs: Any) -> AsyncGenerator[Live]:
        try:
            async with original(self, *args, **kwargs) as live:
                yield live
        finally:
            if self._stepper is not None:
                self._stepper.reap()

    patch.setattr(Pool, "run", run)


def publish_one_token_too_many(patch: Patch) -> None:
    original = Committer._publish

    def publish(self: Committer, blocks: BlockPool, live: Live) -> None:
        if live.computed == len(live.tokens) - 1:
            live.computed += 1
            original(self, blocks, live)
            live.computed -= 1
        else:
            original(self, blocks, live)

    patch.setattr(Committer, "_publish", publish)


def publish_rejected_drafts(patch: Patch) -> None:
    original = Committer._apply

    def apply(self: Committer, blocks: BlockPool, live: Live, item: Any, output: Any) -> int:
        kept = original(self, blocks, live, item, output)
        if item.drafts and not live.over:
            live.computed = min(item.start + item.length, len(live.tokens))
            self._publish(blocks, live)
        return kept

    patch.setattr(Committer, "_apply", apply)


def unchained_keys(patch: Patch) -> None:
    def keys(root: BlockKey, tokens: Sequence[int], block_size: int, **_: Any) -> list[BlockKey]:
        blocks = [tokens[i : i + block_size] for i in range(0, len(tokens) // block_size * block_size, block_size)]
        return [block_keys(root, block, block_size)[0] for block in blocks]

    patch.setattr("deepinfra.engine.live.block_keys", keys)


def evict_without_unpublishing(patch: Patch) -> None:
    def take(self: BlockPool, count: int) -> list[Any] | None:
        if count > self.free_blocks:
            return None
        taken = []
        for _ in range(count):
            block = self._free.popleft() if self._free else self._idle.popitem(last=False)[0]
            self._refs[block] = 1
            taken.append(block)
        return taken

    patch.setattr(BlockPool, "take", take)


def forget_to_close_on_preemption(patch: Patch) -> None:
    def close(self: Planner, live: Live) -> None:
        self._blocks.release(live.table)
        live.reset()

    patch.setattr(Planner, "close", close)


def rewrite_published_blocks(patch: Patch) -> None:
    original = planner.WorkItem

    def item(**fields: Any) -> Any:
        return original(**{**fields, "write_from": 0})

    patch.setattr(planner, "WorkItem", item)


def trust_every_frame(patch: Patch) -> None:
    patch.setattr(loader, "frame_is_good", lambda record, key, kind="block": True)


def reuse_a_whole_prompt_without_its_last_token(patch: Patch) -> None:
    original = Planner._add

    def add(self: Planner, live: Live, start: int, length: int, write_from: int, *rest: Any) -> None:
        if write_from == len(live.tokens) and start == write_from - 1:
            start, length = start - 1, 1
        original(self, live, start, length, write_from, *rest)

    patch.setattr(Planner, "_add", add)


def keep_the_slots_of_cancelled_loads(patch: Patch) -> None:
    original = Slots.give
    patch.setattr(Slots, "give", lambda self, slots: original(self, slots[1:]))


def accept_every_draft(patch: Patch) -> None:
    original = ToyExecutor._sample

    def sample(self: ToyExecutor, item: Any, state: Any) -> Any:
        output = original(self, item, state)
        if item.drafts and len(output.tokens) <= len(item.drafts):
            return output._replace(tokens=(*item.drafts, output.tokens[-1]))
        return output

    patch.setattr(ToyExecutor, "_sample", sample)


def keep_the_matcher_behind_the_drafts(patch: Patch) -> None:
    original = Matcher.rows

    def rows(self: Matcher, drafts: Sequence[int], nbytes: int) -> list[bytes]:
        result = original(self, drafts, nbytes)
        self._library.try_consume_tokens(list(drafts))
        return result

    patch.setattr(Matcher, "rows", rows)


def one_mask_for_all_drafts(patch: Patch) -> None:
    original = Matcher.rows
    patch.setattr(Matcher, "rows", lambda self, drafts, nbytes: original(self, (), nbytes) * (len(drafts) + 1))


def masks_of_another_sequence(patch: Patch) -> None:
    original = stepper.masks_of

    def masks(work: Sequence[Any], vocab_size: int) -> Any:
        rows = original(work, vocab_size)
        return rows._replace(seqs=rows.seqs[1:] + rows.seqs[:1]) if len(set(rows.rows_per_seq)) == 1 else rows

    patch.setattr(stepper, "masks_of", masks)


def no_masks_for_the_first_token(patch: Patch) -> None:
    original = planner.StepPlan

    def plan(**fields: Any) -> Any:
        decoding = fields.get("masked") and not fields["opened"]
        return original(**{**fields, "masked": bool(decoding)})

    patch.setattr(planner, "StepPlan", plan)


def begin_anew_after_a_handoff(patch: Patch) -> None:
    original = Constraints.matcher

    async def matcher(self: Constraints, spec: Any) -> Any:
        return await original(self, replace(spec, tokens=spec.tokens[: spec.prompt_len]))

    patch.setattr(Constraints, "matcher", matcher)


def forget_the_matcher_when_preempted(patch: Patch) -> None:
    original = Live.reset

    def reset(self: Live) -> None:
        original(self)
        if self.opened_before:
            self.matcher = None

    patch.setattr(Live, "reset", reset)


def share_the_matcher_between_answers(patch: Patch) -> None:
    original = Constraints._compiled

    class Shared:
        def __init__(self, library: Any) -> None:
            self.library = library

        def deep_copy(self) -> Any:
            return self.library

    async def compiled(self: Constraints, constraint: Any) -> Any:
        return Shared(await original(self, constraint))

    patch.setattr(Constraints, "_compiled", compiled)


def take_what_was_sampled_not_what_is_kept(patch: Patch) -> None:
    original = Committer._cut

    def cut(self: Committer, live: Live, tokens: tuple[int, ...]) -> Any:
        result = original(self, live, tokens)
        if live.matcher is not None and tokens:
            live.matcher.take(tokens[-1])
        return result

    patch.setattr(Committer, "_cut", cut)


def go_on_behind_a_complete_constraint(patch: Patch) -> None:
    patch.setattr(Matcher, "complete", False)


def end_only_by_the_first_stop_id(patch: Patch) -> None:
    original = Matcher.__init__

    def init(self: Matcher, library: Any, vocab_size: int, stop_ids: frozenset[int]) -> None:
        original(self, library, vocab_size, frozenset(sorted(stop_ids)[:1]))

    patch.setattr(Matcher, "__init__", init)


def begin_without_the_snapshot(patch: Patch) -> None:
    original = planner.SeqOpen
    patch.setattr(planner, "SeqOpen", lambda **fields: original(**{**fields, "restore": -1}))


def replay_one_row_short(patch: Patch) -> None:
    original = WindowPlan.first_row

    def first_row(self: WindowPlan, cached: int, known: int) -> int:
        start = original(self, cached, known)
        return start + 1 if self.rows and start else start

    patch.setattr(WindowPlan, "first_row", first_row)


def replay_what_the_bounded_form_does(patch: Patch) -> None:
    original = pool_module.window_plan
    patch.setattr(pool_module, "window_plan", lambda layout, mode, grid: original(layout, "bounded", grid))


def rewrite_replayed_rows(patch: Patch) -> None:
    original = planner.WorkItem
    patch.setattr(planner, "WorkItem", lambda **fields: original(**{**fields, "write_from": fields["start"]}))


def take_snapshots_one_step_late(patch: Patch) -> None:
    original = Snapshots.due

    def due(self: Any) -> Any:
        late, self.late = getattr(self, "late", ()), original(self)
        return late

    patch.setattr(Snapshots, "due", due)


def take_snapshots_however_far_back(patch: Patch) -> None:
    original = Snapshots._takes

    def takes(self: Snapshots, live: Live, position: int) -> bool:
        live.reached = min(live.reached, live.computed)
        return original(self, live, position)

    patch.setattr(Snapshots, "_takes", takes)


def begin_a_block_behind_the_snapshot(patch: Patch) -> None:
    original = Snapshots.park

    def park(self: Snapshots, live: Live, slot: int, position: int) -> None:
        original(self, live, slot, position - self.plan.unit or position)

    patch.setattr(Snapshots, "park", park)


def give_the_slot_of_a_snapshot_back_too_early(patch: Patch) -> None:
    original = Snapshots.park

    def park(self: Snapshots, live: Live, slot: int, position: int) -> None:
        original(self, live, slot, position)
        self._slots.give([slot])

    patch.setattr(Snapshots, "park", park)


def blame_a_step_for_the_one_before(patch: Patch) -> None:
    original = Committer.failed

    def failed(self: Committer, *args: Any, astray: bool = False) -> None:
        original(self, *args)

    patch.setattr(Committer, "failed", failed)


def follow_without_telling_of_new_blocks(patch: Patch) -> None:
    original = Planner.follow

    def follow(self: Planner, planned: planner.Planned) -> planner.Planned | None:
        after = original(self, planned)
        if after is not None:
            items = tuple(item._replace(blocks=()) for item in after.plan.items)
            after.plan = after.plan._replace(items=items)
        return after

    patch.setattr(Planner, "follow", follow)


WINDOWED: list[Callable[[Patch], None]] = [
    begin_without_the_snapshot,
    replay_one_row_short,
    replay_what_the_bounded_form_does,
    rewrite_replayed_rows,
    take_snapshots_one_step_late,
    take_snapshots_however_far_back,
    begin_a_block_behind_the_snapshot,
    give_the_slot_of_a_snapshot_back_too_early,
]
"""Caught where there are windows."""

MUTANTS: list[Callable[[Patch], None]] = [
    release_inside_a_step,
    publish_one_token_too_many,
    publish_rejected_drafts,
    unchained_keys,
    evict_without_unpublishing,
    forget_to_close_on_preemption,
    rewrite_published_blocks,
    trust_every_frame,
    reuse_a_whole_prompt_without_its_last_token,
    keep_the_slots_of_cancelled_loads,
    accept_every_draft,
    keep_the_matcher_behind_the_drafts,
    one_mask_for_all_drafts,
    masks_of_another_sequence,
    no_masks_for_the_first_token,
    begin_anew_after_a_handoff,
    forget_the_matcher_when_preempted,
    share_the_matcher_between_answers,
    take_what_was_sampled_not_what_is_kept,
    go_on_behind_a_complete_constraint,
    end_only_by_the_first_stop_id,
    blame_a_step_for_the_one_before,
    follow_without_telling_of_new_blocks,
    *WINDOWED,
]


def followed(scenario: Scenario) -> Scenario:
    """Steps that follow each other, some of which fail for some of their sequences."""
    asks = tuple(replace(ask, n=2, max_tokens=12, constraint=None, leave_after=0) for ask in scenario.asks)
    return replace(
        scenario, asks=asks, blocks=200, max_seqs=8, windows=(), speculator="none", executor="failing", depth=2
    )


def hurried(scenario: Scenario, rng: random.Random) -> Scenario:
    """Many clients of one pool with windows, most gone after a token: a release inside a step shows in a snapshot."""
    asks = tuple(replace(ask, leave_after=rng.choice((0, 1, 1, 2))) for ask in scenario.asks)
    return replace(windowed(scenario, rng), asks=(6 * asks)[:6], split=False, threads=True)


def windowed(scenario: Scenario, rng: random.Random) -> Scenario:
    """Windows and a store for their snapshots, on a sound machine."""
    windows = rng.choice(((2, 2), (2, 3, 2), (5, 5)))
    return replace(scenario, windows=windows, store="memory", snapshots="disk", executor="sound", num_slots=8)


def left_early(scenario: Scenario) -> Scenario:
    """One answer's first token, and the client is gone while the others' prompts are being computed."""
    asks = tuple(replace(ask, n=3, leave_after=1) for ask in scenario.asks)
    return replace(scenario, asks=asks, max_step_tokens=16)


@pytest.mark.parametrize("mutate", MUTANTS, ids=lambda mutate: mutate.__name__)
def test_a_broken_engine_breaks_the_law(
    mutate: Callable[[Patch], None], monkeypatch: Patch, caplog: pytest.LogCaptureFixture
) -> None:
    mutate(monkeypatch)
    for seed in range(600):
        rng = random.Random(seed)
        scenario = random_scenario(rng)
        if mutate is release_inside_a_step:
            scenario = hurried(scenario, rng)
        if mutate is blame_a_step_for_the_one_before:
            scenario = followed(scenario)
        if mutate in WINDOWED:
            scenario = windowed(scenario, rng)
        if mutate is take_snapshots_however_far_back:
            scenario = left_early(scenario)
        try:
            wrong = anyio.run(run_scenario, scenario, None, 2.0)
        except Exception:
            return
        if wrong:
            return
    pytest.fail(f"600 scenarios did not catch {mutate.__name__}")
