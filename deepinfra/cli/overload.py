"""`deepinfra bench overload`: more requests than a server can serve."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated

import anyio
import typer

from deepinfra.cli.progress import nbytes_text, shown_line
from deepinfra.cli.setup import Config, Model, blueprint_for, fetch_models

if TYPE_CHECKING:
    from deepinfra.bench.load import Spread
    from deepinfra.bench.overload import OverloadReport, OverloadRun, Retries

__all__ = ("overload",)

_MAX_QUEUE = 64
"""With SmolLM2 on two cores a queue of so many is about ten seconds of work."""


def overload(
    url: Annotated[
        str | None, typer.Option(help="Base URL of a running server; by default one is started, and its memory read.")
    ] = None,
    model: Model = None,
    times: Annotated[float, typer.Option(min=0.1, help="Requests per second, by what the server can serve.")] = 5.0,
    seconds: Annotated[float, typer.Option(min=0.5, help="Seconds of that.")] = 60.0,
    concurrency: Annotated[
        str, typer.Option(metavar="N,N,…", help="Clients at a time, to find what it can serve.")
    ] = "16,64",
    calibrate_s: Annotated[float, typer.Option("--calibrate", min=0.5, help="Seconds of each of these.")] = 20.0,
    prompt: Annotated[int, typer.Option(min=2, help="Words per prompt, each about a token.")] = 32,
    new: Annotated[int, typer.Option(min=1, help="Tokens to generate per request.")] = 32,
    patient: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Share of refused clients that wait as told and ask once more.")
    ] = 1.0,
    max_queue: Annotated[
        int | None,
        typer.Option(min=1, help=f"Of the server that is started; default: the configuration's, or {_MAX_QUEUE}."),
    ] = None,
    api_key: Annotated[str | None, typer.Option(help="Sent as bearer token.")] = None,
    config: Config = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object; docs/reference/bench.md names its fields.")
    ] = False,
) -> None:
    """Several times what a server can serve: what it still serves, and whether those get in who come again as told."""
    from deepinfra.bench.overload import OverloadRun
    from deepinfra.errors import ConfigError

    sizes = tuple(int(size) for size in concurrency.split(",") if size.strip().isdecimal())
    if not sizes or len(sizes) != len(concurrency.split(",")) or min(sizes) < 1:
        raise ConfigError(f"--concurrency takes numbers of clients like 16,64; {concurrency!r} is something else")
    run = OverloadRun(
        times=times,
        seconds=seconds,
        concurrency=sizes,
        calibrate_s=calibrate_s,
        prompt=prompt,
        new=new,
        patient=patient,
        model=model if url else None,
    )
    environ: dict[str, str] = {}
    arguments: list[str] = []
    if url is None:
        keywords: dict[str, object] = {"model": model}
        if max_queue is not None:
            keywords["pool"] = {"scheduler": {"max_queue": max_queue}}
        defaults: dict[str, object] = {"pool": {"store": {"use": "none"}, "scheduler": {"max_queue": _MAX_QUEUE}}}
        blueprint = blueprint_for(config, keywords, defaults=defaults)
        if blueprint.pool is None:
            raise ConfigError("bench overload starts a server of one pool; give others with --url")
        fetch_models(blueprint)
        most = getattr(blueprint.pool.scheduler.options, "max_queue", None)
        if most is not None:
            environ["DEEPINFRA_POOL__SCHEDULER__MAX_QUEUE"] = str(most)
        arguments += ["--no-store"] if blueprint.pool.store is None else []
        arguments += ["--model", model] if model is not None else []
        arguments += ["--config", str(config)] if config is not None else []
    elif max_queue is not None or config is not None:
        raise ConfigError("--max-queue and --config are for a server that is started here, not for one at --url")
    with shown_line() as show:
        report = anyio.run(_overload, url, environ, arguments, run, api_key, show)
    if as_json:
        typer.echo(json.dumps(dataclasses.asdict(report)))
    else:
        _print(report)
    if report.failed or not report.settled:
        raise typer.Exit(1)


async def _overload(
    url: str | None,
    environ: dict[str, str],
    arguments: list[str],
    run: OverloadRun,
    api_key: str | None,
    show: Callable[[str], None],
) -> OverloadReport:
    from deepinfra.bench.overload import run_overload
    from deepinfra.bench.server import serving
    from deepinfra.errors import EngineError

    if url is not None:
        root = url.rstrip("/").removesuffix("/v1")
        return await run_overload(root, run, api_key=api_key, progress=show)
    show("starting the server")
    async with serving(environ, arguments) as child:
        report = await run_overload(child.url, run, pid=child.pid, api_key=api_key, progress=show)
    if child.code:
        raise EngineError(f"the server ended with {child.code}")
    return report


def _print(report: OverloadReport) -> None:
    for level in report.levels:
        typer.echo(
            f"{report.model}, {level.concurrency:4} clients at a time: output {level.output_tokens_per_s:.1f} tok/s, "
            f"{level.requests_per_s:.2f} requests/s"
        )
    typer.echo(
        f"overload: {report.requests_per_s:.1f} requests/s for {report.run.seconds:g} s: output "
        f"{report.output_tokens_per_s:.1f} tok/s, {report.goodput:.1%} of the best"
    )
    typer.echo(
        f"{report.sent} clients: {report.served} served at once, {report.refused} refused, {report.failed} failed; "
        f"at most {report.waiting_most} waited"
    )
    for name, retries in (("while it lasted", report.retries), ("later", report.late_retries)):
        typer.echo(f"came again {name}: {_retries(retries)}")
    for name, spread in (
        ("told to wait", report.told_s),
        ("until refused", report.refusal_s),
        ("TTFT", report.ttft_s),
    ):
        if spread is not None:
            typer.echo(f"{name:16} {_spread(spread)}")
    if (memory := report.memory) is not None:
        halves = ", ".join(nbytes_text(n) for n in (memory.before, memory.first_half, memory.second_half, memory.after))
        children = f"{nbytes_text(memory.children_before)} and {nbytes_text(memory.children_most)}"
        typer.echo(f"memory of the server before, in both halves, after: {halves}; of its children {children} at most")
    typer.echo("everything given back" if report.settled else "NOT everything was given back")
    for error in report.errors:
        typer.echo(f"failed: {error}", err=True)
    cpu = report.cpu
    noisy = "   NOISY: not to be trusted" if cpu.noisy else ""
    typer.echo(
        f"processor: {report.load_cores:.2f} cores for the load, {report.server_cores:.2f} cores for the server, "
        f"{cpu.others_cores:.2f} cores in other programs{noisy}"
    )


def _retries(retries: Retries) -> str:
    share = "" if retries.share is None else f", {retries.share:.1%}"
    return f"{retries.came}, of them got in {retries.served}{share}"


def _spread(values: Spread) -> str:
    return f"p50 {values.p50:.2f} s   p95 {values.p95:.2f} s   worst {values.worst:.2f} s"
