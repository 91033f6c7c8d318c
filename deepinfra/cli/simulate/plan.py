"""`deepinfra simulate plan`: devices for traffic, from what devices, models and traffic are said to be."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from deepinfra.errors import ConfigError

if TYPE_CHECKING:
    from deepinfra.bench.simulate.plan.check import Checked
    from deepinfra.bench.simulate.plan.compare import Compared
    from deepinfra.bench.simulate.plan.fleet import Fleet, Plan
    from deepinfra.bench.simulate.plan.sensitivity import Sensitivity

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
    from deepinfra.bench.simulate.plan.check import checked
    from deepinfra.bench.simulate.plan.compare import compared
    from deepinfra.bench.simulate.plan.html import plan_page
    from deepinfra.bench.simulate.plan.sensitivity import sensitivities
    from deepinfra.bench.simulate.plan.text import checked_lines, plan_lines, sensitivity_lines

    traffic: dict[str, object] = {}
    if tokens_per_day is not None:
        traffic["tokens_day"] = tokens_of(tokens_per_day, "--tokens-per-day")
    if hit_rate is not None:
        traffic["hit_rate"] = hit_rate
    if trace is not None:
        traffic |= _lengths(trace)
    service: dict[str, object] = {"batch": batch, "user_speed": user_speed}
    asked = Asked(
        fleet=fleet,
        prefill=prefill_device or device,
        decode=decode_device or device,
        model=model,
        price=price,
        context=None if context is None else tokens_of(context, "--context"),
        figures={"traffic": traffic, "service": {name: value for name, value in service.items() if value is not None}},
        path=path,
    )
    assembled = asked.assembled()
    planned = assembled.plan()
    beside = compared(fleet, assembled, planned)
    moves = sensitivities(assembled) if sensitivity else []
    simulated = checked(assembled, planned, requests=check) if check else None
    if html is not None:
        _write(html, plan_page(assembled, planned, beside, moves, simulated))
    if as_json is not None:
        document = json.dumps(_object(fleet, assembled, planned, beside, moves, simulated))
        if str(as_json) == "-":
            typer.echo(document)
            return
        _write(as_json, document)
    for line in plan_lines(assembled, planned, beside):
        typer.echo(line)
    if simulated is not None:
        typer.echo()
        for line in checked_lines(planned, simulated):
            typer.echo(line)
    if inputs:
        typer.echo()
        for given in assembled.givens():
            typer.echo(f"{given.name:36} {given.value:<12.6g} {given.source}")
    if sensitivity:
        typer.echo()
        for line in sensitivity_lines(moves):
            typer.echo(line)


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


def _object(
    name: str,
    fleet: Fleet,
    plan: Plan,
    beside: tuple[Compared, ...],
    moves: list[Sensitivity],
    simulated: Checked | None,
) -> dict[str, object]:
    return {
        "kind": "plan",
        "fleet": name,
        "plan": dataclasses.asdict(plan),
        "compared": [each._asdict() for each in beside],
        "checked": dataclasses.asdict(simulated) if simulated is not None else None,
        "batches": [dataclasses.asdict(each) for each in fleet.batches()],
        "inputs": [each._asdict() for each in fleet.givens()],
        "sensitivity": [each._asdict() for each in moves],
    }
