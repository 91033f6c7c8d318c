"""Pools as the simulator takes them, by names like `h100x8/llama-70b`: what steps cost, and room for KV.

A roofline bends where arithmetic overtakes bytes; `StepCost` is linear. The figures are fitted to steps of all sizes
with the error relative to each, so that a step of 5 ms counts as much as one of 500 ms.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from deepinfra.bench.simulate.plan.devices import DEVICES, device_named
from deepinfra.bench.simulate.plan.models import MODELS, model_named
from deepinfra.bench.simulate.plan.roofline import Layout, Roofline
from deepinfra.core.cost import Sample, StepCost, StepWork
from deepinfra.errors import ConfigError

__all__ = ("Replica", "cost_for", "fitted", "names", "replica_for", "replica_of")

BLOCK_SIZE = 128
"""Tokens per block of the replicas; DeepInfer's, and a multiple of what V4's rates of compression ask for."""

OTHERS_DRAFTS = 4
"""Tokens per sequence and step for which steps of models without a draft head are fitted: somebody else's drafts."""

ROUNDS = 4000
"""Of coordinate descent at most; later ones change no figure by a thousandth."""

_NAMED = (
    "laptop/smollm2-135m",
    "h100/llama-8b",
    "b200/llama-8b",
    "h100x8/llama-70b",
    "h200x4/llama-70b",
    "b200x2/llama-70b",
    "h100x8/deepseek-v4.1-flash",
    "b200x8/deepseek-v4.1-flash",
    "gb200x64/deepseek-v4.1-flash",
    "gb300x64/deepseek-v4.1-flash",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Replica:
    """What the simulator needs to know of one pool.

    Attributes:
        name: Device, how many of them and model.
        devices: That one pool stands for: all of a dense model's group; one of a group with experts, of which each has
            sequences of its own.
        cost: Linear figures of its steps.
        error_median: Of those against the roofline, relative, over the steps they were fitted to.
        error_p95: The error that 95 % of them do not exceed.
        num_blocks: That fit beside the weights.
        block_size: Tokens of each.
        block_nbytes: Of one, on all its devices together.
        drafts: Tokens per sequence and step that the model's own head drafts.
    """

    name: str
    devices: int
    cost: StepCost
    error_median: float
    error_p95: float
    num_blocks: int
    block_size: int
    block_nbytes: int
    drafts: int


def names() -> tuple[str, ...]:
    """Those worth having by name; `replica_for` takes any device, number and model."""
    return _NAMED


def cost_for(name: str) -> StepCost:
    """What steps cost there.

    Raises:
        ConfigError: No such device or model, or the weights do not fit.
    """
    return replica_for(name).cost


def replica_for(name: str) -> Replica:
    """A pool by a name like `h100x8/llama-70b`.

    Raises:
        ConfigError: No such device or model, or the weights do not fit.
    """
    devices, slash, model = name.partition("/")
    kind, times, width = devices.rpartition("x") if devices not in DEVICES else (devices, "x", "1")
    if not slash or not times or not width.isdecimal() or int(width) < 1:
        raise ConfigError(
            f"cost: {name!r} is no device, number and model like h100x8/llama-70b; devices: {', '.join(DEVICES)}; "
            f"models: {', '.join(MODELS)}"
        )
    return replica_of(Roofline(device_named(kind), model_named(model), Layout(width=int(width))), name)


def replica_of(roofline: Roofline, name: str) -> Replica:
    """A pool of a roofline of one's own."""
    cost, errors = fitted(_steps(roofline))
    block_nbytes = round(BLOCK_SIZE * roofline.model.stored_nbytes)
    return Replica(
        name=name,
        devices=roofline.cut,
        cost=cost,
        error_median=errors[len(errors) // 2],
        error_p95=errors[int(0.95 * (len(errors) - 1))],
        num_blocks=int(roofline.kv_nbytes / block_nbytes),
        block_size=BLOCK_SIZE,
        block_nbytes=block_nbytes,
        drafts=roofline.model.drafts,
    )


def fitted(samples: Sequence[Sample]) -> tuple[StepCost, list[float]]:
    """Figures, none negative, that minimise the relative errors squared; and those errors, smallest first."""
    scale = [max(sample.work[i] for sample in samples) or 1.0 for i in range(5)]
    rows = [
        [1.0 / seconds, *(value / top / seconds for value, top in zip(work, scale, strict=True))]
        for work, seconds in samples
    ]
    size = len(rows[0])
    gram = [[sum(row[i] * row[j] for row in rows) for j in range(size)] for i in range(size)]
    target = [sum(row[i] for row in rows) for i in range(size)]
    figures = [0.0] * size
    for _ in range(ROUNDS):
        moved = 0.0
        for i in range(size):
            if gram[i][i]:
                rest = target[i] - sum(gram[i][j] * figures[j] for j in range(size) if j != i)
                before, figures[i] = figures[i], max(0.0, rest / gram[i][i])
                moved = max(moved, abs(figures[i] - before) / (figures[i] or 1.0))
        if moved < 1e-7:
            break
    cost = StepCost(figures[0], *(figure / top for figure, top in zip(figures[1:], scale, strict=True)))
    return cost, sorted(abs(cost.seconds(work) - seconds) / seconds for work, seconds in samples)


def _steps(roofline: Roofline) -> list[Sample]:
    """Steps such as a serving pool runs: chunks, decoding batches and both, at short and long contexts."""
    drafts = roofline.model.drafts or OTHERS_DRAFTS
    works = []
    for context in (512, 2048, 8192, 32768):
        rows = [count for count in (0, 1, 4, 16, 64, 128, 256) if count <= max(1, roofline.sequences(context))]
        for count in rows:
            for verified in {0, drafts}:
                for chunk in (0, 128, 512, 2048, 8192):
                    work = StepWork(0, 0.0, count, float(count * context), count * verified)
                    if chunk or count:
                        works.append(work.chunk(context, chunk) if chunk else work)
    return [Sample(work, roofline.seconds(work)) for work in works]
