"""The save queue: published blocks on their way into a store, off the token path.

A queued block is named by its key and holds no reference: published blocks are read-only, so if the key is still in
the prefix index when its turn comes, the bytes are right; if its memory was needed meanwhile, the save is dropped. A
sequence's tail leaves the index before its head, so a parent is never dropped before its child. Blocks are held only
for the batch that is being copied to staging (at most 5 % of the pool), and keep their place among idle ones.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Literal, NamedTuple

import anyio

from deepinfra.core.ids import BlockId, BlockKey
from deepinfra.core.kv import FRAME_NBYTES, KVLayout, KVRecord, RecordRef, Retention
from deepinfra.engine.blocks import BlockPool
from deepinfra.engine.frames import write_frame
from deepinfra.engine.live import Live
from deepinfra.engine.staging import Slots
from deepinfra.engine.stream import Signal
from deepinfra.engine.windows import SnapshotMode
from deepinfra.errors import ExecutorLost
from deepinfra.interfaces.executor import KVMemory
from deepinfra.interfaces.kvstore import KVStore

__all__ = ("SaveItem", "Saver")

_KNOWN = 1 << 16
"""Keys remembered as saved, 32 bytes each: 65,536 blocks of 16 tokens are a million tokens, 8 MB with overhead."""

_QUEUE = 1 << 14
"""Blocks that may wait to be saved; beyond it new ones are dropped."""

_TOUCHES = 256
"""Sequences whose use of the device's blocks may wait to be told; the oldest is left out beyond it."""

_RETRY_S = 0.005
"""Pause when loads hold every staging slot; a step, which frees them, takes that long or longer."""


class _Kept(NamedTuple):
    """What is known of a record: whether a disk may have it, and whether the store says that it is there no more."""

    disk: bool
    gone: bool = False


@dataclass(frozen=True, slots=True)
class SaveItem:
    """A published block, or the snapshot at its end, and what its record will say.

    A snapshot is in staging already: `slot` is the queue's from when it is offered. A block has none (-1).
    """

    key: BlockKey
    parent: BlockKey
    tokens: tuple[int, ...]
    namespace: bytes
    tenant: str
    retention: Retention
    slot: int = -1

    @property
    def id(self) -> bytes:
        """What it is remembered by."""
        return self.key if self.slot < 0 else _snapshot_id(self.key)


def _snapshot_id(key: BlockKey) -> bytes:
    return key + b"snapshot"


class Saver:
    """Copies published blocks, and snapshots, into a store; one per pool, run as a task inside the executor's life.

    Args:
        store: Where to.
        layout: The executor's.
        model: Its name.
        snapshots: Where snapshots are kept.
    """

    def __init__(self, store: KVStore, layout: KVLayout, model: str, snapshots: SnapshotMode = "disk") -> None:
        self._store, self._layout, self._model, self._snapshots = store, layout, model, snapshots
        self._fastest: str | None = None
        self._queue: deque[SaveItem] = deque()
        self._touches: deque[tuple[Live, int]] = deque(maxlen=_TOUCHES)
        self._again: set[BlockKey] = set()
        self._known: OrderedDict[bytes, _Kept] = OrderedDict()
        self._signal = Signal()
        self._idle = anyio.Event()
        self._idle.set()
        self.dropped = 0
        self.saved = 0

    @property
    def waiting(self) -> int:
        """Blocks not yet saved."""
        return len(self._queue)

    def offer(self, live: Live, blocks: Sequence[int]) -> None:
        """Queue published blocks of a sequence (indices into its table) unless known to be saved; never waits."""
        for index in blocks:
            if self._has(live.keys[index], live.spec.retention) or (item := self._item(live, index)) is None:
                continue
            if not self._put(item):
                return

    def opened(self, live: Live) -> None:
        """A sequence began behind blocks that are on the device: they are used, and some are to be kept only now.

        Those are what was computed by requests that asked for less, and what the store asks for when it is told of the
        use. What it was given and does not have any more is not copied again for every hit: that waits until it is
        computed again. What is loaded in the step that opens the sequence is right only after it.
        """
        retention = live.spec.retention
        if retention.traffic == "none":
            return
        if live.published and live.epoch == 1:  # one that was preempted finds what it wrote itself
            self._touches.append((live, live.published))
            self._wake()
        if not retention.disk:
            return
        held = len(live.source.refs) if live.source is not None else 0
        self.offer(
            live,
            [
                index
                for index, key in enumerate(live.keys[: live.published])
                if (index >= held if (kept := self._known.get(key)) is None else not kept.disk)
            ],
        )

    def promote(self, live: Live, index: int, tier: str) -> None:
        """Offer a loaded block once more, if the store has a faster tier for it than the one it came from."""
        if not self._store.promotes:
            return
        if self._fastest is None:
            self._fastest = next(iter(self._store.stats().by_tier), "")
        if tier != self._fastest:
            self._known.pop(live.keys[index], None)
            self.offer(live, (index,))

    def _item(self, live: Live, index: int) -> SaveItem | None:
        """What the record of a block says; `None` if its sequence wants it kept nowhere."""
        size, owner, retention = self._layout.block_size, live.owner(index), live.spec.retention
        if owner.tenant != live.spec.tenant and (retention.traffic == "none" or not retention.disk):
            retention = Retention()  # what everybody shares is not what this request wants kept to itself
        if retention.traffic == "none":
            return None
        return SaveItem(
            key=live.keys[index],
            parent=owner.parent,
            tokens=tuple(live.tokens[index * size : (index + 1) * size]),
            namespace=owner.namespace,
            tenant=owner.tenant,
            retention=retention,
        )

    # -- snapshots ---------------------------------------------------------------------------------

    def snapshot(self, live: Live, position: int) -> SaveItem | None:
        """What the record of a snapshot says; `None` if it is not wanted, or known to be kept. Now known to come."""
        if self._snapshots == "off":
            return None
        item = self._item(live, position // self._layout.block_size - 1)
        if item is None:
            return None
        if self._snapshots == "ram":
            item = replace(item, retention=replace(item.retention, disk=False))
        if self._has(_snapshot_id(item.key), item.retention):
            return None
        self._know(_snapshot_id(item.key), item.retention)
        return item

    def offer_snapshot(self, item: SaveItem, slot: int) -> bool:
        """Queue a snapshot that is in a staging slot; unless there is no room, the slot is the queue's."""
        return self._put(replace(item, slot=slot))

    def forget_snapshot(self, key: BlockKey) -> None:
        """A snapshot that was to come does not, or one that was there is damaged."""
        self._known.pop(_snapshot_id(key), None)

    # -- what the store says -----------------------------------------------------------------------

    def matched(self, keys: Sequence[BlockKey], blocks: int, snapshots: Collection[int]) -> None:
        """Take the store's word for what it holds: `blocks` leading ones and the snapshots at the end of some.

        What it does not hold (any more) is saved again once it is computed again.
        """
        for key in keys[blocks:]:
            if (kept := self._known.get(key)) is not None and not kept.gone:
                self._known[key] = _Kept(kept.disk, gone=True)
        if self._layout.snapshot_nbytes:
            for index, key in enumerate(keys):
                if index in snapshots:
                    self._known.setdefault(_snapshot_id(key), _Kept(disk=True))
                    self._bound()
                else:
                    self._known.pop(_snapshot_id(key), None)

    def begin(self) -> None:
        """A life of the executor begins: snapshots that were queued after the last `run` name slots of the one before.

        Their bytes went with it. A block is looked up by its key when its turn comes, and may stay.
        """
        self._queue = deque(item for item in self._queue if item.slot < 0)

    async def flush(self) -> None:
        """Wait until everything queued so far is saved or dropped."""
        while not self._idle.is_set():
            await self._idle.wait()

    async def run(self, memory: KVMemory, blocks: BlockPool, slots: Slots, freed: Signal) -> None:
        """Save until cancelled or the executor is lost; what was queued by then is dropped.

        `freed` is set whenever references or slots come free.
        """
        try:
            while True:
                if not self._queue and not self._touches:
                    self._idle.set()
                    await self._signal.wait()
                    continue
                await self._one_batch(memory, blocks, slots, freed)
        except ExecutorLost:
            pass
        finally:
            self.dropped += len(self._queue)
            slots.give([item.slot for item in self._queue if item.slot >= 0])
            self._queue.clear()
            self._touches.clear()
            self._again.clear()
            self._known.clear()
            self._idle.set()

    async def _one_batch(self, memory: KVMemory, blocks: BlockPool, slots: Slots, freed: Signal) -> None:
        while self._touches:
            live, count = self._touches.popleft()
            keys = live.keys[:count]
            self._offer_again(live, keys, await self._store.touch(keys, live.spec.retention))
        if not self._queue:
            return
        most = max(1, blocks.num_blocks // 20)
        need = sum(item.slot < 0 for item in islice(self._queue, most))
        taken = slots.take(need, leave=1 if slots.num_slots > 1 else 0)
        if need and not taken:
            await anyio.sleep(_RETRY_S)
            return
        room = list(taken)
        batch: list[tuple[SaveItem, BlockId | None]] = []
        try:
            while self._queue and len(batch) < most and (room or self._queue[0].slot >= 0):
                item = self._queue.popleft()
                self._again.discard(item.key)
                if item.slot >= 0:
                    taken.append(item.slot)
                    batch.append((item, None))
                elif (block := blocks.find(item.key)) is None:
                    self._known.pop(item.key, None)
                    self.dropped += 1
                else:
                    batch.append((replace(item, slot=room.pop()), block))
            if batch:
                await self._save(batch, memory, blocks, freed)
        finally:
            slots.give(taken)
            freed.set()

    async def _save(
        self, batch: Sequence[tuple[SaveItem, BlockId | None]], memory: KVMemory, blocks: BlockPool, freed: Signal
    ) -> None:
        drained = [(block, item.slot) for item, block in batch if block is not None]
        read = [block for block, _ in drained]
        blocks.hold(read)
        try:
            # Shielded: a copy under way must not write into slots that somebody else has been given.
            with anyio.CancelScope(shield=True):
                await memory.drain(read, [slot for _, slot in drained])
        finally:
            blocks.let_go(read)
            freed.set()
        records = [self._record(item, memory.slot(item.slot), is_block=block is not None) for item, block in batch]
        await self._store.save(records)
        self.saved += len(records)

    def _record(self, item: SaveItem, slot: memoryview, *, is_block: bool) -> KVRecord:
        """Frame what is in a slot."""
        kind: Literal["block", "snapshot"] = "block" if is_block else "snapshot"
        nbytes = FRAME_NBYTES + (self._layout.block_nbytes if is_block else self._layout.snapshot_nbytes)
        write_frame(slot[:nbytes], item.key, kind)
        return KVRecord(
            ref=RecordRef(item.key, kind, nbytes),
            parent=item.parent,
            namespace=item.namespace,
            tenant=item.tenant,
            model=self._model,
            tokens=item.tokens,
            retention=item.retention,
            data=slot[:nbytes],
        )

    def _offer_again(self, live: Live, keys: Sequence[BlockKey], wanted: Sequence[BlockKey] | None) -> None:
        """Queue blocks that the store asks for although it was given them, in order; none twice."""
        wishes = set(wanted or ()) - self._again  # a plug-in may forget to return anything
        if not wishes:
            return
        for index, key in enumerate(keys):
            if key in wishes and (item := self._item(live, index)) is not None:
                if not self._put(item):
                    return
                self._again.add(key)

    def _put(self, item: SaveItem) -> bool:
        """Queue a record if there is room."""
        if len(self._queue) >= _QUEUE:
            self.dropped += 1
            return False
        self._know(item.id, item.retention)
        self._queue.append(item)
        self._wake()
        return True

    def _has(self, record_id: bytes, retention: Retention) -> bool:
        """Whether a record is known to be kept, or queued, where such a retention wants it."""
        kept = self._known.get(record_id)
        return kept is not None and not kept.gone and (kept.disk or not retention.disk)

    def _know(self, record_id: bytes, retention: Retention) -> None:
        self._known[record_id] = _Kept(retention.disk)
        self._bound()

    def _bound(self) -> None:
        if len(self._known) > _KNOWN:
            self._known.popitem(last=False)

    def _wake(self) -> None:
        if self._idle.is_set():
            self._idle = anyio.Event()
        self._signal.set()
