"""RedisStore: KV records in a Redis or Valkey server, shared by every engine that can reach it."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Self, TypeVar

import redis
from anyio import CancelScope
from anyio.lowlevel import checkpoint

from deepinfra.core.ids import BlockKey
from deepinfra.core.kv import (
    Forgotten,
    KVRecord,
    KVStats,
    Loaded,
    Match,
    NamespaceFilter,
    RecordRef,
    Retention,
    TierHit,
)
from deepinfra.errors import ConfigError
from deepinfra.interfaces import KVStore
from deepinfra_kv_redis.records import Header, record_id, unpack
from deepinfra_kv_redis.server import Server

__all__ = ("RedisStore",)

_log = logging.getLogger(__name__)

T = TypeVar("T")

DAY_S = 86_400.0

BATCH_NBYTES, BATCH_RECORDS = 8 << 20, 256
"""Of one round trip: what a cancelled call waits for."""

COPY_NBYTES = 1 << 20
"""Bytes copied before the loop gets a turn: about 0.1 ms."""

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 30.0
"""How long a server that could not be reached is left alone; twice as long after each further failure."""

SWEEP_S = 60.0
"""Seconds between looks for what has expired; it is gone from the server without them, and only listed."""


class RedisStore(KVStore):
    """Keeps records as strings with a time to live.

    What is wrong with the server is a miss: nothing raises, and while it cannot be reached nothing waits for it. What
    was to be forgotten meanwhile is forgotten before anything else is asked. The client library's ordinary interface
    runs in worker threads, since its other one needs asyncio; bytes are copied once, from what it returns. A
    cancelled call waits for its round trip, at most `timeout_s` of silence.

    Args:
        url: `redis://`, `rediss://` (TLS) or `unix://`, as redis-py takes it.
        password_file: File whose first line is the password; read on entering.
        prefix: Beginning of every key. The rest is the engine's: no two tenants, models or layouts ever meet.
        timeout_s: How long the server may be silent, and a call wait for a connection.
        max_record_nbytes: Larger records are dropped.
        max_connections: Connections at most.
        default_ttl_s: Seconds that records of no particular traffic live.
        agent_ttl_s: Seconds for traffic `agent`.
        chat_ttl_s: Seconds for traffic `chat`.

    Raises:
        ConfigError: On entering: the password file cannot be read, or the URL makes no sense.
    """

    def __init__(
        self,
        url: str = "redis://127.0.0.1:6379/0",
        *,
        password_file: str | None = None,
        prefix: str = "deepinfra",
        timeout_s: float = 1.0,
        max_record_nbytes: int = 64 << 20,
        max_connections: int = 8,
        default_ttl_s: float = DAY_S,
        agent_ttl_s: float = 3 * DAY_S,
        chat_ttl_s: float = 7 * DAY_S,
    ) -> None:
        self._connect = lambda: Server(url, password_file, prefix, timeout_s, max_connections)
        self._max_record_nbytes = max_record_nbytes
        self._lives = {"default": default_ttl_s, "agent": agent_ttl_s, "chat": chat_ttl_s, "none": 0.0}
        self._server: Server | None = None
        self._reset()

    def _reset(self) -> None:
        self._pause_s = self._resume_at = self._next_sweep = 0.0
        self._owed: list[NamespaceFilter] = []
        self._totals = (0, 0)
        self._hits = self._misses = self._saved = self._dropped = self._damaged = self._expired = 0

    @asynccontextmanager
    async def __asynccontextmanager__(self) -> AsyncGenerator[Self]:
        self._reset()
        try:
            self._server = await self.offload(self._connect)
        except (OSError, ValueError) as error:
            raise ConfigError(f"the redis store cannot be set up: {error}") from None
        try:
            await self._ask(self._settle)
            yield self
        finally:
            with CancelScope(shield=True):
                if self._owed:
                    _log.error("the server could not be reached again: not forgotten there: %s", self._owed)
                await self.offload(self._server.close)
            self._server = None

    # -- the interface ----------------------------------------------------------------------------------

    async def match(self, keys: Sequence[BlockKey]) -> Match:
        """See `KVStore.match`; tier `redis`."""
        held = await self._ask(Server.match, list(keys))
        now = oldest = self.clock.wall()
        refs: list[RecordRef] = []
        snapshots: list[int] = []
        missed = "tier-down" if held is None else "absent"
        for i, (key, (header, size, snapshot)) in enumerate(zip(keys, held or (), strict=False)):
            if i % 256 == 0:
                await checkpoint()
            if header.expires <= now:
                missed = "expired"
                break
            refs.append(RecordRef(key, "block", size - header.data_at))
            oldest = min(oldest, header.created)
            if snapshot is not None and snapshot.expires > now:
                snapshots.append(i)
        self._hits += len(refs)
        self._misses += len(keys) - len(refs)
        return Match(
            refs=tuple(refs),
            tiers=(TierHit("redis", len(refs), now - oldest),) if refs else (),
            snapshots=tuple(snapshots),
            missed="" if len(refs) == len(keys) else missed,
        )

    async def load(self, refs: Sequence[RecordRef], into: Sequence[memoryview]) -> Loaded:
        """See `KVStore.load`."""
        done = 0
        while done < len(refs):
            batch = refs[done : done + _fitting([ref.nbytes for ref in refs[done : done + BATCH_RECORDS]])]
            values = await self._ask(Server.load, batch)
            if values is None:
                return Loaded(count=done, stopped="tier-down")
            aging: list[bytes] = []
            why = ""
            copied = COPY_NBYTES
            now = self.clock.wall()
            for ref, value in zip(batch, values, strict=True):
                if copied >= COPY_NBYTES:
                    copied = 0
                    await checkpoint()
                if why := self._trouble(ref, value, now):
                    break
                assert value is not None
                header = unpack(value)
                assert header is not None
                into[done][:] = memoryview(value)[header.data_at :]
                copied += ref.nbytes
                done += 1
                if now > header.expires - 0.75 * header.life_s:
                    aging.append(record_id(ref))
            if aging:
                await self._ask(Server.touch, aging, now, -1.0)
            if why:
                return Loaded(count=done, stopped=why)
        return Loaded(count=done)

    async def save(self, records: Sequence[KVRecord]) -> None:
        """See `KVStore.save`."""
        wanted: list[tuple[KVRecord, float]] = []
        for record in records:
            if record.ref.nbytes > self._max_record_nbytes:
                self._dropped += 1
            elif record.retention.disk and (life_s := self._life(record.retention)) > 0:
                wanted.append((record, life_s))
        while wanted:
            count = _fitting([record.ref.nbytes for record, _ in wanted[:BATCH_RECORDS]])
            batch, wanted = wanted[:count], wanted[count:]
            saved = await self._ask(Server.save, batch, self.clock.wall())
            if saved is None:
                self._dropped += len(batch) + len(wanted)
                return
            self._saved += saved
        if self.clock.now() >= self._next_sweep:
            self._next_sweep = self.clock.now() + SWEEP_S
            await self._ask(self._settle)
        elif records:
            self._totals = await self._ask(Server.totals) or self._totals

    async def touch(self, keys: Sequence[BlockKey], retention: Retention) -> Sequence[BlockKey]:
        """See `KVStore.touch`."""
        if (life_s := self._life(retention)) > 0 and keys:
            await self._ask(Server.use, list(keys), self.clock.wall(), life_s)
        return ()

    async def forget(self, which: NamespaceFilter) -> Forgotten:
        """See `KVStore.forget`. If the server cannot be reached: as soon as it can, and before anything else."""
        gone = await self._ask(Server.forget, which)
        if gone is None:
            self._owed.append(which)
            _log.warning("the redis server cannot be reached: %s is forgotten when it is back", which)
            return Forgotten(records=0, nbytes=0)
        self._totals = await self._ask(Server.totals) or self._totals
        return Forgotten(records=gone[0], nbytes=gone[1])

    def stats(self) -> KVStats:
        """See `KVStore.stats`; records and bytes as of the last save, of all engines with this prefix.

        What the server evicted on its own counts until its life would have been over.
        """
        return KVStats(
            records=self._totals[0],
            nbytes=self._totals[1],
            hits=self._hits,
            misses=self._misses,
            saved=self._saved,
            dropped=self._dropped,
            damaged=self._damaged,
            expired=self._expired,
            by_tier={"redis": self._totals[1]},
        )

    # -- the server -------------------------------------------------------------------------------------

    async def _ask(self, function: Callable[..., T], *args: object) -> T | None:
        """`function(server, *args)` in a thread; `None` if the server cannot be reached or refuses."""
        if self._server is None or self.clock.now() < self._resume_at:
            await checkpoint()
            return None
        try:
            with CancelScope(shield=True):
                while self._owed:
                    which = self._owed[0]
                    await self.offload(Server.forget, self._server, which)
                    self._owed = [each for each in self._owed if each is not which]
                result = await self.offload(function, self._server, *args)
        except redis.RedisError as error:
            self._failed(error)
            return None
        if self._pause_s:
            _log.warning("the redis server is back")
            self._pause_s = 0.0
        return result

    def _failed(self, error: redis.RedisError) -> None:
        if not isinstance(error, (redis.ConnectionError, redis.TimeoutError)):
            _log.warning("the redis server refused: %s", error)  # its memory is full, say: reading may go on
            return
        self._pause_s = min(LONGEST_PAUSE_S, 2 * self._pause_s) or FIRST_PAUSE_S
        self._resume_at = self.clock.now() + self._pause_s
        _log.warning("the redis server cannot be reached (%s); asked again in %.1f s", error, self._pause_s)

    def _settle(self, server: Server) -> None:
        self._expired += server.sweep(self.clock.wall())
        self._totals = server.totals()

    def _trouble(self, ref: RecordRef, value: bytes | None, now: float) -> str:
        """Why what the server gave is not the record; a word of `Match.missed`."""
        if value is None:
            return "absent"
        header: Header | None = unpack(value)
        if header is None or len(value) - header.data_at != ref.nbytes:
            self._damaged += 1
            return "damaged"
        return "expired" if header.expires <= now else ""

    def _life(self, retention: Retention) -> float:
        if retention.ttl_s is not None and retention.traffic != "none":
            return max(retention.ttl_s, retention.least_s)
        return max(self._lives[retention.traffic], retention.least_s if retention.traffic != "none" else 0.0)


def _fitting(sizes: Sequence[int]) -> int:
    """How many leading records of these sizes go into one round trip."""
    nbytes = 0
    for count, size in enumerate(sizes):
        nbytes += size
        if nbytes > BATCH_NBYTES and count:
            return count
    return len(sizes)
