"""Expert placers: which device holds which expert of a mixture."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from deepinfra.placers.eplb import Eplb
    from deepinfra.placers.options import EplbOptions, StaticPlacerOptions
    from deepinfra.placers.static import StaticPlacer

__all__ = ("Eplb", "EplbOptions", "StaticPlacer", "StaticPlacerOptions")

_HOME = {
    "Eplb": "deepinfra.placers.eplb",
    "EplbOptions": "deepinfra.placers.options",
    "StaticPlacer": "deepinfra.placers.static",
    "StaticPlacerOptions": "deepinfra.placers.options",
}


def __getattr__(name: str) -> object:
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module 'deepinfra.placers' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
