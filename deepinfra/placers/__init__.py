"""Expert placers: which device holds which expert of a mixture."""

from __future__ import annotations

from typing import TYPE_CHECKING

from deepinfra.lazy import lazily

if TYPE_CHECKING:
    from deepinfra.placers.eplb import Eplb
    from deepinfra.placers.options import EplbOptions, StaticPlacerOptions
    from deepinfra.placers.static import StaticPlacer

__all__ = ("Eplb", "EplbOptions", "StaticPlacer", "StaticPlacerOptions")

__getattr__ = lazily(
    __name__,
    {
        "Eplb": "deepinfra.placers.eplb",
        "EplbOptions": "deepinfra.placers.options",
        "StaticPlacer": "deepinfra.placers.static",
        "StaticPlacerOptions": "deepinfra.placers.options",
    },
)
