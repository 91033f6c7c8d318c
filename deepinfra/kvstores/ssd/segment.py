"""A segment and the index of all of them, as kept in memory: plain columns, touched by the event loop only."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence

from deepinfra.kvstores.retention import Departed
from deepinfra.kvstores.ssd.format import Entry, Owner, footer_nbytes, segment_name

__all__ = ("HOUR_S", "Index", "Segment", "allocated")

HOUR_S = 3600.0

FS_BLOCK_NBYTES = 4096
"""Files take whole blocks of this size on common file systems; the cap counts them so."""


def allocated(nbytes: int) -> int:
    """Bytes that a file of `nbytes` takes on disk."""
    return -(-nbytes // FS_BLOCK_NBYTES) * FS_BLOCK_NBYTES


class Segment:
    """One file of records of one class that expire within one hour.

    Attributes:
        hour: Expiry hour since the epoch; when it is over the file is removed unread.
        serial: Number that only grows, over all segments of a folder.
        size: Bytes of records; the footer comes behind.
        disk_nbytes: Bytes the file takes at most, its footer included, even before that is written.
        fd: Open for writing; `None` when sealed, or not yet created.
        used: When one of its records was last wanted, in the store's own ticks.
        readers: Loads under way; the file is not removed meanwhile.
        nbytes, created, expires: Columns by ordinal.
    """

    def __init__(self, traffic: str, hour: int, serial: int) -> None:
        self.traffic, self.hour, self.serial = traffic, hour, serial
        self.name = segment_name(traffic, hour, serial)
        self.size = 0
        self.disk_nbytes = 0
        self.fd: int | None = None
        self.used = 0
        self.readers = 0
        self.live = 0
        self.unsynced_nbytes = 0
        self.synced_at = 0.0
        self.owners: list[Owner] = []
        self._owner_ids: dict[Owner, int] = {}
        self._ids: list[bytes] = []  # empty: the record is dead
        self._owner = array("I")
        self._header = array("I")
        self._offset = array("Q")
        self.nbytes = array("Q")
        self.created = array("d")
        self.expires = array("d")

    @property
    def group(self) -> tuple[str, int]:
        """Class and expiry hour."""
        return self.traffic, self.hour

    def over(self, now: float) -> bool:
        """Whether its hour has passed, so that nothing in it lives."""
        return (self.hour + 1) * HOUR_S <= now

    def owner(self, owner: Owner) -> int:
        """Number of an owner in this segment."""
        number = self._owner_ids.setdefault(owner, len(self.owners))
        if number == len(self.owners):
            self.owners.append(owner)
        return number

    def reserved_nbytes(self, more_nbytes: int = 0, more_entries: int = 0, more_owners: Sequence[Owner] = ()) -> int:
        """Bytes on disk once it is sealed, if so much more is appended before."""
        new = [owner for owner in dict.fromkeys(more_owners) if owner not in self._owner_ids]
        footer = footer_nbytes(len(self._ids) + more_entries, [*self.owners, *new])
        return allocated(self.size + more_nbytes + footer)

    def add(self, entry: Entry) -> int:
        """Append a row; returns its ordinal."""
        self._ids.append(entry.id)
        self._owner.append(entry.owner)
        self._header.append(entry.header_nbytes)
        self._offset.append(entry.offset)
        self.nbytes.append(entry.nbytes)
        self.created.append(entry.created)
        self.expires.append(entry.expires)
        self.live += 1
        return len(self._ids) - 1

    def entry(self, ordinal: int) -> Entry:
        """One row."""
        return Entry(
            self._ids[ordinal],
            self._owner[ordinal],
            self._header[ordinal],
            self._offset[ordinal],
            self.nbytes[ordinal],
            self.created[ordinal],
            self.expires[ordinal],
        )

    def entries(self) -> Iterator[Entry]:
        """Live rows, in the order of the file."""
        return (self.entry(i) for i, id_ in enumerate(self._ids) if id_)

    def ids(self) -> list[bytes]:
        """Record ids by ordinal; empty for a dead row."""
        return list(self._ids)

    def kill(self, ordinal: int) -> None:
        """Mark a row dead; its bytes stay on disk."""
        self._ids[ordinal] = b""
        self.live -= 1


class Index:
    """Which segment holds what, and why the rest is not held. One entry per record id, the newest wins.

    Attributes:
        segments: By serial.
        departed: Why records left.
        damaged, evicted, expired: How many left for that reason.
    """

    def __init__(self) -> None:
        self.segments: dict[int, Segment] = {}
        self.departed = Departed()
        self.damaged = self.evicted = self.expired = 0
        self._places: dict[bytes, int] = {}  # id -> serial << 32 | ordinal
        self._tick = self._serial = 0

    def __len__(self) -> int:
        return len(self._places)

    def seek(self, id_: bytes, now: float) -> tuple[Segment, int] | None:
        """Segment and ordinal of a record, unless its life is over."""
        place = self._places.get(id_)
        if place is None:
            return None
        segment, ordinal = self.segments[place >> 32], place & 0xFFFFFFFF
        if segment.expires[ordinal] <= now:
            self._drop(id_)
            self.departed.add(id_, "expired")
            self.expired += 1
            return None
        return segment, ordinal

    def find(self, id_: bytes, now: float) -> tuple[Segment, Entry] | None:
        """Segment and whole row of a record, unless its life is over."""
        place = self.seek(id_, now)
        return None if place is None else (place[0], place[0].entry(place[1]))

    def insert(self, segment: Segment, entry: Entry) -> None:
        """Append a record to a segment and make it findable."""
        self._drop(entry.id)
        self._places[entry.id] = segment.serial << 32 | segment.add(entry)

    def adopt(self, segment: Segment) -> None:
        """Take over a segment with all its rows."""
        self.segments[segment.serial] = segment
        self._serial = max(self._serial, segment.serial)
        for ordinal, id_ in enumerate(segment.ids()):
            self._drop(id_)
            self._places[id_] = segment.serial << 32 | ordinal

    def remove(self, segment: Segment, why: str = "") -> None:
        """Take a segment out with all its records; `why` they left is a word of `Match.missed`."""
        for entry in segment.entries():
            self._drop(entry.id)
            if why:
                self.departed.add(entry.id, why)
                self.evicted += why == "evicted"
                self.expired += why == "expired"
        del self.segments[segment.serial]

    def lose(self, segment: Segment, entry: Entry) -> None:
        """A record could not be read back: it is held no longer, unless it left or moved meanwhile anyway."""
        place = self._places.get(entry.id)
        if place is None or self.segments[place >> 32] is not segment or segment.entry(place & 0xFFFFFFFF) != entry:
            return
        self._drop(entry.id)
        self.departed.add(entry.id, "damaged")
        self.damaged += 1

    def next_serial(self) -> int:
        """A serial number above all there ever were."""
        self._serial += 1
        return self._serial

    def tick(self) -> int:
        """A number larger than all before: the time of a use."""
        self._tick += 1
        return self._tick

    def use(self, run: Sequence[Segment]) -> None:
        """Segments of a prefix's records were wanted: the head's becomes the youngest, the tail's the oldest."""
        last = None
        for segment in reversed(run):
            if segment is not last:
                segment.used = self.tick()
                last = segment

    def _drop(self, id_: bytes) -> None:
        place = self._places.pop(id_, None)
        if place is not None:
            self.segments[place >> 32].kill(place & 0xFFFFFFFF)
