"""Responses that are kept for later requests: in memory, with limits, each its tenant's own."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from threading import Lock

from deepinfra.api.responses.items import StoredItem
from deepinfra.errors import NotStoredError
from deepinfra.interfaces.given import Clock

__all__ = ("ResponseStore", "Turn")


class Turn:
    """What one response added to its conversation: the items sent to it and those it answered.

    Turns hang on the one before, so that a chain of n responses is kept once, not n times. A turn lives as long as a
    stored response needs it: its own, or a later one of the chain.

    Attributes:
        before: The turn that this one continues.
        items: Its items with their ids, in order.
        asked: How many of them came with the request.
    """

    __slots__ = ("asked", "before", "holders", "items", "nbytes")

    def __init__(self, before: Turn | None, items: Sequence[tuple[str, StoredItem]], asked: int, nbytes: int) -> None:
        self.before, self.items, self.asked, self.nbytes = before, tuple(items), asked, nbytes
        self.holders = 0

    def context(self) -> list[tuple[str, StoredItem]]:
        """Items of the whole chain up to here, oldest first."""
        turns: list[Turn] = []
        turn: Turn | None = self
        while turn is not None:
            turns.append(turn)
            turn = turn.before
        return [item for each in reversed(turns) for item in each.items]


class _Kept:
    __slots__ = ("body", "last_used", "tenant", "turn")

    def __init__(self, tenant: str, body: bytes, turn: Turn, last_used: float) -> None:
        self.tenant, self.body, self.turn, self.last_used = tenant, body, turn, last_used


class _Share:
    """What one tenant holds: its responses, least recently used first, and the bytes of them and their turns."""

    __slots__ = ("ids", "nbytes")

    def __init__(self) -> None:
        self.ids = OrderedDict[str, None]()
        self.nbytes = 0


class ResponseStore:
    """Finished responses by id, until they are deleted, too old, or the least recently used of too many.

    Too many are the tenant's that holds the most: no tenant can push out what another one keeps within its share.

    A response of another tenant is not there, in the same words as one that never was. A deleted or evicted response
    cannot be retrieved or continued; its items stay while a later response of its chain is kept, because that one's
    conversation is made of them. Nothing survives a restart. Safe to use from several threads.

    Args:
        clock: Time since the last use.
        max_responses: Of all tenants together; more are evicted.
        max_nbytes: JSON bytes of responses and their items, likewise. What alone is larger is not kept.
        ttl_s: Kept so long after the last use, in seconds.
    """

    def __init__(
        self,
        clock: Clock,
        *,
        max_responses: int = 10_000,
        max_nbytes: int = 256 * 1024 * 1024,
        ttl_s: float = 24 * 3600.0,
    ) -> None:
        self._clock = clock
        self._max_responses, self._max_nbytes, self._ttl_s = max_responses, max_nbytes, ttl_s
        self._lock = Lock()
        self._kept: OrderedDict[str, _Kept] = OrderedDict()  # least recently used first
        self._items: dict[tuple[str, str], list[tuple[Turn, StoredItem]]] = {}
        self._shares: dict[str, _Share] = {}

    def __len__(self) -> int:
        return len(self._kept)

    def __contains__(self, response_id: str) -> bool:
        return response_id in self._kept

    @property
    def nbytes(self) -> int:
        """Bytes that count against `max_nbytes`."""
        return sum(share.nbytes for share in tuple(self._shares.values()))

    def put(self, tenant: str, response_id: str, body: bytes, turn: Turn) -> None:
        """Keep a response: its JSON, and what it added to its conversation."""
        with self._lock:
            self._expire()
            self._kept[response_id] = _Kept(tenant, body, turn, self._clock.now())
            share = self._shares.setdefault(tenant, _Share())
            share.ids[response_id] = None
            share.nbytes += len(body)
            self._hold(tenant, turn, share)
            while len(self._kept) > self._max_responses:
                self._drop(next(iter(max(self._shares.values(), key=lambda share: len(share.ids)).ids)))
            while self.nbytes > self._max_nbytes:
                self._drop(next(iter(max(self._shares.values(), key=lambda share: share.nbytes).ids)))

    def body(self, tenant: str, response_id: str) -> bytes:
        """A response's JSON.

        Raises:
            NotStoredError: It is not there, or another tenant's.
        """
        with self._lock:
            return self._find(tenant, response_id, "Response", None).body

    def turn(self, tenant: str, response_id: str, param: str | None = None) -> Turn:
        """What a response added to its conversation, and through `before` the conversation; `param` is for the error.

        Raises:
            NotStoredError: It is not there, or another tenant's.
        """
        with self._lock:
            return self._find(tenant, response_id, "Previous response" if param else "Response", param).turn

    def item(self, tenant: str, item_id: str, param: str) -> StoredItem:
        """An item of any response that is kept; `param` is for the error.

        Raises:
            NotStoredError: It is not there, or another tenant's.
        """
        with self._lock:
            self._expire()
            found = self._items.get((tenant, item_id))
            if found is None:
                raise NotStoredError("Item", item_id, param)
            return found[-1][1]

    def delete(self, tenant: str, response_id: str) -> None:
        """Forget a response.

        Raises:
            NotStoredError: It is not there, or another tenant's.
        """
        with self._lock:
            self._find(tenant, response_id, "Response", None)
            self._drop(response_id)

    def _find(self, tenant: str, response_id: str, kind: str, param: str | None) -> _Kept:
        self._expire()
        kept = self._kept.get(response_id)
        if kept is None or kept.tenant != tenant:
            raise NotStoredError(kind, response_id, param)
        kept.last_used = self._clock.now()
        self._kept.move_to_end(response_id)
        self._shares[tenant].ids.move_to_end(response_id)
        return kept

    def _expire(self) -> None:
        """Order of use is order of age, so that the first one that is young enough ends the search."""
        oldest = self._clock.now() - self._ttl_s
        while self._kept and (first := next(iter(self._kept.items())))[1].last_used < oldest:
            self._drop(first[0])

    def _hold(self, tenant: str, turn: Turn, share: _Share) -> None:
        """Count a holder; a turn that nobody held until now comes back with the turns before it."""
        held: Turn | None = turn
        while held is not None:
            held.holders += 1
            if held.holders > 1:
                return
            share.nbytes += held.nbytes
            for item_id, item in held.items:
                self._items.setdefault((tenant, item_id), []).append((held, item))
            held = held.before

    def _drop(self, response_id: str) -> None:
        kept = self._kept.pop(response_id)
        share = self._shares[kept.tenant]
        del share.ids[response_id]
        share.nbytes -= len(kept.body)
        if not share.ids:
            del self._shares[kept.tenant]
        turn: Turn | None = kept.turn
        while turn is not None:
            turn.holders -= 1
            if turn.holders:
                return
            share.nbytes -= turn.nbytes
            for item_id, _ in turn.items:
                left = [each for each in self._items.pop((kept.tenant, item_id), ()) if each[0] is not turn]
                if left:
                    self._items[kept.tenant, item_id] = left
            turn = turn.before
