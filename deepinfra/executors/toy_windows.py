"""Window layers for the toy executor: stacked, so that what a position becomes depends on exactly the last positions.

Layer 0 gets a digest of a position's token; each layer keeps what it gets as the position's cell, reads the cells of
its last `W` positions and passes their digest on. What the last layer passes on goes into the position's KV and into
the next token: a window that is wrong, stale, too short or foreign changes the text.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence

__all__ = ("ToyWindows", "WindowRows", "toy_window")

_CELL_NBYTES = 8
_LOST = b"\xff" * _CELL_NBYTES
_NONE = bytes(_CELL_NBYTES)


def _first(token: int, position: int, seed: int) -> bytes:
    h = hashlib.blake2b(struct.pack("<qq", token, position), digest_size=_CELL_NBYTES, key=seed.to_bytes(8, "little"))
    return h.digest()


def _pass_on(layer: int, cells: bytes) -> bytes:
    return hashlib.blake2b(cells, digest_size=_CELL_NBYTES, key=bytes((layer,))).digest()


def toy_window(prefix: Sequence[int], windows: Sequence[int], seed: int = 0, floor: int = 0) -> bytes:
    """What window layers make of the last position of `prefix`, computed from the tokens alone.

    Args:
        prefix: Tokens from position 0.
        windows: How many positions each layer reads, first layer first; none at all gives no bytes.
        seed: Of the model.
        floor: Positions below it are not seen.
    """
    if not windows:
        return b""
    end = len(prefix)
    begin = max(floor, end - 1 - sum(window - 1 for window in windows))
    cells = [_first(prefix[i], i, seed) for i in range(begin, end)]
    for layer, window in enumerate(windows):
        # Rows whose window begins before `begin` come out wrong; the last one depends on none of them.
        cells = [_pass_on(layer, b"".join(cells[max(0, i - window + 1) : i + 1])) for i in range(len(cells))]
    return cells[-1]


class WindowRows:
    """Rows computed for one item: per layer the cells, and what the last layer passes on; kept by `ToyWindows.keep`."""

    def __init__(self, start: int, end: int, layers: int) -> None:
        self.start, self.end = start, end
        self.cells: list[dict[int, bytes]] = [{} for _ in range(layers)]
        self.out: dict[int, bytes] = {}


class ToyWindows:
    """The windows of one open sequence: of each layer the cells of the last `W + reach` positions, and no others.

    Args:
        windows: How many positions each layer reads.
        reach: How many positions back from the furthest row a snapshot can be taken.
        seed: Of the model.
    """

    def __init__(self, windows: Sequence[int], reach: int, seed: int) -> None:
        self._windows, self._reach, self._seed = tuple(windows), reach, seed
        self._cells: list[dict[int, bytes]] = [{} for _ in windows]
        self._floor: int | None = None
        self._end = 0

    def rows(self, line: Sequence[int], start: int, end: int) -> WindowRows:
        """Compute positions `start .. end-1` of `line`; changes nothing but, at the first call, what can be seen."""
        if self._floor is None:
            self._floor = start
        rows = WindowRows(start, end, len(self._windows))
        if not self._windows:
            rows.out = dict.fromkeys(range(start, end), b"")
            return rows
        for i in range(start, end):
            cell = _first(line[i], i, self._seed)
            for layer, window in enumerate(self._windows):
                now = rows.cells[layer]
                now[i] = cell
                seen = range(max(self._floor, i - window + 1), i + 1)
                past = self._cells[layer]
                cell = _pass_on(layer, b"".join(now[j] if j in now else past.get(j, _LOST) for j in seen))
            rows.out[i] = cell
        return rows

    def keep(self, rows: WindowRows) -> None:
        """Take computed rows; what has fallen out of window and reach is forgotten."""
        self._end = max(self._end, rows.end)
        for window, past, now in zip(self._windows, self._cells, rows.cells, strict=True):
            past.update(now)
            for position in [p for p in past if p < self._end - window - self._reach]:
                del past[position]

    def snapshot(self, position: int) -> bytes:
        """Cells behind which `position` begins, layer by layer, oldest first.

        Raises:
            ValueError: They are not there, or not any more.
        """
        if not 0 < position <= self._end or self._end - position > self._reach:
            raise ValueError(f"a snapshot at {position} is out of reach: {self._end} rows, {self._reach} back")
        return b"".join(
            past.get(i, _NONE)
            for window, past in zip(self._windows, self._cells, strict=True)
            for i in range(position - window, position)
        )

    def restore(self, position: int, data: bytes) -> None:
        """Begin at `position`, behind what a snapshot holds."""
        self._floor, self._end, at = 0, position, 0
        for window, past in zip(self._windows, self._cells, strict=True):
            for i in range(position - window, position):
                past[i] = data[at : at + _CELL_NBYTES]
                at += _CELL_NBYTES
