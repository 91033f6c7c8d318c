"""Configuration: settings, then a blueprint, then an engine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from deepinfra.config.keys import keys_of, read_keys
from deepinfra.config.resolve import Blueprint, Part, PoolBlueprint, checked, resolve
from deepinfra.config.settings import ServerSettings
from deepinfra.config.sources import Provenance, read_settings
from deepinfra.errors import ConfigError
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
    "keys_of",
    "read_keys",
    "read_settings",
    "resolve",
)


def from_toml(path: str | Path = "deepinfra.toml") -> Engine:
    """The engine that a configuration file describes, with the environment over the file.

    What belongs to the server (`host`, `port`, `api`) is `asgi`'s and uvicorn's to be told. API keys, which an engine
    cannot ask for, are refused here, lest a server be open that was meant to be closed.

    Args:
        path: The file; it must exist. Relative paths inside it are relative to the working directory.

    Raises:
        ConfigError: A setting is unknown, wrong, or its parts do not fit each other; names it and where it stands.
            There are API keys.
        ModelError: The model is not there or cannot be used.
    """
    settings, provenance = read_settings(Path(path))
    if settings.api_keys is not None or settings.api.keys_file is not None:
        raise ConfigError(
            "an engine asks for no API keys: take api_keys and api.keys_file out of its configuration and give them "
            "to the application, as in asgi(engine, keys=read_keys('keys.toml'))"
        )
    return resolve(settings, load_plugins(), provenance).build()
