"""Records in RAM, and those of them that may go: what no held record continues, lowest rank first."""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Mapping

from deepinfra.core.kv import KVRecord, RecordRef

__all__ = ("RECORD_OVERHEAD_NBYTES", "Held", "Leaves", "cost", "parent_of", "record_id")

RECORD_OVERHEAD_NBYTES = 640
"""Counted for each record besides its bytes and 4 a token; measured 500 (CPython 3.11, 64-bit), with a margin."""


class Held:
    """A record in RAM.

    Attributes:
        id: See `record_id`.
        parent: Id of the record that must not go before it.
        rank: The lowest goes first; see `kvstores.policy`.
    """

    __slots__ = (
        "data",
        "expires",
        "id",
        "model",
        "namespace",
        "parent",
        "rank",
        "saved_at",
        "tenant",
        "tokens",
        "ttl_s",
    )

    def __init__(self, record: KVRecord, now: float, ttl_s: float, rank: int) -> None:
        self.id = record_id(record.ref)
        self.parent = parent_of(record)
        self.data = bytes(record.data)
        self.tokens = array("I", record.tokens)
        self.tenant, self.model, self.namespace = record.tenant, record.model, record.namespace
        self.saved_at, self.ttl_s, self.expires = now, ttl_s, now + ttl_s
        self.rank = rank

    def use(self, rank: int, expires: float) -> None:
        """It was used: it is worth so much from now on and lives so long."""
        self.rank = max(self.rank, rank)
        self.expires = max(self.expires, expires)

    @property
    def nbytes(self) -> int:
        """What it counts for."""
        return cost(len(self.data), len(self.tokens))


def record_id(ref: RecordRef) -> bytes:
    """A block's key; other kinds have their name behind it."""
    return ref.key if ref.kind == "block" else ref.key + ref.kind.encode()


def cost(data_nbytes: int, tokens: int) -> int:
    """Bytes that a record counts for."""
    return data_nbytes + 4 * tokens + RECORD_OVERHEAD_NBYTES


def parent_of(record: KVRecord) -> bytes:
    """What must not go before this record: a snapshot hangs from its block, the rest from the block before."""
    return record.ref.key if record.ref.kind == "snapshot" else record.parent


class Leaves:
    """A heap of leaves by rank. Entries that are out of date are found when they come up.

    Args:
        held: All records by id.
        children: How many held records continue an id. Both are the store's and change under this.
    """

    def __init__(self, held: Mapping[bytes, Held], children: Mapping[bytes, int]) -> None:
        self._held, self._children = held, children
        self._heap: list[tuple[int, int, Held]] = []
        self._most = 64
        self._serial = 0

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, leaf: Held) -> None:
        """Take in a record that nothing continues."""
        self._push(leaf)
        if len(self._heap) > self._most:  # records that left by other doors keep no bytes alive
            valid = {leaf.id: (leaf.rank, serial, leaf) for _, serial, leaf in self._heap if self._is_leaf(leaf)}
            self._heap = list(valid.values())
            heapq.heapify(self._heap)
            self._most = 2 * len(self._heap) + 64

    def pop(self) -> Held | None:
        """Take out the leaf with the lowest rank; `None`: there is none."""
        while self._heap:
            rank, _, leaf = heapq.heappop(self._heap)
            if not self._is_leaf(leaf):
                continue  # gone, or a parent again: it is added when its last child goes
            if leaf.rank == rank:
                return leaf
            self._push(leaf)
        return None

    def _is_leaf(self, record: Held) -> bool:
        return self._held.get(record.id) is record and record.id not in self._children

    def _push(self, leaf: Held) -> None:
        self._serial += 1
        heapq.heappush(self._heap, (leaf.rank, self._serial, leaf))
