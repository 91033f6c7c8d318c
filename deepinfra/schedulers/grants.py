"""The grants of one step."""

from __future__ import annotations

from deepinfra.core.ids import SeqId
from deepinfra.core.step import Grant, RunRow, StepView
from deepinfra.schedulers.entry import Entry

__all__ = ("Grants", "give_decode")


class Grants:
    """The grants of one step, within its limits, in order of claim."""

    def __init__(self, view: StepView) -> None:
        self.tokens, self.seats = view.max_step_tokens, view.max_seqs
        self._given: dict[SeqId, int] = {}

    def give(self, seq: SeqId, tokens: int) -> int:
        """Grant up to `tokens` more to a sequence; returns how many there were room for."""
        if seq not in self._given and not self.seats:
            return 0
        tokens = min(tokens, self.tokens)
        if tokens > 0:
            self.seats -= seq not in self._given
            self.tokens -= tokens
            self._given[seq] = self._given.get(seq, 0) + tokens
        return tokens

    def of(self, seq: SeqId) -> int:
        """Tokens granted to a sequence so far."""
        return self._given.get(seq, 0)

    def take(self) -> tuple[Grant, ...]:
        """All grants."""
        return tuple(Grant(seq, tokens) for seq, tokens in self._given.items())


def give_decode(grants: Grants, rows: list[tuple[Entry, RunRow]], *, prefill_waits: bool) -> None:
    """Grant every sequence that decodes its token, then drafts from what is left.

    If they are more than the step has room for, those served longest ago come first. Drafts get at most half of the
    rest while a prefill waits: a draft may be wrong, a prompt token is not.
    """
    decoding = [(entry, row) for entry, row in rows if row.todo == 1]
    room = min(grants.tokens, grants.seats)
    if len(decoding) > room:
        chosen = sorted(decoding, key=lambda pair: (pair[0].served, pair[0].rank))[:room]
        decoding = sorted(chosen, key=lambda pair: pair[0].rank)
    for entry, _ in decoding:
        grants.give(entry.job.seq, 1)
    spare = grants.tokens // 2 if prefill_waits else grants.tokens
    for entry, row in decoding:
        spare -= grants.give(entry.job.seq, min(row.drafts, spare))
