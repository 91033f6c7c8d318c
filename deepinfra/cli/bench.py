"""`deepinfra bench`: how fast it is, here."""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated

import anyio
import typer

from deepinfra.cli.compare import compare
from deepinfra.cli.measured import numbers
from deepinfra.cli.mix import mix
from deepinfra.cli.overload import overload
from deepinfra.cli.progress import shown_line
from deepinfra.cli.quality import quality
from deepinfra.cli.roofline import roofline
from deepinfra.cli.setup import OFFLINE, Config, Model, blueprint_for, fetch_models

if TYPE_CHECKING:
    from pathlib import Path

    from deepinfra.bench.cache import CacheReport
    from deepinfra.bench.http import Endpoint
    from deepinfra.bench.kv import KVReport
    from deepinfra.bench.kvrestore import RestoreReport, RestoreRun
    from deepinfra.bench.load import LoadReport, LoadRun, Spread
    from deepinfra.bench.machine import CpuUse
    from deepinfra.bench.offline import OfflineReport, OfflineRun
    from deepinfra.bench.recipe import RecipeReport, RecipeRun
    from deepinfra.config import Blueprint

__all__ = ("bench",)

bench = typer.Typer(
    no_args_is_help=True,
    help="Measure how fast it is on this machine: by itself (bench offline), beside llama.cpp, vLLM and transformers "
    "(bench compare), under load (bench serve).",
)
bench.command("compare")(compare)
bench.command("mix")(mix)
bench.command("overload")(overload)
bench.command("quality")(quality)
bench.command("roofline")(roofline)

AsJson = Annotated[
    bool, typer.Option("--json", help="Print one JSON object; docs/reference/bench.md names its fields.")
]


@bench.command("offline")
def offline(
    model: Model = None,
    dtype: Annotated[str | None, typer.Option(help="float32 or bfloat16; default: the configuration's.")] = None,
    batch: Annotated[str, typer.Option(metavar="N,N,…", help="Sequences that decode together.")] = "1,8,32",
    prompt: Annotated[int, typer.Option(min=1, help="Tokens per prompt.")] = 512,
    new: Annotated[int, typer.Option(min=4, help="Tokens to generate per sequence.")] = 64,
    repeat: Annotated[int, typer.Option(min=1, help="Rounds; the median is reported.")] = 5,
    threads: Annotated[int | None, typer.Option(min=1, help="Threads that compute.")] = None,
    process: Annotated[
        bool | None, typer.Option(help="Run the executor in a child process; default: in this one.")
    ] = None,
    config: Config = None,
    as_json: AsJson = False,
) -> None:
    """Prefill, decode and engine overhead of an engine in this process; `bench compare` sets others beside it."""
    from deepinfra.bench.offline import OfflineRun

    sizes = numbers("--batch", batch)
    executor = {"dtype": dtype, "threads": threads, "process": process}
    chosen = {name: value for name, value in executor.items() if value is not None}
    keywords: dict[str, object] = {"model": model, "pool": {"executor": chosen} if chosen else None}
    blueprint = blueprint_for(config, keywords, defaults=OFFLINE)
    fetch_models(blueprint)
    run = OfflineRun(batches=sizes, prompt=prompt, new=new, repeat=repeat)
    with shown_line() as show:
        report = anyio.run(_offline, blueprint, run, show)
    if as_json:
        _print_json(report)
    else:
        _print_offline(report)


async def _offline(blueprint: Blueprint, run: OfflineRun, show: Callable[[str], None]) -> OfflineReport:
    from deepinfra.bench.offline import run_offline
    from deepinfra.bench.recorder import Recorder
    from deepinfra.engine import Engine, Pool
    from deepinfra.errors import ConfigError

    if blueprint.pool is None:
        raise ConfigError("bench offline measures one pool; this configuration splits prefill and decode")
    parts = blueprint.pool.build()
    recorder = Recorder(parts.executor)
    pool = Pool(parts.scheduler, recorder, store=parts.store, speculator=parts.speculator, placer=parts.placer)
    async with Engine(blueprint.recipe.build(), pool, name=blueprint.name) as engine:
        return await run_offline(engine, recorder, run, progress=show)


