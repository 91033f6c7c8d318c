"""What several commands share: the options that choose a configuration, and the way to a blueprint."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from deepinfra.config import Blueprint
    from deepinfra.registry import Registry

__all__ = ("OFFLINE", "Config", "Model", "blueprint_for", "fetch_models", "settings_file")

Config = Annotated[
    Path | None,
    typer.Option(
        "--config",
        "-c",
        metavar="FILE",
        help="Configuration file; by default deepinfra.toml in this folder, if there is one.",
    ),
]
Model = Annotated[
    str | None, typer.Option(metavar="NAME", help="Catalogue name (smollm2), path of a model, or hub id (org/name).")
]

OFFLINE: dict[str, object] = {"pool": {"store": {"use": "none"}, "executor": {"process": False}}}
"""Defaults of commands that serve nobody else: no store to share with a server, no second process."""


def blueprint_for(
    config: Path | None,
    keywords: dict[str, object],
    *,
    defaults: dict[str, object] | None = None,
    registry: Registry | None = None,
) -> Blueprint:
    """Read the configuration and resolve it; options that were not given (`None`) are left out of `keywords`."""
    from deepinfra.config import read_settings, resolve
    from deepinfra.config.openmp import calm_openmp
    from deepinfra.registry import load_plugins

    calm_openmp()

    settings, provenance = read_settings(
        settings_file(config),
        keywords={name: value for name, value in keywords.items() if value is not None},
        keywords_from="command line",
        defaults=defaults,
    )
    return resolve(settings, registry or load_plugins(), provenance)


def settings_file(config: Path | None) -> Path | None:
    """The file to read: the one that was named, or `deepinfra.toml` in this folder, or none."""
    here = Path("deepinfra.toml")
    return config or (here if here.exists() else None)


def fetch_models(blueprint: Blueprint) -> None:
    """Fetch what the parts will read and is not here yet, showing progress."""
    from deepinfra.cli.progress import shown_progress
    from deepinfra.models import pull

    with shown_progress() as progress:
        for name in blueprint.models:
            pull(name, progress=progress)
