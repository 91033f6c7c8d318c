"""The save queue: published blocks on their way into a store, off the token path.

A queued block is named by its key and holds no reference: published blocks are read-only, so if the key is still in
the prefix index when its turn comes, the bytes are right; if its memory was needed meanwhile, the save is dropped. A
sequence's tail leaves the index before its head, so a parent is never dropped before its child. References are held
only for the batch that is being copied to staging (at most 5 % of the pool).
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass

import anyio

from deepinfra.core.ids import BlockId, BlockKey
from deepinfra.core.kv import FRAME_NBYTES, KVLayout, KVRecord, RecordRef, Retention
from deepinfra.engine.blocks import BlockPool
from deepinfra.engine.frames import write_frame
from deepinfra.engine.live import Live
from deepinfra.engine.staging import Slots
from deepinfra.engine.stream import Signal
from deepinfra.errors import ExecutorLost
from deepinfra.interfaces.executor import KVMemory
from deepinfra.interfaces.kvstore import KVStore

__all__ = ("SaveItem", "Saver")

_KNOWN = 1 << 16
"""Keys remembered as saved, 32 bytes each: 65,536 blocks of 16 tokens are a million tokens, 8 MB with overhead."""

_QUEUE = 1 << 14
"""Blocks that may wait to be saved; beyond it new ones are dropped."""

_RETRY_S = 0.005
"""Pause when loads hold every staging slot; a step, which frees them, takes that long or longer."""


@dataclass(frozen=True, slots=True)
class SaveItem:
    """A published block and what its record will say."""

    key: BlockKey
    parent: BlockKey
    tokens: tuple[int, ...]
    namespace: bytes
    tenant: str
    retention: Retention


class Saver:
    """Copies published blocks into a store; one per pool, run as a task inside the executor's life."""

    def __init__(self, store: KVStore, layout: KVLayout, model: str) -> None:
        self._store, self._layout, self._model = store, layout, model
        self._queue: deque[SaveItem] = deque()
        self._touches: deque[tuple[tuple[BlockKey, ...], Retention]] = deque(maxlen=1024)
        self._known: OrderedDict[BlockKey, None] = OrderedDict()
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
        size = self._layout.block_size
        for index in blocks:
            key, owner, retention = live.keys[index], live.owner(index), live.spec.retention
            if owner.tenant != live.spec.tenant and (retention.traffic == "none" or not retention.disk):
                retention = Retention()  # what everybody shares is not what this request wants kept to itself
            if retention.traffic == "none" or key in self._known:
                continue
            if len(self._queue) >= _QUEUE:
                self.dropped += 1
                return
            self._know(key)
            self._queue.append(
                SaveItem(
                    key=key,
                    parent=owner.parent,
                    tokens=tuple(live.tokens[index * size : (index + 1) * size]),
                    namespace=owner.namespace,
                    tenant=owner.tenant,
                    retention=retention,
                )
            )
            self._wake()

    def missed(self, keys: Sequence[BlockKey]) -> None:
        """Take the store's word that it does not hold these (any more): computed again, they are saved again."""
        for key in keys:
            self._known.pop(key, None)

    def touch(self, keys: Sequence[BlockKey], retention: Retention) -> None:
        """Tell the store, some time, that blocks were used on the device."""
        if keys and retention.traffic != "none":
            self._touches.append((tuple(keys), retention))
            self._wake()

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
            self._queue.clear()
            self._touches.clear()
            self._known.clear()
            self._idle.set()

    async def _one_batch(self, memory: KVMemory, blocks: BlockPool, slots: Slots, freed: Signal) -> None:
        while self._touches:
            keys, retention = self._touches.popleft()
            await self._store.touch(keys, retention)
        if not self._queue:
            return
        most = max(1, blocks.num_blocks // 20)
        taken = slots.take(min(most, len(self._queue)), leave=1 if slots.num_slots > 1 else 0)
        if not taken:
            await anyio.sleep(_RETRY_S)
            return
        try:
            batch: list[tuple[SaveItem, BlockId]] = []
            while self._queue and len(batch) < len(taken):
                item = self._queue.popleft()
                block = blocks.find(item.key)
                if block is None:
                    self._known.pop(item.key, None)
                    self.dropped += 1
                else:
                    batch.append((item, block))
            if batch:
                await self._save(batch, memory, blocks, taken, freed)
        finally:
            slots.give(taken)
            freed.set()

    async def _save(
        self,
        batch: Sequence[tuple[SaveItem, BlockId]],
        memory: KVMemory,
        blocks: BlockPool,
        slots: Sequence[int],
        freed: Signal,
    ) -> None:
        read = [block for _, block in batch]
        blocks.share(read)
        try:
            # Shielded: a copy under way must not write into slots that somebody else has been given.
            with anyio.CancelScope(shield=True):
                await memory.drain(read, slots[: len(batch)])
        finally:
            blocks.release(read)
            freed.set()
        nbytes = FRAME_NBYTES + self._layout.block_nbytes
        records: list[KVRecord] = []
        for (item, _), slot in zip(batch, slots, strict=False):
            data = memory.slot(slot)
            write_frame(data, item.key)
            records.append(
                KVRecord(
                    ref=RecordRef(item.key, "block", nbytes),
                    parent=item.parent,
                    namespace=item.namespace,
                    tenant=item.tenant,
                    model=self._model,
                    tokens=item.tokens,
                    retention=item.retention,
                    data=data,
                )
            )
        await self._store.save(records)
        self.saved += len(records)

    def _know(self, key: BlockKey) -> None:
        self._known[key] = None
        if len(self._known) > _KNOWN:
            self._known.popitem(last=False)

    def _wake(self) -> None:
        if self._idle.is_set():
            self._idle = anyio.Event()
        self._signal.set()
