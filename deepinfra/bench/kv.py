"""What the ssd store costs on a disk: saving and loading beside plain calls, and opening what a killed server left."""

from __future__ import annotations

import ctypes
import mmap
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from deepinfra.bench.kvfolder import KVFolder
from deepinfra.bench.machine import CpuUse, CpuWatch
from deepinfra.core.kv import KVRecord
from deepinfra.interfaces.given import Clock, SystemClock
from deepinfra.kvstores import SsdStore

__all__ = ("KVFigure", "KVReport", "KVRun", "OpenReport", "fill_and_kill", "open_folder", "run_kv")

SYNC_NBYTES = 16 << 20
"""Bytes after which plain appends are synced: what the store's `interval` does."""

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
        repeat: Rounds.
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
        name: `save`: beside plain appends, both synced every 16 MiB; `warm`: loads beside `preadv` of the same bytes
            into the same buffers, from the page cache; `cold`: the same after the page cache was emptied of them.
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
    values: dict[str, list[float]] = {f"{how}{name}": [] for name in ("save", "warm", "cold") for how in ("", "plain ")}
    with tempfile.TemporaryDirectory(prefix="deepinfra-bench-kv-", dir=path) as made:
        folder = KVFolder(Path(made) / "kv", run.records, run.nbytes)
        progress("records")
        fill_and_kill(folder)
        opened = await open_folder(folder, clock)
        for index in range(run.repeat):
            progress(f"round {index + 1} of {run.repeat}")
            await _save_round(Path(made), run, clock, values)
            await _load_round(folder, run, clock, values)
    return KVReport(
        kind="kv",
        run=run,
        open=opened,
        figures=tuple(_figure(name, values[name], values[f"plain {name}"]) for name in ("save", "warm", "cold")),
        cpu=watch.stop(clock.now() - began),
    )


def _figure(name: str, ours: list[float], plain: list[float]) -> KVFigure:
    ratio = statistics.median(a / b for a, b in zip(ours, plain, strict=True))
    return KVFigure(
        name=name, ours=statistics.median(ours), plain=statistics.median(plain), ratio=ratio, values=tuple(ours)
    )


async def _save_round(path: Path, run: KVRun, clock: Clock, values: dict[str, list[float]]) -> None:
    nbytes = run.records * run.nbytes
    with tempfile.TemporaryDirectory(dir=path) as made:
        batches = list(KVFolder(Path(made), run.records, run.nbytes).made())
        started = clock.now()
        _append_plainly(Path(made) / "plain", batches)
        values["plain save"].append(nbytes / (clock.now() - started) / 1e9)
        started = clock.now()
        async with SsdStore(Path(made) / "kv", capacity_nbytes=4 * nbytes, min_free_nbytes=0) as store:
            for batch in batches:
                await store.save(batch)
        values["save"].append(nbytes / (clock.now() - started) / 1e9)


def _append_plainly(path: Path, batches: list[list[KVRecord]]) -> None:
    unsynced = 0
    with open(path, "wb", buffering=0) as file:
        for record in (record for batch in batches for record in batch):
            unsynced += file.write(record.data)
            if unsynced >= SYNC_NBYTES:
                os.fdatasync(file.fileno())
                unsynced = 0
        os.fdatasync(file.fileno())


async def _load_round(folder: KVFolder, run: KVRun, clock: Clock, values: dict[str, list[float]]) -> None:
    buffers = [memoryview(bytearray(run.nbytes)) for _ in range(run.prefix)]
    keys = folder.keys()
    files = sorted(folder.path.glob("*.kvseg"))
    async with folder.store() as store:
        for name in ("warm", "cold"):
            if name == "cold":
                _empty_page_cache(files)
            started = clock.now()
            nbytes = sum(map(_read_plainly, files, [buffers] * len(files)))
            values[f"plain {name}"].append(nbytes / (clock.now() - started) / 1e9)
            if name == "cold":
                _empty_page_cache(files)
            started = clock.now()
            for start in range(0, len(keys), run.prefix):
                match = await store.match(keys[start : start + run.prefix])
                loaded = await store.load(match.refs, buffers[: len(match.refs)])
                if loaded.count != len(keys[start : start + run.prefix]):
                    raise RuntimeError("a record that was saved could not be loaded")
            values[name].append(run.records * run.nbytes / (clock.now() - started) / 1e9)


def _read_plainly(path: Path, buffers: list[memoryview]) -> int:
    fd = os.open(path, os.O_RDONLY)
    try:
        done = 0
        while got := os.preadv(fd, buffers, done):
            done += got
        return done
    finally:
        os.close(fd)


def _empty_page_cache(files: list[Path]) -> None:
    """Drop files from the page cache, and ask mincore(2) whether they are gone."""
    for path in files:
        with open(path, "r+b") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            if sum(_cached(file.fileno())) > 0.01 * os.fstat(file.fileno()).st_size / mmap.PAGESIZE:
                raise RuntimeError(f"the page cache does not let go of {path}")


def _cached(fd: int) -> Iterator[int]:
    with mmap.mmap(fd, 0) as mapped:
        first = ctypes.c_char.from_buffer(mapped)
        pages = (ctypes.c_ubyte * -(-len(mapped) // mmap.PAGESIZE))()
        ctypes.CDLL(None).mincore(ctypes.c_void_p(ctypes.addressof(first)), ctypes.c_size_t(len(mapped)), pages)
        del first
    return (page & 1 for page in pages)


def _resident_nbytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * mmap.PAGESIZE


def _peak_nbytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime
