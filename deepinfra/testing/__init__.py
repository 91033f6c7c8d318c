"""What plug-in writers test their parts with: one conformance class per interface, loaded when first used.

Subclass the class of your part (`class TestMine(SchedulerConformance)`), let its `make` return the part, run pytest.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from deepinfra.testing.clock import ManualClock
    from deepinfra.testing.executor import ExecutorConformance
    from deepinfra.testing.kvstore import KVStoreConformance
    from deepinfra.testing.placer import ExpertPlacerConformance
    from deepinfra.testing.recipe import RecipeConformance
    from deepinfra.testing.scheduler import SchedulerConformance
    from deepinfra.testing.speculator import SpeculatorConformance
    from deepinfra.testing.tiny import TinyRecipe

__all__ = (
    "ExecutorConformance",
    "ExpertPlacerConformance",
    "KVStoreConformance",
    "ManualClock",
    "RecipeConformance",
    "SchedulerConformance",
    "SpeculatorConformance",
    "TinyRecipe",
)

_HOME = {
    "ExecutorConformance": "executor",
    "ExpertPlacerConformance": "placer",
    "KVStoreConformance": "kvstore",
    "ManualClock": "clock",
    "RecipeConformance": "recipe",
    "SchedulerConformance": "scheduler",
    "SpeculatorConformance": "speculator",
    "TinyRecipe": "tiny",
}


def __getattr__(name: str) -> object:
    if name in _HOME:
        return getattr(importlib.import_module(f"deepinfra.testing.{_HOME[name]}"), name)
    raise AttributeError(f"module 'deepinfra.testing' has no attribute {name!r}")
