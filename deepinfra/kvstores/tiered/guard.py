"""One tier behind a guard: what it raises, how long it takes and what it claims stay its own trouble."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

import anyio
from anyio.lowlevel import checkpoint

from deepinfra.core.ids import BlockKey
from deepinfra.core.kv import Forgotten, KVRecord, KVStats, Loaded, Match, NamespaceFilter, RecordRef, Retention
from deepinfra.interfaces.given import Clock
from deepinfra.interfaces.kvstore import KVStore

__all__ = ("SLOWEST_NBYTES_PER_S", "Guard")

_log = logging.getLogger(__name__)

T = TypeVar("T")

MATCH_S = 0.5
"""Longest `match` of one tier: a request waits for it, and the engine waits a second for all tiers together."""

FORGET_S = 300.0
"""Longest `forget`: it may overwrite every file of a disk."""

SLOWEST_NBYTES_PER_S = 16 << 20
"""Bytes per second below which loading is taken for a stall: a laptop computes KV about as fast."""

FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0
"""How long a tier is passed by after a failure; twice as long after each further one."""


class _DownError(Exception):
    """The tier is passed by, or has just failed."""


class Guard:
    """Calls a store with a limit of time, and passes it by for a while after a failure (a circuit breaker).

    A failure is an exception or a call that takes too long. After the pause one call is let through; others pass by
    until it is back. What was to be forgotten while the store was down is forgotten before anything else is asked of
    it. A read that the store cannot stop is waited for, since it writes to the caller's buffers.
    """

    def __init__(self, store: KVStore, name: str, timeout_s: float, clock: Clock) -> None:
        self.store, self.name = store, name
        self.failures = 0
        self._timeout_s, self._clock = timeout_s, clock
        self._pause_s = self._resume_at = 0.0
        self._probing = False
        self._owed: list[NamespaceFilter] = []

    @property
    def up(self) -> bool:
        """False from a failure until a call succeeds."""
        return self._pause_s == 0.0

    @property
    def wait_s(self) -> float:
        """Seconds until a call may be tried; 0: now."""
        if self._probing:
            return FIRST_PAUSE_S
        return 0.0 if self.up else max(0.0, self._resume_at - self._clock.now())

    @property
    def owed(self) -> bool:
        """Whether something is still to be forgotten."""
        return bool(self._owed)

    async def match(self, keys: Sequence[BlockKey]) -> Match:
        """What the tier holds; never more than `keys`, under their names."""
        try:
            match = await self._call(min(MATCH_S, self._timeout_s), self.store.match, keys)
        except _DownError:
            return Match(missed="tier-down")
        count = 0
        for ref, key in zip(match.refs, keys, strict=False):
            if ref.key != key or ref.kind != "block":
                break
            count += 1
        if count == len(match.refs):
            return match
        return Match(refs=match.refs[:count], snapshots=tuple(i for i in match.snapshots if i < count))

    async def load(self, refs: Sequence[RecordRef], into: Sequence[memoryview]) -> Loaded:
        """How many leading records were delivered."""
        nbytes = sum(ref.nbytes for ref in refs)
        try:
            loaded = await self._call(self._limit(nbytes), self.store.load, refs, into)
        except _DownError:
            return Loaded(count=0, stopped="tier-down")
        return Loaded(count=min(max(loaded.count, 0), len(refs)), stopped=loaded.stopped)

    async def save(self, records: Sequence[KVRecord]) -> bool:
        """Whether the tier took note of the records; it may have dropped them all the same."""
        nbytes = sum(record.ref.nbytes for record in records)
        try:
            await self._call(self._limit(nbytes), self.store.save, records)
        except _DownError:
            return False
        return True

    async def touch(self, keys: Sequence[BlockKey], retention: Retention) -> Sequence[BlockKey]:
        """Tell of use, lost if the tier is down; returns what the tier would like to be given."""
        try:
            wanted = await self._call(self._timeout_s, self.store.touch, keys, retention)
        except _DownError:
            return ()
        return wanted or ()  # a plug-in may forget to return anything

    async def successors(self, parent: BlockKey, most: int) -> Sequence[tuple[int, ...]]:
        """See `KVStore.successors`."""
        try:
            return await self._call(self._timeout_s, self.store.successors, parent, most)
        except _DownError:
            return ()

    async def forget(self, which: NamespaceFilter) -> Forgotten:
        """Forget now, or before anything else once the tier is back."""
        try:
            return await self._call(FORGET_S, self.store.forget, which)
        except _DownError:
            _log.warning("tier %s is down: what is to be forgotten is forgotten when it is back", self.name)
            self._owed.append(which)
            return Forgotten(records=0, nbytes=0)
        except BaseException:  # cancelled: it may or may not have been done
            self._owed.append(which)
            raise

    async def settle(self) -> None:
        """Forget what is owed."""
        if self._owed:
            try:
                await self._call(self._timeout_s, checkpoint)
            except _DownError:
                pass

    def stats(self) -> KVStats:
        """The store's own accounting."""
        try:
            return self.store.stats()
        except Exception:  # a door, as in `_call`
            _log.exception("tier %s has no accounts", self.name)
            return KVStats()

    def _limit(self, nbytes: int) -> float:
        return self._timeout_s + nbytes / SLOWEST_NBYTES_PER_S

    async def _call(self, limit_s: float, function: Callable[..., Awaitable[T]], *args: object) -> T:
        """The one door through which a tier is reached.

        Raises:
            _DownError: It was passed by, raised or took too long.
        """
        if self.wait_s > 0:
            raise _DownError
        probing, begun = not self.up, anyio.current_time()
        self._probing = probing
        try:
            with anyio.fail_after(limit_s + (FORGET_S if self._owed else 0.0)):
                while self._owed:
                    which = self._owed[0]
                    await self.store.forget(which)
                    self._owed = [each for each in self._owed if each is not which]
                result = await function(*args)
        except Exception as error:  # a door: whatever a store raises although it must not is a miss
            self._failed("took too long" if isinstance(error, TimeoutError) else f"raised {error!r}", probing)
            raise _DownError from error
        finally:
            if probing:
                self._probing = False
        if anyio.current_time() - begun > limit_s and function != self.store.forget:
            self._failed("took too long", probing)  # it delivered, but could not be stopped: it gets a rest
        elif probing:
            _log.warning("tier %s is back", self.name)
            self._pause_s = 0.0
        return result

    def _failed(self, what: str, probing: bool) -> None:
        self.failures += 1
        if not self.up and not probing:
            return  # one of several calls that were under way when the first failed
        self._pause_s = min(LONGEST_PAUSE_S, 2 * self._pause_s) or FIRST_PAUSE_S
        self._resume_at = self._clock.now() + self._pause_s
        _log.warning("tier %s %s; it is passed by for %.0f s", self.name, what, self._pause_s)
