"""Which record goes first when room is needed: ranks, lowest first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Literal, TypeAlias

from deepinfra.core.ids import BlockKey

__all__ = ("RANKINGS", "Lru", "PolicyName", "Reuse")

PolicyName: TypeAlias = Literal["reuse", "lru"]

CAME_BACK_S = 300.0
"""What was asked for again is kept as if it had been used so much later than what was asked for once."""

CAME_BACK_WHOLE_S = 400.0
"""The same for a prompt with at most `LITTLE_TOKENS` that were never asked for: a chat's next turn, or a repeat."""

LITTLE_TOKENS = 1024

GHOSTS = 32_768
"""Evicted records that are remembered, so that one which returns counts as come back; about 130 bytes each."""

_CAME_BACK, _CAME_BACK_WHOLE = int(CAME_BACK_S * 1e6), int(CAME_BACK_WHOLE_S * 1e6)

_LOOKED_AT = 1024
"""Ghosts that are looked at for one prompt: 0.2 ms."""


class Lru:
    """Ranks by last use: every rank is larger than all before, so what was used last goes last.

    Microseconds of a clock that never goes back, moved on by one where it stands still.
    """

    def __init__(self) -> None:
        self._last = 0

    def asked(self, keys: Sequence[BlockKey], held: int, block_tokens: int, now: float) -> int:
        """Rank of the leading `held` blocks of a prompt that was asked for at `now`; its blocks are `keys`."""
        return self.used(now)

    def used(self, now: float) -> int:
        """Rank of a record that is held and was used."""
        return self._stamp(now)

    def saved(self, record_id: bytes, now: float) -> int:
        """Rank of a record that is put in."""
        return self._stamp(now)

    def evicted(self, record_id: bytes) -> None:
        """Take note that a record left for want of room."""

    def _stamp(self, now: float) -> int:
        self._last = max(self._last + 1, int(now * 1e6))
        return self._last


class Reuse(Lru):
    """LRU in which what came back counts as used minutes later than what was asked for once.

    Most prompts of people never return, and those that do return within minutes: a place given to a first prompt is
    mostly wasted, one given to a conversation's next turn mostly not. The lead is in seconds because people's pauses
    are; where records stay for hours anyway it changes nothing. Records that were evicted are remembered for a while
    (`GHOSTS`), or a small cache would never learn that anything came back.

    The constants are from a coarse grid on the first halves of two traces; both halves, and what more could be had,
    are in decision record 0022.

    Source: the idea of counting evicted keys is 2Q's (Johnson and Shasha, VLDB 1994) and ARC's ghost lists (Megiddo
    and Modha, FAST 2003); here they move a rank in one queue instead of dividing the cache.
    """

    def __init__(self) -> None:
        super().__init__()
        self._ghosts: OrderedDict[bytes, int] = OrderedDict()  # the start of an id -> rank that is due to it

    def asked(self, keys: Sequence[BlockKey], held: int, block_tokens: int, now: float) -> int:
        """See `Lru.asked`."""
        known = held
        while known < len(keys) and known - held < _LOOKED_AT and keys[known][:8] in self._ghosts:
            known += 1
        little = known > 0 and (len(keys) - known) * block_tokens <= LITTLE_TOKENS
        rank = self._stamp(now) + (_CAME_BACK_WHOLE if little else _CAME_BACK)
        for key in keys[held:known]:
            self._ghosts[key[:8]] = rank
        return rank

    def used(self, now: float) -> int:
        """See `Lru.used`."""
        return self._stamp(now) + _CAME_BACK

    def saved(self, record_id: bytes, now: float) -> int:
        """See `Lru.saved`."""
        due = self._ghosts.pop(record_id[:8], None)
        return self._stamp(now) if due is None else max(due, self.used(now))

    def evicted(self, record_id: bytes) -> None:
        """See `Lru.evicted`."""
        self._ghosts[record_id[:8]] = 0
        if len(self._ghosts) > GHOSTS:
            self._ghosts.popitem(last=False)


RANKINGS: dict[PolicyName, type[Lru]] = {"reuse": Reuse, "lru": Lru}
"""By the name they have in a store's options."""
