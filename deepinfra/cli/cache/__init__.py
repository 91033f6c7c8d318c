"""`deepinfra cache`: what the store holds, what is wrong with it, and why a prompt was not found in it."""

from __future__ import annotations

import typer

from deepinfra.cli.cache import lint

__all__ = ("cache",)

cache = typer.Typer(
    no_args_is_help=True, help="Look into the KV that is kept: how much, whose, how whole, and why a prompt missed."
)

cache.command("lint")(lint.lint)
