"""Our stores through our own kit."""

from __future__ import annotations

import random
from pathlib import Path

from deepinfra.interfaces.kvstore import KVStore
from deepinfra.kvstores import MemoryStore, SsdStore, TieredStore
from deepinfra.testing.faults import FlakyStore
from deepinfra.testing.kvrecords import chain, content, keys_of, load
from deepinfra.testing.kvstore import KVStoreConformance


class KeepsHeads(KVStoreConformance):
    async def test_a_prefix_longer_than_the_store_keeps_its_head(self, tmp_path: Path) -> None:
        async with self.entered(tmp_path) as (store, _):
            records = chain(*range(400))
            for start in range(0, 200, 7):
                await store.save(records[start : start + 7])
            match = await store.match(keys_of(records))
            assert 30 < len(match.refs) < 200
            assert await load(store, match.refs) == [content(ref) for ref in match.refs]


class TestMemoryStore(KeepsHeads):
    def make(self, tmp_path: Path) -> KVStore:
        return MemoryStore(capacity_nbytes=self.capacity_nbytes)


class TestSsdStore(KeepsHeads):
    persistent = True

    def make(self, tmp_path: Path) -> KVStore:
        return SsdStore(tmp_path / "kv", capacity_nbytes=self.capacity_nbytes, min_free_nbytes=0)


class TestTieredStore(KVStoreConformance):
    persistent = True

    def make(self, tmp_path: Path) -> KVStore:
        disk = SsdStore(tmp_path / "kv", capacity_nbytes=self.capacity_nbytes, min_free_nbytes=0)
        return TieredStore([MemoryStore(capacity_nbytes=self.capacity_nbytes), disk])

    async def test_what_was_saved_survives_reopening_iff_persistent(self, tmp_path: Path) -> None:
        """Only the disk's part does, so bytes differ."""
        records = chain(*range(40)) + chain(*range(4), kind="snapshot")
        async with self.entered(tmp_path) as (store, _):
            await store.save(records)
        async with self.entered(tmp_path) as (store, _):
            assert store.stats().records == len(records)
            match = await store.match(keys_of(records[:20]))
            assert (len(match.refs), match.snapshots, match.tiers[0].tier) == (20, (0, 1), "ssd")
            assert await load(store, [r.ref for r in records]) == [content(r.ref) for r in records]


class TestTieredStoreOverATierThatLies(KVStoreConformance):
    lossy = True  # what only the lower tier has, since a save was cancelled, its lies may hide

    def make(self, tmp_path: Path) -> KVStore:
        kinds = frozenset(("shorten", "truncate", "drop"))
        below = FlakyStore(MemoryStore(capacity_nbytes=self.capacity_nbytes), random.Random(1), kinds=kinds)
        return TieredStore([MemoryStore(capacity_nbytes=self.capacity_nbytes), below])
