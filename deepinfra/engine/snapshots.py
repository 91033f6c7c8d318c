"""Snapshots on their way between sequences' windows and a store, each in a staging slot.

Taken at two boundaries: the last one of a prompt that has a row behind it (the same prompt again can begin there), and
the last one of a sequence that is over (the next turn of its conversation can). They are copied at the beginning of a
step, leave through the save queue behind their blocks, and are dropped wherever that would make anybody wait. A
handoff has one of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import anyio

from deepinfra.core.ids import BlockKey, Epoch, SeqId
from deepinfra.core.step import Snapshot
from deepinfra.engine.live import Live
from deepinfra.engine.saver import SaveItem, Saver
from deepinfra.engine.staging import Slots
from deepinfra.engine.stats import StepTally
from deepinfra.engine.stream import Signal
from deepinfra.engine.windows import WindowPlan

__all__ = ("Capture", "Resume", "Snapshots")


class Resume(NamedTuple):
    """Where a sequence begins: its first row, from where on its windows are right, and the slot with their snapshot."""

    start: int
    right_from: int
    slot: int = -1


@dataclass(slots=True, eq=False)
class Capture:
    """A snapshot that is wanted of an open sequence, or being taken.

    Attributes:
        live: Whose.
        epoch: In which it is open.
        position: The boundary.
        item: What its record will say; `None` if it is for a handoff only.
        last: The sequence is closed in the step that takes it: now or never.
        slot: Where it is copied to.
        done: For a handoff: set when it was taken (then `slot` is the handoff's), or never will be (-1).
        left: The handoff is not waiting any more.
    """

    live: Live
    epoch: Epoch
    position: int
    item: SaveItem | None = None
    last: bool = False
    slot: int = -1
    done: anyio.Event | None = None
    left: bool = False


class Snapshots:
    """Those of one life of an executor.

    Args:
        plan: What the executor's layout asks for.
        slots: Staging.
        saver: Takes snapshots to a store, if there is one.
        tally: Where things are counted.
        wake: Set when a step is wanted.

    Attributes:
        over: Whether that life is over, and with it all of its slots.
    """

    def __init__(self, plan: WindowPlan, slots: Slots, saver: Saver | None, tally: StepTally, wake: Signal) -> None:
        self.plan, self._slots, self._saver, self._tally, self._wake = plan, slots, saver, tally, wake
        self._parked: dict[SeqId, tuple[int, int]] = {}
        self._wanted: list[Capture] = []
        self._taking: tuple[Capture, ...] = ()
        self.over = False

    @property
    def busy(self) -> bool:
        """Whether a snapshot is wanted, or being taken."""
        return bool(self._wanted or self._taking)

    # -- how sequences begin ------------------------------------------------------------------------

    def park(self, live: Live, slot: int, position: int) -> None:
        """Keep a snapshot that was loaded until its sequence begins; the slot is held here from now on."""
        self._parked[live.spec.seq] = (slot, position)

    def resume(self, live: Live, cached: int) -> Resume:
        """Where a sequence begins behind `cached` positions on the device; changes nothing."""
        known = len(live.tokens)
        start = self.plan.first_row(cached, known)
        slot, position = self._parked.get(live.spec.seq, (-1, 0))
        if self.plan.deepest((position,), cached, known):
            return Resume(position, position, slot)
        return Resume(start, self.plan.right_from(start, cached))

    def resumed(self, live: Live, resume: Resume, cached: int) -> None:
        """A sequence begins as `resume` says; its slot, if it has one, is the step's."""
        live.right_from, live.reached = resume.right_from, resume.start
        if resume.slot >= 0:
            del self._parked[live.spec.seq]
            self._tally.restored += 1
        else:
            self.unpark(live)
        if self.plan.rows:
            self._tally.replayed += max(0, cached - resume.start)

    def damaged(self, key: BlockKey) -> None:
        """The one at the end of a block could not be loaded: the next that is taken there is kept."""
        if self._saver is not None:
            self._saver.forget_snapshot(key)

    def unpark(self, live: Live) -> None:
        """Let go of a snapshot that nobody will begin at."""
        slot, _ = self._parked.pop(live.spec.seq, (-1, 0))
        if slot >= 0:
            self._slots.give([slot])

    # -- what is kept of them ------------------------------------------------------------------------

    def prompt_done(self, live: Live) -> None:
        """A sequence's prompt is computed and its blocks are offered; not for one whose handoff takes a snapshot."""
        if not live.prefill_only:
            self._want(live, self.plan.boundary(live.spec.prompt_len - 1))

    def ended(self, live: Live) -> None:
        """A sequence is over; it is closed in the next step, and not sooner."""
        self.unpark(live)
        if live.running and not live.failed:
            self._want(live, self.plan.boundary(live.computed))
        kept: list[Capture] = []
        for capture in self._wanted:
            if capture.live is live:
                if capture.done is not None or not self._open(capture):
                    self._drop(capture)
                    continue
                capture.last = True
            kept.append(capture)
        self._wanted = kept

    def _want(self, live: Live, position: int) -> None:
        if self._saver is None or not self._takes(live, position):
            return
        item = self._saver.snapshot(live, position)
        if item is not None:
            self._wanted.append(Capture(live, live.epoch, position, item))

    def _takes(self, live: Live, position: int) -> bool:
        """Whether the windows behind a position are known, right, and can be had."""
        return (
            self.plan.snapshot_nbytes > 0
            and self._slots.most_held > 0
            and max(1, live.right_from) <= position <= live.computed
            and live.reached - position <= self.plan.reach
        )

    def _open(self, capture: Capture) -> bool:
        """Whether a snapshot that was wanted can still be had."""
        live = capture.live
        is_open = live.running and live.epoch == capture.epoch and not live.failed
        return is_open and self._takes(live, capture.position)

    def due(self) -> tuple[Snapshot, ...]:
        """What the next step is to take; it must be submitted, and its outcome told by `taken` or `failed`."""
        due: list[Capture] = []
        waiting: list[Capture] = []
        for capture in self._wanted:
            if not (capture.last or self._open(capture)):
                self._drop(capture)
            elif (slot := self._slot(capture)) is not None:
                capture.slot = slot
                due.append(capture)
            elif capture.last:
                self._drop(capture)
            else:
                waiting.append(capture)
        self._wanted, self._taking = waiting, tuple(due)
        return tuple(Snapshot(one.live.spec.seq, one.epoch, one.position, one.slot) for one in due)

    def _slot(self, capture: Capture) -> int | None:
        if capture.done is None:
            return self._slots.hold()
        # A handoff's slot is free again at once, so it is one of those that blocks pass through, and worth a wait.
        taken = self._slots.take(1)
        return taken[0] if taken else None

    def taken(self) -> None:
        """The step took those that were due."""
        due, self._taking = self._taking, ()
        for capture in due:
            self._tally.snapshots += 1
            if capture.done is not None and not capture.left:
                capture.done.set()
            else:
                self.keep(capture)

    def failed(self) -> None:
        """The step did not, or nobody knows."""
        due, self._taking = self._taking, ()
        for capture in due:
            self._drop(capture)

    def keep(self, capture: Capture) -> None:
        """Send a snapshot that was taken to the store, if it is for it; its slot is not the caller's any more."""
        if self.over:
            return
        saver, item, slot = self._saver, capture.item, capture.slot
        if item is None or saver is None or not self._slots.keep(slot) or not saver.offer_snapshot(item, slot):
            self._slots.give([slot])
            if item is not None and saver is not None:
                saver.forget_snapshot(item.key)

    def _drop(self, capture: Capture) -> None:
        self._tally.snapshots_dropped += 1
        if capture.slot >= 0:
            self._slots.give([capture.slot])
            capture.slot = -1
        if capture.item is not None and self._saver is not None:
            self._saver.forget_snapshot(capture.item.key)
        if capture.done is not None:
            capture.done.set()

    # -- handoffs ------------------------------------------------------------------------------------

    async def capture(self, live: Live) -> Capture | None:
        """Have a snapshot taken at a running sequence's last boundary, for a handoff; give it to `keep` afterwards."""
        position = self.plan.boundary(live.computed)
        if self.over or not live.running or not self._takes(live, position):
            return None
        item = self._saver.snapshot(live, position) if self._saver is not None else None
        capture = Capture(live, live.epoch, position, item, done=anyio.Event())
        self._wanted.append(capture)
        self._wake.set()
        waited = False
        try:
            assert capture.done is not None
            await capture.done.wait()
            waited = True
        finally:
            capture.left = True
            if not waited and capture.done is not None and capture.done.is_set() and capture.slot >= 0:
                self.keep(capture)
        return capture if capture.slot >= 0 and not self.over else None

    def end(self) -> None:
        """The executor is left."""
        self.over = True
        self.failed()
        for capture in self._wanted:
            self._drop(capture)
        self._wanted.clear()
