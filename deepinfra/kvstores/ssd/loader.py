"""Loads on the loop's side: batches, one reader per record, and leaving cleanly when cancelled."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from anyio import CancelScope, Event

from deepinfra.core.kv import RecordRef
from deepinfra.interfaces.given import Clock, Offload
from deepinfra.kvstores.ssd.disk import Disk
from deepinfra.kvstores.ssd.format import record_id
from deepinfra.kvstores.ssd.index import Index
from deepinfra.kvstores.ssd.reading import Piece, read_pieces
from deepinfra.kvstores.ssd.segment import Segment

__all__ = ("Loader",)


class _Flight:
    """Records being read by one call: others who want one of them leave their buffers here."""

    def __init__(self) -> None:
        self.landed = Event()
        self.whole: set[bytes] = set()
        self.copies: dict[bytes, list[memoryview]] = {}


class Loader:
    """Reads records that an index knows; equal records wanted at one time are read once."""

    def __init__(self, index: Index, disk: Disk, folder: Path, clock: Clock, offload: Offload) -> None:
        self._index = index
        self._disk, self._folder = disk, folder
        self._clock, self._offload = clock, offload
        self._flights: dict[bytes, _Flight] = {}

    async def load(self, pairs: Sequence[tuple[RecordRef, memoryview]]) -> int:
        """Read what nobody reads yet, then wait for what others read; returns how many leading records are whole.

        Reads are not interrupted; a wait for another's read is. Nobody holds a read while waiting, so two loads never
        wait for each other.
        """
        now, index, flights = self._clock.wall(), self._index, self._flights
        mine: list[tuple[int, Segment, Piece]] = []
        others: list[tuple[int, bytes, _Flight]] = []
        count, flight = len(pairs), _Flight()
        for i, (ref, buffer) in enumerate(pairs):
            id_ = record_id(ref)
            place = index.seek(id_, now)
            if place is None or place[1].nbytes != ref.nbytes:
                count = i
                break
            segment, entry = place
            index.slide(id_, entry, now, segment.traffic, entry.life_s)
            if (other := flights.get(id_)) is not None:
                other.copies.setdefault(id_, []).append(buffer)
                others.append((i, id_, other))
            else:
                flights[id_] = flight
                mine.append((i, segment, Piece(id_, entry, buffer)))
        try:
            count = min(count, await self._read(mine, count, flight))
            for i, id_, other in others:
                if i < count:
                    await other.landed.wait()
                    if id_ not in other.whole and not await self.load(pairs[i : i + 1]):
                        count = i
        finally:
            for i, id_, other in others:
                other.copies[id_] = [copy for copy in other.copies[id_] if copy is not pairs[i][1]]
        return count

    async def _read(self, mine: Sequence[tuple[int, Segment, Piece]], count: int, flight: _Flight) -> int:
        """Read segment by segment and land the flight; returns the number of the first that is not whole."""
        at = 0
        try:
            while at < len(mine):
                segment, end = mine[at][1], at
                while end < len(mine) and mine[end][1] is segment:
                    end += 1
                pieces = [piece for _, _, piece in mine[at:end]]
                whole = await self._read_pieces(segment, pieces)
                flight.whole.update([piece.id for piece in pieces[:whole]])
                for piece in pieces[:whole]:
                    for copy in flight.copies.get(piece.id, ()):
                        copy[:] = piece.buffer
                    del self._flights[piece.id]  # whoever comes while other files are read would get no copy
                if whole < len(pieces):
                    self._index.lose(segment, pieces[whole].id, pieces[whole].entry)
                    return mine[at + whole][0]
                at = end
        finally:
            for _, _, piece in mine:
                if self._flights.get(piece.id) is flight:
                    del self._flights[piece.id]
            flight.landed.set()
        return count

    async def _read_pieces(self, segment: Segment, pieces: Sequence[Piece]) -> int:
        whole = 0
        with CancelScope(shield=True):
            try:
                whole = await self._offload(read_pieces, self._disk, self._folder / segment.name, pieces)
            except FileNotFoundError:
                self._index.vanish(segment)
        return whole