@bench.command("serve")
def serve(
    url: Annotated[str, typer.Option(help="Base URL of an OpenAI-compatible server.")] = "http://127.0.0.1:8000/v1",
    model: Annotated[str | None, typer.Option(help="Name to ask for; default: the first the server lists.")] = None,
    concurrency: Annotated[int, typer.Option(min=1, help="Requests at a time.")] = 8,
    requests: Annotated[int, typer.Option(min=1, help="Requests in all.")] = 32,
    chat: Annotated[bool, typer.Option("--chat", help="Send chats instead of plain prompts.")] = False,
    prompt: Annotated[int, typer.Option(min=1, help="Words per prompt, each about a token.")] = 256,
    new: Annotated[int, typer.Option(min=1, help="Tokens to generate per request.")] = 64,
    api_key: Annotated[str | None, typer.Option(help="Sent as bearer token.")] = None,
    as_json: AsJson = False,
) -> None:
    """Load on a running server: time to first token, between tokens, tokens per second."""
    from deepinfra.bench.http import Endpoint
    from deepinfra.bench.load import LoadRun

    run = LoadRun(requests=requests, concurrency=concurrency, prompt=prompt, new=new, chat=chat, model=model)
    report = anyio.run(_serve, Endpoint(url, api_key=api_key), run)
    if as_json:
        _print_json(report)
    else:
        _print_load(report)
    if report.failed:
        raise typer.Exit(1)


async def _serve(endpoint: Endpoint, run: LoadRun) -> LoadReport:
    from deepinfra.bench.load import run_load

    with shown_line() as show:
        return await run_load(endpoint, run, progress=lambda done: show(f"{done} of {run.requests} requests"))


@bench.command("recipe")
def recipe(
    model: Model = None,
    chars: Annotated[int, typer.Option(min=1000, help="Characters of the chat.")] = 200_000,
    turn: Annotated[int, typer.Option(min=1, help="Characters of each of its messages.")] = 1_000,
    repeat: Annotated[int, typer.Option(min=1, help="Rounds; the median is reported.")] = 5,
    config: Config = None,
    as_json: AsJson = False,
) -> None:
    """Rendering and encoding a chat beside plain tokenisation of the same text, its next turn, and parsing.

    `first` is a chat never seen before, `next` the chat one turn longer, `feed` an answer read id by id.
    """
    from deepinfra.bench.recipe import RecipeRun

    blueprint = blueprint_for(config, {"model": model}, defaults=OFFLINE)
    fetch_models(blueprint)
    with shown_line() as show:
        report = anyio.run(_recipe, blueprint, RecipeRun(chars=chars, turn=turn, repeat=repeat), show)
    if as_json:
        _print_json(report)
    else:
        _print_recipe(report)


async def _recipe(blueprint: Blueprint, run: RecipeRun, show: Callable[[str], None]) -> RecipeReport:
    from deepinfra.bench.recipe import run_recipe
    from deepinfra.models import open_model

    name = blueprint.settings.model
    tokenizer = open_model(name).tokenizer()
    async with blueprint.recipe.build() as built:
        return run_recipe(
            built, lambda text: tokenizer.encode(text, add_special_tokens=False).ids, run, model=name, progress=show
        )


@bench.command("kv")
def kv(
    path: Annotated[str, typer.Option(help="Folder on the disk to measure; what is made there is removed.")] = ".",
    records: Annotated[int, typer.Option(min=1, help="Records to save, open and load.")] = 2048,
    nbytes: Annotated[int, typer.Option(min=1, help="Bytes of each; SmolLM2's blocks have 368,640.")] = 368_640,
    prefix: Annotated[int, typer.Option(min=1, help="Records that are loaded together.")] = 16,
    repeat: Annotated[int, typer.Option(min=1, help="Rounds; the median is reported.")] = 5,
    as_json: AsJson = False,
) -> None:
    """The ssd store on a disk: opening after kill -9, saving and loading beside plain calls."""
    from functools import partial
    from pathlib import Path

    from deepinfra.bench.kv import KVRun, run_kv

    run = KVRun(records=records, nbytes=nbytes, prefix=prefix, repeat=repeat)
    with shown_line() as show:
        report = anyio.run(partial(run_kv, Path(path), run, progress=show))
    if as_json:
        _print_json(report)
    else:
        _print_kv(report)


