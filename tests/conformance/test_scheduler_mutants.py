"""Each law of the scheduler kit can fail: a scheduler that breaks it is caught by the test named beside it."""

from collections.abc import Callable

import pytest
from hypothesis import Phase, settings

from deepinfra.core.step import Choice, Grant, SchedulerStats, StepReport, StepView
from deepinfra.interfaces.scheduler import Scheduler
from deepinfra.schedulers import Bucketed, Fcfs
from deepinfra.schedulers.grants import Grants
from deepinfra.testing.scheduler import SchedulerConformance

LIFE = "test_keeps_its_laws_in_any_life"


class Forgetful(Fcfs):
    """Plans sequences that are over."""

    def finish(self, seq):
        pass


class Moody(Fcfs):
    """Answers depend on how many of its kind there are."""

    born = 0

    def __init__(self):
        super().__init__()
        Moody.born += 1
        self._odd = Moody.born % 2

    def plan(self, view: StepView) -> Choice:
        choice = super().plan(view)
        return choice._replace(run=choice.run[::-1]) if self._odd else choice


class PromptsFirst(Fcfs):
    """Decodes only when no prompt is left."""

    def plan(self, view: StepView) -> Choice:
        choice = super().plan(view)
        decoding = {row.seq for row in view.running if row.todo == 1}
        prompts = tuple(grant for grant in choice.run if grant.seq not in decoding)
        return choice._replace(run=prompts or choice.run)


class AlwaysTheFirst(Fcfs):
    """Of several decoding sequences serves the same one each time."""

    def plan(self, view: StepView) -> Choice:
        choice = super().plan(view)
        rest = {row.seq for row in view.running if row.todo == 1}
        rest.discard(min(rest, default=None))
        return choice._replace(run=tuple(grant for grant in choice.run if grant.seq not in rest))


class AllOrNothing(Fcfs):
    """Computes no prompt in chunks."""

    def plan(self, view: StepView) -> Choice:
        choice = super().plan(view)
        known = self._queue.entries
        whole = [g for g in choice.run if known[g.seq].running or g.max_tokens >= known[g.seq].uncached]
        return choice._replace(run=tuple(whole))


