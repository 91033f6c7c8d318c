"""The six interfaces, one file each, and what implementations are given."""

from deepinfra.interfaces.component import Component
from deepinfra.interfaces.executor import Executor, KVMemory, StepHandle
from deepinfra.interfaces.given import Clock, Offload
from deepinfra.interfaces.kvstore import KVStore
from deepinfra.interfaces.placer import ExpertPlacer
from deepinfra.interfaces.recipe import OutputParser, Recipe, Tokenizer
from deepinfra.interfaces.scheduler import Scheduler
from deepinfra.interfaces.speculator import Speculator

__all__ = (
    "Clock",
    "Component",
    "Executor",
    "ExpertPlacer",
    "KVMemory",
    "KVStore",
    "Offload",
    "OutputParser",
    "Recipe",
    "Scheduler",
    "Speculator",
    "StepHandle",
    "Tokenizer",
)
