"""Routes: which of several pools of one kind takes a sequence. Pure functions of the sequence and the pools' views."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from deepinfra.core.buckets import DEFAULT_EDGES, bucket_of
from deepinfra.core.request import SeqSpec
from deepinfra.errors import ConfigError

__all__ = ("PoolView", "Route", "by_bucket", "cache_aware", "least_loaded")


class PoolView(NamedTuple):
    """One pool as a route sees it, for one sequence.

    Attributes:
        name: The pool's.
        waiting: Sequences without blocks, those included that were sent there and are not queued yet.
        running: Sequences with blocks.
        cached_tokens: Leading tokens of this sequence that are on the pool's device. An estimate; what a store holds
            is not counted, for asking it would make it count hits that are none.
        backlog_tokens: Prompt tokens without cache of the sequences that wait.
        backlog_s: Seconds that these are predicted to take; 0 while nothing is known.
        prefill_tokens: Prompt tokens that running sequences have yet to compute.
        blocks_free: Device blocks that can be taken.
        blocks_total: Device blocks.
    """

    name: str
    waiting: int
    running: int
    cached_tokens: int = 0
    backlog_tokens: int = 0
    backlog_s: float = 0.0
    prefill_tokens: int = 0
    blocks_free: int = 0
    blocks_total: int = 0


Route = Callable[[SeqSpec, Sequence[PoolView]], int]
"""Returns the index of the view whose pool takes the sequence; pools that no longer serve have no view."""


def least_loaded(spec: SeqSpec, views: Sequence[PoolView]) -> int:
    """The pool with the fewest waiting, then running sequences; the first of equals."""
    return min(range(len(views)), key=lambda i: (views[i].waiting, views[i].running))


def cache_aware(*, cached_weight: float = 1.0, running_tokens: float = 64.0) -> Route:
    """A route to the pool that has the least to compute before the sequence's first token.

    That is what waits there, what is being prefilled there, and what of its own prompt the pool has not cached.

    Args:
        cached_weight: How many tokens of others' work one cached token is worth. 1 is best for the sequence itself;
            more keeps conversations where they were for longer, so that less is computed in all.
        running_tokens: Prompt tokens that one running sequence counts as, because it takes its share of every step.

    Source: Mooncake's KVCache-centric conductor (arXiv 2407.00079) compares queueing and prefill times; in tokens here,
    which replicas of one model compute alike.
    """
    if cached_weight < 0.0 or running_tokens < 0.0:
        raise ConfigError("cache_aware: cached_weight and running_tokens must not be negative")

    def route(spec: SeqSpec, views: Sequence[PoolView]) -> int:
        def tokens(index: int) -> tuple[float, int]:
            view = views[index]
            work = view.backlog_tokens + view.prefill_tokens - cached_weight * view.cached_tokens
            return work + running_tokens * view.running, view.waiting

        return min(range(len(views)), key=tokens)

    return route


def by_bucket(
    pools: Sequence[Sequence[str]], *, edges: Sequence[int] = DEFAULT_EDGES, among: Route = least_loaded
) -> Route:
    """A route that gives each length bucket pools of its own.

    A sequence goes to the shortest bucket that has a pool where so little is left to compute: a long conversation that
    the pool for short prompts has cached goes on there. A bucket whose pools all failed leaves its sequences to the
    next longer one; behind the longest one, to whoever serves.

    Args:
        pools: Names of the pools of each bucket, shortest first; a pool may serve several.
        edges: Uncached tokens at which the second and further buckets begin.
        among: Chooses among the pools of a bucket.
    """
    names = tuple(frozenset(bucket) for bucket in pools)
    if len(names) != len(edges) + 1 or not all(names):
        raise ConfigError(f"by_bucket: {len(edges)} edges make {len(edges) + 1} buckets, and each needs a pool's name")

    def route(spec: SeqSpec, views: Sequence[PoolView]) -> int:
        lines = [bucket_of(max(1, len(spec.tokens) - view.cached_tokens), edges) for view in views]
        for bucket, served in enumerate(names):
            fits = [i for i, view in enumerate(views) if view.name in served and lines[i] <= bucket]
            if fits:
                return fits[among(spec, [views[i] for i in fits])]
        return among(spec, views)

    return route
