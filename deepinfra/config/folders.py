"""Where a server keeps its data unless told otherwise."""

from __future__ import annotations

from pathlib import Path

import platformdirs

__all__ = ("kv_folder",)


def kv_folder() -> Path:
    """`~/.cache/deepinfra/kv`, unless `XDG_CACHE_HOME` says otherwise; beside the models' folder."""
    return platformdirs.user_cache_path("deepinfra", appauthor=False) / "kv"
