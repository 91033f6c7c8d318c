"""`deepinfra simulate`: the real engine in virtual time, and a plan for a fleet."""

from __future__ import annotations

from typing import TYPE_CHECKING

from deepinfra.lazy import lazily

if TYPE_CHECKING:
    from deepinfra.bench.simulate.compare import document, summaries
    from deepinfra.bench.simulate.html import page
    from deepinfra.bench.simulate.plan.replicas import replica_for
    from deepinfra.bench.simulate.report import Summary, summarise
    from deepinfra.bench.simulate.results import SimulationResult
    from deepinfra.bench.simulate.run import PoolSetup, Setup, simulate
    from deepinfra.bench.simulate.traces import Arrival, LengthClass, generated, read_workload

__all__ = (
    "Arrival",
    "LengthClass",
    "PoolSetup",
    "Setup",
    "SimulationResult",
    "Summary",
    "document",
    "generated",
    "page",
    "read_workload",
    "replica_for",
    "simulate",
    "summaries",
    "summarise",
)

__getattr__ = lazily(
    __name__,
    {
        "Arrival": "deepinfra.bench.simulate.traces",
        "LengthClass": "deepinfra.bench.simulate.traces",
        "PoolSetup": "deepinfra.bench.simulate.run",
        "Setup": "deepinfra.bench.simulate.run",
        "SimulationResult": "deepinfra.bench.simulate.results",
        "Summary": "deepinfra.bench.simulate.report",
        "document": "deepinfra.bench.simulate.compare",
        "generated": "deepinfra.bench.simulate.traces",
        "page": "deepinfra.bench.simulate.html",
        "read_workload": "deepinfra.bench.simulate.traces",
        "replica_for": "deepinfra.bench.simulate.plan.replicas",
        "simulate": "deepinfra.bench.simulate.run",
        "summaries": "deepinfra.bench.simulate.compare",
        "summarise": "deepinfra.bench.simulate.report",
    },
)
