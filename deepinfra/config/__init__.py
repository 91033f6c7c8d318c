"""Configuration: settings, then a blueprint, then an engine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from deepinfra.config.resolve import Blueprint, Part, PoolBlueprint, checked, resolve
from deepinfra.config.settings import ServerSettings
from deepinfra.config.sources import Provenance, read_settings
from deepinfra.registry import load_plugins

if TYPE_CHECKING:
    from deepinfra.engine import Engine

__all__ = (
    "Blueprint",
    "Part",
    "PoolBlueprint",
    "Provenance",
    "ServerSettings",
    "checked",
    "from_toml",
    "read_settings",
    "resolve",
)


def from_toml(path: str | Path = "deepinfra.toml") -> Engine:
    """The engine that a configuration file describes, with the environment over the file.

    Args:
        path: The file; it must exist. Relative paths inside it are relative to the working directory.

    Raises:
        ConfigError: A setting is unknown, wrong, or its parts do not fit each other; names it and where it stands.
        ModelError: The model is not there or cannot be used.
    """
    settings, provenance = read_settings(Path(path))
    return resolve(settings, load_plugins(), provenance).build()
