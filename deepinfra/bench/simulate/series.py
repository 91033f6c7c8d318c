"""What happened over time: samples of pools, gathered into bins, pools of one kind taken together."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

from deepinfra.bench.simulate.results import PoolSample, SimulationResult

__all__ = ("BINS", "Course", "courses", "kind_of", "kinds")

BINS = 150
"""Most points of a curve: two a pixel of a phone would not be seen."""

_NUMBER = re.compile(r"(?<=.)[-_ ]?\d+$")


class Course(NamedTuple):
    """A measure of one kind of pool over time: mean over its pools, and the lowest and highest of them.

    `total` times the mean is the sum over the pools.
    """

    points: list[tuple[float, float]]
    band: list[tuple[float, float]]
    total: int


def kind_of(name: str) -> str:
    """A pool's name without its number: `prefill` of `prefill-3`."""
    return _NUMBER.sub("", name)


def kinds(result: SimulationResult) -> dict[str, list[int]]:
    """Indices of the pools of each kind."""
    found: dict[str, list[int]] = {}
    for index, name in enumerate(result.pools):
        found.setdefault(kind_of(name), []).append(index)
    return found


def courses(
    result: SimulationResult, measures: Sequence[Callable[[PoolSample, int], float]]
) -> dict[str, list[Course]]:
    """By kind of pool, one course for each measure, a function of a sample and its pool's number of blocks."""
    if not result.samples:
        return {}
    start = min(sample.at_s for sample in result.samples) - result.interval_s
    end = max(sample.at_s for sample in result.samples)
    bins = min(BINS, max(1, round((end - start) / result.interval_s)))
    wide = (end - start) / bins
    sums = [[[0.0] * bins for _ in result.pools] for _ in measures]
    counts = [[0] * bins for _ in result.pools]
    for sample in result.samples:
        at = min(bins - 1, int((sample.at_s - 0.5 * result.interval_s - start) / wide))
        blocks = result.blocks[sample.pool] if sample.pool < len(result.blocks) else 0
        counts[sample.pool][at] += 1
        for each, measure in zip(sums, measures, strict=True):
            each[sample.pool][at] += measure(sample, blocks)
    return {kind: [_course(each, counts, pools, start, wide) for each in sums] for kind, pools in kinds(result).items()}


def _course(
    sums: Sequence[Sequence[float]], counts: Sequence[Sequence[int]], pools: Sequence[int], start: float, wide: float
) -> Course:
    points: list[tuple[float, float]] = []
    band: list[tuple[float, float]] = []
    for at in range(len(counts[pools[0]])):
        values = [sums[pool][at] / counts[pool][at] for pool in pools if counts[pool][at]]
        if values:
            points.append((start + (at + 0.5) * wide, sum(values) / len(values)))
            band.append((min(values), max(values)))
    return Course(points, band if len(pools) > 1 else [], len(pools))
