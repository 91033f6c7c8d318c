"""Routes by name: which of several pools takes a request."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Collection, Sequence

from deepinfra.engine import Route, by_bucket, cache_aware, least_loaded
from deepinfra.errors import ConfigError

__all__ = ("route_for",)

KNOWN = "least-loaded, cache-aware, by-bucket:POOL+…/POOL+…/… or MODULE:FUNCTION"


def route_for(name: str, *, edges: Sequence[int], pools: Collection[str]) -> Route:
    """A route by name, a map of buckets to pools, or a function of a module of one's own.

    Args:
        name: `by-bucket:pool-0+pool-1/pool-1/pool-2/pool-3` gives each bucket its pools, shortest prompts first.
        edges: Of the buckets.
        pools: Names of those there are.

    Raises:
        ConfigError: There is no such route, function or pool.
    """
    if name == "least-loaded":
        return least_loaded
    if name == "cache-aware":
        return cache_aware()
    module, colon, rest = name.partition(":")
    if module == "by-bucket":
        buckets = [bucket.split("+") for bucket in rest.split("/")]
        if unknown := [each for bucket in buckets for each in bucket if each not in pools]:
            raise ConfigError(f"--route {name}: there is no pool {unknown[0]!r}; there are {', '.join(pools)}")
        return by_bucket(buckets, edges=edges)
    if not colon:
        raise ConfigError(f"--route takes {KNOWN}; {name!r} is something else")
    sys.path.insert(0, "")  # modules of the user's folder, as uvicorn finds them
    try:
        found: Route = getattr(importlib.import_module(module), rest)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"--route {name}: {error}") from error
    return found
