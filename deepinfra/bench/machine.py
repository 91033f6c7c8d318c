"""What else the machine was doing while something was measured."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

__all__ = ("NOISY_CORES", "CpuUse", "CpuWatch", "Use", "peak_nbytes", "use_of")

NOISY_CORES = 0.10
"""Cores used by other programs above which a figure is not to be trusted."""

_PROC = Path("/proc")


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuUse:
    """Processor time used while a `CpuWatch` was on, in cores (1.0 is one core, busy all the time).

    Attributes:
        own_cores: By this process and its descendants.
        others_cores: By everything else, time stolen by a hypervisor included.
        noisy: Whether others used more than `NOISY_CORES`.
    """

    own_cores: float
    others_cores: float
    noisy: bool


class CpuWatch:
    """Compares the whole machine's processor time with that of this process and its descendants.

    Counts in the kernel's ticks of 10 ms: watch for a second or more. Source: proc(5), `/proc/stat` and
    `/proc/[pid]/stat`.
    """

    def __init__(self) -> None:
        self._tick_s = 1.0 / os.sysconf("SC_CLK_TCK")
        self._start = self._read()

    def stop(self, wall_s: float) -> CpuUse:
        """What was used since construction, `wall_s` seconds ago."""
        busy, own = (after - before for after, before in zip(self._read(), self._start, strict=True))
        others = max(0.0, (busy - own) * self._tick_s / wall_s)
        return CpuUse(own_cores=own * self._tick_s / wall_s, others_cores=others, noisy=others > NOISY_CORES)

    def _read(self) -> tuple[int, int]:
        """(ticks the machine was busy, ticks of ours)."""
        user, nice, system, _, _, irq, softirq, steal = map(int, (_PROC / "stat").read_text().split()[1:9])
        return user + nice + system + irq + softirq + steal, sum(_ticks(os.getpid()).values())


class Use(NamedTuple):
    """Processor seconds used so far, and bytes of resident memory, of a process and of its descendants together."""

    cpu_s: float
    nbytes: int
    descendants_nbytes: int


def use_of(pid: int) -> Use:
    """What a process and its descendants use; nothing where there is none."""
    ticks = _ticks(pid)
    nbytes = {each: _resident_nbytes(each) for each in ticks}
    own = nbytes.pop(pid, 0)
    return Use(sum(ticks.values()) / os.sysconf("SC_CLK_TCK"), own, sum(nbytes.values()))


def _resident_nbytes(pid: int) -> int:
    try:
        return int((_PROC / str(pid) / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError):
        return 0


def _ticks(root: int) -> dict[int, int]:
    """Those of a process and of its descendants."""
    parents: dict[int, int] = {}
    ticks: dict[int, int] = {}
    for folder in _PROC.iterdir():
        if folder.name.isdecimal():
            try:
                # The name, in parentheses, may hold anything; fields are counted from behind it.
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            pid = int(folder.name)
            parents[pid] = int(fields[1])
            ticks[pid] = sum(map(int, fields[11:15]))  # utime, stime and those of children waited for
    found = {}
    for pid in ticks:
        ancestor = pid
        while ancestor != root and ancestor in parents:
            ancestor = parents[ancestor]
        if ancestor == root:
            found[pid] = ticks[pid]
    return found


def peak_nbytes(pid: int) -> int:
    """Most resident memory that a process and its present descendants have held, summed over them."""
    return sum(_peak_nbytes(each) for each in _ticks(pid))


def _peak_nbytes(pid: int) -> int:
    try:
        lines = (_PROC / str(pid) / "status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")), 0)
