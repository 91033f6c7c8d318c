"""Prompt lookup: what followed the last tokens when they occurred before will follow again.

Source: prompt lookup decoding (A. Saxena, 2023), as in vLLM's and transformers' n-gram speculators. What changed: an
incremental index instead of a scan, the longest of several earlier matches instead of the first, drafts that run on
into themselves when the match overlaps the end, and confidences learned for each match length, so that the common
gate can decide. They are learned from drafts that the gate held back, too: once one was, only that can bring it back.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import takewhile
from operator import eq
from typing import NamedTuple

from deepinfra.core.drafts import Draft, DraftOutcome, TokenView
from deepinfra.core.ids import SeqId
from deepinfra.interfaces.speculator import Speculator

__all__ = ("INDEX_BUDGET", "Ngram")

INDEX_BUDGET = 2048
"""Tokens indexed in one call, over all sequences: about 0.5 ms; a long prompt is caught up with over several steps."""

_CANDIDATES = 16
"""Earlier occurrences compared, newest first."""

_PRIOR = 1.0
_FADE = 0.995
"""What was learned about a match length fades with each draft of it: one that is no longer verified gets a chance."""


class _Drafted(NamedTuple):
    """A sequence's last draft, after `match` equal tokens, for the positions from `at` on."""

    match: int
    at: int
    tokens: tuple[int, ...]


class _Index:
    """Where each run of `n` tokens of one sequence ended: the newest place, and for each place the one before it."""

    def __init__(self, n: int) -> None:
        self.n = n
        self.newest: dict[int, int] = {}
        self.before = array("q")
        self._mask = (1 << 32 * n) - 1
        self._key = 0

    def grow(self, tokens: Sequence[int], budget: int) -> int:
        """Index up to `budget` more tokens, never the last one (nothing follows it); returns how many."""
        start = len(self.before)
        stop = min(len(tokens) - 1, start + budget)
        key = self._key
        for end, token in enumerate(tokens[start:stop], start + 1):
            key = (key << 32 | token) & self._mask
            if end >= self.n:
                self.before.append(self.newest.get(key, 0))
                self.newest[key] = end
            else:
                self.before.append(0)
        self._key = key
        return max(0, stop - start)

    def places(self, tokens: Sequence[int]) -> list[int]:
        """Ends of earlier occurrences of the last `n` tokens, newest first."""
        key = 0
        for token in tokens[len(tokens) - self.n :]:
            key = key << 32 | token
        places: list[int] = []
        place = self.newest.get(key, 0)
        while place and len(places) < _CANDIDATES:
            places.append(place)
            place = self.before[place - 1]
        return places


class Ngram(Speculator):
    """Drafts from the sequence's own tokens; costs memory of about 150 bytes per token and no model.

    Args:
        max_drafts: Most drafts per sequence and step.
        min_match: Last tokens that must have occurred before, at least.
        max_match: Longer matches are not told apart.
    """

    def __init__(self, *, max_drafts: int = 4, min_match: int = 2, max_match: int = 6) -> None:
        self.max_drafts = max_drafts
        self._min, self._max = min_match, max_match
        self._indices: dict[SeqId, _Index] = {}
        self._drafted: dict[SeqId, _Drafted] = {}
        self._right = [0.0] * (max_match + 1)
        self._wrong = [0.0] * (max_match + 1)

    def confidence(self, match: int) -> float:
        """Learned probability that a draft after `match` equal tokens is right, given that those before it are."""
        right, wrong = self._right[match], self._wrong[match]
        return (right + _PRIOR) / (right + wrong + 2.0 * _PRIOR)

    def propose(self, views: Sequence[TokenView]) -> Sequence[Draft]:
        """See `Speculator.propose`; sequences whose last tokens are new are left out."""
        budget = INDEX_BUDGET
        drafts: list[Draft] = []
        for view in views:
            self._look_back(view)
            index = self._indices.get(view.seq)
            if index is None:
                index = self._indices[view.seq] = _Index(self._min)
            budget -= index.grow(view.tokens, budget)
            draft = self._draft(index, view)
            if draft is not None:
                drafts.append(draft)
        return drafts

    def _draft(self, index: _Index, view: TokenView) -> Draft | None:
        count = min(view.limit, self.max_drafts)
        tokens = view.tokens
        if count <= 0 or len(tokens) <= self._min:
            return None
        best, place = 0, 0
        for end in index.places(tokens):
            match = self._match(tokens, end)
            if match > best:
                best, place = match, end
                if match == self._max:
                    break
        if not best:
            return None
        drafts: list[int] = []
        for position in range(place, place + count):
            # A match that overlaps the end repeats itself: what follows is then a draft.
            drafts.append(tokens[position] if position < len(tokens) else drafts[position - len(tokens)])
        self._drafted[view.seq] = _Drafted(best, len(tokens), tuple(drafts))
        self._right[best] *= _FADE
        self._wrong[best] *= _FADE
        return Draft(view.seq, tuple(drafts), (self.confidence(best),) * count)

    def _look_back(self, view: TokenView) -> None:
        """Learn from a draft that nobody verified: what came in its place is known by now."""
        drafted = self._drafted.pop(view.seq, None)
        if drafted is not None:
            came = view.tokens[drafted.at : drafted.at + len(drafted.tokens)]
            right = sum(1 for _ in takewhile(bool, map(eq, came, drafted.tokens)))
            self._learn(drafted.match, len(came), right)

    def _learn(self, match: int, verified: int, accepted: int) -> None:
        self._right[match] += accepted
        self._wrong[match] += accepted < verified

    def _match(self, tokens: Sequence[int], end: int) -> int:
        """How many tokens before `end` equal the last ones; `min_match` are known to."""
        match, last = self._min, len(tokens)
        while match < self._max and match < end and tokens[end - 1 - match] == tokens[last - 1 - match]:
            match += 1
        return match

    def observe(self, outcomes: Sequence[DraftOutcome]) -> None:
        """See `Speculator.observe`."""
        for outcome in outcomes:
            if outcome.verified and (drafted := self._drafted.pop(outcome.seq, None)) is not None:
                self._learn(drafted.match, outcome.verified, outcome.accepted)

    def forget(self, seq: SeqId) -> None:
        """See `Speculator.forget`."""
        self._indices.pop(seq, None)
        self._drafted.pop(seq, None)
