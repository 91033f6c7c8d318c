"""Each law of the speculator kit can fail."""

from collections.abc import Callable

import pytest
from hypothesis import Phase, settings

from deepinfra.core.drafts import Allotment, TokenView
from deepinfra.interfaces.speculator import Speculator
from deepinfra.speculators import Ngram
from deepinfra.testing.speculator import SpeculatorConformance
from deepinfra.testing.speculators import Hostile

LIMITS = "test_drafts_are_within_their_limits"


class IgnoresLimits(Ngram):
    def propose(self, views):
        return super().propose([view._replace(limit=9) for view in views])


class TooSure(Ngram):
    def propose(self, views):
        return [draft._replace(confidences=(1.5,) * len(draft.tokens)) for draft in super().propose(views)]


class LosesConfidences(Ngram):
    def propose(self, views):
        return [draft._replace(confidences=draft.confidences[1:]) for draft in super().propose(views)]


class DraftsForOthers(Ngram):
    def propose(self, views):
        return [draft._replace(seq=draft.seq + 1) for draft in super().propose(views)]


class WritesIntoViews(Ngram):
    def propose(self, views):
        drafts = super().propose(views)
        for view in views:
            view.tokens.append(0)
        return drafts


class NeverForgets(Ngram):
    def forget(self, seq):
        pass


class ForgetsOnce(Ngram):
    def forget(self, seq):
        del self._indices[seq]


class Moody(Ngram):
    born = 0

    def __init__(self):
        Moody.born += 1
        super().__init__(max_drafts=1 + Moody.born % 2, min_match=1)


class SurprisedByOutcomes(Ngram):
    def observe(self, outcomes):
        for outcome in outcomes:
            self._drafted.pop(outcome.seq)


class AllotsTooMuch(Ngram):
    def allot(self, rows, curve):
        return Allotment(tuple(1 for _ in rows))


class DraftsForNobody(Ngram):
    def propose(self, views):
        return super().propose(views) if views else super().propose([TokenView(0, [1, 1, 1, 1], 1)])


@pytest.mark.parametrize(
    ("mutant", "law"),
    [
        (Hostile, LIMITS),
        (IgnoresLimits, LIMITS),
        (IgnoresLimits, "test_a_limit_of_nothing_gets_no_drafts"),
        (TooSure, LIMITS),
        (LosesConfidences, LIMITS),
        (DraftsForOthers, LIMITS),
        (WritesIntoViews, LIMITS),
        (Moody, "test_equal_calls_give_equal_drafts"),
        (NeverForgets, "test_a_forgotten_sequence_leaves_nothing_behind"),
        (ForgetsOnce, "test_forget_takes_unknown_sequences_and_repeats"),
        (SurprisedByOutcomes, "test_outcomes_of_unknown_sequences_are_taken"),
        (AllotsTooMuch, "test_allotments_are_prefixes_of_the_rows"),
        (DraftsForNobody, "test_nothing_is_proposed_for_nobody"),
    ],
)
def test_a_mutant_is_caught(mutant: Callable[[], Speculator], law: str) -> None:
    class Kit(SpeculatorConformance):
        trials = settings(SpeculatorConformance.trials, phases=[Phase.generate], derandomize=True)

        def make(self) -> Speculator:
            return mutant()

    with pytest.raises((AssertionError, LookupError, ExceptionGroup)):
        getattr(Kit(), law)()
