"""`deepinfra simulate plan`: devices for traffic, from what devices, models and traffic are said to be."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from deepinfra.errors import ConfigError

__all__ = ("plan",)


def plan(
    fleet: Annotated[
        str, typer.Option(metavar="NAME", help="To begin with: deepseek-2026 or deepseek-2025.")
    ] = "deepseek-2026",
    device: Annotated[str | None, typer.Option(metavar="NAME", help="For prompts and for decoding.")] = None,
    prefill_device: Annotated[str | None, typer.Option(metavar="NAME", help="For prompts.")] = None,
    decode_device: Annotated[str | None, typer.Option(metavar="NAME", help="For decoding.")] = None,
    model: Annotated[str | None, typer.Option(metavar="NAME", help="What is served.")] = None,
    tokens_per_day: Annotated[
        str | None, typer.Option(metavar="N", help="Prompt and output tokens, like 155T.")
    ] = None,
    hit_rate: Annotated[float | None, typer.Option(help="Share of prompt tokens that are cached, 0 to 1.")] = None,
    context: Annotated[
        str | None, typer.Option(metavar="N", help="Mean context of a generated token, of equally long requests.")
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Take lengths from recorded requests: Mooncake's or Azure's format."),
    ] = None,
    batch: Annotated[
        int | None, typer.Option(min=1, help="Sequences that decode together; by default the best.")
    ] = None,
    user_speed: Annotated[
        float | None, typer.Option(help="Tokens per second and user that decoding must reach.")
    ] = None,
    price: Annotated[
        float | None, typer.Option(help="Of a device for an hour in US dollars, for the cost of tokens.")
    ] = None,
    path: Annotated[
        Path | None, typer.Option("--file", metavar="FILE", help="TOML with devices, models and other figures.")
    ] = None,
    inputs: Annotated[
        bool, typer.Option("--inputs", help="Print every figure the plan is given, and its source.")
    ] = False,
    sensitivity: Annotated[bool, typer.Option("--sensitivity", help="Vary each of those by 20 %.")] = False,
    check: Annotated[
        int, typer.Option(metavar="N", min=0, help="Simulate N requests (a few hundred) through one pool of each kind.")
    ] = 0,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the plan with a plot here.")] = None,
    as_json: Annotated[
        Path | None,
        typer.Option(
            "--json", metavar="FILE", help="Write the numbers here, - for standard output; see docs/reference/plan.md."
        ),
    ] = None,
) -> None:
    """Predict speeds, ratio and number of devices of a fleet, beside what was published about it."""
    from deepinfra.bench.simulate.plan.asked import Asked, tokens_of
    from deepinfra.bench.simulate.plan.html import plan_page
    from deepinfra.bench.simulate.plan.outcome import outcome_of
    from deepinfra.bench.simulate.plan.text import outcome_lines

    day = None if tokens_per_day is None else tokens_of(tokens_per_day, "--tokens-per-day")
    traffic = {"tokens_day": day, "hit_rate": hit_rate, **(_lengths(trace) if trace is not None else {})}
    service = {"batch": batch, "user_speed": user_speed}
    asked = Asked(
        fleet=fleet,
        prefill=prefill_device or device,
        decode=decode_device or device,
        model=model,
        price=price,
        context=None if context is None else tokens_of(context, "--context"),
        figures={"traffic": _given(traffic), "service": _given(service)},
        path=path,
    )
    outcome = outcome_of(fleet, asked.assembled(), sensitivity=sensitivity, check=check)
    if html is not None:
        _write(html, plan_page(outcome))
    if as_json is not None:
        document = json.dumps(outcome.document())
        if str(as_json) == "-":
            typer.echo(document)
            return
        _write(as_json, document)
    for line in outcome_lines(outcome, inputs=inputs):
        typer.echo(line)


def _given(figures: Mapping[str, object]) -> dict[str, object]:
    return {name: value for name, value in figures.items() if value is not None}


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error}") from error


def _lengths(path: Path) -> dict[str, object]:
    """Lengths of a trace's requests."""
    from deepinfra.bench.simulate.plan.traffic import summarised
    from deepinfra.bench.simulate.traces import read_workload

    found = summarised(
        ((each.prompt, each.output) for each in read_workload(path)), source=path.name, tokens_day=1.0, hit_rate=0.0
    )
    return {name: getattr(found, name) for name in ("source", "prompt", "output", "position", "context")}
