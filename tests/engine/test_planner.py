"""The planner's laws, against choices that no sane scheduler would make."""

from __future__ import annotations

import random
from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfra.core.drafts import Draft
from deepinfra.core.ids import BlockId, BlockKey, SeqId
from deepinfra.core.kv import KVGroup, KVLayout, Namespace, root_key
from deepinfra.core.model import ExecutorLimits
from deepinfra.core.request import SeqSpec
from deepinfra.core.step import Choice, Grant
from deepinfra.engine.blocks import BlockPool
from deepinfra.engine.live import Live
from deepinfra.engine.planner import Arrived, Planned, Planner
from deepinfra.engine.snapshots import Snapshots
from deepinfra.engine.staging import Slots
from deepinfra.engine.stats import StepTally
from deepinfra.engine.stream import Signal
from deepinfra.engine.windows import ReplayMode, window_plan

ROOT = root_key(Namespace(weights="w", recipe="r", kv_dtype="d", layout="l", tenant="t"))


def live(seq: int, tokens: Sequence[int], max_tokens: int = 8) -> Live:
    spec = SeqSpec(seq=SeqId(seq), tokens=tuple(tokens), prompt_len=len(tokens), max_tokens=max_tokens, seed=0)
    return Live(spec=spec, root=ROOT, tokens=list(tokens))


def snapshots(block_size: int, window: int = 0, mode: ReplayMode = "exact", grid: int = 1) -> Snapshots:
    """None, of two layers with a window, or of none."""
    groups = [KVGroup(name="full", kind="full", layers=(2,), nbytes_per_token=8)]
    if window:
        groups.append(KVGroup(name="window", kind="window", layers=(0, 1), nbytes_per_token=16, window=window))
    layout = KVLayout(
        block_size=block_size, block_nbytes=8 * block_size, dtype="d", groups=tuple(groups), snapshot_reach=2
    )
    return Snapshots(window_plan(layout, mode, grid), Slots(4), None, StepTally(), Signal())


