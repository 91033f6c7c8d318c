"""KV as data: who owns it (namespace), what it is called (keys), how it is laid out, and what stores exchange.

A block's key is a SHA-256 chain: H(parent key, the block's token ids, digests of media inside it), rooted in the
digest of a `Namespace`. Everything that decides what the stored bytes mean, and whose they are, is in the namespace;
one function serves device, RAM, disk, peers and routers.
"""

from __future__ import annotations

import hashlib
import struct
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, TypeAlias

from deepinfra.core.ids import BlockKey

__all__ = (
    "FORMAT_VERSION",
    "FRAME_NBYTES",
    "Forgotten",
    "KVGroup",
    "KVLayout",
    "KVRecord",
    "KVStats",
    "Loaded",
    "Match",
    "Namespace",
    "NamespaceFilter",
    "PublicBlocks",
    "RecordRef",
    "Retention",
    "TierHit",
    "TierStats",
    "Traffic",
    "block_keys",
    "namespace_digest",
    "parent_key",
    "root_key",
)

FORMAT_VERSION = 1
"""Of keys, frames and payload order; a change makes every older record a miss."""

FRAME_NBYTES = 128
"""Bytes that the engine's frame takes before a record's payload; see `engine.frames`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Namespace:
    """Everything besides the tokens that decides what a record's bytes mean, and whose they are.

    Attributes:
        weights: Fingerprint of the weights (content, not path).
        adapter: Fingerprint of an adapter; empty for none.
        recipe: Tokenizer and recipe version.
        kv_dtype: Element type of the KV.
        layout: `KVLayout.fingerprint`.
        numerics: Mode and form of computing that change what it is worth (`ordinary stored`), and the replay mode.
        tenant: Salt of the tenant; `public` is a tenant like any other.
        salt: What a client narrows it by: part of a tenant's prompts that shares nothing with the rest.
    """

    weights: str
    recipe: str
    kv_dtype: str
    layout: str
    tenant: str
    adapter: str = ""
    numerics: str = "ordinary"
    salt: str = ""


def namespace_digest(namespace: Namespace) -> bytes:
    """32 bytes that name a namespace; every field is framed by its length, so no two namespaces collide by joining."""
    h = hashlib.sha256(b"deepinfra/namespace\0" + struct.pack("<I", FORMAT_VERSION))
    values = (
        namespace.weights,
        namespace.adapter,
        namespace.recipe,
        namespace.kv_dtype,
        namespace.layout,
        namespace.numerics,
        namespace.tenant,
    )
    # A field more where there is a salt: without one, keys are what they were before there were salts.
    for value in (*values, namespace.salt) if namespace.salt else values:
        data = value.encode()
        h.update(struct.pack("<Q", len(data)))
        h.update(data)
    return h.digest()


def root_key(namespace: Namespace) -> BlockKey:
    """The parent of every first block in a namespace."""
    return BlockKey(namespace_digest(namespace))


class PublicBlocks(NamedTuple):
    """Leading blocks of a sequence that every tenant may find: their namespace's `root_key`, and how many they are."""

    root: BlockKey
    blocks: int


def parent_key(root: BlockKey, before: Sequence[BlockKey], index: int, public: PublicBlocks | None = None) -> BlockKey:
    """What the key of block `index` is chained from; `before` are the keys of the blocks before it.

    The first block behind public ones begins a namespace of its own, which depends on the tenant's root and on all
    that stands before it: whatever two tenants have there, and however alike, has no key in common.
    """
    if index == 0:
        return root if public is None or not public.blocks else public.root
    if public is not None and index == public.blocks:
        return BlockKey(hashlib.sha256(b"deepinfra/branch\0" + root + before[index - 1]).digest())
    return before[index - 1]


def block_keys(
    root: BlockKey,
    tokens: Sequence[int],
    block_size: int,
    *,
    known: Sequence[BlockKey] = (),
    media: Sequence[tuple[int, bytes]] = (),
    public: PublicBlocks | None = None,
) -> list[BlockKey]:
    """Keys of all full blocks of `tokens`.

    Args:
        root: `root_key` of the namespace.
        tokens: Token ids from position 0.
        block_size: Tokens per block.
        known: Keys already computed for a prefix of the same tokens; only the rest is hashed.
        media: Digests of media with the token position each is bound to.
        public: Leading blocks that are no tenant's own; see `parent_key`.

    Returns:
        `len(tokens) // block_size` keys.
    """
    blocks, keys = len(tokens) // block_size, list(known[: len(tokens) // block_size])
    first, stride, sha256 = len(keys), array("I").itemsize * block_size, hashlib.sha256
    data = array("I", tokens[first * block_size : blocks * block_size]).tobytes()
    bound = [_bound(media, index, block_size) for index in range(first, blocks)] if media else ()
    branches = 0 if public is None else public.blocks
    for index in range(first, blocks):
        parent = keys[-1] if index and index != branches else parent_key(root, keys, index, public)
        own = data[(index - first) * stride : (index - first + 1) * stride]
        keys.append(BlockKey(sha256(parent + own + bound[index - first] if bound else parent + own).digest()))
    return keys


