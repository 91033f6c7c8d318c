"""A folder of records for measuring stores: the same ones every time, made as they are needed."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import anyio

from deepinfra.core.ids import BlockKey
from deepinfra.core.kv import KVRecord, RecordRef, Retention
from deepinfra.kvstores import SsdStore

__all__ = ("KVFolder",)

BATCH = 64
"""Records per save."""

_ROOT = BlockKey(hashlib.sha256(b"deepinfra bench kv").digest())


class KVFolder(NamedTuple):
    """A folder that holds records, or is to hold them.

    Attributes:
        path: Where; a folder of its own.
        records: How many.
        nbytes: Bytes of each record's payload.
    """

    path: Path
    records: int
    nbytes: int

    def store(self) -> SsdStore:
        """A store that holds them all."""
        return SsdStore(self.path, capacity_nbytes=1 << 40, min_free_nbytes=0, fsync="none")

    def keys(self) -> list[BlockKey]:
        """The records' keys."""
        return [_key(number) for number in range(self.records)]

    def made(self) -> Iterator[list[KVRecord]]:
        """The records by batches, each batch a prefix."""
        data = memoryview(random.Random(self.nbytes).randbytes(2 * self.nbytes))
        for start in range(0, self.records, BATCH):
            numbers = range(start, min(self.records, start + BATCH))
            yield [
                KVRecord(
                    ref=RecordRef(_key(number), "block", self.nbytes),
                    parent=_key(number - 1) if number > start else _ROOT,
                    namespace=_ROOT,
                    tenant="public",
                    model="bench",
                    tokens=tuple(range(number, number + 16)),
                    retention=Retention(traffic="agent"),
                    data=data[number % self.nbytes :][: self.nbytes],
                )
                for number in numbers
            ]

    async def fill(self, saved: Callable[[], None]) -> None:
        """Save the records, say so, and wait to be killed: that leaves what a killed server leaves."""
        async with self.store() as store:
            for batch in self.made():
                await store.save(batch)
            saved()
            await anyio.sleep_forever()


def _key(number: int) -> BlockKey:
    return BlockKey(hashlib.sha256(_ROOT + number.to_bytes(8, "little")).digest())
