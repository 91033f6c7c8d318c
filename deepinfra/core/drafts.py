"""How many drafts to verify: the gate that every Speculator inherits.

Verifying B tokens for R sequences yields R plus the survival probabilities of the chosen drafts; it costs
`curve.seconds(B)`. Because a sequence's survivals never rise, the best choice for a fixed B is the globally largest
survivals, and these form prefixes. The size is the one with the most expected tokens per second.

Source: DSpark paper, confidence-scheduled verification (section 3.2.2). What changed: sizes are searched over all B
(the curve need not be smooth), ties prefer fewer tokens, and the same rows size and split, which is exact under
`matched` verification where the choice never changes the text.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

from deepinfra.core.ids import SeqId

__all__ = ("Allotment", "CostCurve", "Draft", "DraftOutcome", "RowConfidence", "TokenView", "allot")


class TokenView(NamedTuple):
    """A sequence that decodes: its tokens so far (append-only, never to be changed) and the most drafts it can use."""

    seq: SeqId
    tokens: Sequence[int]
    limit: int


class Draft(NamedTuple):
    """Guessed next tokens and, for each, the probability that it is right given that those before it are."""

    seq: SeqId
    tokens: tuple[int, ...]
    confidences: tuple[float, ...]


class RowConfidence(NamedTuple):
    """A sequence's conditional confidences, one per available draft."""

    seq: SeqId
    confidences: tuple[float, ...]


class Allotment(NamedTuple):
    """How many leading drafts of each sequence to verify, in the order of the rows given."""

    lengths: tuple[int, ...]


class DraftOutcome(NamedTuple):
    """What became of a draft: how many of the verified tokens were accepted."""

    seq: SeqId
    verified: int
    accepted: int


class CostCurve(NamedTuple):
    """Measured seconds (above 0) of a step by its number of tokens, ascending; piecewise linear, flat outside."""

    tokens: tuple[int, ...]
    times: tuple[float, ...]

    def seconds(self, tokens: int) -> float:
        """Predicted seconds of a step with that many tokens; 1.0 for every size if nothing is known."""
        if not self.tokens:
            return 1.0
        i = bisect_left(self.tokens, tokens)
        if i == 0:
            return self.times[0]
        if i == len(self.tokens):
            return self.times[-1]
        x0, x1, y0, y1 = self.tokens[i - 1], self.tokens[i], self.times[i - 1], self.times[i]
        return y0 + (y1 - y0) * (tokens - x0) / (x1 - x0)


def allot(rows: Sequence[RowConfidence], curve: CostCurve) -> Allotment:
    """Choose how many drafts of each row to verify.

    With an empty curve every draft whose survival is positive is verified.

    Args:
        rows: Sequences with their drafts' confidences in [0, 1].
        curve: Step seconds by number of tokens (`len(rows)` plus verified drafts).
    """
    survivals: list[tuple[float, int, int]] = []
    for index, row in enumerate(rows):
        survival = 1.0
        for depth, confidence in enumerate(row.confidences):
            survival *= min(1.0, max(0.0, confidence))
            if survival <= 0.0:
                break
            survivals.append((-survival, depth, index))
    survivals.sort()
    base = len(rows)
    best, best_rate, expected = 0, base / curve.seconds(base), float(base)
    for count, (negative, _, _) in enumerate(survivals, 1):
        expected -= negative
        rate = expected / curve.seconds(base + count)
        if rate > best_rate:
            best, best_rate = count, rate
    lengths = [0] * base
    for _, _, index in survivals[:best]:
        lengths[index] += 1
    return Allotment(tuple(lengths))