def _bound(media: Sequence[tuple[int, bytes]], index: int, block_size: int) -> bytes:
    """What a block's key says of media in it."""
    inside = ((position - index * block_size, digest) for position, digest in media)
    return b"".join(struct.pack("<I", at) + digest for at, digest in inside if 0 <= at < block_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class KVGroup:
    """Layers that keep KV in the same way.

    `full` keeps every position in pages; `window` keeps the last `window` positions in a slot of the sequence;
    `state` keeps one fixed record in that slot.
    """

    name: str
    kind: Literal["full", "window", "state"]
    layers: tuple[int, ...]
    nbytes_per_token: int
    window: int = 0
    compress_rate: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class KVLayout:
    """How an executor keeps KV.

    Attributes:
        block_size: Positions per block; a multiple of every group's `compress_rate`.
        block_nbytes: Bytes of one block over all `full` groups, unsharded.
        dtype: Element type (`float32`, `bfloat16`, `digest64`, ...).
        groups: At least one; executors with only `full` groups need no snapshots.
        snapshot_nbytes: Bytes of windows and states at one boundary; 0 with only `full` groups.
        snapshot_reach: How many positions back from a sequence's end a snapshot can still be taken.
    """

    block_size: int
    block_nbytes: int
    dtype: str
    groups: tuple[KVGroup, ...]
    snapshot_nbytes: int = 0
    snapshot_reach: int = 0

    @property
    def slot_nbytes(self) -> int:
        """Bytes of a staging slot: room for the engine's frame and the larger of the two kinds of record."""
        return FRAME_NBYTES + max(self.block_nbytes, self.snapshot_nbytes)

    @property
    def fingerprint(self) -> str:
        """Hex digest of everything that decides the order of a record's bytes."""
        text = repr((self.block_size, self.block_nbytes, self.dtype, self.groups, self.snapshot_nbytes))
        return hashlib.sha256(text.encode()).hexdigest()


Traffic: TypeAlias = Literal["default", "agent", "chat", "none"]
"""Classes of traffic, by how long their KV is worth keeping."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Retention:
    """How long KV is worth keeping, and where.

    `none` is never given to a store; `ttl_s` overrides the class's own; without `disk` it stays in RAM: a store that
    writes to a disk or sends over a network leaves it. `least_s` is a lower bound: a life that is longer anyway stays.
    """

    traffic: Traffic = "default"
    ttl_s: float | None = None
    disk: bool = True
    least_s: float = 0.0


class RecordRef(NamedTuple):
    """Name of a record: key, what it holds, and how many bytes (frame included) a store must deliver."""

    key: BlockKey
    kind: Literal["block", "snapshot", "tail"]
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class KVRecord:
    """A record on its way into a store.

    Attributes:
        ref: Its name and size.
        parent: Key of the block before it (the namespace's root for the first).
        namespace: Root of the chain of keys it is in: `namespace_digest`, or where a tenant's own blocks branch off
            public ones; see `parent_key`.
        tenant: Whose record.
        model: The model's name, for `forget` and statistics only.
        tokens: The block's token ids, so that a miss can be explained in text.
        retention: How long to keep it.
        data: Framed bytes, `ref.nbytes` long; the store may read them until `save` returns, not longer.
    """

    ref: RecordRef
    parent: BlockKey
    namespace: bytes
    tenant: str
    model: str
    tokens: tuple[int, ...]
    retention: Retention
    data: memoryview


@dataclass(frozen=True, slots=True)
class TierHit:
    """Leading records that one tier holds: how many, and seconds since the oldest was saved."""

    tier: str
    count: int
    age_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """Longest leading run of keys that a store holds.

    Attributes:
        refs: One per key of the run, in order; `load` takes any slice of it.
        tiers: The run cut by tier; counts sum to `len(refs)`.
        snapshots: Indices into the run after which a snapshot exists.
        missed: Why the next key is no hit: `absent`, `expired`, `evicted`, `damaged`, `tier-down` (what may hold it
            cannot be asked), `""` if all hit.
    """

    refs: tuple[RecordRef, ...] = ()
    tiers: tuple[TierHit, ...] = ()
    snapshots: tuple[int, ...] = ()
    missed: str = "absent"


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """Outcome of a load: how many leading records were delivered whole, and why it stopped (`""` = all)."""

    count: int
    stopped: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class NamespaceFilter:
    """Which records: of one tenant, one model, one namespace (a whole `KVRecord.namespace`); empty ones match all.

    Raises:
        ValueError: A namespace that is no digest: a part of one would be taken for one that nobody has.
    """

    tenant: str = ""
    model: str = ""
    namespace: bytes = b""

    def __post_init__(self) -> None:
        if len(self.namespace) not in (0, 32):
            raise ValueError(f"a namespace is named by a digest of 32 bytes, not by {len(self.namespace)}")

    def matches(self, tenant: str, model: str, namespace: bytes) -> bool:
        """Whether a record of this tenant, model and namespace is meant."""
        return self.tenant in ("", tenant) and self.model in ("", model) and self.namespace in (b"", bytes(namespace))


@dataclass(frozen=True, slots=True, kw_only=True)
class Forgotten:
    """What `forget` removed."""

    records: int
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class KVStats:
    """A store's own accounting; `nbytes` are bytes on disk or in RAM, dead bytes included.

    Attributes:
        renewed: Records written once more because they were used near the end of their life.
        saved_nbytes: Bytes written for records when they were first saved.
        written_nbytes: All bytes written; more than `saved_nbytes` by what keeping them costs.
        tiers: A store of several tiers tells of each.
        processes: That use what it keeps, this one included, as far as it knows.
        erasures: Times that something was forgotten there, by whichever process, as far as it knows.
    """

    records: int = 0
    nbytes: int = 0
    capacity_nbytes: int = 0
    hits: int = 0
    misses: int = 0
    saved: int = 0
    dropped: int = 0
    damaged: int = 0
    evicted: int = 0
    expired: int = 0
    by_tier: dict[str, int] = field(default_factory=dict)
    renewed: int = 0
    saved_nbytes: int = 0
    written_nbytes: int = 0
    tiers: tuple[TierStats, ...] = ()
    processes: int = 1
    erasures: int = 0

    @property
    def write_amplification(self) -> float:
        """Bytes written per byte saved; 1.0 before anything was saved."""
        return self.written_nbytes / self.saved_nbytes if self.saved_nbytes else 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TierStats:
    """One tier of a store that has several.

    Attributes:
        name: What `TierHit.tier` calls it.
        up: False while it is passed by because it raised or took too long.
        held: Its own accounting.
        failures: Calls that raised or took too long.
        waiting: Records in memory that wait to be written to it.
        waiting_nbytes: Their bytes.
        dropped: Records it never got, because too many waited or it failed.
        filtered: Records it was not given because of its admission filter.
    """

    name: str
    up: bool
    held: KVStats
    failures: int = 0
    waiting: int = 0
    waiting_nbytes: int = 0
    dropped: int = 0
    filtered: int = 0
