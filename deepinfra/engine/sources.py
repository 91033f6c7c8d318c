"""Where a sequence's KV may come from before it is computed: a handoff, or the store."""

from __future__ import annotations

from itertools import takewhile

from deepinfra.core.ids import BlockKey
from deepinfra.core.kv import FRAME_NBYTES, KVLayout, Match, Namespace, RecordRef
from deepinfra.engine.live import Live, Source
from deepinfra.interfaces.executor import Executor
from deepinfra.interfaces.kvstore import KVStore

__all__ = ("find_source", "namespace_of")


def namespace_of(executor: Executor, recipe_version: str, tenant: str) -> Namespace:
    """Whose KV, and what its bytes mean."""
    identity = executor.identity
    return Namespace(
        weights=identity.weights,
        adapter=identity.adapter,
        recipe=recipe_version,
        kv_dtype=identity.kv_dtype,
        layout=executor.layout.fingerprint,
        numerics=identity.numerics,
        tenant=tenant,
    )


async def find_source(store: KVStore, live: Live, layout: KVLayout) -> Source | None:
    """Ask a store what it holds of a sequence's blocks; moves no bytes.

    What a store claims is believed only as far as it names the right keys and sizes.
    """
    match: Match = await store.match(live.keys)
    nbytes = FRAME_NBYTES + layout.block_nbytes

    def fits(pair: tuple[RecordRef, BlockKey]) -> bool:
        ref, key = pair
        return (ref.key, ref.kind, ref.nbytes) == (key, "block", nbytes)

    refs = tuple(ref for ref, _ in takewhile(fits, zip(match.refs, live.keys, strict=False)))
    if not refs:
        return None
    tiers = [hit.tier for hit in match.tiers for _ in range(min(hit.count, len(refs)))][: len(refs)]
    return Source(store, refs, (*tiers, *["store"] * (len(refs) - len(tiers))))
