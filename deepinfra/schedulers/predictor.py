"""Predicts how long a step takes from what is in it, learned from the steps that ran.

    seconds = step + chunk tokens + chunk reads + decode rows + decode reads + verified drafts, each times its figure

All figures are non-negative, so more work never looks cheaper. They minimise the relative error: a step of 5 ms counts
as much as one of 500 ms, and a step that took ten times too long for some other reason counts little, unless most
lately did, for then the machine has changed. Steps are of kinds (prompts or not, decoding or not, drafts or not), and
older ones fade only as newer ones of their kind come: an hour of decoding does not wear away what prompts cost. Until
`READY` steps have been seen the predictor says that it knows nothing.

SmolLM2 in bfloat16 on one core, 171 mixed steps of 33 to 890 ms, half to fit and half to test: 4 % median error, 16 %
at p95 (7 % and 20 % with drafts counted as rows). Drafts with reads of their own, or a figure per chunk, changed
neither.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from math import sqrt
from operator import mul

from deepinfra.core.cost import Sample, StepCost, StepWork
from deepinfra.core.step import StepReport

__all__ = ("ASSUMED", "MEMORY", "READY", "RECENT", "StepPredictor", "percentile")

READY = 8
"""Steps to see before predicting; fewer than the number of coefficients say nothing."""

FADE = 0.97
"""Weight that a step keeps per later step of its kind: half after 23 of them, so that a slower machine is noticed."""

OUTLIER = 0.3
"""Relative error beyond which a step counts less, so that its pull on the figures stays what it is there.

Twice the median of the latest `SURPRISES` errors, if that is more.
"""

SURPRISES = 15
"""Latest errors that say whether the machine has changed: it has if their median, sign included, exceeds `OUTLIER`."""

RIGHT = 1e-3
"""Relative error within which a step teaches nothing: the figures say it already, and a fit takes time.

