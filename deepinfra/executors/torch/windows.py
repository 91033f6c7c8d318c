"""Windows of sequences: the latest keys and values of layers that see no others."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from deepinfra.executors.torch.decoder import DecoderConfig
from deepinfra.executors.torch.kv import PagedKV
from deepinfra.executors.torch.plan import window_reach

__all__ = ("Window", "Windows")


class Window:
    """One sequence's window: consecutive pages, the first of them for positions from `base * block_size`.

    Attributes:
        floor: Nothing below this position is seen.
        first: Rows are computed from here on; above `floor` if what lies between was restored.
        end: Positions computed, drafts that were not accepted left out.
    """

    __slots__ = ("base", "end", "first", "floor", "pages")

    def __init__(self) -> None:
        self.pages: list[int] = []
        self.base = self.floor = self.first = self.end = 0

    @classmethod
    def of_blocks(cls, blocks: NDArray[np.int64]) -> Window:
        """A sequence's block table, seen as a window that begins at position 0."""
        window = cls()
        window.pages = blocks.tolist()
        return window

    def blocks(self, first: int, count: int) -> NDArray[np.int64]:
        """Pages of `count` blocks from block `first`; its own nearest page where it has none."""
        wanted = np.clip(np.arange(count) + (first - self.base), 0, len(self.pages) - 1)
        return np.asarray(self.pages, np.int64).take(wanted)

    def slots(self, start: int, end: int, size: int) -> NDArray[np.int64]:
        """Where positions `start .. end` lie (page * block_size + offset)."""
        where = np.arange(start, end)
        return np.asarray(self.pages, np.int64).take(where // size - self.base) * size + where % size


class Windows:
    """The pages of all sequences' windows.

    A window is a short list of pages, longer while a step computes many rows and cut to what can still be asked for
    after it. Pages are never shared: a window's values depend on where the sequence was replayed from.

    Args:
        config: The model; it has layers that slide.
        dtype: Of elements.
        num_pages: See `window_pages`.
        block_size: Positions per page.
    """

    def __init__(self, config: DecoderConfig, dtype: torch.dtype, num_pages: int, block_size: int) -> None:
        self.kv = PagedKV(config, dtype, num_pages, block_size, len(config.sliding))
        self._size, self._window, self._reach = block_size, config.window, window_reach(block_size)
        self._free = list(range(num_pages - 1, -1, -1))

    def open(self, start: int) -> Window:
        """A window of which nothing below `start` is seen."""
        window = Window()
        window.floor = window.first = window.end = start
        window.base = start // self._size
        return window

    def why_not(self, window: Window, start: int) -> str:
        """Why rows from `start` cannot be computed; empty if they can."""
        low = max(window.floor, start - self._window + 1)
        if window.first <= start <= window.end and low >= window.base * self._size:
            return ""
        return f"position {start} does not follow the sequence's window, computed from {window.first} to {window.end}"

    def reserve(self, window: Window, end: int) -> None:
        """Have pages for all positions below `end`.

        Raises:
            IndexError: More sequences are open than `max_seqs`, or a step has more rows than it may.
        """
        for _ in range(-(-end // self._size) - window.base - len(window.pages)):
            if not self._free:
                raise IndexError("no page is left for windows: more sequences or rows than the limits allow")
            window.pages.append(self._free.pop())

    def trim(self, window: Window, end: int) -> None:
        """Say how many positions are computed; pages that nothing can ask for any more are free."""
        window.end = end
        first = max(window.base, (end - self._window - self._reach) // self._size)
        last = -(-end // self._size)
        kept = window.pages[first - window.base : last - window.base]
        self._free += window.pages[: first - window.base] + window.pages[last - window.base :]
        window.pages, window.base = kept, first

    def close(self, window: Window, *, clear: bool) -> None:
        """Give all pages back; `clear` zeroes them, because what is hidden from the next owner is multiplied by 0."""
        if clear:
            self.kv.clear(window.pages)
        self._free += window.pages
        window.pages = []

    def snapshot(self, window: Window, position: int, slot: memoryview) -> str:
        """Copy the window as it was behind `position` positions into a slot's payload, zeros below position 0.

        Returns:
            Why that is impossible; empty if it was done.
        """
        low = position - self._window
        if not window.end - self._reach <= position <= window.end:
            return f"no snapshot at position {position}: the window ends at {window.end}, reach {self._reach}"
        if max(0, low) < window.floor:
            return f"no snapshot at position {position}: nothing below {window.floor} is known"
        payload = self.kv.payload(slot, self._window)
        payload[:, :, : max(0, -low)].zero_()
        where = torch.from_numpy(window.slots(max(0, low), position, self._size))
        self.kv.take(where, payload[:, :, max(0, -low) :])
        return ""

    def restore(self, position: int, slot: memoryview) -> Window:
        """A window as a snapshot at `position` had it."""
        low = max(0, position - self._window)
        window = self.open(low)
        self.reserve(window, position)
        where = torch.from_numpy(window.slots(low, position, self._size))
        payload = self.kv.payload(slot, self._window)
        self.kv.put(where, payload[:, :, self._window - (position - low) :])
        window.first = window.end = position
        return window

    @property
    def free_pages(self) -> int:
        """Pages that no sequence holds."""
        return len(self._free)
