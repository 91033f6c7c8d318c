"""What plug-in writers test their parts with: one conformance class per interface, loaded when first used.

Subclass the class of your part (`class TestMine(SchedulerConformance)`), let its `make` return the part, run pytest.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from deepinfra.lazy import lazily

if TYPE_CHECKING:
    from deepinfra.testing.clock import ManualClock
    from deepinfra.testing.executor import ExecutorConformance
    from deepinfra.testing.kvstore import KVStoreConformance
    from deepinfra.testing.placer import ExpertPlacerConformance
    from deepinfra.testing.recipe import RecipeConformance
    from deepinfra.testing.replay import ReplayExecutor
    from deepinfra.testing.scheduler import SchedulerConformance
    from deepinfra.testing.speculator import SpeculatorConformance
    from deepinfra.testing.tiny import TinyRecipe

__all__ = (
    "ExecutorConformance",
    "ExpertPlacerConformance",
    "KVStoreConformance",
    "ManualClock",
    "RecipeConformance",
    "ReplayExecutor",
    "SchedulerConformance",
    "SpeculatorConformance",
    "TinyRecipe",
)

__getattr__ = lazily(
    __name__,
    {
        "ExecutorConformance": "deepinfra.testing.executor",
        "ExpertPlacerConformance": "deepinfra.testing.placer",
        "KVStoreConformance": "deepinfra.testing.kvstore",
        "ManualClock": "deepinfra.testing.clock",
        "RecipeConformance": "deepinfra.testing.recipe",
        "ReplayExecutor": "deepinfra.testing.replay",
        "SchedulerConformance": "deepinfra.testing.scheduler",
        "SpeculatorConformance": "deepinfra.testing.speculator",
        "TinyRecipe": "deepinfra.testing.tiny",
    },
)
