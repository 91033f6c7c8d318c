"""Where a sequence's KV may come from before it is computed: a handoff, or the store."""

from __future__ import annotations

from dataclasses import replace
from itertools import takewhile
from typing import NamedTuple

from deepinfra.core.ids import BlockKey
from deepinfra.core.kv import FRAME_NBYTES, KVLayout, Match, Namespace, PublicBlocks, RecordRef, block_keys, root_key
from deepinfra.core.request import PUBLIC, SeqSpec
from deepinfra.engine.live import Live, Source
from deepinfra.engine.windows import ReplayMode
from deepinfra.interfaces.executor import Executor
from deepinfra.interfaces.kvstore import KVStore

__all__ = ("Chain", "Kin", "find_source", "namespace_of")


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


class Chain(NamedTuple):
    """What a sequence's blocks are called: the root of their keys, those that are no tenant's own, a key per block."""

    root: BlockKey
    public: PublicBlocks | None
    keys: list[BlockKey]


class Kin(NamedTuple):
    """All that a pool decides about keys: `namespace` of the public tenant, and tokens per block."""

    namespace: Namespace
    block_size: int

    @classmethod
    def of(cls, executor: Executor, recipe_version: str, replay: ReplayMode = "exact") -> Kin:
        """That of a pool with such an executor."""
        return cls(namespace_of(executor, recipe_version, PUBLIC, replay=replay), executor.layout.block_size)

    def chain(self, spec: SeqSpec) -> Chain:
        """Names of a sequence's blocks.

        Those that lie whole in a public prefix are public, where its tenant does not own these anyway. A salt asks to
        share with nobody, so it shares nothing public either.
        """
        root = root_key(replace(self.namespace, tenant=spec.tenant, salt=spec.salt))
        public: PublicBlocks | None = None
        if (blocks := spec.public // self.block_size) and not spec.salt and spec.tenant != PUBLIC:
            public = PublicBlocks(root_key(self.namespace), blocks)
        return Chain(root, public, block_keys(root, spec.tokens, self.block_size, public=public))


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
