"""Two real processes under load on one folder while one of them is killed again and again."""

from __future__ import annotations

import fcntl
import json
import os
import selectors
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import pytest

from deepinfra.core.kv import NamespaceFilter
from deepinfra.kvstores import SsdStore
from deepinfra.kvstores.ssd.format import tag_of
from deepinfra.testing.kvrecords import chain, content, load

ROOT = Path(__file__).parents[3]
CAP, QUOTA = 48 << 20, 6 << 20

CHILD = """
import json, random, sys, time
import anyio
from deepinfra.core.kv import NamespaceFilter
from deepinfra.kvstores import SsdStore
from deepinfra.testing.kvrecords import chain, content, keys_of, load

folder, me, other, seconds, seed = sys.argv[1], sys.argv[2], sys.argv[3], float(sys.argv[4]), int(sys.argv[5])
CAP, QUOTA = int(sys.argv[6]), int(sys.argv[7])

def beacon(who, tick):
    return chain(tick & 0x7FFFFFFF, ord(who), tenant="beacon", nbytes=500)

async def main():
    rng, saved, seen, tick = random.Random(seed), set(), set(), 0
    end = time.time() + seconds
    count = dict.fromkeys(("hits", "foreign", "asked", "forgotten"), 0)
    async with SsdStore(folder, capacity_nbytes=CAP, segment_nbytes=2 << 20, min_free_nbytes=0,
                        quotas={"limited": QUOTA}) as store:
        while (now := time.time()) < end:
            number, tenant = rng.randrange(60), rng.choice(["free", "limited", "hunted"])
            tokens = range(1000 * number, 1000 * number + 2 * rng.randrange(1, 8))
            records = chain(*tokens, tenant=tenant, nbytes=20_000)
            match = await store.match(keys_of(records))
            for data, ref in zip(await load(store, match.refs), match.refs):
                if data != content(ref):
                    sys.exit(3)
                count["hits"] += 1
                count["foreign"] += (tenant, ref.key) not in saved
            count["asked"] += len(records)
            if rng.random() < 0.25:
                await store.save(records)
                saved.update((tenant, r.ref.key) for r in records)
            if rng.random() < 0.01:
                await store.forget(NamespaceFilter(tenant="hunted"))
                saved = {s for s in saved if s[0] != "hunted"}
                count["forgotten"] += 1
            if int(now * 2) != tick:
                tick = int(now * 2)
                await store.save(beacon(me, tick))
                print(json.dumps({"beacon": tick, "at": time.time()}), flush=True)
                print(json.dumps(count | {"nbytes": store.stats().nbytes}), flush=True)
            for past in range(tick - 14, tick + 1):
                if past not in seen and (await store.match(keys_of(beacon(other, past)))).refs:
                    seen.add(past)
                    print(json.dumps({"saw": past, "at": time.time()}), flush=True)
            await anyio.sleep(0.004)
    print(json.dumps({"over": True}), flush=True)
anyio.run(main)
"""


class Child(NamedTuple):
    name: str
    process: subprocess.Popen[bytes]
    born: float
    lines: list[dict[str, float]]
    rest: bytearray


class Soak:
    """Parent and observer: starts, kills and reads two children, and measures the folder from outside."""

    def __init__(self, folder: Path, seconds: float) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.end = folder, time.time() + seconds
        self.selector = selectors.DefaultSelector()
        self.children: dict[str, Child] = {}
        self.past: list[tuple[Child, float]] = []
        self.most = self.looks = self.seed = 0
        for name in "ab":
            self.start(name)

    def start(self, name: str) -> None:
        self.seed += 1
        names = name, "b" if name == "a" else "a"
        left = max(0.5, self.end - time.time())
        command = [
            sys.executable,
            "-c",
            CHILD,
            str(self.folder),
            *names,
            str(left),
            str(self.seed),
            str(CAP),
            str(QUOTA),
        ]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT)
        assert process.stdout is not None
        os.set_blocking(process.stdout.fileno(), False)
        self.children[name] = Child(name, process, time.time(), [], bytearray())
        self.selector.register(process.stdout, selectors.EVENT_READ, self.children[name])

    def turn(self) -> None:
        """Read what children say, and measure."""
        for key, _ in self.selector.select(0.01):
            child: Child = key.data
            child.rest.extend(os.read(key.fd, 1 << 16))
            *whole, rest = bytes(child.rest).split(b"\n")
            child.rest[:] = rest
            child.lines.extend(json.loads(line) for line in whole)
        with (self.folder / "lock").open("a") as lock:  # so that files do not change places while they are counted
            try:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return
            sizes = {path.name: path.stat().st_blocks * 512 for path in self.folder.iterdir() if path.exists()}
        self.looks += 1
        self.most = max(self.most, sum(sizes.values()))
        assert sum(sizes.values()) <= CAP
        assert sum(nbytes for name, nbytes in sizes.items() if tag_of("limited") in name) <= QUOTA

    def gone(self, child: Child) -> None:
        assert child.process.stdout is not None
        self.selector.unregister(child.process.stdout)
        child.process.stdout.close()
        self.past.append((child, time.time()))

    def kill(self, name: str) -> None:
        self.end_of(name)
        self.start(name)

    def end_of(self, name: str) -> None:
        child = self.children[name]
        child.process.kill()
        assert child.process.wait() == -9
        self.gone(child)

    def stop(self) -> None:
        for name in self.children:
            self.end_of(name)

    def finish(self) -> None:
        while any(not child.lines or "over" not in child.lines[-1] for child in self.children.values()):
            self.turn()
            assert all(child.process.poll() in (None, 0) for child in self.children.values())
        for child in self.children.values():
            assert child.process.wait() == 0
            self.gone(child)

    def total(self, name: str, field: str) -> float:
        last = [max((line.get(field, 0) for line in c.lines), default=0) for c, _ in self.past if c.name == name]
        return sum(last)

    def delays(self) -> list[float]:
        """Seconds after which a beacon was seen by the other process, where that one lived for 5 s behind it."""
        found = []
        for child, _ in self.past:
            for line in child.lines:
                if "beacon" not in line:
                    continue
                for other, died in self.past:
                    first = next((entry["at"] for entry in other.lines if "beacon" in entry), died)
                    if other.name != child.name and first <= line["at"] and line["at"] + 5.5 < died:
                        saw = [e["at"] - line["at"] for e in other.lines if e.get("saw") == line["beacon"]]
                        found.append(saw[0] if saw else 99.0)
        return found


def test_two_processes_share_a_folder_while_one_is_killed(tmp_path: Path) -> None:
    soak = Soak(tmp_path / "kv", 100.0)
    for number in range(3):
        name = "ab"[number % 2]
        while len(soak.children[name].lines) < 4:
            soak.turn()
        soak.kill(name)
    while not all(any(line.get("foreign") for line in child.lines) for child in soak.children.values()):
        soak.turn()
        assert all(child.process.poll() is None for child in soak.children.values())
    soak.stop()
    assert soak.looks > 10


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_two_processes_share_a_folder_for_a_minute_while_one_is_killed_every_five_seconds(tmp_path: Path) -> None:
    soak = Soak(tmp_path / "kv", 60.0)
    kills = 0
    while time.time() < soak.end - 6:
        if time.time() > soak.end - 60 + 5 * (kills + 1):
            soak.kill("ab"[kills // 2 % 2])
            kills += 1
        soak.turn()
    soak.finish()
    delays = soak.delays()
    print(
        f"{kills} kills, {soak.looks} looks, most {soak.most / CAP:.0%} of the cap, {len(delays)} beacons seen after "
        f"{sum(delays) / len(delays):.2f} s, at most {max(delays):.2f} s; hits and what the other wrote:",
        {name: [int(soak.total(name, field)) for field in ("asked", "hits", "foreign", "forgotten")] for name in "ab"},
    )
    assert kills >= 10
    assert soak.most > 0.8 * CAP
    assert max(delays) < 5.0
    assert all(soak.total(name, "foreign") > 100 for name in "ab")


WRITER = """
import sys, anyio
from deepinfra.kvstores import SsdStore
from deepinfra.testing.kvrecords import chain
async def main():
    async with SsdStore(sys.argv[1], segment_nbytes=200_000, min_free_nbytes=0) as store:
        for i in range(10_000):
            for tenant in ("tenant-hunted", "others"):
                await store.save(chain(i, i, i, i, tenant=tenant))
            print(i, flush=True)
            await anyio.sleep(0.002)
anyio.run(main)
"""


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_no_byte_is_left_of_what_was_forgotten_while_another_process_writes(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE, cwd=ROOT) as child:
        assert child.stdout is not None
        async with SsdStore(tmp_path, segment_nbytes=200_000, min_free_nbytes=0) as store:
            saved = 0
            for _ in range(3):
                first = saved
                while saved < first + 40:
                    saved = int(child.stdout.readline())
                assert (await store.forget(NamespaceFilter(tenant="tenant-hunted"))).records > 0
                files = b"".join(path.read_bytes() for path in tmp_path.iterdir() if path.exists())
                for i in range(saved + 1):
                    for record in chain(i, i, i, i, tenant="tenant-hunted"):
                        data = content(record.ref)
                        assert not any(data[at : at + 32] in files for at in range(0, len(data) - 31, 800)), i
        child.kill()
        child.wait()
        async with SsdStore(tmp_path, segment_nbytes=200_000, min_free_nbytes=0) as store:
            for i in range(saved + 1):
                records = chain(i, i, i, i, tenant="others")
                assert await load(store, [r.ref for r in records]) == [content(r.ref) for r in records]
