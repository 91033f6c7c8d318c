"""Our stores through our own kit."""

from __future__ import annotations

from pathlib import Path

from deepinfra.interfaces.kvstore import KVStore
from deepinfra.kvstores import MemoryStore, SsdStore
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
