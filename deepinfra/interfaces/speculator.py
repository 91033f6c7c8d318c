"""Speculator: guesses tokens and says how sure it is. Changes speed, never the text."""

from __future__ import annotations

from collections.abc import Sequence

from deepinfra.core import drafts
from deepinfra.core.drafts import Allotment, CostCurve, Draft, DraftOutcome, RowConfidence, TokenView
from deepinfra.core.ids import SeqId
from deepinfra.interfaces.component import Component

__all__ = ("Speculator",)


class Speculator(Component):
    """Synchronous; all calls come from the pool's task, between steps, so each must be quick (under 1 ms a call)."""

    max_drafts: int = 4
    """Most drafts per sequence and step."""

    head: str | None = None
    """Name of a draft head that the executor builds; then `propose` is not called."""

    def propose(self, views: Sequence[TokenView]) -> Sequence[Draft]:
        """Drafts for sequences that decode; sequences may be left out, none gets more than its `limit`."""
        return ()

    def allot(self, rows: Sequence[RowConfidence], curve: CostCurve) -> Allotment:
        """How many of each row's drafts to verify; default: most expected tokens per second."""
        return drafts.allot(rows, curve)

    def observe(self, outcomes: Sequence[DraftOutcome]) -> None:
        """Learn what was accepted."""

    def forget(self, seq: SeqId) -> None:
        """Free everything held for a sequence; unknown or repeated: no effect."""
