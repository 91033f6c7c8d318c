"""Equal records that several calls want at one time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import anyio
import pytest
from anyio.lowlevel import checkpoint

from deepinfra.core.kv import RecordRef
from deepinfra.kvstores import SsdStore
from deepinfra.kvstores.ssd.reading import read_pieces
from deepinfra.testing.clock import ManualClock
from deepinfra.testing.kvrecords import chain, content, load

T = TypeVar("T")


class HoldsARead:
    """An `Offload` that lets one read wait, counted from 1, until `go`."""

    def __init__(self, held: int) -> None:
        self.reached, self.go = anyio.Event(), anyio.Event()
        self.reads, self._held = 0, held

    async def __call__(self, function: Callable[..., T], /, *args: object) -> T:
        self.reads += function is read_pieces
        if function is read_pieces and self.reads == self._held:
            self.reached.set()
            await self.go.wait()
        await checkpoint()
        return function(*args)


@pytest.mark.parametrize(("held", "reads"), [(1, 3), (2, 4), (3, 4)])
async def test_who_comes_while_another_reads_gets_the_bytes_whichever_file_it_is_at(
    tmp_path: Path, held: int, reads: int
) -> None:
    records = chain(*range(18))
    refs = [record.ref for record in records]
    store, offload = SsdStore(tmp_path, capacity_nbytes=80_000, min_free_nbytes=0), HoldsARead(held)
    store.give(ManualClock(), offload)
    delivered: list[list[bytes]] = []

    async def reader(part: Sequence[RecordRef]) -> None:
        delivered.append(await load(store, part))

    async with store:
        await store.save(records)
        assert len(list(tmp_path.glob("*.kvseg"))) == 3
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(reader, refs)
            await offload.reached.wait()
            tasks.start_soon(reader, refs[:1])
            await anyio.wait_all_tasks_blocked()
            offload.go.set()
    assert sorted(delivered, key=len) == [[content(ref) for ref in part] for part in (refs[:1], refs)]
    assert offload.reads == reads, "what is being read is read once"
