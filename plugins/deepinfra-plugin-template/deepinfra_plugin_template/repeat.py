"""A speculator that expects what came last time after the same token."""

from __future__ import annotations

from collections.abc import Sequence

from deepinfra.core.drafts import Draft, TokenView
from deepinfra.interfaces import Speculator

__all__ = ("Repeat",)

_WINDOW = 256
"""How far to look back: a linear scan of this many tokens takes about 5 µs."""


class Repeat(Speculator):
    """Guesses the tokens that followed the last earlier occurrence of the newest token.

    Args:
        max_drafts: Most tokens to guess at once.
    """

    def __init__(self, max_drafts: int = 3) -> None:
        self.max_drafts = max_drafts

    def propose(self, views: Sequence[TokenView]) -> Sequence[Draft]:
        """See `Speculator.propose`; sequences without an earlier occurrence are left out."""
        return [draft for view in views if (draft := self._guess(view)) is not None]

    def _guess(self, view: TokenView) -> Draft | None:
        recent = list(view.tokens[-_WINDOW:])
        newest = recent.pop()
        if newest not in recent:
            return None
        behind = len(recent) - recent[::-1].index(newest)
        guess = tuple([*recent, newest][behind : behind + min(view.limit, self.max_drafts)])
        return Draft(view.seq, guess, (0.5,) * len(guess))