@bench.command("cache")
def cache(
    trace: Annotated[str, typer.Argument(help="Requests in the Mooncake format, .jsonl or .jsonl.xz.")],
    blocks: Annotated[str, typer.Option(metavar="N,N,…", help="Room for so many blocks of 512 tokens.")] = "5000",
    as_json: AsJson = False,
) -> None:
    """What caches of some sizes would hit of recorded requests, by eviction policy, in virtual time."""
    from functools import partial
    from pathlib import Path

    from deepinfra.bench.cache import run_cache
    from deepinfra.errors import ConfigError

    sizes = [int(size) for size in blocks.split(",") if size.strip().isdecimal()]
    if not sizes or len(sizes) != len(blocks.split(",")) or min(sizes) < 1:
        raise ConfigError(f"--blocks takes numbers of blocks like 1000,5000; {blocks!r} is something else")
    try:
        with shown_line() as show:
            report = anyio.run(partial(run_cache, Path(trace), sizes, progress=show))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{trace} cannot be replayed: {error}") from error
    if as_json:
        _print_json(report)
    else:
        _print_cache(report)


@bench.command("restore")
def restore(
    model: Model = None,
    path: Annotated[str, typer.Option(help="Folder on the disk to measure; what is made there is removed.")] = ".",
    prefix: Annotated[int, typer.Option(min=128, help="Tokens to compute, and to restore after a restart.")] = 2000,
    batch: Annotated[int, typer.Option(min=1, help="Sequences that decode while KV is saved.")] = 4,
    new: Annotated[int, typer.Option(min=4, help="Tokens that each of them generates.")] = 48,
    repeat: Annotated[int, typer.Option(min=1, help="Rounds; the median is reported.")] = 5,
    config: Config = None,
    as_json: AsJson = False,
) -> None:
    """A model with the ssd store: first token of a restored prefix beside a computed one, and tokens beside saving."""
    from pathlib import Path

    from deepinfra.bench.kvrestore import RestoreRun

    blueprint = blueprint_for(config, {"model": model}, defaults=OFFLINE)
    fetch_models(blueprint)
    run = RestoreRun(prefix=prefix, batch=batch, new=new, repeat=repeat)
    with shown_line() as show:
        report = anyio.run(_restore, blueprint, Path(path), run, show)
    if as_json:
        _print_json(report)
    else:
        _print_restore(report)


async def _restore(blueprint: Blueprint, path: Path, run: RestoreRun, show: Callable[[str], None]) -> RestoreReport:
    from deepinfra.bench.kvrestore import run_restore
    from deepinfra.bench.recorder import Recorder
    from deepinfra.errors import ConfigError

    if blueprint.pool is None:
        raise ConfigError("bench restore measures one pool; this configuration splits prefill and decode")
    parts = blueprint.pool.build()
    recorder = Recorder(parts.executor)
    recipe = blueprint.recipe.build()
    return await run_restore(recipe, parts.scheduler, recorder, run, model=blueprint.name, path=path, progress=show)


# -- output ---------------------------------------------------------------------------------------


def _print_json(report: OfflineReport | LoadReport | RecipeReport | KVReport | CacheReport | RestoreReport) -> None:
    typer.echo(json.dumps(dataclasses.asdict(report)))


def _print_cache(report: CacheReport) -> None:
    typer.echo(
        f"{report.trace}: {report.requests} requests for {report.asked} blocks, {report.distinct} different; "
        f"without a limit {report.ideal:.1%} are hits"
    )
    for figure in report.figures:
        first, second = figure.halves
        typer.echo(
            f"{figure.blocks:>9} blocks {figure.policy:6} {figure.hit:6.1%} of blocks ({first:.1%}, then {second:.1%})"
            f", {figure.token_hit:6.1%} of tokens"
        )


