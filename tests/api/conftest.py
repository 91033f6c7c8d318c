"""A real engine over the toy executor, and the in-process client."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from deepinfra.engine import Engine, Pool
from deepinfra.executors.toy import ToyExecutor
from deepinfra.schedulers.fcfs import Fcfs
from deepinfra.testing.tiny import TinyRecipe

MakeEngine = Callable[..., Engine]


def build_engine(executor: ToyExecutor | None = None, **settings: object) -> Engine:
    return Engine(TinyRecipe(), Pool(Fcfs(), executor or ToyExecutor()), **settings)  # type: ignore[arg-type]


@pytest.fixture
def make_engine() -> MakeEngine:
    """Engines named `toy`, 64 blocks of 4 positions."""
    return build_engine


@pytest.fixture
def engine() -> Engine:
    return build_engine()
