"""What else the machine was doing while something was measured."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

__all__ = ("NOISY_CORES", "CpuUse", "CpuWatch")

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
        return user + nice + system + irq + softirq + steal, sum(_own_ticks())


def _own_ticks() -> Iterator[int]:
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
    me = os.getpid()
    for pid in ticks:
        ancestor = pid
        while ancestor != me and ancestor in parents:
            ancestor = parents[ancestor]
        if ancestor == me:
            yield ticks[pid]
