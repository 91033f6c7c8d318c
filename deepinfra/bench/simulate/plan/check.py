"""A plan against the simulator: one pool of each kind at its share of the peak, with what a formula has no queue for.

Prompts are as long as what a prefill device has to compute of them. Decoding begins with whole prompts, which another
pool hands over at no cost. A step that verifies drafts stands for `accepted` steps of one token. Lengths scatter as the
traffic's do, and requests come at random.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import exp, log, sqrt
from statistics import mean

from deepinfra.bench.simulate.plan.fleet import Fleet, Plan
from deepinfra.bench.simulate.plan.replicas import fitted
from deepinfra.bench.simulate.report import percentile
from deepinfra.bench.simulate.results import SimulationResult
from deepinfra.bench.simulate.run import PoolSetup, Setup, simulate
from deepinfra.bench.simulate.traces import Arrival, LengthClass, generated, stretched
from deepinfra.core.cost import Sample, StepCost
from deepinfra.errors import ConfigError
from deepinfra.executors.simulated import SimulatedExecutor
from deepinfra.schedulers.bucketed import Bucketed

__all__ = ("Checked", "checked")

BLOCK_SIZE = 128
"""Tokens per block."""

SAMPLES = 50
"""Of how busy the prefill pool is."""

LONGEST = 131_072
"""Most tokens of a simulated sequence, unless contexts are so long that four of the mean are more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """What the simulator makes of a plan.

    Attributes:
        requests: Simulated, of each kind of pool.
        user_tokens_s: Output tokens per second of half of the users, at least.
        user_tokens_s_p10: Of nine tenths.
        batch: Sequences that decode together in the mean.
        batch_most: At most.
        first_token_s: From arrival to the end of its prompt, for half of the requests at most.
        first_token_s_p99: For 99 of 100.
        busy: Share of the time in which the prefill pool computes.
        took_s: Real seconds.
    """

    requests: int
    user_tokens_s: float
    user_tokens_s_p10: float
    batch: float
    batch_most: int
    first_token_s: float
    first_token_s_p99: float
    busy: float
    took_s: float