On a machine one step in fifty is predicted so well, in a simulation without noise nearly all are.
"""

FORGET = 0.8
"""Weight that all steps so far keep per step on a machine that has changed."""

SWEEPS = 3
"""Rounds of coordinate descent per step; warm-started, so that more changes nothing measurable."""

REFIT = 4
"""Steps per fit once there are `MEMORY`: a fit takes 70 us, which every step of 12 ms would feel."""

MEMORY = 64
"""Steps of each kind that are kept to be learned from again; what has faded more than these is not worth it."""

RECENT = 256
"""Predictions over which the error is told."""


ASSUMED = StepCost(step=0.03, chunk_token=1e-3, decode_row=2e-3)
"""A small model on two cores: what a machine is taken for of which nothing is known."""

# Features are divided by these before fitting, so that coefficients are of one magnitude (seconds per typical step).
_SCALE = (1.0, 512.0, 512.0 * 2048.0, 32.0, 32.0 * 2048.0, 32.0)
_SIZE = len(_SCALE)
# What rows cost is fitted before the constant: what one kind of step cannot tell apart is charged per token.
_SWEEP_ORDER = (1, 3, 5, 2, 4, 0)

_Kind = tuple[bool, bool, bool]


class _Evidence:
    """Normal equations of one kind of step, the newest weighing most, and its latest steps."""

    __slots__ = ("gram", "own", "samples", "target")

    def __init__(self, kind: _Kind) -> None:
        chunks, decodes, drafts = kind
        self.own = (0, *(1, 2) * chunks, *(3, 4) * decodes, *(5,) * drafts)  # features that such steps have
        self.gram = [[0.0] * _SIZE for _ in range(_SIZE)]
        self.target = [0.0] * _SIZE
        self.samples: deque[Sample] = deque(maxlen=MEMORY)

    def fade(self, share: float) -> None:
        """Let all that was added weigh less."""
        self.gram = [[share * value for value in row] for row in self.gram]
        self.target = [share * value for value in self.target]

    def add(self, sample: Sample, seconds: float, weight: float) -> None:
        """Add a step whose errors count relative to `seconds`."""
        work = sample.work
        values = (1.0, work.chunk_tokens, work.chunk_reads, work.decode_rows, work.decode_reads, work.drafts)
        target = weight * sample.seconds / seconds
        features = [(i, values[i] / _SCALE[i] / seconds) for i in self.own]
        for place, (i, left) in enumerate(features):
            row = self.gram[i]
            for j, right in features[place:]:
                row[j] = FADE * row[j] + weight * left * right
            self.target[i] = FADE * self.target[i] + target * left


class StepPredictor:
    """Fits a `StepCost` online; the same steps give the same figures."""

    def __init__(self) -> None:
        self._evidence: dict[_Kind, _Evidence] = {}
        self._weights = [0.0] * _SIZE
        self._seen = 0
        self._cost = StepCost()
        self._errors: deque[float] = deque(maxlen=RECENT)
        self._surprises: deque[float] = deque(maxlen=SURPRISES)
        self.learned = 0

    @property
    def cost(self) -> StepCost | None:
        """The figures, or `None` while too few steps have been seen."""
        return self._cost if self._seen >= READY else None

    @property
    def guess(self) -> StepCost:
        """The figures even after few steps, with what those had nothing of as `ASSUMED`."""
        if self._seen >= READY:
            return self._cost
        return StepCost(*(own or assumed for own, assumed in zip(self._cost, ASSUMED, strict=True)))

    @property
    def errors(self) -> tuple[float, ...]:
        """Relative errors of the latest predictions, each made before its step was learned from, oldest first."""
        return tuple(self._errors)

    @property
    def samples(self) -> Iterator[Sample]:
        """The latest steps of each kind, oldest first; what another predictor would have to `restore`."""
        for evidence in self._evidence.values():
            yield from evidence.samples

    def observe(self, report: StepReport) -> float | None:
        """Learn from a step; steps without rows or without a measured time are left out.

        Returns:
            The seconds that it was predicted to take, if that was known before.
        """
        if not report.rows or report.seconds <= 0.0:
            return None
        sample = Sample(StepWork.of(report.rows), report.seconds)
        predicted_s, known = self._cost.seconds(sample.work), self._seen >= READY
        if known:
            self._errors.append(abs(predicted_s - sample.seconds) / sample.seconds)
        self._learn(sample, predicted_s)
        self.learned += 1
        return predicted_s if known else None

    def restore(self, samples: Iterable[Sample]) -> None:
        """Learn from steps of an earlier life."""
        for sample in samples:
            self._learn(sample, self._cost.seconds(sample.work))

    def _learn(self, sample: Sample, predicted: float) -> None:
        work, seconds, weight = sample.work, sample.seconds, 1.0
        if self._seen >= READY and predicted > 0.0:
            # Between the two: relative to what was measured, a machine that became slower would be believed too late,
            # and relative to the prediction, one that became faster.
            seconds = sqrt(predicted * seconds)
            error = (sample.seconds - predicted) / seconds
            if abs(error) <= RIGHT:
                self._evidence_of(work).samples.append(sample)
                self._surprises.append(error)
                return
            usual = max(OUTLIER, 2.0 * percentile(map(abs, self._surprises), 0.5))
            weight = min(1.0, usual / abs(error)) if error else 1.0
            self._surprises.append(error)
            if abs(percentile(self._surprises, 0.5)) > OUTLIER and len(self._surprises) == SURPRISES:
                for evidence in self._evidence.values():
                    evidence.fade(FORGET)
        self._seen += 1
        evidence = self._evidence_of(work)
        evidence.samples.append(sample)
        evidence.add(sample, seconds, weight)
        if self._seen <= MEMORY or self._seen % REFIT == 0:
            self._fit()

    def _evidence_of(self, work: StepWork) -> _Evidence:
        kind = (work.chunk_tokens > 0, work.decode_rows > 0, work.drafts > 0)
        evidence = self._evidence.get(kind)
        if evidence is None:
            evidence = self._evidence[kind] = _Evidence(kind)
        return evidence

    def _fit(self) -> None:
        """Coordinate descent for non-negative least squares, from the last solution."""
        gram, target = [[0.0] * _SIZE for _ in range(_SIZE)], [0.0] * _SIZE
        for evidence in self._evidence.values():
            for place, i in enumerate(evidence.own):
                row, into = evidence.gram[i], gram[i]
                target[i] += evidence.target[i]
                for j in evidence.own[place:]:
                    into[j] += row[j]
        for i in range(_SIZE):
            for j in range(i):
                gram[i][j] = gram[j][i]
        weights = self._weights
        for _ in range(SWEEPS):
            for i in _SWEEP_ORDER:
                row = gram[i]
                if row[i] > 0.0:
                    rest = sum(map(mul, row, weights)) - row[i] * weights[i]
                    weights[i] = max(0.0, (target[i] - rest) / row[i])
        self._cost = StepCost(*(weight / scale for weight, scale in zip(weights, _SCALE, strict=True)))


def percentile(values: Iterable[float], share: float) -> float:
    """The smallest value that at least `share` of all do not exceed; 0.0 without values."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0