def _print_offline(report: OfflineReport) -> None:
    run = report.run
    typer.echo(f"{report.model}, {report.kv_dtype}, {run.prompt} tokens of prompt, {run.new} new, {run.repeat} rounds")
    for figure in report.figures:
        name = f"{figure.name} at batch {figure.batch}"
        value = f"{figure.median:10.1%}" if figure.name == "overhead" else f"{figure.median:10.1f} tok/s"
        typer.echo(f"{name:24} {value}")
    _print_cpu(report.cpu)


def _print_recipe(report: RecipeReport) -> None:
    run = report.run
    typer.echo(f"{report.model}, {report.recipe}, {run.chars} characters in turns of {run.turn}, {run.repeat} rounds")
    for figure in report.figures:
        line = f"{figure.name:8} {figure.ours:10.2f} {'µs per token' if figure.name == 'feed' else 'ms'}"
        if figure.plain is not None and figure.ratio is not None:
            line += f"   plain tokenisation: {figure.plain:.2f} ms   ratio {figure.ratio:.2f}"
        typer.echo(line)
    _print_cpu(report.cpu)


def _print_kv(report: KVReport) -> None:
    run, opened = report.run, report.open
    typer.echo(f"{run.records} records of {run.nbytes} bytes, {run.prefix} per load, {run.repeat} rounds")
    typer.echo(
        f"open {opened.seconds * 1000:10.1f} ms   {opened.grown_nbytes / 1e6:.1f} MB of memory"
        f"   match {opened.match_us:.1f} µs per key"
    )
    for figure in report.figures:
        line = f"{figure.name} {figure.ours:10.2f} GB/s   plain calls: {figure.plain:.2f} GB/s"
        typer.echo(f"{line}   ratio {figure.ratio:.2f}")
    _print_cpu(report.cpu)


def _print_restore(report: RestoreReport) -> None:
    run = report.run
    typer.echo(
        f"{report.model}, {report.kv_dtype}, records of {report.record_nbytes} bytes, {run.prefix} tokens of prefix,"
        f" {run.repeat} rounds"
    )
    for figure in report.figures:
        computed, restored = (statistics.median(values) for values in (figure.computed_s, figure.restored_s))
        line = f"first token, {figure.name} {restored * 1000:10.1f} ms   computed: {computed * 1000:.1f} ms"
        typer.echo(f"{line}   {figure.ratio:.1f} times sooner")
    for gap in report.gaps:
        line = f"between tokens of {run.batch}, {gap.name:5} {gap.saving_s * 1000:10.1f} ms saving"
        typer.echo(f"{line}   {gap.idle_s * 1000:.1f} ms without   ratio {gap.ratio:.2f}")
    _print_cpu(report.cpu)


def _print_load(report: LoadReport) -> None:
    typer.echo(
        f"{report.model}: {report.succeeded} of {report.run.requests} requests, {report.run.concurrency} at a time"
    )
    typer.echo(f"output {report.output_tokens_per_s:.1f} tok/s over {report.wall_s:.1f} s")
    for name, values in (
        ("TTFT", report.ttft_s),
        ("ITL", report.itl_s),
        ("request", report.request_s),
    ):
        if values is not None:
            typer.echo(f"{name:16} {_spread(values)}")
    typer.echo(f"prompt tokens {report.prompt_tokens}, of them cached {report.cached_tokens}")
    for error in report.errors:
        typer.echo(f"failed: {error}", err=True)


def _spread(values: Spread) -> str:
    return f"p50 {values.p50 * 1000:.1f} ms   p95 {values.p95 * 1000:.1f} ms   worst {values.worst * 1000:.1f} ms"


def _print_cpu(cpu: CpuUse) -> None:
    noisy = "   NOISY: not to be trusted" if cpu.noisy else ""
    typer.echo(f"processor: {cpu.own_cores:.2f} cores here, {cpu.others_cores:.2f} cores in other programs{noisy}")
