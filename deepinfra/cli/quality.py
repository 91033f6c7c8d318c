"""`deepinfra bench quality`: what a form of weights costs in quality."""

from __future__ import annotations

import dataclasses
import json
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import anyio
import typer

from deepinfra.cli.measured import measured
from deepinfra.cli.progress import shown_line
from deepinfra.cli.setup import Config

if TYPE_CHECKING:
    from deepinfra.bench.quality import QualityReport

__all__ = ("quality",)

_USED = ("dtype", "kernels", "weights", "batch_invariant", "threads")
"""Of the executor's options: the others are sizes."""


def quality(
    model: Annotated[
        str | None, typer.Argument(metavar="MODEL", help="Catalogue name (smollm2), path of a model, or hub id.")
    ] = None,
    forms: Annotated[
        str | None,
        typer.Option(
            metavar="FORM,…",
            help="stored (the file's blocks of integers), bfloat16, float32, torch (no kernels of ours). Default: "
            "stored,bfloat16, or bfloat16 for a model without such blocks.",
        ),
    ] = None,
    tokens: Annotated[int, typer.Option(min=2, help="Tokens of the text.")] = 50_688,
    chunk: Annotated[int, typer.Option(min=2, help="Tokens that see each other.")] = 512,
    text: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Text to read; default: Python's manual, as Python ships it.")
    ] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="Threads that compute.")] = None,
    config: Config = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object; docs/reference/bench.md names its fields.")
    ] = False,
) -> None:
    """Perplexity, agreement on the next token, and error of logits, beside the weights decoded to float32.

    Exits with 1 if a form's perplexity differs by more than 0.5 %, or it agrees on fewer than 95 % of the tokens.
    """
    from deepinfra.bench.quality import QualityRun, run_quality
    from deepinfra.errors import ConfigError

    given = None
    if text is not None:
        try:
            given = (text.name, text.read_text("utf-8"))
        except UnicodeDecodeError as error:
            raise ConfigError(f"--text {text} is no text in UTF-8: {error}") from error
    found = measured("bench quality", config, model, forms, "--forms", only=_USED)
    run, cores = QualityRun(tokens=tokens, chunk=chunk), threads or found.threads()
    read = partial(run_quality, found.model, found.options, run, text=given, threads=cores)
    with shown_line() as show:
        report = anyio.run(partial(read, progress=show))
    if as_json:
        typer.echo(json.dumps(dataclasses.asdict(report)))
    else:
        _print(report)
    if not all(form.kept for form in report.forms):
        raise typer.Exit(1)


def _print(report: QualityReport) -> None:
    typer.echo(f"{report.model}: {report.predictions} predictions in chunks of {report.run.chunk}, {report.text}")
    typer.echo(f"{'float32 by torch':20} perplexity {report.perplexity:.4f}")
    for form in report.forms:
        verdict = "kept" if form.kept else "NOT KEPT"
        typer.echo(
            f"{form.form:20} perplexity {form.perplexity:.4f} ({form.change:+.3%})   agreement {form.agreement:.2%}   "
            f"logit error mean {form.mean_error:.4f} max {form.max_error:.3f}   {verdict}"
        )
