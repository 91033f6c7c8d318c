"""SsdStore in a child process that is killed at any moment of a history of everything it does."""

from __future__ import annotations

import random
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from deepinfra.core.kv import KVRecord
from deepinfra.kvstores import SsdStore
from deepinfra.testing.kvrecords import chain, content, keys_of, load

CHILD = """
import random, sys
import anyio
from deepinfra.core.kv import NamespaceFilter, Retention
from deepinfra.kvstores import SsdStore
from deepinfra.testing.kvrecords import chain, keys_of, load
folder, first, seed = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
rng = random.Random(seed)
async def main():
    async with SsdStore(folder, capacity_nbytes=2_000_000, segment_nbytes=100_000, min_free_nbytes=0) as store:
        for i in range(first, 1 << 30):
            records = chain(*[i] * 8, nbytes=5_000)
            await store.save(records)
            print(i, flush=True)
            await store.save(chain(*[i] * 8, nbytes=5_000, tenant="gone"))
            await load(store, [record.ref for record in records])
            if rng.random() < 0.2:
                await store.forget(NamespaceFilter(tenant="gone"))
            if rng.random() < 0.2:  # due at once
                await store.save(chain(i, i, nbytes=5_000, tenant="old", retention=Retention(ttl_s=3600.0)))
                await store.touch(keys_of(chain(i, i, tenant="old")), Retention())
anyio.run(main)
"""

ROOT = Path(__file__).parents[3]


def killed(folder: Path, first: int, rng: random.Random) -> int:
    """Let a child do its history from number `first` on and kill it; returns the last number it said it had saved.

    `first - 1`: it said none.
    """
    command = [sys.executable, "-c", CHILD, str(folder), str(first), str(rng.randrange(1 << 30))]
    last = first - 1
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as child:
        assert child.stdout is not None
        for _ in range(rng.randrange(60)):
            last = int(child.stdout.readline())
        threading.Event().wait(rng.random() * 0.01)  # anywhere between two lines
        child.kill()
        return max([last, *(int(line) for line in child.stdout.read().split("\n")[:-1])])


def files_nbytes(folder: Path) -> int:
    return sum(path.stat().st_blocks * 512 for path in folder.glob("*.kvseg"))


async def check_kills(folder: Path, times: int) -> None:
    rng = random.Random(5)
    before = len(list(Path("/proc/self/fd").iterdir()))
    first = held = 0
    for _ in range(times):
        last = killed(folder, first, rng)
        store = SsdStore(folder, capacity_nbytes=2_000_000, segment_nbytes=100_000, min_free_nbytes=0)
        async with store:  # no lock is left
            stats = store.stats()
            assert stats.nbytes == files_nbytes(folder) <= 2_000_000
            records: list[KVRecord] = [
                r for i in range(max(0, last - 60), last + 2) for r in chain(*[i] * 8, nbytes=5_000)
            ]
            right = 0
            for record in records:
                data = await load(store, [record.ref])
                assert data in ([], [content(record.ref)]), "wrong bytes"
                right += len(data)
            newest = chain(*[last] * 8, nbytes=5_000) if last >= first else []
            assert len((await store.match(keys_of(newest))).refs) == len(newest), "what was saved last is held"
            held += right
            assert store.stats().damaged == 0, "a record that is not all there is not held"
        first = last + 2  # the save behind the last one may have been cut, or not been told
    assert held > 10 * times
    assert len(list(Path("/proc/self/fd").iterdir())) <= before


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_process_killed_at_any_moment_leaves_right_bytes_or_misses(tmp_path: Path) -> None:
    await check_kills(tmp_path / "kv", 4)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_process_killed_at_300_moments_leaves_right_bytes_or_misses(tmp_path: Path) -> None:
    await check_kills(tmp_path / "kv", 300)
