"""Experiments that orders of service are judged by: the same engine, machine and requests, and only the order differs.

`sustained` finds what a machine serves of a workload when it never runs out of it; `orders` brings the same requests at
shares of that; `giant` puts a short prompt behind a giant one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from deepinfra.bench.simulate.plan.replicas import replica_for
from deepinfra.bench.simulate.report import bucket_names, percentile
from deepinfra.bench.simulate.results import RequestRow, SimulationResult
from deepinfra.bench.simulate.run import PoolSetup, Setup, simulate
from deepinfra.bench.simulate.store import ModelledStore
from deepinfra.bench.simulate.traces import Arrival, stretched
from deepinfra.core.buckets import DEFAULT_EDGES, bucket_of
from deepinfra.core.kv import FRAME_NBYTES
from deepinfra.executors.simulated import SimulatedExecutor
from deepinfra.interfaces.kvstore import KVStore
from deepinfra.interfaces.scheduler import Scheduler
from deepinfra.schedulers import Bucketed, Fcfs

__all__ = ("MACHINE", "Bench", "Giant", "OrderAt", "giant", "orders", "sustained")

MACHINE = "h100x8/llama-70b"
"""What they run on: a dense model of 70 billion parameters in 8 bits on one node of eight H100, by roofline."""

SHARES = (0.85, 0.95, 1.05)

_QUEUE = 100_000
"""Nobody is refused, or two orders would be compared that served different requests."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """What both orders run on.

    Attributes:
        machine: See `plan.replica_for`.
        replicas: How many of it.
        step_budget_s: Both schedulers' aim for a step.
        ram_nbytes: Of a RAM tier behind each; 0: none.
        max_context: Longest request.
        max_seqs: Sequences that may run at once; with few, all wait for a seat, whatever the order.
        edges: Of the report's buckets; the scheduler learns or has its own.
    """

    machine: str = MACHINE
    replicas: int = 1
    step_budget_s: float = 0.25
    ram_nbytes: int = 0
    max_context: int = 200_000
    max_seqs: int = 1024
    edges: Sequence[int] = DEFAULT_EDGES

    def fcfs(self) -> Scheduler:
        """First come, first served, with the same budget and the same share of decoding."""
        return Fcfs(step_budget_s=self.step_budget_s, max_queue=_QUEUE, max_queue_s=None)

    def bucketed(self) -> Scheduler:
        """Buckets, as they are by default."""
        return Bucketed(step_budget_s=self.step_budget_s, max_queue=_QUEUE, max_queue_s=None)

    def setup(self, name: str, scheduler: Callable[[], Scheduler], *, at_once: int | None = None) -> Setup:
        """A setup with a scheduler."""
        replica = replica_for(self.machine)

        def executor() -> SimulatedExecutor:
            return SimulatedExecutor(
                cost=replica.cost,
                num_blocks=replica.num_blocks,
                block_size=replica.block_size,
                block_nbytes=replica.block_nbytes,
                max_context=self.max_context,
                max_seqs=self.max_seqs,
            )

        pool = PoolSetup(
            scheduler=scheduler,
            executor=executor,
            store=self._store if self.ram_nbytes else None,
            replicas=self.replicas,
        )
        return Setup(
            name=name, pools=[pool], edges=self.edges, at_once=at_once, devices=self.replicas * replica.devices
        )

    def _store(self, executor: SimulatedExecutor) -> KVStore:
        layout = executor.layout
        return ModelledStore(
            "ram",
            block_nbytes=executor.block_nbytes,
            block_tokens=layout.block_size,
            record_nbytes=FRAME_NBYTES + layout.block_nbytes,
            capacity_nbytes=self.ram_nbytes,
        )


def sustained(workload: Sequence[Arrival], bench: Bench, *, at_once: int = 256) -> float:
    """Seconds that `fcfs` needs for a workload when `at_once` of its requests are there all the time.

    Enough of them to keep every step full, few enough that their prompts fit into memory.
    """
    setup = bench.setup("fcfs, saturated", bench.fcfs, at_once=at_once)
    return simulate(stretched(workload, 0.0), setup).span_s


class OrderAt(NamedTuple):
    """Two orders at one load.

    Attributes:
        share: Of what `fcfs` sustains.
        fcfs: What came of it.
        other: What came of the other.
    """

    share: float
    fcfs: SimulationResult
    other: SimulationResult

    @property
    def throughput(self) -> float:
        """Tokens per second of the other over those of `fcfs`."""
        return _tokens(self.other) / self.other.span_s / (_tokens(self.fcfs) / self.fcfs.span_s)

    def first_token_s(self, percent: int = 99) -> list[tuple[str, int, float, float]]:
        """By bucket: its name, requests, and a percentile of the time to first token with `fcfs` and with the other.

        Both are asked about the same requests: those that the other put into that bucket as they came, or, if it has
        none, those that were so long with `fcfs`. Learned buckets have the name that they had at the end.
        """
        edges = self.other.own_edges or self.fcfs.edges
        times: list[list[tuple[float, float]]] = [[] for _ in range(len(edges) + 1)]
        for ours, others in zip(self.fcfs.requests, self.other.requests, strict=True):
            bucket = others.own_bucket if self.other.own_edges else bucket_of(ours.uncached, edges)
            if ours.first_s is not None and others.first_s is not None:
                times[bucket].append((ours.first_s, others.first_s))
        told = []
        for name, both in zip(bucket_names(edges), times, strict=True):
            if both:
                first, second = (percentile(sorted(each), percent) for each in zip(*both, strict=True))
                told.append((name, len(both), first, second))
        return told


def orders(
    workload: Sequence[Arrival],
    bench: Bench,
    *,
    shares: Sequence[float] = SHARES,
    other: Callable[[], Scheduler] | None = None,
    sustained_s: float | None = None,
) -> list[OrderAt]:
    """Bring a workload at shares of what `fcfs` sustains of it, to `fcfs` and to another order.

    Args:
        workload: By time.
        bench: What both run on.
        shares: Loads.
        other: Makes the other scheduler; by default `Bucketed` as it comes.
        sustained_s: What `sustained` found, if that is known.
    """
    whole_s = sustained(workload, bench) if sustained_s is None else sustained_s
    found = []
    for share in shares:
        due = stretched(workload, whole_s / share / workload[-1].at_s)
        found.append(
            OrderAt(
                share,
                simulate(due, bench.setup(f"fcfs at {share:g}", bench.fcfs)),
                simulate(due, bench.setup(f"bucketed at {share:g}", other or bench.bucketed)),
            )
        )
    return found


class Giant(NamedTuple):
    """A short prompt behind a giant one; seconds to the first token.

    Attributes:
        short_alone_s: Of the short prompt when nothing else is there.
        short_s: Behind the giant, the most that any of the short ones waited.
        giant_alone_s: Of the giant when nothing else is there.
        giant_s: With the short ones.
    """

    short_alone_s: float
    short_s: float
    giant_alone_s: float
    giant_s: float


def giant(workload: Sequence[Arrival], bench: Bench, scheduler: Callable[[], Scheduler] | None = None) -> Giant:
    """Put short requests behind the first one of a workload, after a warm-up that tells the scheduler what steps cost.

    Args:
        workload: A giant, and short ones of one length that come while it is computed.
        bench: What they run on.
        scheduler: Makes the scheduler; by default `Bucketed` as it comes.
    """
    warm = [Arrival(2.0 * i, 300 * (i % 5 + 1) ** 2, 24) for i in range(24)]
    start_s = 2.0 * len(warm) + 30.0

    def ran(arrivals: Sequence[Arrival]) -> Sequence[RequestRow]:
        later = [arrival._replace(at_s=start_s + arrival.at_s) for arrival in arrivals]
        setup = bench.setup("giant", scheduler or bench.bucketed)
        return simulate([*warm, *later], setup).requests[len(warm) :]

    long, *short = workload
    together = ran(workload)
    return Giant(
        short_alone_s=_first(ran(short[:1])[0]),
        short_s=max(map(_first, together[1:])),
        giant_alone_s=_first(ran([long])[0]),
        giant_s=_first(together[0]),
    )


def _first(row: RequestRow) -> float:
    assert row.first_s is not None, row
    return row.first_s


def _tokens(result: SimulationResult) -> int:
    return sum(row.prompt + row.output for row in result.requests)
