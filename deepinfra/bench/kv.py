"""What the ssd store costs on a disk: saving and loading beside plain calls, and opening what a killed server left."""

from __future__ import annotations

import mmap
import random
import resource
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from deepinfra.bench.kvdisk import NotedDisk, Write, append_plainly, drop_pages, read_plainly, sync_files
from deepinfra.bench.kvfolder import KVFolder
from deepinfra.bench.machine import CpuUse, CpuWatch
from deepinfra.interfaces.given import Clock, SystemClock
from deepinfra.kvstores import SsdStore
from deepinfra.kvstores.ssd.disk import Disk

__all__ = ("KVFigure", "KVReport", "KVRun", "OpenReport", "fill_and_kill", "open_folder", "run_kv")

FILL = """
import sys, anyio
from pathlib import Path
from deepinfra.bench.kvfolder import KVFolder
folder = KVFolder(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
anyio.run(folder.fill, lambda: print("saved", flush=True))
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class KVRun:
    """What to run.

    Attributes:
        records: Records in the folder.
        nbytes: Bytes of each.
        prefix: Records that are loaded together.
        repeat: Rounds; plain calls come first in even ones, the store in odd ones.
    """

    records: int = 2048
    nbytes: int = 368_640
    prefix: int = 16
    repeat: int = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenReport:
    """What opening a folder took.

    Attributes:
        records: Found.
        disk_nbytes: Their files.
        seconds: Until the store answered.
        cpu_s: Of this process's CPUs in them.
        grown_nbytes: Resident memory more than before.
        peak_nbytes: The same at its largest, while opening.
        match_us: Microseconds per key of matches of 64, at random places.
        hits: Keys of those matches that were found.
        asked: Keys of those matches.
    """

    records: int
    disk_nbytes: int
    seconds: float
    cpu_s: float
    grown_nbytes: int
    peak_nbytes: int
    match_us: float
    hits: int
    asked: int


@dataclass(frozen=True, slots=True, kw_only=True)
class KVFigure:
    """One thing that was measured, in GB/s.

    Attributes:
        name: `save`: beside the same appends and syncs (policy `interval`), of as many bytes to as many files, without
            a store; `warm`: matches and loads beside `preadv` of the same files into the same buffers, as many bytes
            per call as are loaded together, from the page cache; `cold`: the same after the page cache was emptied.
        ours: Median over the rounds.
        plain: Median of the plain calls.
        ratio: Median of the rounds' ratios.
        values: One value of ours per round, in order.
    """

    name: str
    ours: float
    plain: float
    ratio: float
    values: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class KVReport:
    """Everything a run found; its fields are those of the JSON output.

    Attributes:
        kind: `kv`.
        run: What was run.
        open: Opening the folder of a process that was killed.
        figures: Saving and loading.
        cpu: What else the machine did meanwhile; with `noisy` the figures are not to be trusted.
    """

    kind: str
    run: KVRun
    open: OpenReport
    figures: tuple[KVFigure, ...]
    cpu: CpuUse


def fill_and_kill(folder: KVFolder) -> None:
    """Let another process save the records of a folder, and kill it."""
    command = [sys.executable, "-c", FILL, str(folder.path), str(folder.records), str(folder.nbytes)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        said = child.stdout.readline() if child.stdout is not None else ""
        child.kill()
    if said != "saved\n":
        raise RuntimeError(f"the folder {folder.path} could not be filled")


async def open_folder(folder: KVFolder, clock: Clock | None = None) -> OpenReport:
    """Open a folder, and match at random; memory is only told right in a process that did little before."""
    clock = clock or SystemClock()
    keys = folder.keys()
    with tempfile.TemporaryDirectory() as empty:
        async with SsdStore(empty, min_free_nbytes=0) as store:
            await store.match(keys[:1])
    before, peak = _resident_nbytes(), _peak_nbytes()
    started, cpu = clock.now(), _cpu_s()
    async with folder.store() as store:
        seconds, cpu = clock.now() - started, _cpu_s() - cpu
        grown, peak = _resident_nbytes() - before, max(0, _peak_nbytes() - max(before, peak))
        stats = store.stats()
        draw = random.Random(1)
        asked = [keys[start : start + 64] for start in (draw.randrange(len(keys)) for _ in range(300))]
        started = clock.now()
        matches = [await store.match(some) for some in asked]
        match_s = clock.now() - started
        num_asked = sum(map(len, asked))
        return OpenReport(
            records=stats.records,
            disk_nbytes=stats.nbytes,
            seconds=seconds,
            cpu_s=cpu,
            grown_nbytes=grown,
            peak_nbytes=peak,
            match_us=match_s / num_asked * 1e6,
            hits=sum(len(match.refs) for match in matches),
            asked=num_asked,
        )


async def run_kv(
    path: Path, run: KVRun, *, clock: Clock | None = None, progress: Callable[[str], None] = lambda what: None
) -> KVReport:
    """Measure in a folder made under `path` and removed again; blocks the loop while plain calls are made."""
    clock = clock or SystemClock()
    watch, began = CpuWatch(), clock.now()
    with tempfile.TemporaryDirectory(prefix="deepinfra-bench-kv-", dir=path) as made:
        folder = KVFolder(Path(made) / "kv", run.records, run.nbytes)
        progress("records")
        fill_and_kill(folder)
        opened = await open_folder(folder, clock)
        rounds = _Rounds(folder, run, clock)
        await rounds.warm_up()
        for index in range(run.repeat):
            progress(f"round {index + 1} of {run.repeat}")
            await rounds.one(index)
    return KVReport(kind="kv", run=run, open=opened, figures=rounds.figures(), cpu=watch.stop(clock.now() - began))


class _Rounds:
    """Saving, warm and cold loading, by the store and by plain calls in turns; values in GB/s of payload."""

    def __init__(self, folder: KVFolder, run: KVRun, clock: Clock) -> None:
        self._folder, self._run, self._clock = folder, run, clock
        self._nbytes = run.records * run.nbytes
        self._batches = list(folder.made())
        self._keys, self._files = folder.keys(), sorted(folder.path.glob("*.kvseg"))
        self._buffers = [memoryview(bytearray(run.nbytes)) for _ in range(run.prefix)]
        self._writes: list[Write] = []
        self._data = memoryview(b"")
        self._ours: dict[str, list[float]] = {"save": [], "warm": [], "cold": []}
        self._plain: dict[str, list[float]] = {"save": [], "warm": [], "cold": []}

    def figures(self) -> tuple[KVFigure, ...]:
        return tuple(_figure(name, self._ours[name], self._plain[name]) for name in self._ours)

    async def warm_up(self) -> None:
        """Note what the store writes, and have the records on the disk and in the page cache."""
        disk = NotedDisk()
        await self._save(disk)
        self._writes = disk.writes
        self._data = memoryview(bytearray(max(size for write in disk.writes for size in write.sizes)))
        sync_files(self._files)
        self._read()

    async def one(self, index: int) -> None:
        """Everything once."""
        for name in self._ours:
            for plain in (True, False) if index % 2 == 0 else (False, True):
                if name == "cold":
                    drop_pages(self._files)
                if name == "save":
                    seconds = self._append() if plain else await self._save(Disk())
                else:
                    seconds = self._read() if plain else await self._load()
                (self._plain if plain else self._ours)[name].append(self._nbytes / seconds / 1e9)

    async def _save(self, disk: Disk) -> float:
        with tempfile.TemporaryDirectory(dir=self._folder.path.parent) as made:
            started = self._clock.now()
            store = SsdStore(Path(made), capacity_nbytes=4 * self._nbytes + (1 << 20), min_free_nbytes=0)
            store.disk = disk
            async with store:
                for batch in self._batches:
                    await store.save(batch)
            return self._clock.now() - started

    def _append(self) -> float:
        with tempfile.TemporaryDirectory(dir=self._folder.path.parent) as made:
            started = self._clock.now()
            append_plainly(Path(made), self._writes, self._data)
            return self._clock.now() - started

    def _read(self) -> float:
        started = self._clock.now()
        for path in self._files:
            read_plainly(path, self._buffers)
        return self._clock.now() - started

    async def _load(self) -> float:
        prefix, keys, buffers = self._run.prefix, self._keys, self._buffers
        async with self._folder.store() as store:
            started = self._clock.now()
            for start in range(0, len(keys), prefix):
                match = await store.match(keys[start : start + prefix])
                loaded = await store.load(match.refs, buffers[: len(match.refs)])
                if loaded.count != len(keys[start : start + prefix]):
                    raise RuntimeError("a record that was saved could not be loaded")
            return self._clock.now() - started


def _figure(name: str, ours: list[float], plain: list[float]) -> KVFigure:
    ratio = statistics.median(a / b for a, b in zip(ours, plain, strict=True))
    return KVFigure(
        name=name, ours=statistics.median(ours), plain=statistics.median(plain), ratio=ratio, values=tuple(ours)
    )


def _resident_nbytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * mmap.PAGESIZE


def _peak_nbytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime
