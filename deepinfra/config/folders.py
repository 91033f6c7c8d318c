"""Where a server keeps its data unless told otherwise."""

from __future__ import annotations

from pathlib import Path

import platformdirs

__all__ = ("kv_folder", "peers_folder", "timings_folder")


def kv_folder() -> Path:
    """`~/.cache/deepinfra/kv`, unless `XDG_CACHE_HOME` says otherwise; beside the models' folder."""
    return platformdirs.user_cache_path("deepinfra", appauthor=False) / "kv"


def timings_folder() -> Path:
    """Where schedulers keep the step times they measured, beside it."""
    return platformdirs.user_cache_path("deepinfra", appauthor=False) / "timings"


def peers_folder() -> Path:
    """Where `deepinfra bench compare` keeps weights in other programs' formats, beside it."""
    return platformdirs.user_cache_path("deepinfra", appauthor=False) / "peers"
