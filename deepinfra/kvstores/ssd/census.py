"""What a folder of the ssd store holds, counted without entering a store. Blocking: run in offloaded functions.

Nothing is locked or written, so servers may use the folder meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, TypeAlias

import numpy as np

from deepinfra.kvstores.ssd.claims import read_others
from deepinfra.kvstores.ssd.disk import Disk
from deepinfra.kvstores.ssd.format import ROW_DTYPE, Owner, Rows, parse_name
from deepinfra.kvstores.ssd.recovery import fill
from deepinfra.kvstores.ssd.segment import Segment, allocated

__all__ = ("Census", "CountedFile", "take_census")

Flags: TypeAlias = np.ndarray[tuple[int], np.dtype[np.bool_]]
Ints: TypeAlias = np.ndarray[tuple[int], np.dtype[np.int64]]


class CountedFile(NamedTuple):
    """A file of records.

    Attributes:
        hour: Hour since the epoch in which its records expire.
        nbytes: Its length; `records_nbytes` of it are records, the rest is its footer.
        disk_nbytes: What it takes on disk.
        sealed: Whether it has a whole footer.
        living: Whether a running process appends to it.
    """

    name: str
    traffic: str
    hour: int
    nbytes: int
    records_nbytes: int
    disk_nbytes: int
    sealed: bool
    living: bool


class Census(NamedTuple):
    """Files, and the newest copy of every record that their lists name.

    Attributes:
        processes: That use the folder now.
        owners: Namespaces, tenants and models; `owner` names them by number.
        rows: Of the records, as `format.Entry` has them.
        owner: Number of each row's owner.
        file: Number of each row's file.
        alive: Whether each row can be found: it has not expired.
    """

    files: tuple[CountedFile, ...]
    processes: int
    owners: tuple[Owner, ...]
    rows: Rows
    owner: Ints
    file: Ints
    alive: Flags

    @property
    def nbytes(self) -> Ints:
        """Bytes of each row, header included."""
        return self.rows["nbytes"].astype(np.int64) + self.rows["header_nbytes"].astype(np.int64)

    @property
    def dead_nbytes(self) -> int:
        """Bytes of records that cannot be found any more: expired, or written again."""
        return sum(file.records_nbytes for file in self.files) - int(self.nbytes[self.alive].sum())

    def living(self) -> Census:
        """The same without expired records."""
        alive = self.alive
        return self._replace(rows=self.rows[alive], owner=self.owner[alive], file=self.file[alive], alive=alive[alive])


def take_census(
    folder: Path, now: float, seen: Callable[[int], None] = lambda nbytes: None, disk: Disk | None = None
) -> Census:
    """Count what is in a folder; what goes meanwhile is left out.

    Args:
        folder: The store's.
        now: Unix seconds.
        seen: Told the bytes of each file that was looked at.
        disk: Whose system calls.

    Raises:
        OSError: The folder cannot be read.
    """
    disk = disk or Disk()
    names = disk.names(folder)
    others, _ = read_others(disk, folder, names, "")
    files: list[CountedFile] = []
    owners: dict[Owner, int] = {}
    tables: list[tuple[int, Ints, Rows]] = []
    for name in sorted(names):
        parsed = parse_name(name)
        if parsed is None:
            continue
        segment = Segment(*parsed)
        try:
            fd = disk.open(folder / name)
            try:
                nbytes = disk.size(fd)
                fill(disk, fd, segment, 0.0)
            finally:
                disk.close(fd)
        except OSError:
            continue
        numbers = np.array([owners.setdefault(owner, len(owners)) for owner in segment.owners] or [0], np.int64)
        table = segment.live_rows()
        tables.append((len(files), numbers[(table["tag"] >> 2).astype(np.int64)], table))
        sizes = nbytes, segment.size, max(allocated(nbytes), others.claims.get(name, 0))
        state = segment.sealed, name in others.claims
        files.append(CountedFile(name, parsed.traffic, parsed.hour, *sizes, *state))
        seen(nbytes)
    return _counted(tuple(files), others.processes, tuple(owners), tables, now)


def _counted(
    files: tuple[CountedFile, ...],
    processes: int,
    owners: tuple[Owner, ...],
    tables: Sequence[tuple[int, Ints, Rows]],
    now: float,
) -> Census:
    """Rows of all files in one, the newest copy of each record."""
    tables = tables or [(0, np.zeros(0, np.int64), np.zeros(0, ROW_DTYPE))]
    rows = np.concatenate([table for _, _, table in tables])
    owner = np.concatenate([numbers for _, numbers, _ in tables])
    file = np.concatenate([np.full(len(table), index, np.int64) for index, _, table in tables])
    kind, prefix = rows["tag"] & 3, rows["prefix"]
    order = np.lexsort((file, rows["expires"], kind, prefix[:, 1], prefix[:, 0]))
    same = (prefix[order][1:] == prefix[order][:-1]).all(axis=1) & (kind[order][1:] == kind[order][:-1])
    newest = np.sort(order[np.append(~same, True)]) if len(order) else order
    rows = rows[newest]
    return Census(files, processes, owners, rows, owner[newest], file[newest], rows["expires"] > now)
