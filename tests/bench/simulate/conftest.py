"""A queue before a machine, followed by hand: results for reports, without the engine."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from deepinfra.bench.simulate.results import PoolSample, RequestRow, SimulationResult

BOUNDS = tuple(0.001 * 1.2**n for n in range(50))
EDGES = (512, 4096, 32768)


def queue(
    name: str = "in order",
    *,
    shortest_first: bool = False,
    requests: int = 300,
    pools: tuple[str, ...] = ("pool",),
    refuse_over: int = 10**9,
    seed: int = 1,
) -> SimulationResult:
    """Each request goes to the pool that is free first, which computes 10,000 tokens of prompt a second."""
    rng = random.Random(seed)
    arrivals = [(rng.uniform(0.0, 0.5 * requests), int(10 ** rng.uniform(1.5, 5.0))) for _ in range(requests)]
    waiting = sorted(arrivals)
    free = [0.0] * len(pools)
    rows: list[RequestRow] = []
    gaps = [[0] * (len(BOUNDS) + 1) for _ in range(len(EDGES) + 1)]
    while waiting:
        pool = min(range(len(pools)), key=free.__getitem__)
        now = max(free[pool], waiting[0][0])
        here = [each for each in waiting if each[0] <= now]
        at, prompt = min(here, key=lambda each: each[1]) if shortest_first else here[0]
        waiting.remove((at, prompt))
        if len(here) > refuse_over:
            rows.append(RequestRow(at, prompt, 0, {}, prompt, "", 0, -1, None, None, 0.0, None, 0, "overloaded", 5.0))
            continue
        cached = {"device": prompt // 4, "ssd": prompt // 8} if prompt > 1000 else {}
        uncached = prompt - sum(cached.values())
        output = rng.randrange(1, 30)
        times = [rng.uniform(0.01, 0.05) for _ in range(output - 1)]
        free[pool] = now + uncached / 10_000
        first = free[pool] - at
        bucket = sum(edge <= uncached for edge in EDGES)
        for time in times:
            gaps[bucket][sum(bound < time for bound in BOUNDS)] += 1
        worst = max(times, default=None)
        row = RequestRow(
            at, prompt, output, cached, uncached, "", 0, pool, now - at, first, first + sum(times), worst, 3, "length"
        )
        rows.append(row)
    rows.sort(key=lambda row: row.at_s)
    span = max(row.at_s + row.last_s for row in rows) - rows[0].at_s
    samples = [
        PoolSample(
            float(second),
            pool,
            sum(row.at_s <= second < row.at_s + (row.opened_s or 0.0) for row in rows if row.pool == pool),
            sum(row.at_s + (row.opened_s or 0) <= second < row.at_s + row.last_s for row in rows if row.pool == pool),
            rng.randrange(100),
            rng.random(),
            5000,
            40,
        )
        for second in range(1, int(span) + 2)
        for pool in range(len(pools))
    ]
    return SimulationResult(
        name=name,
        settings={"trace": "made up", "scheduler": name},
        edges=EDGES,
        requests=rows,
        samples=samples,
        gaps=gaps,
        gap_bounds=BOUNDS,
        pools=pools,
        blocks=(100,) * len(pools),
        devices=len(pools),
        span_s=span,
        steps=1000,
        max_overtakes=8 if shortest_first else None,
        error_median=0.05,
        error_p95=0.2,
        took_s=1.5,
    )


@pytest.fixture
def make_result() -> Callable[..., SimulationResult]:
    """`queue`."""
    return queue
