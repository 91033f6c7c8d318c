"""`deepinfra pull`: fetch a model."""

from __future__ import annotations

from typing import Annotated

import typer

__all__ = ("pull",)


def pull(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Catalogue name (smollm2) or hub id (org/name).")],
) -> None:
    """Fetch a model unless it is here, and print where it is."""
    from deepinfra import models
    from deepinfra.cli.progress import shown_progress

    with shown_progress() as progress:
        path = models.pull(name, progress=progress)
    typer.echo(path)
