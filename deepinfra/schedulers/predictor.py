"""Predicts how long a step takes from what is in it, learned from the steps that ran.

    seconds = t0 + a * chunk tokens + b * chunk tokens * their context + c * decode tokens + d * decode context

All five figures are non-negative, so more work never looks cheaper. They minimise the relative error (a step of 5 ms
counts as much as one of 500 ms, and a step that took ten times too long for some other reason counts little), with
older steps fading. Until `READY` steps have been seen the predictor says that it knows nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import sqrt
from typing import NamedTuple

from deepinfra.core.step import DoneRow, StepReport

__all__ = ("READY", "StepCost", "StepPredictor", "StepWork")

READY = 8
"""Steps to see before predicting; fewer than about twice the number of coefficients say nothing."""

FADE = 0.985
"""Weight that a step keeps per later step: half after about 45 steps, so that a slower machine is noticed."""

SWEEPS = 3
"""Rounds of coordinate descent per step; warm-started, so that more changes nothing measurable."""


class StepWork(NamedTuple):
    """What is in a step: tokens of prompt chunks and of decoding rows, and how much context each kind reads.

    `chunk_reads` sums, over chunk tokens, the positions before each; `decode_reads` sums contexts of decoding tokens.
    """

    chunk_tokens: int = 0
    chunk_reads: float = 0.0
    decode_tokens: int = 0
    decode_reads: float = 0.0

    def chunk(self, start: int, length: int) -> StepWork:
        """With a chunk more."""
        reads = self.chunk_reads + length * (start + 0.5 * length)
        return self._replace(chunk_tokens=self.chunk_tokens + length, chunk_reads=reads)

    def decode(self, context: int, tokens: int) -> StepWork:
        """With a decoding row more, drafts counted in `tokens`."""
        return self._replace(
            decode_tokens=self.decode_tokens + tokens, decode_reads=self.decode_reads + context * tokens
        )

    @classmethod
    def of(cls, rows: Iterable[DoneRow]) -> StepWork:
        """What the rows of a report did."""
        work = cls()
        for row in rows:
            if row.length - row.drafts > 1:
                work = work.chunk(row.start, row.length)
            else:
                work = work.decode(row.start, row.length)
        return work


class StepCost(NamedTuple):
    """The coefficients: seconds per step, chunk token, chunk read, decode token and decode read."""

    step: float = 0.0
    chunk_token: float = 0.0
    chunk_read: float = 0.0
    decode_token: float = 0.0
    decode_read: float = 0.0

    def seconds(self, work: StepWork) -> float:
        """Predicted seconds of a step."""
        return (
            self.step
            + self.chunk_token * work.chunk_tokens
            + self.chunk_read * work.chunk_reads
            + self.decode_token * work.decode_tokens
            + self.decode_read * work.decode_reads
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


_UNLIMITED = 1 << 40

# Features are divided by these before fitting, so that coefficients are of one magnitude (seconds per typical step).
_SCALE = (1.0, 512.0, 512.0 * 2048.0, 32.0, 32.0 * 2048.0)
_SIZE = len(_SCALE)
# Chunk and decode tokens are fitted before the constant: what one kind of step cannot tell apart is charged per token.
_SWEEP_ORDER = (1, 3, 2, 4, 0)


class StepPredictor:
    """Fits a `StepCost` online; the same reports give the same figures."""

    def __init__(self) -> None:
        self._gram = [[0.0] * _SIZE for _ in range(_SIZE)]
        self._target = [0.0] * _SIZE
        self._weights = [0.0] * _SIZE
        self._seen = 0
        self._cost = StepCost()
        self.error = 0.0

    @property
    def cost(self) -> StepCost | None:
        """The figures, or `None` while too few steps have been seen."""
        return self._cost if self._seen >= READY else None

    def observe(self, report: StepReport) -> None:
        """Learn from a step; steps without rows or without a measured time are left out."""
        if not report.rows or report.seconds <= 0.0:
            return
        work = StepWork.of(report.rows)
        if self._seen >= READY:
            relative = abs(self._cost.seconds(work) - report.seconds) / report.seconds
            self.error += 0.05 * (min(relative, 1.0) - self.error)
        self._seen += 1
        values = (1.0, work.chunk_tokens, work.chunk_reads, work.decode_tokens, work.decode_reads)
        features = [value / scale / report.seconds for value, scale in zip(values, _SCALE, strict=True)]
        for i, left in enumerate(features):
            row = self._gram[i]
            for j, right in enumerate(features):
                row[j] = FADE * row[j] + left * right
            self._target[i] = FADE * self._target[i] + left
        self._fit()

    def _fit(self) -> None:
        """Coordinate descent for non-negative least squares, from the last solution."""
        weights = self._weights
        for _ in range(SWEEPS):
            for i in _SWEEP_ORDER:
                row = self._gram[i]
                if row[i] <= 0.0:
                    continue
                rest = sum(row[j] * weights[j] for j in range(_SIZE)) - row[i] * weights[i]
                weights[i] = max(0.0, (self._target[i] - rest) / row[i])
        self._cost = StepCost(*(weight / scale for weight, scale in zip(weights, _SCALE, strict=True)))
