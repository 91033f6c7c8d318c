"""Handoff: a prefilled sequence on its way from one pool to another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import anyio

from deepinfra.core.ids import BlockKey
from deepinfra.core.kv import (
    FRAME_NBYTES,
    Forgotten,
    KVLayout,
    KVRecord,
    KVStats,
    Loaded,
    Match,
    NamespaceFilter,
    RecordRef,
    TierHit,
)
from deepinfra.engine.blocks import BlockPool
from deepinfra.engine.frames import write_frame
from deepinfra.engine.live import Live
from deepinfra.engine.snapshots import Snapshots
from deepinfra.engine.staging import Slots
from deepinfra.engine.stream import Signal
from deepinfra.errors import ExecutorLost
from deepinfra.interfaces.executor import KVMemory
from deepinfra.interfaces.given import Offload
from deepinfra.interfaces.kvstore import KVStore

__all__ = ("Handoff", "HandoffStore", "export")

_RETRY_S = 0.005
"""Pause while loads and saves hold every staging slot."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Handoff:
    """What a decode pool gets besides the tokens: the prompt's full blocks as framed records.

    The rows of a last, partial block are computed again by the receiver. A handoff that is lost, late or damaged is a
    miss: the receiver computes the prompt itself.

    Attributes:
        keys: Of the blocks.
        records: The blocks.
        snapshot: Framed snapshot of the windows behind the first `snapshot_blocks` of them; empty without windows, and
            where none could be had: the receiver replays.
    """

    keys: tuple[BlockKey, ...]
    records: tuple[bytes, ...]
    snapshot: bytes = b""
    snapshot_blocks: int = 0


class HandoffStore(KVStore):
    """A handoff seen as a store, so that its blocks take the same way onto the device as any others."""

    def __init__(self, handoff: Handoff) -> None:
        self._records: dict[tuple[BlockKey, str], bytes] = {
            (key, "block"): data for key, data in zip(handoff.keys, handoff.records, strict=True)
        }
        self._snapshots: tuple[int, ...] = ()
        if handoff.snapshot:
            self._snapshots = (handoff.snapshot_blocks - 1,)
            self._records[handoff.keys[handoff.snapshot_blocks - 1], "snapshot"] = handoff.snapshot

    async def match(self, keys: Sequence[BlockKey]) -> Match:
        """See `KVStore.match`."""
        refs: list[RecordRef] = []
        for key in keys:
            data = self._records.get((key, "block"))
            if data is None:
                break
            refs.append(RecordRef(key, "block", len(data)))
        return Match(refs=tuple(refs), tiers=(TierHit("handoff", len(refs), 0.0),), snapshots=self._snapshots)

    async def load(self, refs: Sequence[RecordRef], into: Sequence[memoryview]) -> Loaded:
        """See `KVStore.load`."""
        for count, (ref, view) in enumerate(zip(refs, into, strict=True)):
            data = self._records.get((ref.key, ref.kind))
            if data is None or len(data) != len(view):
                return Loaded(count=count, stopped="absent")
            view[:] = data
        return Loaded(count=len(refs))

    async def save(self, records: Sequence[KVRecord]) -> None:
        """A handoff takes nothing."""

    async def forget(self, which: NamespaceFilter) -> Forgotten:
        """A handoff dies with its sequence."""
        return Forgotten(records=0, nbytes=0)

    def stats(self) -> KVStats:
        """See `KVStore.stats`."""
        return KVStats(records=len(self._records), nbytes=sum(map(len, self._records.values())))


async def export(
    live: Live,
    blocks: BlockPool,
    slots: Slots,
    memory: KVMemory,
    layout: KVLayout,
    freed: Signal,
    snapshots: Snapshots,
    offload: Offload,
) -> Handoff:
    """Copy the published blocks of a sequence out of the device, in rounds through staging, and its windows.

    Raises:
        ExecutorLost: The blocks are gone.
    """
    nbytes = FRAME_NBYTES + layout.block_nbytes
    count = live.published
    keys = tuple(live.keys[:count])
    held = list(live.table[:count])
    records: list[bytes] = []
    blocks.share(held)
    try:
        while len(records) < count:
            if snapshots.over:  # nobody gives back the slots of an executor that is gone
                raise ExecutorLost("the executor was lost during the handoff")
            taken = slots.take(min(count - len(records), max(1, slots.num_slots // 2)))
            if not taken:
                await anyio.sleep(_RETRY_S)
                continue
            try:
                # Shielded: a copy under way must not write into slots that somebody else has been given.
                with anyio.CancelScope(shield=True):
                    await memory.drain(held[len(records) : len(records) + len(taken)], taken)
                for slot in taken:
                    view = memory.slot(slot)[:nbytes]
                    write_frame(view, keys[len(records)])
                    records.append(bytes(view))
            finally:
                slots.give(taken)
                freed.set()
    finally:
        blocks.release(held)
        freed.set()
    handoff = Handoff(keys=keys, records=tuple(records))
    capture = await snapshots.capture(live)
    if capture is None:
        return handoff
    try:
        at = capture.position // layout.block_size
        view = memory.slot(capture.slot)[: FRAME_NBYTES + layout.snapshot_nbytes]
        # Off the loop: a snapshot may have tens of megabytes.
        return replace(handoff, snapshot=await offload(_framed, view, keys[at - 1]), snapshot_blocks=at)
    finally:
        snapshots.keep(capture)


def _framed(view: memoryview, key: BlockKey) -> bytes:
    write_frame(view, key, "snapshot")
    return bytes(view)
