"""What is in a step, and what it costs: the figures that a predictor learns, a planner assumes, a simulation obeys."""

from __future__ import annotations

from collections.abc import Iterable
from math import sqrt
from typing import NamedTuple

from deepinfra.core.step import DoneRow

__all__ = ("Sample", "StepCost", "StepWork")

_UNLIMITED = 1 << 40


class StepWork(NamedTuple):
    """What is in a step: tokens of prompt chunks, sequences that decode, how much context each kind reads, and drafts.

    `chunk_reads` sums, over chunk tokens, the positions before each; `decode_reads` sums contexts of decoding
    sequences, whose drafts read what their sequence reads anyway.
    """

    chunk_tokens: int = 0
    chunk_reads: float = 0.0
    decode_rows: int = 0
    decode_reads: float = 0.0
    drafts: int = 0

    def chunk(self, start: int, length: int) -> StepWork:
        """With a chunk more."""
        reads = self.chunk_reads + length * (start + 0.5 * length)
        return self._replace(chunk_tokens=self.chunk_tokens + length, chunk_reads=reads)

    def decode(self, context: int, tokens: int) -> StepWork:
        """With a decoding sequence more; `tokens` are its one and the drafts behind it."""
        return self._replace(
            decode_rows=self.decode_rows + 1,
            decode_reads=self.decode_reads + context,
            drafts=self.drafts + tokens - 1,
        )

    @classmethod
    def of(cls, rows: Iterable[DoneRow]) -> StepWork:
        """What the rows of a report did."""
        chunk_tokens = decode_rows = drafts = 0
        chunk_reads = decode_reads = 0.0
        for row in rows:
            start, length = row.start, row.length
            if length - row.drafts > 1:
                chunk_tokens += length
                chunk_reads += length * (start + 0.5 * length)
            else:
                decode_rows += 1
                decode_reads += start
                drafts += length - 1
        return cls(chunk_tokens, chunk_reads, decode_rows, decode_reads, drafts)


class Sample(NamedTuple):
    """A step that ran: what was in it and how long it took."""

    work: StepWork
    seconds: float


class StepCost(NamedTuple):
    """The figures: seconds per step, chunk token, chunk read, decoding sequence, its context's token, and draft."""

    step: float = 0.0
    chunk_token: float = 0.0
    chunk_read: float = 0.0
    decode_row: float = 0.0
    decode_read: float = 0.0
    draft: float = 0.0

    def seconds(self, work: StepWork) -> float:
        """Predicted seconds of a step."""
        return (
            self.step
            + self.chunk_token * work.chunk_tokens
            + self.chunk_read * work.chunk_reads
            + self.decode_row * work.decode_rows
            + self.decode_read * work.decode_reads
            + self.draft * work.drafts
        )

    def tokens_within(self, seconds: float, start: int) -> int:
        """Longest chunk from position `start` that adds at most `seconds` to a step."""
        if seconds <= 0.0:
            return 0
        linear = self.chunk_token + self.chunk_read * start
        square = 0.5 * self.chunk_read
        if square * seconds <= 1e-6 * linear * linear:  # the usual root would cancel digits
            return _UNLIMITED if linear <= 0.0 else min(_UNLIMITED, int(seconds / linear))
        return min(_UNLIMITED, int((sqrt(linear * linear + 4.0 * square * seconds) - linear) / (2.0 * square)))
