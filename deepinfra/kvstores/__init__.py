"""KV stores: `MemoryStore` in RAM, `SsdStore` on a local disk. Loaded when first used."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from deepinfra.kvstores.memory import MemoryStore
    from deepinfra.kvstores.ssd import SsdStore

__all__ = ("MemoryStore", "SsdStore")

_HOME = {"MemoryStore": "deepinfra.kvstores.memory", "SsdStore": "deepinfra.kvstores.ssd"}


def __getattr__(name: str) -> object:
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module 'deepinfra.kvstores' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
