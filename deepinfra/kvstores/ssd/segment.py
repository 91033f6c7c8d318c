"""A segment as kept in memory: the rows of its footer, as bytes."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TypeAlias

import numpy as np

from deepinfra.kvstores.ssd.disk import Status
from deepinfra.kvstores.ssd.format import (
    NOBODY,
    ROW,
    ROW_DTYPE,
    Entry,
    Erased,
    Owner,
    Rows,
    SegmentName,
    Traffic,
    footer_nbytes,
)
from deepinfra.kvstores.ssd.places import Column

__all__ = ("HOUR_S", "Group", "Ordinals", "Segment", "allocated", "taken")

HOUR_S = 3600.0

FS_BLOCK_NBYTES = 4096
"""Files take whole blocks of this size on common file systems; the cap counts them so."""

Group: TypeAlias = tuple[Traffic, int, str]
"""Class, expiry hour and tag: what records of a segment have in common."""

Ordinals: TypeAlias = np.ndarray[tuple[int], np.dtype[np.int64]]

_NBYTES, _KIND, _TAG_AT = ROW.size, np.uint32(3), ROW.size - 4


def allocated(nbytes: int) -> int:
    """Bytes that a file of `nbytes` takes on disk."""
    return -(-nbytes // FS_BLOCK_NBYTES) * FS_BLOCK_NBYTES


def taken(status: Status) -> int:
    """Bytes that a file takes on disk, also where the file system does not tell before it writes."""
    return max(allocated(status.size), status.disk_nbytes)


class Segment:
    """One file of records of one class that expire within one hour.

    Attributes:
        hour: Expiry hour since the epoch; when it is over the file is removed unread.
        serial: Number that grows; with the writer's, it says which of two copies of a record counts.
        tag: Of the only tenant whose records are in it, if its bytes are counted.
        number: What the index calls it.
        size: Bytes of records that are known; the footer comes behind.
        disk_nbytes: Bytes the file takes at most, its footer included, even before that is written.
        sealed: Whether the file ends with a footer, so that nobody appends to it.
        living: Whether a process has it open for appending.
        unread: Whether more may be in the file than rows and owners tell of, since it could not be read or cut.
        fd: Open for appending by us; `None` when it is not, or not yet created.
        used: When one of its records was last wanted: nanoseconds since the epoch, made unequal.
        live: Rows that are not dead.
        owed: Numbers of owners who were forgotten, and whose bytes may still be in the file; their names stay until
            those are overwritten, and no footer is written before.
        rows: One row per record, in the order of the file; a dead one has kind 0.
    """

    def __init__(self, traffic: Traffic, hour: int, serial: int, writer: str = "", tag: str = "") -> None:
        self.traffic, self.hour, self.serial, self.writer, self.tag = traffic, hour, serial, writer, tag
        self.name = str(SegmentName(traffic, hour, serial, writer, tag))
        self.number = 0
        self.size = 0
        self.disk_nbytes = 0
        self.sealed = self.living = self.unread = False
        self.fd: int | None = None
        self.used = 0
        self.live = 0
        self.unsynced_nbytes = 0
        self.synced_at = 0.0
        self.owners: list[Owner] = []
        self.owed: set[int] = set()
        self.rows = bytearray()
        self._owner_ids: dict[Owner, int] = {}

    def anew(self) -> Segment:
        """The same file, nothing of it read."""
        other = Segment(self.traffic, self.hour, self.serial, self.writer, self.tag)
        other.living, other.disk_nbytes, other.used = self.living, self.disk_nbytes, self.used
        return other

    def __len__(self) -> int:
        return len(self.rows) // _NBYTES

    @property
    def group(self) -> Group:
        """What its records have in common."""
        return self.traffic, self.hour, self.tag

    def over(self, now: float) -> bool:
        """Whether its hour has passed, so that nothing in it lives."""
        return (self.hour + 1) * HOUR_S <= now

    def owner(self, owner: Owner) -> int:
        """Number of an owner in this segment."""
        number = self._owner_ids.setdefault(owner, len(self.owners))
        if number == len(self.owners):
            self.owners.append(owner)
        return number

    def take_over(self, owner: Owner) -> None:
        """Give the next number to an owner, also to one that is nobody any more."""
        self._owner_ids.setdefault(owner, len(self.owners))
        self.owners.append(owner)

    def reserved_nbytes(self, more_nbytes: int = 0, more_rows: int = 0, more_owners: Sequence[Owner] = ()) -> int:
        """Bytes on disk once it is sealed, if so much more is appended before."""
        new = [owner for owner in dict.fromkeys(more_owners) if owner not in self._owner_ids]
        footer = footer_nbytes(len(self) + more_rows, [*self.owners, *new])
        return allocated(self.size + more_nbytes + footer)

    def add(self, entry: Entry) -> int:
        """Append a row; returns its ordinal."""
        self.rows += ROW.pack(*entry)
        self.live += 1
        return len(self) - 1

    def fill(self, rows: bytearray) -> None:
        """Take over rows, all of them live."""
        self.rows = rows
        self.live = len(self)

    def entry(self, ordinal: int) -> Entry:
        """One row."""
        return Entry._make(ROW.unpack_from(self.rows, ordinal * _NBYTES))

    def table(self) -> Rows:
        """All rows, in place; nothing can be appended while this is held."""
        return np.frombuffer(self.rows, ROW_DTYPE)

    def live_rows(self) -> Rows:
        """A copy of the live rows."""
        table = self.table()
        return table.compress((table["tag"] & _KIND) != 0)

    def keys(self) -> Column:
        """Of all rows, what the index finds them by."""
        table = self.table()
        return table["prefix"][:, 0] & ~np.uint64(3) | (table["tag"] & _KIND)

    def kill(self, ordinal: int) -> None:
        """Mark a live row dead; its bytes stay on disk."""
        self.rows[ordinal * _NBYTES + _TAG_AT] &= 0xFC
        self.live -= 1

    def kill_all(self, ordinals: Ordinals) -> None:
        """Mark live rows dead."""
        self.table()["tag"][ordinals] &= ~_KIND
        self.live -= len(ordinals)

    def kill_at(self, offsets: Collection[int]) -> None:
        """Mark the live rows at certain offsets dead."""
        table = self.table()
        at = np.isin(table["offset"], np.fromiter(offsets, np.uint64))
        self.kill_all(np.flatnonzero(at & (table["tag"] & _KIND != 0)))

    def forget(self, which: Erased) -> tuple[int, int]:
        """Mark the rows of certain owners dead, and owe their overwriting; returns how many, and bytes of payload."""
        gone = [number for number, owner in enumerate(self.owners) if which.means(owner)]
        table = self.table()
        ordinals = np.flatnonzero(np.isin(table["tag"] >> 2, gone) & (table["tag"] & _KIND != 0))
        nbytes = int(table["nbytes"][ordinals].sum(dtype=np.uint64))
        self.kill_all(ordinals)
        for number in gone:
            self._owner_ids.pop(self.owners[number], None)  # what they save from now on has another number
        self.owed.update(gone)
        return len(ordinals), nbytes

    def settle(self, which: Erased) -> None:
        """What was owed to certain owners is overwritten: nobody is named any more."""
        for number in [number for number in self.owed if which.means(self.owners[number])]:
            self.owners[number] = NOBODY
            self.owed.discard(number)
