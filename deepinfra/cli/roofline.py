"""`deepinfra bench roofline`: where the time of a step goes, beside what this machine reaches."""

from __future__ import annotations

import dataclasses
import json
import os
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import anyio
import typer

from deepinfra.cli.measured import chart_file, measured, numbers
from deepinfra.cli.progress import shown_line
from deepinfra.cli.setup import Config

if TYPE_CHECKING:
    from deepinfra.bench.roofline import RooflineReport

__all__ = ("roofline",)

_WIDE = 40
"""Characters of the longest bar."""


def roofline(
    model: Annotated[
        str | None, typer.Argument(metavar="MODEL", help="Catalogue name (smollm2), path of a model, or hub id.")
    ] = None,
    form: Annotated[
        str | None,
        typer.Option(
            help="stored (the file's blocks of integers), bfloat16, float32, torch (no kernels of ours, one part). "
            "Default: stored, or bfloat16 for a model without such blocks."
        ),
    ] = None,
    prefill: Annotated[str, typer.Option(metavar="N,N,…", help="Tokens of prompts.")] = "512",
    batch: Annotated[str, typer.Option(metavar="N,N,…", help="Sequences that decode together.")] = "1,8,32",
    context: Annotated[int, typer.Option(min=1, help="Tokens that each of them has behind it.")] = 256,
    steps: Annotated[int, typer.Option(min=2, help="Steps of each kind; medians are reported.")] = 16,
    threads: Annotated[
        int | None, typer.Option(min=1, help="Threads that compute; default: as configured, else all cores.")
    ] = None,
    chart: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw a chart, one HTML file: FILE.html.")] = None,
    config: Config = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object; docs/reference/bench.md names its fields.")
    ] = False,
) -> None:
    """Seconds of each part of a step beside the least that bytes and operations allow at what this machine reaches."""
    from deepinfra.bench.compare.draw import roofline_page
    from deepinfra.bench.roofline import RooflineRun, run_roofline
    from deepinfra.executors.torch.options import TorchOptions

    chart_file("--chart", chart)
    run = RooflineRun(
        prefills=numbers("--prefill", prefill), batches=numbers("--batch", batch), context=context, steps=steps
    )
    found = measured("bench roofline", config, model, form, "--form", most=1, only=tuple(TorchOptions.model_fields))
    (options,) = found.options.values()
    cores = threads or found.threads() or len(os.sched_getaffinity(0))
    with shown_line() as show:
        report = anyio.run(partial(run_roofline, found.model, options, run, threads=cores, progress=show))
    if chart is not None:
        chart.write_text(roofline_page(report), "utf-8")
    if as_json:
        typer.echo(json.dumps(dataclasses.asdict(report)))
    else:
        _print(report)


def _print(report: RooflineReport) -> None:
    from deepinfra.bench.compare.draw import cpu_text
    from deepinfra.bench.simulate.plots import seconds_text

    reached = report.reached
    typer.echo(f"{report.model}, {report.speed}")
    typer.echo(
        f"reached by {report.threads} threads: {reached.bytes_per_s / 1e9:.1f} GB/s; operations per ns: "
        f"float32 {reached.float32 / 1e9:.0f}, bfloat16 {reached.bfloat16 / 1e9:.0f}, int8 {reached.int8 / 1e9:.0f}"
    )
    for work in report.works:
        typer.echo(f"{work.name}: {seconds_text(work.seconds)} a step, {work.share:.0%} of what could be reached")
        most = max(part.seconds for part in work.parts)
        for part in work.parts:
            whole = max(1, round(_WIDE * part.seconds / most))
            full = min(whole, round(_WIDE * part.limit_s / most))
            bar = "█" * full + "░" * (whole - full)
            typer.echo(
                f"  {part.name:18} {seconds_text(part.seconds):>9} {part.seconds / work.seconds:4.0%}  {bar:{_WIDE}} "
                f"{part.share:4.0%} of its limit ({part.bound})"
            )
    typer.echo(cpu_text(report.cpu))
