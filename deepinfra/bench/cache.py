"""What a cache of some size would hit of recorded requests, by eviction policy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from deepinfra.core.kv import Retention
from deepinfra.interfaces.given import InlineOffload
from deepinfra.kvstores import MemoryStore
from deepinfra.kvstores.leaves import cost
from deepinfra.kvstores.policy import RANKINGS
from deepinfra.testing.clock import ManualClock
from deepinfra.testing.traces import TRACE_BLOCK_TOKENS, TraceRequest, read_trace, replay

__all__ = ("CacheFigure", "CacheReport", "run_cache")

FOR_EVER = Retention(ttl_s=1e9)
NBYTES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheFigure:
    """Hits with room for so many blocks: shares of all blocks, of all tokens, and of the blocks of each half."""

    policy: str
    blocks: int
    hit: float
    token_hit: float
    halves: tuple[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheReport:
    """Hits of one trace.

    Attributes:
        kind: `cache`.
        trace: Name of the file.
        requests: In it.
        asked: Blocks that they ask for.
        distinct: How many different ones.
        ideal: Share of blocks that a cache without a limit hits.
        figures: By capacity and policy.
    """

    kind: str
    trace: str
    requests: int
    asked: int
    distinct: int
    ideal: float
    figures: tuple[CacheFigure, ...]


async def run_cache(
    path: Path, capacities: Sequence[int], *, progress: Callable[[str], None] = lambda line: None
) -> CacheReport:
    """Replay a trace in the Mooncake format through `MemoryStore`, once for each capacity in blocks and each policy.

    Raises:
        ValueError: The file is no such trace, or there is nothing in it.
    """
    try:
        trace = read_trace(path)
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path.name}: not a trace of timestamp, input_length and hash_ids: {error!r}") from error
    if not any(request.blocks for request in trace):
        raise ValueError(f"{path.name}: nothing in it asks for a block")
    figures: list[CacheFigure] = []
    for blocks in capacities:
        for policy in RANKINGS:
            progress(f"{path.name}: {blocks} blocks, {policy}")
            clock = ManualClock()
            store = MemoryStore(capacity_nbytes=blocks * cost(NBYTES, TRACE_BLOCK_TOKENS), policy=policy)
            store.give(clock, InlineOffload())
            async with store:
                hits = await replay(store, clock, trace, nbytes=NBYTES, retention=lambda _: FOR_EVER)
            half = len(trace) // 2
            tokens = sum(min(n * TRACE_BLOCK_TOKENS, request.tokens) for n, request in zip(hits, trace, strict=True))
            figures.append(
                CacheFigure(
                    policy=policy,
                    blocks=blocks,
                    hit=_share(hits, trace),
                    token_hit=tokens / max(1, sum(request.tokens for request in trace)),
                    halves=(_share(hits[:half], trace[:half]), _share(hits[half:], trace[half:])),
                )
            )
    seen: set[int] = set()
    ideal: list[int] = []
    for request in trace:
        ideal.append(next((i for i, block in enumerate(request.blocks) if block not in seen), len(request.blocks)))
        seen.update(request.blocks)
    return CacheReport(
        kind="cache",
        trace=path.name,
        requests=len(trace),
        asked=sum(len(request.blocks) for request in trace),
        distinct=len(seen),
        ideal=_share(ideal, trace),
        figures=tuple(figures),
    )


def _share(hits: Sequence[int], trace: Sequence[TraceRequest]) -> float:
    return sum(hits) / max(1, sum(len(request.blocks) for request in trace))
