"""What the ssd store costs on this disk: opening a folder that a server left, loading beside plain reads."""

from __future__ import annotations

import hashlib
import os
import random
import resource
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import anyio

from deepinfra.core.ids import BlockKey
from deepinfra.core.kv import KVRecord, RecordRef, Retention
from deepinfra.interfaces.given import SystemClock
from deepinfra.kvstores import SsdStore

__all__ = ("KVFolder", "OpenReport", "fill", "open_folder")

BATCH = 256
"""Records per save."""


class KVFolder(NamedTuple):
    """A folder of records to be made, and opened.

    Attributes:
        path: Where; a folder of its own.
        records: How many.
        nbytes: Bytes of each record's payload.
    """

    path: Path
    records: int
    nbytes: int

    @property
    def store(self) -> SsdStore:
        """A store that holds them all."""
        return SsdStore(self.path, capacity_nbytes=1 << 40, min_free_nbytes=0, fsync="none")

    def made(self) -> Iterator[list[KVRecord]]:
        """The records, chained in prefixes of 64, by batches; the same ones every time."""
        root = hashlib.sha256(b"deepinfra bench kv").digest()
        rng = random.Random(self.nbytes)
        data = rng.randbytes(2 * self.nbytes)
        batch: list[KVRecord] = []
        parent = root
        for i in range(self.records):
            key = hashlib.sha256(root + i.to_bytes(8, "little")).digest()
            at = i % self.nbytes
            batch.append(
                KVRecord(
                    ref=RecordRef(BlockKey(key), "block", self.nbytes),
                    parent=BlockKey(parent if i % 64 else root),
                    namespace=root,
                    tenant="public",
                    model="bench",
                    tokens=tuple(range(i, i + 16)),
                    retention=Retention(traffic="agent"),
                    data=memoryview(data)[at : at + self.nbytes],
                )
            )
            parent = key
            if len(batch) == BATCH:
                yield batch
                batch = []
        if batch:
            yield batch


class OpenReport(NamedTuple):
    """What opening took.

    Attributes:
        records: Found.
        disk_nbytes: Their files.
        open_s: Seconds until the store answered.
        cpu_s: Seconds of this process's CPUs in them.
        grown_nbytes: Resident memory more than before.
        peak_nbytes: The same at its largest, while opening.
        match_us: Microseconds per key of matches of 64, at random places.
        hits: Keys of those matches that were found.
        asked: Keys of those matches.
    """

    records: int
    disk_nbytes: int
    open_s: float
    cpu_s: float
    grown_nbytes: int
    peak_nbytes: int
    match_us: float
    hits: int
    asked: int


async def fill(folder: KVFolder, saved: Callable[[], None]) -> None:
    """Save the records of a folder, say so, and wait to be killed: that leaves what a killed server leaves."""
    async with folder.store as store:
        for batch in folder.made():
            await store.save(batch)
        saved()
        await anyio.sleep_forever()


async def open_folder(folder: KVFolder) -> OpenReport:
    """Open a folder, in a process that did nothing else before, and match at random."""
    keys = [record.ref.key for batch in folder.made() for record in batch]
    async with KVFolder(folder.path.with_name(folder.path.name + ".empty"), 0, 0).store as store:
        await store.match(keys[:1])
    before, peak = _resident_nbytes(), _peak_nbytes()
    store = folder.store
    clock = SystemClock()
    started, cpu = clock.now(), _cpu_s()
    async with store:
        open_s, cpu_s = clock.now() - started, _cpu_s() - cpu
        grown, peak = _resident_nbytes() - before, max(0, _peak_nbytes() - max(before, peak))
        stats = store.stats()
        rng = random.Random(1)
        starts = [rng.randrange(0, max(1, len(keys) - 64), 64) for _ in range(300)]
        started = clock.now()
        matches = [await store.match(keys[start : start + 64]) for start in starts]
        match_s = clock.now() - started
        asked = sum(len(keys[start : start + 64]) for start in starts)
        return OpenReport(
            records=stats.records,
            disk_nbytes=stats.nbytes,
            open_s=open_s,
            cpu_s=cpu_s,
            grown_nbytes=grown,
            peak_nbytes=peak,
            match_us=match_s / asked * 1e6,
            hits=sum(len(match.refs) for match in matches),
            asked=asked,
        )


def _resident_nbytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE")


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _peak_nbytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
