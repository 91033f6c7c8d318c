"""Who is best left alone because another brings what it needs, and how much waiting sequences have left to compute.

When several sequences begin alike and none of that is on the device, the first that is opened computes it, and the
others wait for its blocks instead of computing them side by side. Nobody follows one that waits itself, so a follower
is let go as soon as there is nothing under way that it could wait for.

Source: in-batch prefix caching is SGLang's in idea; what changed: followers wait block by block for as long as they go
on alike, with bounded patience, and lose no place in the order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from deepinfra.core.ids import BlockKey, SeqId
from deepinfra.core.step import Prefix, StepView
from deepinfra.schedulers.entry import PATIENCE_S, Entry

__all__ = ("Sharing",)


class Sharing:
    """What waiting sequences would find, as seen while a step is chosen.

    Args:
        recount: Told of a sequence whose cached tokens are not what they were.
    """

    def __init__(self, recount: Callable[[Entry, int], None]) -> None:
        self._recount = recount
        self._view: StepView | None = None
        self._chosen: set[BlockKey] = set()
        self._seen: dict[SeqId, Prefix | None] = {}

    def planning(self, view: StepView) -> None:
        """A step is about to be chosen."""
        self._view, self._chosen, self._seen = view, set(), {}

    def look(self, entry: Entry) -> Prefix | None:
        """What a waiting sequence would find now, if that is known."""
        seq = entry.job.seq
        if seq in self._seen or self._view is None:
            return self._seen.get(seq)
        found = self._seen[seq] = self._view.waiting.get(seq)
        if found is not None and found.cached != entry.cached:
            self._recount(entry, found.cached)
        return found

    def choose(self, entry: Entry) -> None:
        """A sequence is chosen to be opened, or to be loaded: what it lacks is under way from now on."""
        found = self.look(entry)
        if found is not None and found.next is not None:
            self._chosen.add(found.next)

    def follows(self, entry: Entry) -> bool:
        """Whether what a waiting sequence would compute first is under way."""
        found = self.look(entry)
        return found is not None and found.next is not None and (found.under_way or found.next in self._chosen)

    def loads(self, entries: Iterable[Entry]) -> Iterator[Entry]:
        """Those whose load may be started: of several that lack the same, the first."""
        fetchable = self._view.fetchable if self._view is not None else ()
        for entry in entries:
            seq = entry.job.seq
            # Asked again after it was looked at: then there is nothing to load if the device has it by now.
            if seq in fetchable and not self.follows(entry) and seq in fetchable:
                yield entry
                self.choose(entry)

    def left_alone(self, entry: Entry) -> bool:
        """Whether a waiting sequence's KV is on its way, or about to be, and its patience is not used up."""
        view = self._view
        if view is None:
            return False
        follows, seq = self.follows(entry), entry.job.seq
        if not (follows or seq in view.loading or seq in view.fetchable):
            if entry.left_alone_since is not None:
                entry.patience_s -= view.now - entry.left_alone_since
                entry.left_alone_since = None
            return False
        if entry.cached > entry.most_cached:
            entry.most_cached, entry.patience_s, entry.left_alone_since = entry.cached, PATIENCE_S, view.now
        if entry.left_alone_since is None:
            entry.left_alone_since = view.now
        return view.now < entry.left_alone_since + entry.patience_s
