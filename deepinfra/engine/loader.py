"""Loads: a waiting sequence's blocks, from a store or a handoff through staging into the prefix index.

Loaded blocks are published like computed ones, so a sequence finds them by its ordinary prefix match, and waiting
sequences hold neither blocks nor slots. A prefix longer than the staging memory comes in rounds.
"""

from __future__ import annotations

from collections.abc import Callable

import anyio

from deepinfra.core.ids import BlockKey
from deepinfra.core.kv import FRAME_NBYTES, RecordRef
from deepinfra.engine.blocks import BlockPool
from deepinfra.engine.frames import frame_is_good
from deepinfra.engine.live import Live, Source
from deepinfra.engine.planner import Arrived
from deepinfra.engine.snapshots import Snapshots
from deepinfra.engine.staging import Slots
from deepinfra.engine.stream import Signal
from deepinfra.interfaces.executor import KVMemory
from deepinfra.interfaces.given import Offload

__all__ = ("Loader",)

_RETRY_S = 0.05
"""Pause while there is no slot, if nobody says that one was given back."""

_CHECK_INLINE_NBYTES = 1 << 22
"""Frames of up to 4 MiB are checked on the loop: xxh3 does 40 GB/s here, so that is 0.1 ms."""


class Loader:
    """Runs loads and collects what arrived for the planner; one per executor life."""

    def __init__(
        self, blocks: BlockPool, slots: Slots, memory: KVMemory, snapshots: Snapshots, offload: Offload
    ) -> None:
        self._blocks, self._slots, self._memory, self._offload = blocks, slots, memory, offload
        self._snapshots = snapshots
        self._arrived: list[Arrived] = []
        self._freed = Signal()
        self.damaged = 0

    def collect(self) -> list[Arrived]:
        """What arrived since the last call; its slots are the caller's until it gives them back."""
        arrived, self._arrived = self._arrived, []
        return arrived

    def slots_freed(self) -> None:
        """Tell a waiting load that slots were given back."""
        self._freed.set()

    async def run(self, live: Live, source: Source, done: Callable[[], None]) -> None:
        """Load what `source` has beyond the device's own prefix, and a snapshot; `done` is called after each round."""
        blocks = await self._load(live, source, done)
        live.bringing = False  # others wait for blocks, and might hold the slot that the snapshot waits for
        await self._snapshot(live, source, blocks)
        done()

    async def _load(self, live: Live, source: Source, done: Callable[[], None]) -> int:
        """Load blocks; returns how many leading blocks there are now."""
        keys = live.keys
        begun = self._blocks.match(keys)
        self._blocks.share(begun)  # used last from now on: what is loaded behind them does not take their memory
        self._blocks.release(begun)
        index = len(begun)
        while index < len(source.refs) and not live.over:
            leave = 1 if self._slots.num_slots > 1 else 0
            taken = self._slots.take(min(len(source.refs) - index, max(1, self._slots.num_slots // 2)), leave=leave)
            if not taken:
                with anyio.move_on_after(_RETRY_S):
                    await self._freed.wait()
                continue
            good = 0
            try:
                refs = source.refs[index : index + len(taken)]
                views = [self._memory.slot(slot)[: ref.nbytes] for slot, ref in zip(taken, refs, strict=True)]
                loaded = await source.store.load(refs, views)
                good = await self._check(live, index, views[: loaded.count])
            finally:
                self._slots.give(taken[good:])
            for offset in range(good):
                key, tier = keys[index + offset], source.tiers[index + offset]
                live.loaded_tiers[key] = tier
                self._arrived.append(Arrived(taken[offset], key, tier, live, index + offset))
            done()
            index += good
            if good < len(taken):
                break
        return index

    async def _snapshot(self, live: Live, source: Source, index: int) -> None:
        """Load the deepest snapshot that is worth it, and park it; there are `index` leading blocks."""
        size, plan = self._blocks.block_size, self._snapshots.plan
        position = plan.deepest(((i + 1) * size for i in source.snapshots), index * size, len(live.tokens))
        if not position or (slot := await self._hold(live)) is None:
            return
        key, parked = live.keys[position // size - 1], False
        try:
            ref = RecordRef(key, "snapshot", FRAME_NBYTES + plan.snapshot_nbytes)
            view = self._memory.slot(slot)[: ref.nbytes]
            loaded = await source.store.load([ref], [view])
            good = loaded.count == 1 and await self._good(view, key)
            self.damaged += loaded.count == 1 and not good
            if not good:
                self._snapshots.damaged(key)
            if good and not live.over and not live.running:
                self._snapshots.park(live, slot, position)
                parked = True
        finally:
            if not parked:
                self._slots.give([slot])

    async def _hold(self, live: Live) -> int | None:
        """A slot for a sequence's snapshot; `None` if snapshots have none, or once the sequence does not wait."""
        if not self._slots.most_held:
            return None
        while (slot := self._slots.hold()) is None:
            if live.over or live.running:
                return None
            with anyio.move_on_after(_RETRY_S):
                await self._freed.wait()
        return slot

    async def _good(self, view: memoryview, key: BlockKey) -> bool:
        if len(view) <= _CHECK_INLINE_NBYTES:
            return frame_is_good(view, key, "snapshot")
        return await self._offload(frame_is_good, view, key, "snapshot")

    async def _check(self, live: Live, index: int, views: list[memoryview]) -> int:
        """How many leading records are what their keys say."""
        keys = live.keys[index : index + len(views)]

        def count() -> int:
            for position, (view, key) in enumerate(zip(views, keys, strict=True)):
                if not frame_is_good(view, key):
                    return position
            return len(views)

        small = sum(len(view) - FRAME_NBYTES for view in views) <= _CHECK_INLINE_NBYTES
        good = count() if small else await self._offload(count)
        self.damaged += good < len(views)
        return good
