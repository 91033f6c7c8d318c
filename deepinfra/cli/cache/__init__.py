"""`deepinfra cache`: what the store holds, what is wrong with it, and why a prompt was not found in it."""

from __future__ import annotations

import typer

from deepinfra.cli.cache import counts, explain, fsck, lint, moving

__all__ = ("cache",)

cache = typer.Typer(
    no_args_is_help=True, help="Look into the KV that is kept: how much, whose, how whole, and why a prompt missed."
)

cache.command("stats")(counts.stats)
cache.command("du")(counts.du)
cache.command("fsck")(fsck.fsck)
cache.command("export")(moving.export)
cache.command("import")(moving.import_)
cache.command("forget")(moving.forget)
cache.command("explain")(explain.explain)
cache.command("lint")(lint.lint)
