"""`deepinfra simulate run`: configurations on one workload, beside each other."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from deepinfra.cli.measured import writable
from deepinfra.cli.progress import shown_count
from deepinfra.cli.setup import Config

if TYPE_CHECKING:
    from deepinfra.bench.simulate.results import SimulationResult
    from deepinfra.bench.simulate.run import Setup
    from deepinfra.cli.simulate.variants import Variant

__all__ = ("run",)

Workload = Annotated[
    str,
    typer.Argument(
        metavar="WORKLOAD",
        help="What comes in: a trace (Mooncake's JSON lines or Azure's CSV, as it is or .xz), or a generator with its "
        "parameters like mix:requests=500,per_s=4 (also bursts, giant, agents).",
    ),
]
Against = Annotated[
    list[str] | None,
    typer.Option(
        metavar="WHAT",
        help="Compare with: another configuration file, a scheduler's name (fcfs), or this configuration with "
        "KEY=VALUE changed. May be given more than once.",
    ),
]
Replicas = Annotated[
    str | None, typer.Option(metavar="N,N,…", help="So many pools that each do everything; several are compared.")
]
Split = Annotated[
    str | None, typer.Option(metavar="P:D,P:D,…", help="So many prefill and decode pools; several ratios are compared.")
]
RouteName = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        help="Which pool takes a request: least-loaded, cache-aware, by-bucket:pool-0/pool-0+pool-1/pool-2/pool-2 "
        "(pools of each length bucket), or MODULE:FUNCTION of your own.",
    ),
]
Cost = Annotated[
    str | None,
    typer.Option(
        metavar="NAME|FILE",
        help="What a pool's steps cost: devices and a model (h100x8/llama-70b), or a JSON file; default: what the "
        "configuration's `simulated` executor says, or what `deepinfra profile` measured here.",
    ),
]
Price = Annotated[
    float | None, typer.Option(min=0.0, help="Of a device for an hour, in any money, for the cost of tokens.")
]
AsJson = Annotated[
    Path | None,
    typer.Option(
        "--json", metavar="FILE", help="Write the numbers here, - for standard output; see docs/reference/simulate.md."
    ),
]


def run(
    workload: Workload = "mix",
    config: Config = None,
    against: Against = None,
    replicas: Replicas = None,
    split: Split = None,
    route: RouteName = "least-loaded",
    cost: Cost = None,
    scale: Annotated[float, typer.Option(min=0.001, help="Requests arrive so many times as fast.")] = 1.0,
    requests: Annotated[int | None, typer.Option(min=1, help="Only the first so many.")] = None,
    price: Price = None,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the report with plots here.")] = None,
    as_json: AsJson = None,
    rows: Annotated[bool, typer.Option(help="With --json: one object per request as well.")] = False,
) -> None:
    """Put a workload through the real engine, scheduler and stores in virtual time; no model runs.

    What would my configuration do:    deepinfra simulate run trace.jsonl --html report.html

    Is another scheduler better:       deepinfra simulate run trace.jsonl --against fcfs

    How many replicas do I need:       deepinfra simulate run trace.jsonl --replicas 2,4,8

    Several simulations are compared with the first column: what --against names, or the first number.
    """
    from deepinfra.bench.simulate.run import simulate
    from deepinfra.bench.simulate.traces import first, stretched
    from deepinfra.cli.simulate.variants import fleets_for, variants_for
    from deepinfra.cli.simulate.workloads import workload_for
    from deepinfra.errors import ConfigError

    if rows and as_json is None:
        raise ConfigError("--rows says what --json writes; give --json too")
    for option, path in (("--html", html), ("--json", as_json)):  # before an hour is spent
        if path is not None and str(path) != "-":
            writable(option, path)
    if html is not None and html == as_json:
        raise ConfigError(f"--html and --json would both write {html}")
    variants = variants_for(config, against or (), fleets_for(replicas, split))
    arrivals = stretched(first(workload_for(workload), requests), 1.0 / scale)
    if not arrivals:
        raise ConfigError(f"{workload}: there are no requests in it")
    settings = {"workload": workload, "requests": f"{len(arrivals):,}", "arrivals": f"{scale:g} times as fast"}
    setups = _setups(variants, cost, route, settings)
    with shown_count() as show:
        results = [simulate(arrivals, setup, progress=_progress(show, setup.name, len(arrivals))) for setup in setups]
    _tell(results, price, html, as_json, rows=rows)


def _setups(variants: Sequence[Variant], cost: str | None, route: str, settings: dict[str, str]) -> list[Setup]:
    """What is simulated, one after the other."""
    from deepinfra.bench.simulate.configured import configured, edges_of
    from deepinfra.bench.simulate.machines import machine_named
    from deepinfra.cli.simulate.routes import route_for
    from deepinfra.errors import ConfigError

    machine = machine_named(cost) if cost else None
    edges = edges_of(variants[-1].blueprint)
    told = {**settings, "route": route}
    setups = [
        configured(each.blueprint, name=each.name, machine=machine, fleet=each.fleet, settings=told, edges=edges)
        for each in variants
    ]
    routed = [replace(setup, route=route_for(route, edges=edges, pools=setup.pool_names)) for setup in setups]
    if route != "least-loaded" and all(len(setup.pool_names) == 1 for setup in setups):
        raise ConfigError(f"--route {route}: there is one pool, and nothing to choose; give --replicas or --split too")
    return routed


def _tell(
    results: Sequence[SimulationResult], price: float | None, html: Path | None, as_json: Path | None, *, rows: bool
) -> None:
    """Write the files, and print the table unless the numbers are printed."""
    from deepinfra.bench.simulate.compare import document, summaries
    from deepinfra.bench.simulate.html import page
    from deepinfra.cli.simulate.table import table_lines

    if html is not None:
        html.write_text(page(results, price=price), "utf-8")
    if as_json is not None:
        text = json.dumps(document(results, price=price, rows=rows), allow_nan=False)
        if str(as_json) == "-":
            typer.echo(text)
            return
        as_json.write_text(text)
    for line in table_lines(summaries(results, price=price)):
        typer.echo(line)
    if html is not None:
        typer.echo(f"report: {html}")


def _progress(show: Callable[[str, int, int, str], None], name: str, total: int) -> Callable[[int, float], None]:
    """What a simulation tells of itself, in words."""
    from deepinfra.bench.simulate.plots import seconds_text

    return lambda done, now_s: show(name, done, total, f"{seconds_text(now_s)} of virtual time")
