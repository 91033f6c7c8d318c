"""`deepinfra plugins`: what is installed, and from where."""

from __future__ import annotations

import json
from typing import Annotated

import typer

__all__ = ("plugins",)


def plugins(
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON list of kind, name, plug-in, origin.")] = False,
) -> None:
    """List every part that a configuration can name, with the distribution and version it came from."""
    from deepinfra.registry import KINDS, load_plugins

    registry = load_plugins()
    rows = [
        {
            "kind": kind,
            "name": entry.name,
            "plugin": entry.origin.plugin,
            "distribution": entry.origin.distribution,
            "version": entry.origin.version,
        }
        for kind in KINDS
        for _, entry in sorted(registry.of_kind(kind).items())
    ]
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
        return
    for row in rows:
        typer.echo(f"{row['kind']:10}  {row['name']:20}  {row['distribution']} {row['version']}")
    providers = {row["plugin"] for row in rows}
    for origin in registry.origins:
        if origin.plugin not in providers:
            typer.echo(f"{'hooks only':10}  {origin.plugin:20}  {origin}")
