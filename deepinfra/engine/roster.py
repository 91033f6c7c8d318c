"""The sequences of one pool."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import anyio

from deepinfra.core.ids import SeqId
from deepinfra.engine.live import Live
from deepinfra.engine.stream import Signal

__all__ = ("Roster", "Wake")


class Wake(Signal):
    """A `Signal` of which the stepper hears at once, in the midst of a step; `heard` is what it does then."""

    def __init__(self) -> None:
        super().__init__()
        self.heard: Callable[[], None] = lambda: None

    def set(self) -> None:
        """See `Signal.set`."""
        super().set()
        self.heard()


@dataclass(slots=True, eq=False)
class Roster:
    """Who is in a pool, from admission to the step boundary at which it is forgotten.

    Attributes:
        lives: Everybody.
        gone: Those who left since the last boundary; they are in `lives` until then.
        fetchable: Waiting sequences with blocks in the store whose load has not been started.
        loading: Sequences whose load is under way.
        stirred: Whether anybody came or left, or a load ended, since the last plan.
        wake: Something changed that a next step may have to know.
        empty: Set while nobody is here and nothing loads.
    """

    lives: dict[SeqId, Live] = field(default_factory=dict)
    gone: list[Live] = field(default_factory=list)
    fetchable: set[SeqId] = field(default_factory=set)
    loading: set[SeqId] = field(default_factory=set)
    stirred: bool = False
    wake: Wake = field(default_factory=Wake)
    empty: anyio.Event = field(default_factory=anyio.Event)

    def enter(self, live: Live) -> None:
        """A sequence was admitted."""
        self.lives[live.spec.seq] = live
        if self.empty.is_set():
            self.empty = anyio.Event()
        self.stirred = True
        self.wake.set()

    def leave(self, live: Live) -> None:
        """A sequence is over; it is forgotten at the next step boundary."""
        self.stirred = True
        self.wake.set()  # first: what a repeated step has computed for it by now is its own
        live.over = True
        self.gone.append(live)

    def forget(self, live: Live) -> None:
        """A boundary came, or there will be none any more."""
        self.lives.pop(live.spec.seq, None)
        self.fetchable.discard(live.spec.seq)
