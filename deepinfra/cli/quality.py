"""`deepinfra bench quality`: what a form of weights costs in quality."""

from __future__ import annotations

import dataclasses
import json
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import anyio
import typer

from deepinfra.cli.compare import names
from deepinfra.cli.progress import shown_line
from deepinfra.cli.setup import OFFLINE, Config, blueprint_for, fetch_models

if TYPE_CHECKING:
    from deepinfra.bench.quality import QualityReport

__all__ = ("quality",)


def quality(
    model: Annotated[
        str | None, typer.Argument(metavar="MODEL", help="Catalogue name (smollm2), path of a model, or hub id.")
    ] = None,
    forms: Annotated[
        str,
        typer.Option(
            metavar="FORM,…", help="stored (the file's own formats), bfloat16, float32, torch (no kernels of ours)."
        ),
    ] = "stored,bfloat16",
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
    from deepinfra.bench.compare.sides import our_options
    from deepinfra.bench.quality import QualityRun, run_quality
    from deepinfra.errors import ConfigError
    from deepinfra.models import open_model

    blueprint = blueprint_for(config, {"model": model}, defaults=OFFLINE)
    fetch_models(blueprint)
    given = None
    if text is not None:
        try:
            given = (text.name, text.read_text())
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{text} cannot be read: {error}") from error
    chosen = {form: our_options(form, threads) for form in names("--forms", forms)}
    opened = open_model(blueprint.settings.model)
    with shown_line() as show:
        run = QualityRun(tokens=tokens, chunk=chunk)
        report = anyio.run(partial(run_quality, opened, chosen, run, text=given, threads=threads, progress=show))
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
