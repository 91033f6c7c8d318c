"""Speculators for tests of whole engines: one that is right as often as told, one that proposes anything."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from deepinfra.core.drafts import Draft, TokenView
from deepinfra.core.ids import SeqId
from deepinfra.core.sampling import Purpose, uniform
from deepinfra.interfaces.speculator import Speculator

__all__ = ("Hostile", "Oracle")


class Oracle(Speculator):
    """Drafts the true next token with probability `p`, else another one; its confidences say `p`.

    Args:
        truth: The target's next token for a whole prefix; greedy, or with its draws folded in.
        p: Probability that a draft is right, given that those before it are.
        seed: Of the misses; whether a draft misses depends on it, the sequence and the position alone.
        max_drafts: Most drafts per sequence and step.
    """

    def __init__(
        self, truth: Callable[[Sequence[int]], int], p: float = 1.0, seed: int = 0, *, max_drafts: int = 4
    ) -> None:
        self.max_drafts = max_drafts
        self._truth, self._p, self._seed = truth, p, seed

    def propose(self, views: Sequence[TokenView]) -> Sequence[Draft]:
        """Up to `max_drafts` tokens for every view."""
        return [self._draft(view) for view in views]

    def _draft(self, view: TokenView) -> Draft:
        line = list(view.tokens)
        count = max(0, min(view.limit, self.max_drafts))
        for _ in range(count):
            token = self._truth(line)
            hit = uniform(self._seed, view.seq, len(line), Purpose.ACCEPT) < self._p
            line.append(token if hit else token - 1 if token else 1)
        drafts = tuple(line[len(line) - count :]) if count else ()
        return Draft(view.seq, drafts, (self._p,) * count)


class Hostile(Speculator):
    """Breaks every promise of `propose` but its types: an engine must serve the same text with it.

    It proposes more than the limit, ids outside the vocabulary, confidences outside [0, 1] or too few of them,
    the same sequence twice, sequences it was not asked for, and sometimes nothing.

    Args:
        seed: The same calls give the same garbage.
        vocab_size: Most proposals stay below it, so that some are even verified.
        max_drafts: What it claims to propose at most.
    """

    def __init__(self, seed: int = 0, *, vocab_size: int = 256, max_drafts: int = 4) -> None:
        self.max_drafts = max_drafts
        self._vocab_size = vocab_size
        self._random = random.Random(seed)

    def propose(self, views: Sequence[TokenView]) -> Sequence[Draft]:
        """Anything."""
        draw = self._random
        drafts = [self._garbage(view) for view in views if draw.random() < 0.9]
        if drafts and draw.random() < 0.1:
            drafts.append(draw.choice(drafts))
        if drafts and draw.random() < 0.1:
            drafts.append(drafts[0]._replace(seq=SeqId(1 << 40)))
        draw.shuffle(drafts)
        return drafts

    def _garbage(self, view: TokenView) -> Draft:
        draw = self._random
        count = draw.choice((0, 1, view.limit, view.limit + 1, 3 * view.limit + 7))
        echo = tuple(view.tokens[-1:]) * count
        noise = tuple(draw.choice((draw.randrange(self._vocab_size),) * 8 + (-1, 1 << 31)) for _ in range(count))
        confidences = tuple(draw.choice((0.0, 0.5, 1.0, -3.0, 7.0)) for _ in range(max(0, count - draw.randrange(2))))
        return Draft(view.seq, draw.choice((echo, noise)), confidences)
