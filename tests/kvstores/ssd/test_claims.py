"""Rows of the file `forgotten`: of this version, and of the one before it."""

from __future__ import annotations

import hashlib
import struct
from pathlib import Path

import pytest
import xxhash

from deepinfra.core.kv import NamespaceFilter
from deepinfra.interfaces.given import InlineOffload
from deepinfra.kvstores import SsdStore
from deepinfra.kvstores.ssd.claims import TOMBSTONE_NBYTES, pack_tombstone, read_tombstones
from deepinfra.kvstores.ssd.disk import Disk
from deepinfra.kvstores.ssd.format import NOBODY, Erased, Owner
from deepinfra.testing.clock import ManualClock
from deepinfra.testing.kvrecords import chain, content, keys_of, load

NAMESPACE = bytes(range(32))
FILTERS = [
    NamespaceFilter(),
    NamespaceFilter(tenant="a"),
    NamespaceFilter(namespace=NAMESPACE),
    NamespaceFilter(tenant="a", model="m", namespace=NAMESPACE),
]


@pytest.mark.parametrize("done", [False, True])
@pytest.mark.parametrize("which", FILTERS)
def test_a_row_says_what_was_written(tmp_path: Path, which: NamespaceFilter, done: bool) -> None:
    row = pack_tombstone(Erased.of(which), done=done)
    disk = Disk()
    (tmp_path / "forgotten").write_bytes(2 * row + row[:-1])
    fd = disk.open(tmp_path / "forgotten")
    rows, end = read_tombstones(disk, fd, 0)
    disk.close(fd)
    assert [(row.which, row.done) for row in rows] == 2 * [(Erased.of(which), done)]
    assert end == 2 * TOMBSTONE_NBYTES


def test_rows_of_the_version_before_are_read(tmp_path: Path) -> None:
    digest = hashlib.sha256(b"deepinfra/kv\0a").digest()
    bodies = [struct.pack("<4sI32s32s", b"DIkc", done, digest, bytes(32)) for done in (0, 1)]
    rows = [body + struct.pack("<Q", xxhash.xxh3_64_intdigest(body)) for body in bodies]
    assert rows[0] == pack_tombstone(Erased.of(NamespaceFilter(tenant="a")), done=False)
    assert rows[1] == pack_tombstone(Erased.of(NamespaceFilter(tenant="a")), done=True)


@pytest.mark.parametrize("which", FILTERS)
@pytest.mark.parametrize("tenant", ["a", "b"])
@pytest.mark.parametrize("model", ["m", "n"])
@pytest.mark.parametrize("namespace", [NAMESPACE, bytes(31) + b"x"])
def test_digests_mean_what_the_filter_does(which: NamespaceFilter, tenant: str, model: str, namespace: bytes) -> None:
    assert Erased.of(which).means(Owner(namespace, tenant, model)) == which.matches(tenant, model, namespace)
    assert not Erased.of(which).means(NOBODY)


@pytest.mark.parametrize("namespace", [b"short", bytes(33)])
def test_a_namespace_that_is_no_digest_is_refused(namespace: bytes) -> None:
    with pytest.raises(ValueError, match="32 bytes"):
        NamespaceFilter(namespace=namespace)


async def test_a_namespace_that_one_process_forgets_is_gone_for_all(tmp_path: Path) -> None:
    clock = ManualClock()
    one, other = (SsdStore(tmp_path, min_free_nbytes=0, capacity_nbytes=1 << 20) for _ in range(2))
    one.give(clock, InlineOffload())
    other.give(clock, InlineOffload())
    gone, kept = chain(1, 2, 3, 4, salt="gone"), chain(1, 2, 3, 4, salt="kept")
    async with one, other:
        await one.save(gone + kept)
        assert (await other.forget(NamespaceFilter(namespace=gone[0].namespace))).records == len(gone)
        clock.advance(1.5)
        assert (await one.match(keys_of(gone))).refs == ()
        assert await load(one, (await one.match(keys_of(kept))).refs) == [content(record.ref) for record in kept]
        files = b"".join(path.read_bytes() for path in tmp_path.iterdir())
        assert not any(content(record.ref)[:64] in files for record in gone)
        await one.save(gone)
        assert len((await one.match(keys_of(gone))).refs) == len(gone)
