from __future__ import annotations

from pathlib import Path

from deepinfra.bench.kvdisk import NotedDisk, append_plainly, drop_folder
from deepinfra.bench.kvfolder import KVFolder
from deepinfra.kvstores import SsdStore


async def test_plain_appends_are_the_stores_own_calls(tmp_path: Path) -> None:
    disk = NotedDisk()
    store = SsdStore(tmp_path / "kv", capacity_nbytes=1 << 30, segment_nbytes=4 << 20, min_free_nbytes=0)
    store.disk = disk
    async with store:
        for batch in KVFolder(tmp_path, 200, 50_000).made():
            await store.save(batch)
    (tmp_path / "plain").mkdir()
    append_plainly(tmp_path / "plain", disk.writes, memoryview(bytearray(1 << 20)))
    sizes = [
        sorted(path.stat().st_size for path in paths)
        for paths in ((tmp_path / "kv").glob("*.kvseg"), (tmp_path / "plain").iterdir())
    ]
    assert sizes[0] == sizes[1]
    assert len(sizes[0]) > 1
    syncs = [write for write in disk.writes if not write.sizes]
    assert len(syncs) == len(sizes[0]), "every file is synced when it is sealed, none has 16 MiB"


def test_a_folder_can_be_dropped_from_the_page_cache(tmp_path: Path) -> None:
    (tmp_path / "default-1-00000001.kvseg").write_bytes(bytes(1 << 20))
    drop_folder(tmp_path)  # raises where mincore(2) says otherwise
