"""Any history of two stores on one folder, with failing disks and kills: no wrong byte, nothing forgotten returns."""

from __future__ import annotations

import os
import random
import tempfile
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import anyio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from deepinfra.core.kv import KVRecord, NamespaceFilter, Retention
from deepinfra.interfaces.given import InlineOffload
from deepinfra.kvstores import SsdStore
from deepinfra.kvstores.ssd.format import tag_of
from deepinfra.testing.clock import ManualClock
from deepinfra.testing.disks import FaultyDisk
from deepinfra.testing.kvrecords import chain, content, keys_of, load

CAP, QUOTA = 120_000, 40_000
TENANTS = ("a", "b", "limited")


FAULTS = "EIO", "ENOSPC", "short"


class Failing(FaultyDisk):
    """Fails every `one_in`-th call or so, and writes or reads less than it was asked to."""

    def __init__(self, seed: int) -> None:
        rng = random.Random(seed)
        super().__init__(rng, lambda call, number: self._strike(rng))
        self.one_in = 0

    def _strike(self, rng: random.Random) -> str:
        return rng.choice(FAULTS) if self.one_in and rng.randrange(self.one_in) == 0 else ""


class Pair:
    """Two stores that can be left, killed and entered again one by one."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder, self.clock = folder, ManualClock()
        self.disks = [Failing(seed), Failing(seed + 1)]
        self.stores: list[SsdStore] = []
        self.stacks = [AsyncExitStack(), AsyncExitStack()]
        self.ever: dict[str, dict[bytes, KVRecord]] = {tenant: {} for tenant in TENANTS}

    async def enter(self, i: int) -> None:
        store = SsdStore(self.folder, capacity_nbytes=CAP, min_free_nbytes=0, fsync="none", quotas={"limited": QUOTA})
        store.disk = self.disks[i]
        store.give(self.clock, InlineOffload())
        self.stores[i : i + 1] = [store]
        self.stacks[i] = AsyncExitStack()
        await self.stacks[i].enter_async_context(store)

    async def leave(self, i: int, *, killed: bool) -> None:
        """What the kernel does when a process is killed: everything is closed and unlocked, nothing is written."""
        if killed:
            folder, writer = self.stores[i]._folder, self.stores[i]._writer
            fds = [segment.fd for segment in writer._open.values() if segment.fd is not None]
            for fd in (*fds, folder._process, folder._forgotten):
                os.close(fd)
            writer._open.clear()
            folder.leave = lambda: None  # type: ignore[method-assign]
        await self.stacks[i].aclose()

    async def held(self, i: int, tenant: str) -> int:
        """Records of a tenant that a store delivers, all of them right."""
        found = 0
        for record in self.ever[tenant].values():
            match = await self.stores[i].match([record.ref.key])
            for data in await load(self.stores[i], match.refs):
                assert data == content(match.refs[0]), "wrong bytes"
                found += 1
        return found

    async def matched(self, i: int, tenant: str) -> int:
        return sum([len((await self.stores[i].match([key])).refs) for key in keys_of([*self.ever[tenant].values()])])

    def check_disk(self) -> None:
        sizes = {path.name: path.stat().st_blocks * 512 for path in self.folder.iterdir()}
        assert sum(sizes.values()) <= CAP
        assert sum(nbytes for name, nbytes in sizes.items() if tag_of("limited") in name) <= QUOTA

    def check_forgotten(self, tenant: str) -> None:
        files = b"".join(path.read_bytes() for path in self.folder.iterdir())
        for record in self.ever[tenant].values():
            data = content(record.ref)
            assert not any(data[at : at + 32] in files for at in range(0, len(data) - 31, 32)), "no 64 bytes anywhere"


who = st.integers(0, 1)
tenants = st.sampled_from(TENANTS)
steps = st.one_of(
    st.tuples(st.just("save"), who, tenants, st.lists(st.integers(0, 2), min_size=2, max_size=12)),
    st.tuples(st.just("save"), who, tenants, st.lists(st.integers(0, 2), min_size=2, max_size=12)),
    st.tuples(st.just("look"), who, tenants),
    st.tuples(st.just("touch"), who, tenants),
    st.tuples(st.just("forget"), who, tenants),
    st.tuples(st.just("advance"), st.sampled_from([0.0, 0.5, 2.0, 4_000.0, 70_000.0])),
    st.tuples(st.just("restart"), who, st.booleans()),
    st.tuples(st.just("faults"), who, st.sampled_from([0, 0, 4, 30])),
)


async def run(folder: Path, seed: int, history: list[tuple[Any, ...]]) -> None:
    pair = Pair(folder, seed)
    await pair.enter(0)
    await pair.enter(1)
    well = True  # no disk failed since the last time that both were entered anew
    try:
        for step in history:
            if step[0] == "save":
                _, i, tenant, tokens = step
                records = chain(*tokens, tenant=tenant, nbytes=2_500)
                pair.ever[tenant].update({record.ref.key: record for record in records})
                await pair.stores[i].save(records)
                if well and tenant != "limited":
                    assert len((await pair.stores[i].match(keys_of(records))).refs) == len(records)
            elif step[0] == "look":
                await pair.held(*step[1:])
            elif step[0] == "touch":
                await pair.stores[step[1]].touch(list(pair.ever[step[2]]), Retention())  # type: ignore[arg-type]
            elif step[0] == "forget":
                _, i, tenant = step
                await pair.stores[i].forget(NamespaceFilter(tenant=tenant))
                assert await pair.matched(i, tenant) == 0
                if well:
                    pair.check_forgotten(tenant)
                    assert await pair.held(1 - i, tenant) == 0
                    pair.clock.advance(1.0)
                    await pair.stores[1 - i].match([])  # what is saved before it has heard is dropped
                    assert await pair.matched(1 - i, tenant) == 0
            elif step[0] == "advance":
                pair.clock.advance(step[1])
            elif step[0] == "faults":
                pair.disks[step[1]].one_in = step[2]
                well = well and not step[2]
            else:
                _, i, killed = step
                one_in, pair.disks[i].one_in = pair.disks[i].one_in, 0
                await pair.leave(i, killed=killed)
                await pair.enter(i)
                pair.disks[i].one_in = one_in
            pair.check_disk()
    finally:
        for i in (0, 1):
            pair.disks[i].one_in = 0
            await pair.leave(i, killed=False)
    pair.check_disk()


@given(st.lists(steps, min_size=4, max_size=40), st.integers(0, 1 << 20))
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
def test_any_history_of_two_stores_keeps_the_laws(history: list[tuple[Any, ...]], seed: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        anyio.run(run, Path(folder), seed, history)
