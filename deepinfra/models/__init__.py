"""Names to files: finds a model by name or path, fetches it, and opens it without reading its weights."""

from deepinfra.models.cache import default_cache_dir
from deepinfra.models.catalogue import CATALOGUE, CatalogueEntry
from deepinfra.models.opening import open_model, opened_once, pull
from deepinfra.models.records import JsonValue, Model, Progress, SpecialTokens, TensorInfo, TensorSource

__all__ = (
    "CATALOGUE",
    "CatalogueEntry",
    "JsonValue",
    "Model",
    "Progress",
    "SpecialTokens",
    "TensorInfo",
    "TensorSource",
    "default_cache_dir",
    "open_model",
    "opened_once",
    "pull",
)
