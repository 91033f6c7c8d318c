"""The engine: joins the six parts and owns every request from admission to its last token."""

from deepinfra.engine.engine import Engine
from deepinfra.engine.pool import Pool
from deepinfra.engine.routes import PoolView, Route, by_bucket, cache_aware, least_loaded
from deepinfra.engine.stats import EngineStats, HistogramSnapshot
from deepinfra.engine.stream import Stream

__all__ = (
    "Engine",
    "EngineStats",
    "HistogramSnapshot",
    "Pool",
    "PoolView",
    "Route",
    "Stream",
    "by_bucket",
    "cache_aware",
    "least_loaded",
)
