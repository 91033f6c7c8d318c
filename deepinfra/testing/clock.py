"""A clock that stands still until told."""

from __future__ import annotations

__all__ = ("ManualClock",)


class ManualClock:
    """A `Clock` for tests: `now` and `wall` move together, only by `advance`.

    Args:
        now: Monotonic seconds to begin with.
        wall: Unix seconds to begin with; the default is in the middle of an hour, so that no test begins on an edge.
    """

    def __init__(self, now: float = 1_000.0, wall: float = 1_800_001_800.0) -> None:
        self._now, self._wall = now, wall

    def now(self) -> float:
        """Monotonic seconds."""
        return self._now

    def wall(self) -> float:
        """Unix seconds."""
        return self._wall

    def advance(self, seconds: float) -> None:
        """Let `seconds` pass at once; nobody is woken."""
        self._now += seconds
        self._wall += seconds
