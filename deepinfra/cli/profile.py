"""`deepinfra profile`: how long steps take here, kept for the server's next start."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated

import anyio
import typer

from deepinfra.cli.progress import shown_line
from deepinfra.cli.setup import Config, blueprint_for, fetch_models

if TYPE_CHECKING:
    from deepinfra.bench.profile import ProfileReport, ProfileRun
    from deepinfra.interfaces import Executor
    from deepinfra.schedulers.predictor import StepPredictor

__all__ = ("profile",)


def profile(
    model: Annotated[
        str | None, typer.Argument(metavar="MODEL", help="Catalogue name (smollm2), path of a model, or hub id.")
    ] = None,
    steps: Annotated[int, typer.Option(min=20, help="Steps to run.")] = 300,
    context: Annotated[int, typer.Option(min=32, help="Longest context.")] = 4096,
    save: Annotated[bool, typer.Option(help="Keep what was measured for the server's next start.")] = True,
    config: Config = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object; docs/reference/bench.md names its fields.")
    ] = False,
) -> None:
    """Run a mix of steps, learn how long each kind takes, and keep it for the server's next start.

    Runs the configured executor where serve would run it, so that what is measured is what serve will see.
    """
    from deepinfra.bench.profile import ProfileRun
    from deepinfra.config.folders import timings_folder
    from deepinfra.errors import ConfigError
    from deepinfra.schedulers.predictor import StepPredictor
    from deepinfra.schedulers.timings import Timings

    blueprint = blueprint_for(config, {"model": model}, defaults={"pool": {"store": {"use": "none"}}})
    if blueprint.pool is None:
        raise ConfigError("profile measures one pool; this configuration splits prefill and decode")
    fetch_models(blueprint)
    folder = blueprint.pool.scheduler.options.model_dump().get("timings") or timings_folder()
    executor, predictor = blueprint.pool.build().executor, StepPredictor()
    with shown_line() as show:
        report = anyio.run(_profile, executor, ProfileRun(steps=steps, context=context), predictor, show)
    timings = Timings(folder, report.speed)
    saved = save and predictor.cost is not None and timings.save(predictor.cost, predictor.samples)
    if as_json:
        typer.echo(json.dumps({**dataclasses.asdict(report), "saved": str(timings.path) if saved else None}))
        return
    _print(report)
    if saved:
        typer.echo(f"saved in {timings.path}")


async def _profile(
    executor: Executor, run: ProfileRun, predictor: StepPredictor, show: Callable[[str], None]
) -> ProfileReport:
    from deepinfra.bench.profile import run_profile

    async with executor:
        return await run_profile(executor, run, predictor, progress=show)


def _print(report: ProfileReport) -> None:
    typer.echo(f"{report.speed}, {report.run.steps} steps")
    typer.echo(f"{'predicted steps':16} {'number':>6} {'median error':>13} {'p95':>7}")
    for row in report.errors:
        typer.echo(f"{row.name:16} {row.steps:6} {row.median:13.1%} {row.p95:7.1%}")
    for name, seconds in report.cost.items():
        typer.echo(f"{name:16} {1e6 * seconds:14.4f} µs")
    cpu = report.cpu
    noisy = "   NOISY: not to be trusted" if cpu.noisy else ""
    typer.echo(f"processor: {cpu.own_cores:.2f} cores here, {cpu.others_cores:.2f} cores in other programs{noisy}")
