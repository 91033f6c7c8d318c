"""`deepinfra explain`: every value and where it came from."""

from __future__ import annotations

import dataclasses
import json
from typing import Annotated

import typer

from deepinfra.cli.setup import Config, Model, blueprint_for

__all__ = ("explain",)


def explain(
    model: Model = None,
    config: Config = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print a JSON list of name, value, origin, about, became.")
    ] = False,
) -> None:
    """Print every setting in effect, where it came from, and what "auto" became.

    Starts and fetches nothing; what "auto" becomes is told once the model is on this machine.
    """
    from deepinfra.config.explain import explain as explain_blueprint

    blueprint = blueprint_for(config, {"model": model})
    troubles = [trouble for name in blueprint.models if (trouble := _trouble_with(name))]
    values = explain_blueprint(blueprint, ask_parts=not troubles)
    if as_json:
        typer.echo(json.dumps([dataclasses.asdict(value) for value in values], indent=2))
        return
    lines = [f"{value.name} = {json.dumps(value.value, ensure_ascii=False)}" for value in values]
    width = min(60, max(len(line) for line in lines))
    for line, value in zip(lines, values, strict=True):
        became = f"; {value.became}" if value.became else ""
        typer.echo(f"{line:{width}}  # {value.origin}{became}")
    for trouble in troubles:
        typer.echo(f"what auto becomes is unknown: {trouble}", err=True)


def _trouble_with(model: str) -> str:
    """Why a model cannot be looked into; empty if it can."""
    from deepinfra.errors import ModelError
    from deepinfra.models import open_model

    try:
        open_model(model, offline=True)
    except ModelError as error:
        return str(error)
    return ""