def checked(fleet: Fleet, plan: Plan, *, requests: int = 300, seed: int = 0) -> Checked:
    """Simulate both kinds of pools.

    Args:
        fleet: What was planned.
        plan: Its plan.
        requests: How many go through each pool.
        seed: Of their lengths and arrivals.

    Raises:
        ConfigError: All prompts are cached, so that there is no prefill pool.
    """
    if not fleet.traffic.uncached:
        raise ConfigError("hit_rate: no prompt is computed, so that there is no prefill pool to simulate")
    prompts = _prompts(fleet, plan, requests, seed)
    prefill = simulate(prompts, replace(_prefill(fleet), interval_s=max(1e-3, prompts[-1].at_s / SAMPLES)))
    decode = simulate(_answers(fleet, plan, requests, seed), _decode(fleet, plan))
    firsts = sorted(row.first_s for row in prefill.requests if row.first_s is not None)
    rows = [row for row in decode.requests if row.first_s is not None and row.output > 1]
    speeds = sorted((row.output - 1) / (row.last_s - (row.first_s or 0.0)) for row in rows)
    spans = [(row.at_s + (row.first_s or 0.0), row.at_s + row.last_s) for row in rows]
    batch, most = _together(spans, rows[len(rows) // 5].at_s, rows[-1].at_s)
    return Checked(
        requests=requests,
        user_tokens_s=percentile(speeds, 50),
        user_tokens_s_p10=percentile(speeds, 10),
        batch=batch,
        batch_most=most,
        first_token_s=percentile(firsts, 50),
        first_token_s_p99=percentile(firsts, 99),
        busy=_busy(prefill),
        took_s=prefill.took_s + decode.took_s,
    )


def _together(spans: Sequence[tuple[float, float]], begin: float, end: float) -> tuple[float, int]:
    """How many spans lie over a moment between `begin` and `end`: in the mean, and at most."""
    lived = sum(max(0.0, min(end, last) - max(begin, first)) for first, last in spans)
    running = most = 0
    for _, change in sorted([(first, 1) for first, _ in spans] + [(last, -1) for _, last in spans]):
        running += change
        most = max(most, running)
    return lived / (end - begin), most


def _busy(result: SimulationResult) -> float:
    return sum(sample.busy for sample in result.samples) / max(1, len(result.samples))


def _prompts(fleet: Fleet, plan: Plan, requests: int, seed: int) -> list[Arrival]:
    """Prompts of one prefill pool at the peak, of which only what is computed is left."""
    per_s = plan.prefill_tokens_s * fleet.prefill_roofline.cut * fleet.service.busy / fleet.traffic.uncached
    computed = fleet.traffic.uncached / fleet.prefill_useful
    return _drawn(fleet, requests, per_s, computed, 1.0, seed)


def _answers(fleet: Fleet, plan: Plan, requests: int, seed: int) -> list[Arrival]:
    """Sequences of one decode pool at the peak."""
    per_s = plan.decode_tokens_s * fleet.decode_roofline.cut / fleet.traffic.output
    return _drawn(fleet, requests, per_s, fleet.traffic.prompt, fleet.traffic.output, seed)


def _drawn(fleet: Fleet, requests: int, per_s: float, prompt: float, output: float, seed: int) -> list[Arrival]:
    """Requests of these means, which scatter as the traffic's prompts do; an output of 1 does not.

    They come a little faster or slower than `per_s`, so that the few that are drawn bring the load that many would.
    """
    scatter = sqrt(max(0.0, log(2.0 * fleet.traffic.position / fleet.traffic.prompt)))
    median = exp(-0.5 * scatter * scatter)
    kind = LengthClass(1.0, prompt * median, max(1.0, output * median), scatter)
    found = generated(requests, per_s, [kind], seed=seed, longest=_longest(fleet))
    if output == 1.0:
        found = [each._replace(output=1) for each in found]
        return stretched(found, mean(each.prompt for each in found) / prompt)
    return stretched(found, mean(each.output for each in found) / output)


def _longest(fleet: Fleet) -> int:
    return max(LONGEST, 4 * round(fleet.traffic.context))


def _prefill(fleet: Fleet) -> Setup:
    chunk = fleet.service.chunk
    works = [fleet.prefill_work(max(1, chunk * share // 8)) for share in range(1, 9)]
    cost, _ = fitted([Sample(work, fleet.prefill_roofline.seconds(work)) for work in works])
    token = cost.chunk_token + cost.chunk_read * fleet.traffic.uncached_position
    cost = StepCost(step=cost.step, chunk_token=token)
    longest = _longest(fleet)
    return Setup(name="prefill", pools=[_pool(cost, 4 * longest // BLOCK_SIZE, chunk, longest, "prefill")])


def _decode(fleet: Fleet, plan: Plan) -> Setup:
    works = [
        fleet.decode_work(max(1, plan.batch * share // 8), fleet.traffic.context * longer)
        for share in range(1, 17)
        for longer in (0.5, 1.0, 2.0)
    ]
    fit, _ = fitted([Sample(work, fleet.decode_roofline.seconds(work)) for work in works])
    tokens = fleet.service.accepted if fleet.model.drafts else 1.0
    cost = StepCost(
        step=fit.step / tokens,
        decode_row=(fit.decode_row + fit.draft * fleet.model.drafts) / tokens,
        decode_read=fit.decode_read / tokens,
    )
    nbytes = fleet.model.stored_nbytes * BLOCK_SIZE
    room = int(fleet.decode_roofline.kv_nbytes / nbytes)
    longest = _longest(fleet)
    blocks = min(room, 4 * plan.batch * longest // BLOCK_SIZE)  # more would never be used
    free = _pool(StepCost(), 64 * longest // BLOCK_SIZE, 4 * longest, longest, "prompts")
    return Setup(name="decode", prefill=[free], decode=[_pool(cost, blocks, 4 * longest, longest, "decode")])


def _pool(cost: StepCost, blocks: int, step_tokens: int, longest: int, name: str) -> PoolSetup:
    return PoolSetup(
        scheduler=Bucketed,
        executor=lambda: SimulatedExecutor(
            cost=cost,
            num_blocks=blocks,
            block_size=BLOCK_SIZE,
            max_step_tokens=step_tokens,
            max_seqs=4096,
            max_context=longest,
        ),
        name=name,
    )
