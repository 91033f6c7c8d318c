"""What waiting sequences would begin behind: looked up when it is asked, so that nothing is kept for those who wait."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from deepinfra.core.ids import BlockKey, SeqId
from deepinfra.core.step import Prefix
from deepinfra.engine.blocks import BlockPool
from deepinfra.engine.live import Live
from deepinfra.engine.roster import Roster
from deepinfra.engine.snapshots import Snapshots

__all__ = ("Prefixes",)


class Prefixes(Mapping[SeqId, Prefix]):
    """Those of one life of an executor.

    Two sequences with a common beginning have the same keys so far, and find the same of it on the device. So a
    sequence lacks the very block that a running one computes next exactly if both go on alike: the one key says all.

    Args:
        roster: The pool's sequences.
        running: Those that hold blocks.
        blocks: The device's.
        snapshots: Where sequences begin behind a prefix.
    """

    def __init__(self, roster: Roster, running: Mapping[SeqId, Live], blocks: BlockPool, snapshots: Snapshots) -> None:
        self._roster, self._running, self._blocks, self._snapshots = roster, running, blocks, snapshots
        self._under_way: set[BlockKey] | None = None

    def now(self) -> Prefixes:
        """Itself, for a new step: what is under way is looked up anew."""
        self._under_way = None
        return self

    def __getitem__(self, seq: SeqId) -> Prefix:
        live = self._roster.lives[seq]
        if live.running or live.over:
            raise KeyError(seq)
        cached = self.cached(live)
        lacking = self._next(live, self._begin(live.found))
        return Prefix(cached, lacking, lacking is not None and lacking in self._coming())

    def __iter__(self) -> Iterator[SeqId]:
        return (seq for seq, live in self._roster.lives.items() if not (live.running or live.over))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def cached(self, live: Live) -> int:
        """Tokens that need not be computed, once what the store has of them is loaded; notes if anything is to be."""
        seq, source, plan, known = live.spec.seq, live.source, self._snapshots.plan, len(live.tokens)
        size = self._blocks.block_size
        device = self._found(live) * size
        if source is None and not plan.rows:
            return min(device, known - 1)
        start = self._snapshots.resume(live, device).start
        if source is None or (live.fetched and seq not in self._roster.loading):
            return start
        held = max(device, len(source.refs) * size)
        snapshot = plan.deepest(((index + 1) * size for index in source.snapshots), held, known)
        best = max(start, plan.first_row(held, known), snapshot)
        if not live.fetched:
            (self._roster.fetchable.add if best > start else self._roster.fetchable.discard)(seq)
        return best

    def _found(self, live: Live) -> int:
        """Leading blocks on the device that it can begin behind."""
        keys, find, count = live.extend_keys(self._blocks.block_size), self._blocks.find, live.found
        # A sequence's last blocks are forgotten first, so the end of what was found last time is all there is to see.
        # Where that is wrong (blocks that a failed step was to fill), the planner finds out and corrects it.
        while count and find(keys[count - 1]) is None:
            count -= 1
        while count < len(keys) and find(keys[count]) is not None:
            count += 1
        live.found = count
        return self._begin(count)

    def _begin(self, blocks: int) -> int:
        return self._snapshots.plan.boundary(blocks * self._blocks.block_size) // self._blocks.block_size

    def _next(self, live: Live, blocks: int) -> BlockKey | None:
        """The block behind so many, if it may be worth waiting for: not where windows are computed anew anyway."""
        keys, plan = live.keys, self._snapshots.plan
        if blocks >= len(keys):
            return None
        if plan.rows and not plan.first_row(len(keys) * self._blocks.block_size, len(live.tokens)):
            return None
        return keys[blocks]

    def _coming(self) -> set[BlockKey]:
        """Blocks that running sequences compute next, and loads bring next."""
        if self._under_way is None:
            lives = [(live, self._begin(live.published)) for live in self._running.values() if live.todo > 1]
            for seq in self._roster.loading:
                live = self._roster.lives.get(seq)
                if live is None or live.source is None or not live.bringing:
                    continue
                found = self._found(live)
                if found < len(live.source.refs):
                    lives.append((live, found))
            keys = (self._next(live, blocks) for live, blocks in lives if not live.over)
            self._under_way = {key for key in keys if key is not None}
        return self._under_way