class ShortestFirst(Fcfs):
    """Opens short prompts first, for ever."""

    def plan(self, view: StepView) -> Choice:
        grants = Grants(view)
        for row in view.running:
            grants.give(row.seq, row.todo)
        for entry in sorted(self._queue.lines[0], key=lambda entry: entry.uncached):
            if grants.seats and -(-entry.uncached // view.block_size) < view.free_blocks // 2:
                grants.give(entry.job.seq, entry.uncached)
        return Choice(grants.take(), tuple(row.seq for row in view.running)[::-1])


class NoAging(Bucketed):
    """Strict priorities."""

    def __init__(self):
        super().__init__(edges=(), aging_steps=10**9)


class Unbounded(Bucketed):
    """Promises a bound that it does not keep."""

    def __init__(self):
        super().__init__(edges=(4, 8, 16), max_overtakes=10**9)

    def stats(self) -> SchedulerStats:
        return super().stats()._replace(max_overtakes=1)


class Impatient(Bucketed):
    """Promises that one which has waited so long comes next, and does not keep it."""

    def __init__(self):
        super().__init__(edges=(4, 8, 16), aging_steps=10**6, max_overtakes=10**6)

    def stats(self) -> SchedulerStats:
        return super().stats()._replace(max_wait_steps=30)


class RepeatsAnything(Fcfs):
    """Says that it would choose the same again though it would not."""

    def plan(self, view: StepView) -> Choice:
        return super().plan(view)._replace(repeat=2)


class RepeatsRotations(Fcfs):
    """Says so when more decode than the step has room for."""

    def plan(self, view: StepView) -> Choice:
        steady = all(row.todo == 1 and not row.drafts for row in view.running)
        return super().plan(view)._replace(repeat=2 if steady else 1)


class WaitsForLoads(Fcfs):
    """Lets everything behind a load wait."""

    def plan(self, view: StepView) -> Choice:
        choice = super().plan(view)
        busy = view.loading | view.fetchable
        return choice._replace(run=tuple(g for g in choice.run if not busy or g.seq < min(busy)))


class IgnoresLoads(Fcfs):
    """Computes what is being loaded."""

    def plan(self, view: StepView) -> Choice:
        return super().plan(view._replace(loading=frozenset()))


class WaitsForEver(Fcfs):
    """Leaves a sequence alone until its load arrives, if ever."""

    def plan(self, view: StepView) -> Choice:
        choice = super().plan(view)
        return choice._replace(run=tuple(g for g in choice.run if g.seq not in view.loading))


class LosesPreempted(Fcfs):
    """Does not notice who lost its blocks."""

    def commit(self, report: StepReport) -> None:
        super().commit(report._replace(preempted=()))


class TrustsItself(Fcfs):
    """Takes every grant to be honoured: what it once opened it never opens again."""

    def plan(self, view: StepView) -> Choice:
        choice = super().plan(view)
        asked = self.__dict__.setdefault("asked", set())
        running = {row.seq for row in view.running}
        run = tuple(g for g in choice.run if g.seq in running or g.seq not in asked)
        asked.update(g.seq for g in run)
        return choice._replace(run=run)


class NeverLearns(Fcfs):
    """Gives the step's tokens to the same opening again, and not to those that run, after it came to nothing."""

    def plan(self, view: StepView) -> Choice:
        choice = super().plan(view)
        for entry in self._queue.lines[0][:1]:
            if entry.uncached // view.block_size < view.free_blocks:
                return choice._replace(run=(Grant(entry.job.seq, entry.uncached),), repeat=1)
        return choice


class ShedsTheUnhurried(Fcfs):
    """Ends sequences that could wait."""

    def plan(self, view: StepView) -> Choice:
        choice = super().plan(view)
        waiting = [entry.job.seq for entry in self._queue.lines[0]]
        return choice._replace(shed=tuple(waiting[8:]))


class PreemptsAnyone(Fcfs):
    """Names sequences that hold nothing."""

    def plan(self, view: StepView) -> Choice:
        return super().plan(view)._replace(preempt=tuple(self._queue.entries))


class FetchesAnything(Fcfs):
    """Asks for loads of what has none."""

    def plan(self, view: StepView) -> Choice:
        return super().plan(view)._replace(fetch=tuple(self._queue.entries))


class GrantsTwice(Fcfs):
    """Names a sequence twice."""

    def plan(self, view: StepView) -> Choice:
        choice = super().plan(view)
        return choice._replace(run=choice.run * 2)


class SleepsThroughDeadlines(Fcfs):
    """Sheds at deadlines, but does not ask to be woken."""

    def wake_at(self) -> float | None:
        return None


@pytest.mark.parametrize(
    ("mutant", "law"),
    [
        (Forgetful, "test_finish_is_idempotent_and_takes_unknown_sequences"),
        (Forgetful, LIFE),
        (Moody, LIFE),
        (PromptsFirst, "test_streams_keep_flowing_while_a_giant_is_computed"),
        (PromptsFirst, LIFE),
        (AlwaysTheFirst, LIFE),
        (AllOrNothing, "test_a_long_prompt_is_computed_in_chunks"),
        (ShortestFirst, "test_a_giant_gets_through_while_short_ones_keep_coming"),
        (NoAging, "test_a_low_priority_gets_through_while_high_ones_keep_coming"),
        (Unbounded, LIFE),
        (Impatient, "test_one_that_waited_long_enough_is_opened_before_all_that_came_later"),
        (RepeatsAnything, LIFE),
        (RepeatsRotations, LIFE),
        (WaitsForLoads, "test_nobody_waits_behind_a_load"),
        (IgnoresLoads, "test_nobody_waits_behind_a_load"),
        (WaitsForEver, "test_a_load_that_never_arrives_is_not_waited_for"),
        (LosesPreempted, "test_preempted_sequences_come_back"),
        (LosesPreempted, LIFE),
        (TrustsItself, LIFE),
        (NeverLearns, "test_an_opening_that_comes_to_nothing_takes_nothing_from_those_that_run"),
        (ShedsTheUnhurried, LIFE),
        (PreemptsAnyone, LIFE),
        (FetchesAnything, LIFE),
        (GrantsTwice, LIFE),
        (SleepsThroughDeadlines, "test_wake_at_is_the_deadline_of_one_that_waits"),
    ],
)
def test_a_mutant_is_caught(mutant: Callable[[], Scheduler], law: str) -> None:
    class Kit(SchedulerConformance):
        life = settings(SchedulerConformance.life, max_examples=400, phases=[Phase.generate], derandomize=True)

        def make(self) -> Scheduler:
            return mutant()

    with pytest.raises((AssertionError, ExceptionGroup)):
        getattr(Kit(), law)()
