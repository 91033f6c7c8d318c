"""Schedulers: who runs next, and how much."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from deepinfra.schedulers.bucketed import Bucketed
    from deepinfra.schedulers.fcfs import Fcfs
    from deepinfra.schedulers.options import BucketedOptions, FcfsOptions

__all__ = ("Bucketed", "BucketedOptions", "Fcfs", "FcfsOptions")

_HOME = {
    "Bucketed": "deepinfra.schedulers.bucketed",
    "BucketedOptions": "deepinfra.schedulers.options",
    "Fcfs": "deepinfra.schedulers.fcfs",
    "FcfsOptions": "deepinfra.schedulers.options",
}


def __getattr__(name: str) -> object:
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module 'deepinfra.schedulers' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
