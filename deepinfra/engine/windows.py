"""Windows and prefixes: which rows are computed again behind a prefix whose windows are gone, and how many.

Published blocks hold the KV of `full` groups only; windows live with their sequence. Behind a prefix of P positions
they come back from a snapshot, or by replay: the last R rows before P are computed once more, writing windows and no
block. With D window layers and windows of at most W positions a row of the last layer depends on the D·(W-1) rows
before it, so that R = W + (D-1)·(W-1) makes the windows at P exactly what they were, and the row before P right as
well (a hit that goes to the end of the tokens samples from it). R = W is an approximation: the first rows of each
layer see less than they did.

Source: bounded replay and its exact variant are DeepSeek-V4.1's (technical report 3.2.2) and vLLM's; what changed: a
hit that replay would eat up keeps its blocks, it only saves no rows.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import lcm
from typing import Literal, TypeAlias

from deepinfra.core.kv import KVLayout

__all__ = ("ReplayMode", "SnapshotMode", "WindowPlan", "window_plan")

ReplayMode: TypeAlias = Literal["exact", "bounded"]
"""`exact` gives the text of computing everything; `bounded` computes fewer rows again and is an approximation."""

SnapshotMode: TypeAlias = Literal["off", "ram", "disk"]
"""Where snapshots are kept: nowhere, in RAM at most, or wherever the sequence's blocks may be."""


@dataclass(frozen=True, slots=True)
class WindowPlan:
    """What an executor's layout asks of whoever begins behind a prefix.

    Attributes:
        rows: R of the module's text; 0 without window groups.
        unit: Positions between boundaries at which sequences may begin: block ends on the executor's grid.
        grid: Granularity of first rows.
        reach: As `KVLayout.snapshot_reach`.
        snapshot_nbytes: As `KVLayout.snapshot_nbytes`.
        mode: How windows are rebuilt; empty without window groups.
    """

    rows: int
    unit: int
    grid: int
    reach: int
    snapshot_nbytes: int
    mode: Literal["", "exact", "bounded"]

    def first_row(self, cached: int, known: int) -> int:
        """The first row to compute behind `cached` positions of `known` tokens, if there is no snapshot."""
        if not self.rows:
            return min(cached, known - 1)
        return max(0, cached - self.rows) // self.grid * self.grid

    def right_from(self, first_row: int, cached: int) -> int:
        """From which position on windows are good enough to be kept, if computing begins there without a snapshot."""
        return cached if self.rows and first_row else 0

    def boundary(self, positions: int) -> int:
        """The last boundary within `positions`."""
        return positions // self.unit * self.unit

    def deepest(self, boundaries: Iterable[int], cached: int, known: int) -> int:
        """The deepest boundary worth beginning at (0: none): within `cached`, with a row behind it, better than replay.

        Args:
            boundaries: Where snapshots are said to be.
            cached: Positions whose blocks are or will be on the device.
            known: Tokens of the sequence.
        """
        if not self.snapshot_nbytes:
            return 0
        most = min(cached, known - 1)
        best = max((at for at in boundaries if 0 < at <= most and at % self.unit == 0), default=0)
        return best if best > self.first_row(cached, known) else 0

    @property
    def least_prefix(self) -> int:
        """Tokens of the smallest prefix that saves computing where there is no snapshot of its end."""
        return self.boundary(self.rows) + self.unit if self.rows else self.unit

    def sentence(self, snapshots: str) -> str:
        """What a cached prefix must have to be worth anything; `snapshots` says where those are kept."""
        return (
            f"windows come back from snapshots ({snapshots}), or by computing {self.rows} rows again ({self.mode} "
            f"replay): without a snapshot the smallest reusable prefix has {self.least_prefix} tokens"
        )


def window_plan(layout: KVLayout, mode: ReplayMode = "exact", grid: int = 1) -> WindowPlan:
    """What a layout asks for.

    Args:
        layout: The executor's.
        mode: How windows are rebuilt without a snapshot.
        grid: The executor's granularity of chunk and hit ends.
    """
    windows = [group for group in layout.groups if group.kind == "window"]
    rows = 0
    if windows:
        rows = widest = max(group.window for group in windows)
        if mode == "exact":
            rows += (sum(len(group.layers) for group in windows) - 1) * (widest - 1)
    return WindowPlan(
        rows=rows,
        unit=lcm(layout.block_size, grid),
        grid=grid,
        reach=layout.snapshot_reach,
        snapshot_nbytes=layout.snapshot_nbytes if windows else 0,
        mode=mode if windows else "",
    )
