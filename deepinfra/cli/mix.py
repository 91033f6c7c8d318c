"""`deepinfra bench mix`: short chats beside giants, under two schedulers, measured and simulated."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Annotated

import typer

from deepinfra.cli.measured import writable
from deepinfra.cli.progress import shown_line
from deepinfra.cli.setup import OFFLINE, Config, Model, blueprint_for, fetch_models

__all__ = ("mix",)


def mix(
    model: Model = None,
    chats: Annotated[int, typer.Option(min=1, help="Short requests.")] = 50,
    chat: Annotated[int, typer.Option(min=1, help="Median tokens of their prompts.")] = 120,
    giants: Annotated[int, typer.Option(min=1, help="Long requests.")] = 4,
    giant: Annotated[int, typer.Option(min=2, help="Tokens of their prompts.")] = 6000,
    new: Annotated[int, typer.Option(min=2, help="Tokens to generate per request.")] = 48,
    over_s: Annotated[float, typer.Option("--over", min=0.0, help="Seconds over which they arrive.")] = 60.0,
    budget_s: Annotated[float, typer.Option("--budget", min=0.001, help="Step budget of both, in seconds.")] = 0.25,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw it, too.")] = None,
    config: Config = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object; docs/reference/bench.md names its fields.")
    ] = False,
) -> None:
    """How long short chats wait beside giants, under fcfs and bucketed, and what the simulator says of it."""
    from deepinfra.bench.mix import MixRun, run_mix
    from deepinfra.bench.simulate.html import page
    from deepinfra.errors import ConfigError

    if html is not None:
        writable("--html", html)
    blueprint = blueprint_for(config, {"model": model, "pool": {"executor": {"process": True}}}, defaults=OFFLINE)
    if blueprint.pool is None:
        raise ConfigError("bench mix measures one pool; this configuration splits prefill and decode")
    fetch_models(blueprint)
    run = MixRun(chats=chats, chat=chat, giants=giants, giant=giant, new=new, over_s=over_s, step_budget_s=budget_s)
    pool = blueprint.pool
    with shown_line() as show:
        report, results = run_mix(lambda: pool.build().executor, run, progress=show)
    if html is not None:
        html.write_text(page(results), "utf-8")
    if as_json:
        typer.echo(json.dumps(dataclasses.asdict(report)))
        return
    from deepinfra.cli.simulate.table import table_lines

    typer.echo(report.speed)
    for line in table_lines(report.summaries):
        typer.echo(line)
    for name, errors in report.errors.items():
        told = ", ".join(f"{figure} {error:+.1%}" for figure, error in errors.items())
        typer.echo(f"{name}: simulated figures are off by {told}")
    cpu = report.cpu
    noisy = "   NOISY: not to be trusted" if cpu.noisy else ""
    typer.echo(f"processor: {cpu.own_cores:.2f} cores here, {cpu.others_cores:.2f} cores in other programs{noisy}")