class Game:
    """Plays pool: applies plans to sequences with a fake model, and checks every law on the way."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.size = rng.choice((1, 2, 3))
        self.grid = rng.choice((1, 1, 2))
        num_blocks = rng.randint(12, 40)
        self.limits = ExecutorLimits(
            max_step_tokens=rng.choice((2, 5, 16)),
            max_seqs=rng.choice((1, 2, 4)),
            max_context=1000,
            vocab_size=100,
            num_blocks=num_blocks,
            num_slots=4,
            grid=self.grid,
        )
        self.blocks = BlockPool(num_blocks, self.size)
        self.snapshots = snapshots(self.size, rng.choice((0, 0, 1, 3)), rng.choice(("exact", "bounded")), self.grid)
        self.planner = Planner(self.blocks, self.limits, self.snapshots)
        self.lives = {
            SeqId(i): live(i, [rng.randrange(2) for _ in range(rng.randint(1, 12))]) for i in range(rng.randint(1, 5))
        }
        self.known: dict[SeqId, int] = {}

    def choice(self) -> Choice:
        rng = self.rng
        seqs = [*self.lives, SeqId(99)]
        run = tuple(Grant(rng.choice(seqs), rng.randint(0, 20)) for _ in range(rng.randint(0, 6)))
        return Choice(run=run, preempt=tuple(rng.sample(seqs, rng.randint(0, len(seqs)))))

    def arrived(self) -> list[Arrived]:
        keys = [BlockKey(self.rng.randbytes(32)) for _ in range(self.rng.choice((0, 0, 1, 3)))]
        return [Arrived(slot, key, "ram", live(0, [0]), 0) for slot, key in enumerate(keys)]

    def step(self) -> None:
        for state in self.lives.values():
            if state.running and state.todo == 1 and self.rng.random() < 0.5:
                state.drafts = Draft(state.spec.seq, (7, 7, 7), (0.5, 0.5, 0.5))
        running = {seq for seq, state in self.lives.items() if state.running}
        planned = self.planner.plan(self.choice(), self.lives, self.arrived())
        if planned is not None:
            self.check(planned, running)
            self.apply(planned)
        for state in list(self.lives.values()):
            if self.rng.random() < 0.05:
                self.planner.close(state)
                del self.lives[state.spec.seq]

    def check(self, planned: Planned, running: set[SeqId]) -> None:
        plan = planned.plan
        assert sum(item.length for item in plan.items) <= self.limits.max_step_tokens
        assert len({item.seq for item in plan.items}) == len(plan.items)
        assert len(running - set(planned.preempted)) + len(plan.opened) <= self.limits.max_seqs
        assert not set(planned.preempted) & {item.seq for item in plan.items}
        opened = {entry.seq: entry for entry in plan.opened}
        taken: list[BlockId] = []
        for item in plan.items:
            state = self.lives[item.seq]
            held = len(state.table) - len(item.blocks)
            end = item.start + item.length
            # Tiled: a step begins where the last one ended, or behind the hit.
            if item.seq in opened:
                hit = held * self.size
                assert item.start == self.snapshots.plan.first_row(hit, len(state.tokens))
                assert not hit or item.write_from >= hit
                assert opened[item.seq].blocks == tuple(state.table[:held])
            else:
                assert item.start == self.known[item.seq]
            # Nothing reserved that is not used, and no row without a block.
            assert len(state.table) == max(held, -(-end // self.size))
            known_end = end - len(item.drafts)
            assert item.samples == (known_end >= len(state.tokens))
            assert not item.drafts or item.samples
            if not item.samples:
                assert known_end % self.grid == 0
            assert item.write_from >= item.start
            assert not self.snapshots.plan.rows or len(item.drafts) <= self.snapshots.plan.reach
            taken.extend(item.blocks)
        assert len(set(taken)) == len(taken)
        for seq, state in self.lives.items():
            if seq not in opened and state.running:
                assert not set(taken) & set(state.table[: len(state.table) - self._fresh(plan.items, seq)])

    @staticmethod
    def _fresh(items: Sequence[object], seq: SeqId) -> int:
        return sum(len(getattr(item, "blocks", ())) for item in items if getattr(item, "seq", None) == seq)

    def apply(self, planned: Planned) -> None:
        for item in planned.plan.items:
            state = self.lives[item.seq]
            state.drafts = None
            if item.samples:
                accepted = self.rng.randint(0, len(item.drafts))
                state.tokens.extend([7] * accepted + [self.rng.randrange(2)])
                state.computed = len(state.tokens) - 1
            else:
                state.computed = item.start + item.length
            self.known[item.seq] = state.computed
            keys = state.extend_keys(self.size)
            for index in range(state.published, state.computed // self.size):
                self.blocks.publish(state.table[index], keys[index])
            state.published = max(state.published, state.computed // self.size)
            if state.room <= 0:
                self.planner.close(state)
                del self.lives[item.seq]


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 2**32))
def test_every_plan_keeps_the_laws(seed: int) -> None:
    game = Game(random.Random(seed))
    for _ in range(30):
        game.step()
    for state in game.lives.values():
        game.planner.close(state)
    assert game.blocks.free_blocks == game.blocks.num_blocks


def test_a_full_hit_computes_its_last_token_without_writing() -> None:
    blocks = BlockPool(8, 2)
    limits = ExecutorLimits(16, 4, 100, 100, 8, 4)
    first, second = live(1, [1, 2, 3, 4]), live(2, [1, 2, 3, 4])
    planner = Planner(blocks, limits, snapshots(blocks.block_size))
    lives = {SeqId(1): first, SeqId(2): second}
    planner.plan(Choice(run=(Grant(SeqId(1), 16),)), lives, [])
    for index, key in enumerate(first.extend_keys(2)):
        blocks.publish(first.table[index], key)
    planned = planner.plan(Choice(run=(Grant(SeqId(2), 16),)), lives, [])
    assert planned is not None
    (item,) = planned.plan.items
    assert (item.start, item.length, item.write_from, item.blocks) == (3, 1, 4, ())
    assert second.cached.device == 3


def test_two_stuck_sequences_free_one_of_them() -> None:
    blocks = BlockPool(2, 1)
    planner = Planner(blocks, ExecutorLimits(16, 4, 100, 100, 2, 1), snapshots(blocks.block_size))
    first, second = live(1, [1]), live(2, [2])
    lives = {SeqId(1): first, SeqId(2): second}
    both = Choice(run=(Grant(SeqId(1), 4), Grant(SeqId(2), 4)))
    planner.plan(both, lives, [])
    for state in lives.values():
        state.tokens.append(5)
        state.computed = 1
    planned = planner.plan(both, lives, [])
    assert planned is not None
    assert planned.preempted == (SeqId(2),)
    assert [item.seq for item in planned.plan.items] == [SeqId(1)]
