"""Laws that every Speculator keeps.

Example::

    class TestMine(SpeculatorConformance):
        def make(self) -> Speculator:
            return Mine()
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfra.core.drafts import CostCurve, Draft, DraftOutcome, RowConfidence, TokenView
from deepinfra.core.ids import SeqId
from deepinfra.interfaces.speculator import Speculator

__all__ = ("SpeculatorConformance",)

_CURVES = (CostCurve((), ()), CostCurve((1, 8, 64), (1.0, 1.0, 9.0)), CostCurve((1,), (2.0,)))

_CALLS = st.lists(
    st.tuples(
        st.integers(0, 3),  # sequence
        st.lists(st.integers(0, 3), min_size=1, max_size=6),  # its new tokens
        st.integers(0, 6),  # limit
        st.integers(0, 6),  # how many of the drafts are accepted, at most
        st.booleans(),  # forgotten afterwards
    ),
    max_size=40,
)
_Call = tuple[int, list[int], int, int, bool]


class SpeculatorConformance(ABC):
    """Subclass it in a test module with a name that begins with `Test`.

    Attributes:
        trials: How many random cases each law is tried on.
    """

    trials: ClassVar[settings] = settings(deadline=None)

    @abstractmethod
    def make(self) -> Speculator:
        """A new speculator, always with the same settings."""

    def life(self, speculator: Speculator, calls: Sequence[_Call]) -> list[Sequence[Draft]]:
        """Sequences that grow, get drafts, have some accepted and are forgotten; checks every answer."""
        tokens: dict[int, list[int]] = {}
        answers: list[Sequence[Draft]] = []
        for number, grown, limit, accepted, forgotten in calls:
            tokens.setdefault(number, []).extend(grown)
            before = {seq: list(line) for seq, line in tokens.items()}
            views = [TokenView(SeqId(seq), line, limit) for seq, line in tokens.items()]
            drafts = speculator.propose(views)
            assert tokens == before, "propose changed a view's tokens"
            self.check(speculator, views, drafts)
            answers.append(drafts)
            speculator.observe([DraftOutcome(d.seq, len(d.tokens), min(accepted, len(d.tokens))) for d in drafts])
            for draft in drafts:
                tokens[draft.seq].extend(draft.tokens[:accepted])
            if forgotten:
                speculator.forget(SeqId(number))
                speculator.forget(SeqId(number))
                tokens.pop(number)
        return answers

    def check(self, speculator: Speculator, views: Sequence[TokenView], drafts: Sequence[Draft]) -> None:
        """One answer of `propose` against the views it was given."""
        limits = {view.seq: view.limit for view in views}
        assert len({draft.seq for draft in drafts}) == len(drafts), "a sequence has more than one draft"
        for draft in drafts:
            assert draft.seq in limits, f"sequence {draft.seq} was not asked for"
            most = min(limits[draft.seq], speculator.max_drafts)
            assert len(draft.tokens) <= most, f"{len(draft.tokens)} drafts where {most} are allowed"
            assert len(draft.confidences) == len(draft.tokens), "one confidence for each draft"
            assert all(0.0 <= confidence <= 1.0 for confidence in draft.confidences), "confidences are probabilities"
            assert all(token >= 0 for token in draft.tokens), "drafts are token ids"

    def test_drafts_are_within_their_limits(self) -> None:
        def law(calls: list[_Call]) -> None:
            self.life(self.make(), calls)

        self.trials(given(_CALLS)(law))()

    def test_equal_calls_give_equal_drafts(self) -> None:
        def law(calls: list[_Call]) -> None:
            assert self.life(self.make(), calls) == self.life(self.make(), calls)

        self.trials(given(_CALLS)(law))()

    def test_nothing_is_proposed_for_nobody(self) -> None:
        assert not self.make().propose([])

    def test_a_limit_of_nothing_gets_no_drafts(self) -> None:
        drafts = self.make().propose([TokenView(SeqId(1), [1, 2, 1, 2, 1, 2], 0)])
        assert not any(draft.tokens for draft in drafts)

    def test_forget_takes_unknown_sequences_and_repeats(self) -> None:
        speculator = self.make()
        speculator.forget(SeqId(7))
        speculator.propose([TokenView(SeqId(7), [1, 2, 1, 2], 2)])
        speculator.forget(SeqId(7))
        speculator.forget(SeqId(7))

    def test_a_forgotten_sequence_leaves_nothing_behind(self) -> None:
        """A new sequence of the same number is drafted as if nobody had had it before."""
        old = [TokenView(SeqId(1), [1, 2, 3, 1, 2, 3, 1, 2, 3], 4)]
        new = [TokenView(SeqId(1), [1, 2, 5, 6, 1, 2], 4)]
        fresh = self.make()
        used = self.make()
        used.propose(old)
        used.forget(SeqId(1))
        # Only tokens: what was learned about confidences may stay.
        expected = [(draft.seq, draft.tokens) for draft in fresh.propose(new)]
        assert [(draft.seq, draft.tokens) for draft in used.propose(new)] == expected

    def test_outcomes_of_unknown_sequences_are_taken(self) -> None:
        self.make().observe([DraftOutcome(SeqId(99), 3, 1), DraftOutcome(SeqId(99), 0, 0)])

    def test_allotments_are_prefixes_of_the_rows(self) -> None:
        def law(rows: list[list[float]], curve: CostCurve) -> None:
            confidences = [RowConfidence(SeqId(i), tuple(row)) for i, row in enumerate(rows)]
            lengths = self.make().allot(confidences, curve).lengths
            assert len(lengths) == len(rows), "one length for each row"
            assert all(0 <= length <= len(row) for length, row in zip(lengths, rows, strict=True)), "within its drafts"

        rows = st.lists(st.lists(st.floats(0.0, 1.0), max_size=6), max_size=8)
        self.trials(given(rows, st.sampled_from(_CURVES))(law))()
