"""Length buckets: one ladder of edges for the Scheduler that sorts by length and for routes between pools."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

__all__ = ("DEFAULT_EDGES", "bucket_of")

DEFAULT_EDGES: tuple[int, ...] = (512, 4096, 32768)
"""Uncached prompt tokens at which the next bucket begins: chat, document, repository, giant.

Four buckets are what DeepSeek's balancer has; its edges are not published. Each of ours is one power-of-two octave
triple wide, so that within a bucket the longest costs at most about 8 times the shortest.
"""


def bucket_of(uncached: int, edges: Sequence[int] = DEFAULT_EDGES) -> int:
    """Index of the bucket, 0 for the shortest.

    Args:
        uncached: Prompt tokens to be computed.
        edges: Ascending first lengths of buckets 1, 2, ...
    """
    return bisect_right(edges, uncached)
