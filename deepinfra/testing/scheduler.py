"""Laws that every Scheduler keeps.

Example::

    class TestMine(SchedulerConformance):
        def make(self) -> Scheduler:
            return Mine()
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import ClassVar

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from deepinfra.core.ids import SeqId
from deepinfra.interfaces.scheduler import Scheduler
from deepinfra.testing.mini_pool import MiniPool

__all__ = ("SchedulerConformance", "SchedulerMachine")


class SchedulerMachine(RuleBasedStateMachine):
    """Arrivals, steps (grants cut, failures), late loads, ends at any time; at the end everything gets its turn."""

    make: ClassVar[Callable[[], Scheduler]]

    @initialize(
        depth=st.sampled_from([1, 1, 2]),
        tokens=st.sampled_from([3, 12]),
        blocks=st.sampled_from([6, 12, 24]),
        grid=st.sampled_from([1, 1, 2]),
        drafts=st.booleans(),
    )
    def begin(self, depth: int, tokens: int, blocks: int, grid: int, drafts: bool) -> None:
        self.pool = MiniPool(
            type(self).make, depth=depth, max_step_tokens=tokens, num_blocks=blocks, grid=grid, drafts=drafts
        )

    @rule(
        tokens=st.one_of(st.integers(1, 6), st.integers(1, 30)),
        max_new=st.sampled_from([1, 8, 30]),
        hit=st.integers(0, 4),
        priority=st.sampled_from([0, 0, 0, 1, -1, 1000]),
        deadline_s=st.one_of(st.none(), st.none(), st.floats(0.0, 0.2)),
        stored=st.booleans(),
        tenant=st.sampled_from(["public", "public", "other"]),
        like=st.sampled_from(["", "", "a", "b"]),
    )
    def add(
        self,
        tokens: int,
        max_new: int,
        hit: int,
        priority: int,
        deadline_s: float | None,
        stored: bool,
        tenant: str,
        like: str,
    ) -> None:
        # Every sequence fits into the pool alone, or it would have been refused at the door.
        tokens = min(tokens, self.pool.num_blocks * self.pool.block_size - 1)
        self.pool.add(
            tokens,
            min(max_new, self.pool.num_blocks * self.pool.block_size - tokens),
            cached=min(tokens, hit * self.pool.block_size) if stored and not like else 0,
            priority=priority,
            deadline=None if deadline_s is None else self.pool.clock.now() + deadline_s,
            stored=stored and not like,
            like=like,
            common=max(0, tokens - hit),
            tenant=tenant,
        )

    @rule(count=st.integers(1, 8))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.pool.step()

    @rule(cuts=st.lists(st.sampled_from([0, 1, 3, 99]), min_size=1, max_size=4), fails=st.booleans())
    def hostile_step(self, cuts: list[int], fails: bool) -> None:
        # A cut to nothing of the whole step could go on for ever; a real planner serves the first claim.
        self.pool.step(lambda seq, tokens: min(tokens, cuts[seq % len(cuts)]), fails=fails)

    @rule(data=st.data())
    @precondition(lambda self: self.pool.seqs)
    def finish(self, data: st.DataObject) -> None:
        self.pool.finish(data.draw(st.sampled_from(sorted(self.pool.seqs))))

    @rule(data=st.data())
    @precondition(lambda self: self.pool.over)
    def finish_again(self, data: st.DataObject) -> None:
        self.pool.finish(data.draw(st.sampled_from(self.pool.over)))

    @rule()
    def finish_unknown(self) -> None:
        for scheduler in self.pool.schedulers:
            scheduler.finish(SeqId(10**9))

    @rule()
    def loads_arrive(self) -> None:
        for seq in [q for q, s in self.pool.seqs.items() if s.loading]:
            self.pool.arrive(seq)

    @rule(like=st.sampled_from(["a", "b"]))
    def forget(self, like: str) -> None:
        self.pool.forget(like)

    @rule(seconds=st.floats(0.0, 1.0))
    def time_passes(self, seconds: float) -> None:
        self.pool.clock.advance(seconds)

    def teardown(self) -> None:
        if not hasattr(self, "pool"):
            return
        self.pool.drain(400 + 60 * len(self.pool.seqs))
        self.pool.flush()
        choice = self.pool.step()
        assert choice == type(choice)(), f"with nothing left to do the choice is empty, not {choice}"


class SchedulerConformance(ABC):
    """Subclass it in a test module with a name that begins with `Test`.

    A scheduler that publishes bounds, `SchedulerStats.max_overtakes` and `max_wait_steps`, is held to them.

    Attributes:
        patience: Steps in which a giant must be through while short ones keep coming.
        life: How many random lives to try, and how long ones.
    """

    patience: ClassVar[int] = 400
    life: ClassVar[settings] = settings(
        max_examples=100, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
    )

    @abstractmethod
    def make(self) -> Scheduler:
        """A new scheduler, always with the same settings."""

    def pool(self, *, depth: int = 1, max_step_tokens: int = 12, num_blocks: int = 24) -> MiniPool:
        """A pool around it."""
        return MiniPool(
            self.make,
            depth=depth,
            max_step_tokens=max_step_tokens,
            num_blocks=num_blocks,
        )

    def test_keeps_its_laws_in_any_life(self) -> None:
        """The state machine: see `MiniPool` for what is checked in every step."""
        machine = type("Machine", (SchedulerMachine,), {"make": staticmethod(self.make)})
        run_state_machine_as_test(machine, settings=self.life)

    def test_nothing_to_do_gives_an_empty_choice(self) -> None:
        choice = self.pool().step()
        assert choice == type(choice)()

    def test_finish_is_idempotent_and_takes_unknown_sequences(self) -> None:
        pool = self.pool()
        seq = pool.add(4)
        assert seq is not None
        for _ in range(3):
            pool.finish(seq)
        pool.finish(SeqId(999))
        choice = pool.step()
        assert choice == type(choice)()

    def test_a_long_prompt_is_computed_in_chunks(self) -> None:
        pool = self.pool(max_step_tokens=4, num_blocks=64)
        pool.add(100, 2)
        assert pool.drain(200) >= 25

    def test_streams_keep_flowing_while_a_giant_is_computed(self) -> None:
        pool = self.pool(max_step_tokens=8, num_blocks=200)
        stream = pool.add(2, 60)
        assert stream is not None
        pool.step()
        pool.add(300, 1)
        before = pool.seqs[stream].tokens
        for _ in range(20):
            pool.step()
        assert pool.seqs[stream].tokens >= before + 20

    def test_a_giant_gets_through_while_short_ones_keep_coming(self) -> None:
        pool = self.pool(num_blocks=200)
        giant = pool.add(200, 2)
        assert giant is not None
        for _ in range(self.patience):
            pool.add(6, 1)
            pool.add(6, 1)
            pool.step()
            if giant not in pool.seqs:
                return
        s = pool.seqs[giant]
        raise AssertionError(f"after {self.patience} steps the giant has computed {s.computed} of {s.tokens} tokens")

    def test_a_low_priority_gets_through_while_high_ones_keep_coming(self) -> None:
        pool = self.pool(num_blocks=200)
        low = pool.add(6, 1, priority=-1)
        for _ in range(10 * self.patience):
            pool.add(12, 1, priority=1)
            pool.step()
            if low not in pool.seqs:
                return
        raise AssertionError(f"it was never run in {10 * self.patience} steps")

    def test_one_that_waited_long_enough_is_opened_before_all_that_came_later(self) -> None:
        """Whoever keeps coming, of whatever priority; how long is `SchedulerStats.max_wait_steps`, if that is said."""
        pool = self.pool(num_blocks=200)
        most = pool.max_wait_steps
        if most is None:
            return
        low = pool.add(12, 1, priority=-1000)
        assert low is not None
        for _ in range(most):
            for _ in range(3):
                pool.add(12, 1, priority=1000)
            pool.step()
        for _ in range(20):
            if low not in pool.seqs or pool.seqs[low].begun:
                return
            pool.add(12, 1, priority=1000)
            pool.step()
        raise AssertionError(f"it was not opened in {most + 20} steps, though {most} were promised")

    def test_nobody_waits_behind_a_load(self) -> None:
        pool = self.pool()
        slow = pool.add(8, 1, cached=4, stored=True)
        quick = pool.add(8, 1)
        assert slow is not None
        for _ in range(10):
            pool.step()
        assert quick not in pool.seqs
        assert slow in pool.seqs, "it was computed though its load is on the way"
        assert pool.seqs[slow].loading, "the load was never asked for"
        assert not pool.seqs[slow].begun, "it was computed though its load is on the way"
        pool.arrive(slow)
        pool.drain(20)

    def test_a_load_that_never_arrives_is_not_waited_for(self) -> None:
        pool = self.pool()
        seq = pool.add(8, 1, cached=4, stored=True)
        for _ in range(20):
            pool.step()
            pool.clock.advance(60.0)
        assert seq not in pool.seqs

    def test_preempted_sequences_come_back(self) -> None:
        pool = self.pool(num_blocks=12)
        for _ in range(6):
            pool.add(5, 15)
        pool.drain(400)

    def test_an_opening_that_comes_to_nothing_takes_nothing_from_those_that_run(self) -> None:
        """A store's blocks need room on the device too, which no scheduler can see beforehand."""
        for tokens in range(3, 12):
            pool = self.pool(max_step_tokens=3, num_blocks=6)
            pool.add(tokens, 1)
            pool.step()
            pool.add(11, 1, cached=8)
            pool.drain(100)

    def test_wake_at_is_the_deadline_of_one_that_waits(self) -> None:
        pool = self.pool()
        for _ in range(8):
            pool.add(4, 30)
        pool.step()
        deadline = pool.clock.now() + 5.0
        pool.add(4, 1, deadline=deadline)
        wake = pool.schedulers[0].wake_at()
        choice_without = pool.step()
        pool.clock.advance(6.0)
        choice = pool.step()
        assert not choice_without.shed
        if choice.shed:
            assert wake is not None, "what is shed at a deadline must be woken for"
            assert wake <= deadline, "what is shed at a deadline must be woken for in time"
