"""The grants of one step."""

from __future__ import annotations

from collections.abc import Sequence

from deepinfra.core.cost import StepWork
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


def give_decode(grants: Grants, rows: Sequence[tuple[Entry, RunRow]], *, prefill_waits: bool, keep: int) -> StepWork:
    """Grant every sequence that decodes its token, then drafts from what is left; returns all that.

    If they are more than the step has room for, those served longest ago come first; `keep` tokens are left for a
    prompt under way. Drafts get at most half of the rest while one waits: a draft may be wrong, a prompt token is not.
    """
    decoding = [(entry, row) for entry, row in rows if row.todo == 1]
    room = min(grants.tokens - keep, grants.seats)
    if len(decoding) > room:
        chosen = sorted(decoding, key=lambda pair: (pair[0].served, pair[0].rank))[: max(0, room)]
        decoding = sorted(chosen, key=lambda pair: pair[0].rank)
    for entry, _ in decoding:
        grants.give(entry.job.seq, 1)
    spare = grants.tokens // 2 if prefill_waits else grants.tokens
    reads = drafts = 0
    for entry, row in decoding:
        reads += entry.tokens - 1
        if row.drafts:
            given = grants.give(entry.job.seq, min(row.drafts, spare))
            spare, drafts = spare - given, drafts + given
    return StepWork(decode_rows=len(decoding), decode_reads=reads, drafts=drafts)
