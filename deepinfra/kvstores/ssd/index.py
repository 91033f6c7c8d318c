"""Which segment holds what; changed by the event loop only. About 75 bytes a record: a row and a place."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from deepinfra.kvstores.retention import Departed
from deepinfra.kvstores.ssd.format import KEY_NBYTES, PREFIX_NBYTES, ROW, Entry, Traffic, index_key, kind_of
from deepinfra.kvstores.ssd.places import Column, Places
from deepinfra.kvstores.ssd.segment import Ordinals, Segment

__all__ = ("Index", "Slide")

PURGE = 256
"""Rows of a removed segment that are looked at before the loop gets a turn: about 0.5 ms."""

MOST_DUE = 1 << 14
"""Records that may wait to be written again; one that finds no place is found again at its next use."""


MOST_SERIAL = 10**17
"""Larger ones in a folder are not counted on from: names with larger ones yet are no names."""

PARTS = 16
"""Parts in which many rows are sorted, so that sorting takes little memory."""


_entry, _unpack, _ROW_NBYTES = tuple.__new__, ROW.unpack_from, ROW.size


class Slide(NamedTuple):
    """A life that is to be longer: of which class, until when, and how long from a use on."""

    traffic: Traffic
    expires: float
    life_s: float


class Index:
    """Which segment holds what, and why the rest is not held. One row per record.

    Of two, the one saved later counts; of two copies of one, the one that expires later; then serial and writer of
    the segments decide, so that all processes choose the same. A removed segment's records are gone at once; what the
    index still says of them is taken out by `purge`.

    Attributes:
        segments: By number; numbers are given in the order in which segments came, and never again.
        names: The same by name.
        touched: When segments were used of late, by name: what other processes are still to be told.
        snapshots: Whether there ever was one.
        due: Records in the last quarter of their life that were used, by id: what is to be written again.
        damaged, evicted, expired: How many records left for that reason.
    """

    def __init__(self) -> None:
        self.segments: dict[int, Segment] = {}
        self.names: dict[str, Segment] = {}
        self.touched: dict[str, int] = {}
        self.snapshots = False
        self.due: dict[bytes, Slide] = {}
        self.damaged = self.evicted = self.expired = 0
        self._places = Places()  # key -> number << 32 | ordinal
        self._departed = Departed()
        self._removed: deque[tuple[Segment, str]] = deque()
        self._purged = 0  # rows of the first of them
        self._tick = self._serial = self._number = 0

    def __len__(self) -> int:
        return sum(segment.live for segment in self.segments.values())

    def seek(self, id_: bytes, now: float) -> tuple[Segment, Entry] | None:
        """Segment and row of a record, unless its life is over."""
        key = int.from_bytes(id_[:8], "little") & ~3 | (1 if len(id_) == KEY_NBYTES else kind_of(id_))
        place = self._places.get(key)
        if place is None:
            return None
        segment = self.segments.get(place >> 32)
        if segment is None:
            return None
        entry = _entry(Entry, _unpack(segment.rows, (place & 0xFFFFFFFF) * _ROW_NBYTES))
        if entry[0] != id_[:PREFIX_NBYTES] or not entry[7] & 3:
            return None
        if entry[3] <= now:
            self._kill(self._places.pop(key, place))
            self._departed.add(id_, "expired")
            self.expired += 1
            return None
        return segment, entry

    def why(self, id_: bytes) -> str:
        """Why a record that is not held is not held: a word of `Match.missed`."""
        place = self._places.get(index_key(id_, kind_of(id_)))
        for segment, why in self._removed:
            if place is not None and segment.number == place >> 32 and why:
                return why
        return self._departed.why(id_)

    def insert(self, segment: Segment, id_: bytes, entry: Entry) -> None:
        """Append a record to a segment and make it findable."""
        self._put(segment, segment.add(entry), entry)

    def place(self, segment: Segment, start: int, end: int) -> None:
        """Make some rows of a segment findable."""
        for ordinal in range(start, end):
            if (entry := segment.entry(ordinal)).kind:
                self._put(segment, ordinal, entry)

    def begin(self, segment: Segment) -> None:
        """Take in a segment; what is in it is not findable yet."""
        self._number += 1
        segment.number = self._number
        self.segments[segment.number] = self.names[segment.name] = segment
        self._serial = max(self._serial, min(segment.serial, MOST_SERIAL))

    def adopt(self, found: Sequence[Segment]) -> None:
        """Fill an empty index with segments and all their rows, all live."""
        found = sorted(found, key=lambda segment: (segment.serial, segment.writer))
        for segment in found:
            self.begin(segment)
        keys = np.concatenate([np.empty(0, np.uint64), *(segment.keys() for segment in found)])
        starts = np.cumsum([0, *(len(segment) for segment in found)])
        self.snapshots = bool(np.any(keys & np.uint64(3) == 2))
        for part in range(PARTS):
            rows = np.flatnonzero(keys >> np.uint64(60) == part)
            rows = rows[np.argsort(keys[rows], kind="stable")]
            sorted_keys = keys[rows]
            _rank(found, starts, sorted_keys, rows)
            last = np.append(sorted_keys[1:] != sorted_keys[:-1], True)[: len(rows)]
            of = np.searchsorted(starts, rows, side="right") - 1  # which of `found`
            ordinals = rows - starts[of]
            for number in np.unique(of[~last]):
                found[number].kill_all(ordinals[~last & (of == number)])
            numbers = of + found[0].number if found else of
            self._places.extend(sorted_keys[last], (numbers << 32 | ordinals)[last].astype(np.uint64))

    def remove(self, segment: Segment, why: str = "") -> None:
        """Take a segment out with all its records; `why` they left is a word of `Match.missed`."""
        del self.segments[segment.number], self.names[segment.name]
        self.touched.pop(segment.name, None)
        self.evicted += segment.live * (why == "evicted")
        self.expired += segment.live * (why == "expired")
        self._removed.append((segment, why))
        self.purge()

    def vanish(self, segment: Segment) -> None:
        """A file is gone: another process removed it, unless it is one that we append to and somebody else's doing."""
        if self.segments.get(segment.number) is segment and segment.fd is None:
            self.remove(segment, "evicted")

    def purge(self) -> bool:
        """Forget the places of some records of removed segments; returns whether there are more."""
        if not self._removed:
            return False
        segment, why = self._removed[0]
        end = min(len(segment), self._purged + PURGE)
        for ordinal in range(self._purged, end):
            entry = segment.entry(ordinal)
            for kind in (entry.kind,) if entry.kind else (1, 2, 3):  # a dead row may still have a place
                self._places.pop(index_key(entry.prefix, kind), segment.number << 32 | ordinal)
            if entry.kind and why:
                self._departed.add(entry.prefix, why)
        self._purged = end
        if end == len(segment):
            self._removed.popleft()
            self._purged = 0
        return bool(self._removed)

    def lose(self, segment: Segment, id_: bytes, entry: Entry) -> None:
        """A record could not be read back: it is held no longer, unless it left or moved meanwhile anyway."""
        key = index_key(id_, entry.kind)
        place = self._places.get(key)
        if place is None or self.segments.get(place >> 32) is not segment:
            return
        if segment.entry(place & 0xFFFFFFFF) == entry:
            self._kill(self._places.pop(key, place))
            self._departed.add(id_, "damaged")
            self.damaged += 1

    @property
    def serial(self) -> int:
        """The largest serial number there ever was."""
        return self._serial

    def next_serial(self) -> int:
        """A serial number above all there ever were."""
        self._serial += 1
        return self._serial

    def tick(self, now: float) -> int:
        """The time of a use in nanoseconds, larger than all before."""
        self._tick = max(self._tick + 1, int(now * 1e9))
        return self._tick

    def use(self, run: Sequence[Segment], now: float) -> None:
        """Segments of a prefix's records were wanted: the head's becomes the youngest, the tail's the oldest."""
        last = None
        for segment in reversed(run):
            if segment is not last:
                segment.used = self.touched[segment.name] = self.tick(now)
                last = segment

    def slide(self, id_: bytes, entry: Entry, now: float, traffic: Traffic, life_s: float) -> None:
        """A record was used: if it is in the last quarter of such a life, it is due to be written again."""
        if entry.expires - now < life_s / 4 and len(self.due) < MOST_DUE:
            self.due[id_] = Slide(traffic, now + life_s, life_s)

    def _put(self, segment: Segment, ordinal: int, entry: Entry) -> None:
        key = index_key(entry.prefix, entry.kind)
        held = self._places.get(key)
        other = None if held is None else self.segments.get(held >> 32)
        if held is not None and other is not None:
            rival = other.entry(held & 0xFFFFFFFF)
            ranks = [(e.created, e.expires, s.serial, s.writer) for e, s in ((rival, other), (entry, segment))]
            if other is not segment and rival.kind and rival.prefix == entry.prefix and ranks[0] > ranks[1]:
                segment.kill(ordinal)
                return
        before = self._places.put(key, segment.number << 32 | ordinal)
        if before is not None and other is not None and rival.kind:
            other.kill(before & 0xFFFFFFFF)
        self.snapshots = self.snapshots or entry.kind == 2

    def _kill(self, place: int | None) -> None:
        if place is not None and (segment := self.segments.get(place >> 32)) is not None:
            segment.kill(place & 0xFFFFFFFF)


def _rank(found: Sequence[Segment], starts: Ordinals, keys: Column, rows: Ordinals) -> None:
    """Put rows with equal keys, which lie side by side, into the order in which the last one counts."""
    equal = np.append(keys[1:] == keys[:-1], False)[: len(keys)]
    at = np.flatnonzero(equal | np.append(False, equal[:-1])[: len(keys)])
    of = np.searchsorted(starts, rows[at], side="right") - 1
    created, expires = np.empty(len(at)), np.empty(len(at))
    for number in set(of.tolist()):
        here = of == number
        table = found[number].table()[rows[at][here] - starts[number]]
        created[here], expires[here] = table["created"], table["expires"]
    rows[at] = rows[at][np.lexsort((of, expires, created, keys[at]))]
