"""Disks that fail: every system call of the ssd store can be made to err, to do less than asked, to lie or to stall."""

from __future__ import annotations

import errno
import random
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partialmethod
from typing import Any, TypeAlias

from deepinfra.kvstores.ssd.disk import Disk

__all__ = ("CALLS", "FAULTS", "FaultyDisk", "Strike", "at_random", "once", "since")

CALLS = tuple(sorted(name for name in vars(Disk) if not name.startswith("_")))
"""Every call that a `Disk` makes."""

_ERRORS = {"EIO": errno.EIO, "ENOSPC": errno.ENOSPC}

FAULTS = ("EIO", "ENOSPC", "short", "flip", "slow")
"""What can happen: an error instead of the call; a read or write of fewer bytes than asked; one bit that differs in
what was read or is written; a call that takes a thousand times longer. `short` and `flip` strike reads and writes."""

Strike: TypeAlias = Callable[[str, int], str]
"""From a call's name and its number among those of that name (from 0), a fault or the empty string."""

_SLOW_S = 0.002


def at_random(rng: random.Random, rate: float, faults: Sequence[str] = FAULTS) -> Strike:
    """Any fault at any call, with probability `rate`."""
    return lambda call, number: rng.choice(faults) if rng.random() < rate else ""


def once(call: str, number: int, fault: str) -> Strike:
    """One fault at one call."""
    return lambda name, count: fault if (name, count) == (call, number) else ""


def since(call: str, number: int, fault: str) -> Strike:
    """A fault at one call and all later ones of that name."""
    return lambda name, count: fault if name == call and count >= number else ""


class FaultyDisk(Disk):
    """A disk with faults; `close` and `release` never fail, as they promise, and no sync waits: no power is cut.

    Attributes:
        strike: Decides about each call; `None` for a disk that is well.
        calls: How many calls of each name there were.
        faults: How often each fault struck, by call and fault (`preadv flip`).
    """

    def __init__(self, rng: random.Random, strike: Strike | None = None) -> None:
        self.strike = strike
        self.calls: Counter[str] = Counter()
        self.faults: Counter[str] = Counter()
        self._rng = rng
        self._lock = threading.Lock()

    def _call(self, name: str, *args: Any, **options: Any) -> Any:
        with self._lock:
            fault = self.strike(name, self.calls[name]) if self.strike else ""
            self.calls[name] += 1
        call = (lambda fd: None) if name == "sync" else getattr(super(), name)
        if name in ("close", "release") or not fault:
            return call(*args, **options)
        if fault in _ERRORS:
            self.faults[f"{name} {fault}"] += 1
            raise OSError(_ERRORS[fault], f"injected into {name}")
        if fault == "slow":
            self.faults[f"{name} {fault}"] += 1
            threading.Event().wait(_SLOW_S)
        elif name in ("preadv", "pwritev"):
            self.faults[f"{name} {fault}"] += 1
            return self._moved(name, fault, *args)
        return call(*args, **options)

    def _moved(self, name: str, fault: str, fd: int, buffers: Sequence[Any], offset: int) -> int:
        """A read or write that moves fewer bytes, or others."""
        move = getattr(super(), name)
        views = [memoryview(buffer).cast("B") for buffer in buffers]
        index = self._rng.choice([i for i, view in enumerate(views) if view.nbytes])
        part = self._rng.randrange(views[index].nbytes)
        if fault == "short":
            return int(move(fd, [*views[:index], views[index][: part + (not index)]], offset))
        if name == "pwritev":
            views[index] = memoryview(bytearray(views[index]))
            views[index][part] ^= 1 << self._rng.randrange(8)
            return int(move(fd, views, offset))
        moved = int(move(fd, buffers, offset))
        views[index][part] ^= 1 << self._rng.randrange(8)
        return moved


for _name in CALLS:
    setattr(FaultyDisk, _name, partialmethod(FaultyDisk._call, _name))
