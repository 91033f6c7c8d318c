"""Staging slots beside the device's KV."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import anyio

from deepinfra.core.ids import BlockId
from deepinfra.executors.torch.worker import Worker
from deepinfra.interfaces.executor import KVMemory

if TYPE_CHECKING:
    from deepinfra.executors.torch.blocks import KVBlocks

__all__ = ("Staging",)


class Staging(KVMemory):
    """Slots in one buffer; draining is work of the same thread, hence ordered with steps."""

    def __init__(self, buffer: memoryview, num_slots: int, stride: int, worker: Worker) -> None:
        self._buffer, self._num_slots, self._stride, self._worker = buffer, num_slots, stride, worker
        self._slots = [buffer[index * stride : (index + 1) * stride] for index in range(num_slots)]
        self.kv: KVBlocks | None = None

    @property
    def num_slots(self) -> int:
        """See `KVMemory.num_slots`."""
        return self._num_slots

    def slot(self, index: int) -> memoryview:
        """See `KVMemory.slot`."""
        return self._slots[index]

    async def drain(self, blocks: Sequence[BlockId], slots: Sequence[int]) -> None:
        """See `KVMemory.drain`."""
        pairs = list(zip(blocks, slots, strict=True))
        job = self._worker.post(lambda: self._copy(pairs))
        with anyio.CancelScope(shield=True):  # who is cancelled may reuse its slots at once
            await job.wait()
        await anyio.lowlevel.checkpoint_if_cancelled()

    def _copy(self, pairs: Sequence[tuple[BlockId, int]]) -> None:
        assert self.kv is not None
        for block, slot in pairs:
            self.kv.drain(block, self._slots[slot])
