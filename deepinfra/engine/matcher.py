"""Where an answer stands in its constraint, and the masks of a step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from deepinfra.core.ids import SeqId
from deepinfra.core.step import MaskRows

if TYPE_CHECKING:
    from llguidance import LLMatcher

__all__ = ("MaskWork", "Matcher", "masks_of")

MaskWork = tuple[SeqId, "Matcher", tuple[int, ...]]
"""A sequence that samples under a constraint, and the drafts that its step verifies."""


class Matcher:
    """One answer's way through its constraint; used by one caller at a time.

    Args:
        library: The library's matcher, at the beginning; owned from here on.
        vocab_size: Of the tokenizer; ids above it are padding and never allowed.
        stop_ids: Ids that end this answer: allowed where the constraint may end.
    """

    __slots__ = ("_library", "_stop_ids", "_stuck", "_taken", "_vocab_size")

    def __init__(self, library: LLMatcher, vocab_size: int, stop_ids: frozenset[int]) -> None:
        self._library, self._vocab_size, self._stop_ids = library, vocab_size, stop_ids
        self._taken = 0
        self._stuck: dict[int, str] = {}

    @property
    def complete(self) -> bool:
        """Whether nothing but the end can follow."""
        return bool(self._library.is_stopped()) and not self._library.is_error()

    @property
    def why_stuck(self) -> str | None:
        """Why no token can follow, if none can, and empty if the constraint is met; known once a mask was computed."""
        return self._stuck.get(self._taken)

    def take(self, token: int) -> bool:
        """Go on by a token that is kept; false if the constraint does not allow it."""
        if token >= self._vocab_size or self._library.try_consume_tokens([token]) != 1:
            return False
        self._taken += 1
        return True

    def admits(self, tokens: Sequence[int]) -> int:
        """How many leading tokens the constraint allows from here; nothing changes."""
        inside = next((index for index, token in enumerate(tokens) if token >= self._vocab_size), len(tokens))
        return self._library.validate_tokens(list(tokens[:inside])) if inside else 0

    def rows(self, drafts: Sequence[int], nbytes: int) -> list[bytes]:
        """One mask for the next token and one behind each draft, of `nbytes` bytes each; nothing changes.

        Where no token is allowed the mask allows all, because a step must sample something; `why_stuck` then tells,
        before the token is taken, that it counts for nothing.
        """
        self._stuck.clear()  # what was known ahead of other drafts does not hold any more
        rows = [self._row(0, nbytes)]
        taken = 0
        for draft in drafts:
            if self._library.try_consume_tokens([draft]) != 1:
                break
            taken += 1
            rows.append(self._row(taken, nbytes))
        if taken:
            self._library.rollback(taken)
        # Behind a draft that is not allowed nothing is ever kept.
        return rows + rows[-1:] * (len(drafts) - taken)

    def _row(self, ahead: int, nbytes: int) -> bytes:
        row = bytearray(nbytes)
        if not self._library.is_error():
            bits = self._library.compute_bitmask()
            row[: len(bits)] = bits[:nbytes]
            end = self._vocab_size >> 3  # the library's own end token stands behind the vocabulary
            if end < nbytes:
                row[end] &= ~(1 << (self._vocab_size & 7))
            if self._library.is_accepting():
                for token in self._stop_ids:
                    if token >> 3 < nbytes:
                        row[token >> 3] |= 1 << (token & 7)
        if self._library.is_error():
            self._stuck[self._taken + ahead] = _first_line(self._library.get_error())
        elif row.count(0) == nbytes:
            self._stuck[self._taken + ahead] = "" if self._library.is_accepting() else "no token is allowed"
        else:
            return bytes(row)
        return b"\xff" * nbytes


def masks_of(work: Sequence[MaskWork], vocab_size: int) -> MaskRows:
    """The masks of a step, for an executor with `vocab_size` ids; takes about 0.1 ms a row, at most a few."""
    nbytes = -(-vocab_size // 8)
    rows = [matcher.rows(drafts, nbytes) for _, matcher, drafts in work]
    return MaskRows(
        seqs=tuple(seq for seq, _, _ in work),
        rows_per_seq=tuple(map(len, rows)),
        bits=b"".join(row for each in rows for row in each),
    )


def _first_line(text: str) -> str:
    return (text.strip().splitlines() or ["it does not say why"])[0][:200]
