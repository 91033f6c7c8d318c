"""Where a sequence's KV may come from before it is computed: a handoff, or the store."""

from __future__ import annotations

from itertools import takewhile

from deepinfra.core.ids import BlockKey
from deepinfra.core.kv import FRAME_NBYTES, KVLayout, Match, Namespace, PublicBlocks, RecordRef, root_key
from deepinfra.core.request import PUBLIC, SeqSpec
from deepinfra.engine.live import Live, Source
from deepinfra.engine.windows import ReplayMode
from deepinfra.interfaces.executor import Executor
from deepinfra.interfaces.kvstore import KVStore

__all__ = ("find_source", "namespace_of", "public_blocks")


def namespace_of(
    executor: Executor, recipe_version: str, tenant: str, salt: str = "", replay: ReplayMode = "exact"
) -> Namespace:
    """Whose KV, and what its bytes mean; with windows that are rebuilt approximately, they mean something else."""
    identity = executor.identity
    approximate = replay == "bounded" and any(group.kind == "window" for group in executor.layout.groups)
    return Namespace(
        weights=identity.weights,
        adapter=identity.adapter,
        recipe=recipe_version,
        kv_dtype=identity.kv_dtype,
        layout=executor.layout.fingerprint,
        numerics=f"{identity.numerics}+bounded" if approximate else identity.numerics,
        tenant=tenant,
        salt=salt,
    )


def public_blocks(
    executor: Executor, recipe_version: str, spec: SeqSpec, replay: ReplayMode = "exact"
) -> PublicBlocks | None:
    """The blocks of a sequence that lie whole in a public prefix, where its tenant does not own these anyway.

    A salt asks to share with nobody, so it shares nothing public either.
    """
    blocks = spec.public // executor.layout.block_size
    if not blocks or spec.salt or spec.tenant == PUBLIC:
        return None
    return PublicBlocks(root_key(namespace_of(executor, recipe_version, PUBLIC, replay=replay)), blocks)


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
    ages_s: dict[str, float] = {}
    for hit in match.tiers:
        ages_s[hit.tier] = max(hit.age_s, ages_s.get(hit.tier, 0.0))
    snapshots = tuple(index for index in match.snapshots if 0 <= index < len(refs)) if layout.snapshot_nbytes else ()
    return Source(store, refs, (*tiers, *["store"] * (len(refs) - len(tiers))), ages_s, snapshots)
