"""Talking to the server, in a worker thread: plain functions that may raise `redis.RedisError`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from deepinfra.core.ids import BlockKey
from deepinfra.core.kv import KVRecord, NamespaceFilter, RecordRef
from deepinfra_kv_redis import scripts
from deepinfra_kv_redis.records import Header, member_of, pack, record_id, scope_of, unpack

__all__ = ("Server",)

CHUNK_KEYS = 512
"""Keys of one match script: about a millisecond of the server's time."""

CHUNK_MEMBERS = 500
"""Records that one script forgets."""


class Server:
    """One server, reached by a pool of connections; a dead connection is replaced once, without a wait."""

    def __init__(
        self, url: str, password_file: str | None, prefix: str, timeout_s: float, max_connections: int
    ) -> None:
        password = None if password_file is None else Path(password_file).expanduser().read_text().partition("\n")[0]
        secret = {} if password is None else {"password": password}
        pool = redis.BlockingConnectionPool.from_url(
            url,
            max_connections=max_connections,
            timeout=timeout_s,
            socket_timeout=timeout_s,
            socket_connect_timeout=timeout_s,
            retry=Retry(NoBackoff(), 1, supported_errors=(redis.ConnectionError,)),
            **secret,
        )
        self._client: Any = redis.Redis.from_pool(pool)  # typed for strings and asyncio too: an answer is one of four
        self._prefix = prefix.encode()
        self._match, self._save, self._touch, self._touch_last, self._forget = (
            self._client.register_script(text)
            for text in (scripts.MATCH, scripts.SAVE, scripts.TOUCH, scripts.TOUCH_LAST, scripts.FORGET)
        )

    def close(self) -> None:
        """Close every connection."""
        self._client.close()

    def totals(self) -> tuple[int, int]:
        """How many records are listed, and their bytes."""
        records, nbytes = self._client.hmget(self._name("totals"), "records", "nbytes")
        return int(records or 0), int(nbytes or 0)

    def match(self, keys: Sequence[BlockKey]) -> list[tuple[Header, int, Header | None]]:
        """What is held of `keys`, up to the first that is not: header, size of the string, header of the snapshot."""
        held: list[tuple[Header, int, Header | None]] = []
        for start in range(0, len(keys), CHUNK_KEYS):
            chunk = keys[start : start + CHUNK_KEYS]
            found = self._match(args=[self._prefix, *chunk])
            for head, size, snapshot in zip(found[::3], found[1::3], found[2::3], strict=True):
                if (header := unpack(head)) is None:
                    return held
                held.append((header, size, unpack(snapshot)))
            if len(held) < start + len(chunk):
                break
        return held

    def load(self, refs: Sequence[RecordRef]) -> list[bytes | None]:
        """Whole strings of records, in one round trip."""
        values: list[bytes | None] = self._client.mget([self._record(record_id(ref)) for ref in refs])
        return values

    def save(self, records: Iterable[tuple[KVRecord, float]], now: float) -> int:
        """Keep records for so many seconds, in one round trip; returns how many were not held."""
        pipeline = self._client.pipeline(transaction=False)
        for record, life_s in records:
            value, scope = pack(record, now, life_s), scope_of(record).hex()
            about = json.dumps([record.tenant, record.model, record.namespace.hex()])
            member = member_of(record, len(value))
            self._save(
                args=[self._prefix, record_id(record.ref), now, life_s, value, scope, member, about], client=pipeline
            )
        return sum(pipeline.execute())

    def touch(self, ids: Sequence[bytes], now: float, life_s: float) -> None:
        """Let records live on; a negative life is each record's own."""
        for start in range(0, len(ids), CHUNK_KEYS):
            self._touch(args=[self._prefix, now, life_s, *ids[start : start + CHUNK_KEYS]])

    def use(self, keys: Sequence[BlockKey], now: float, life_s: float) -> None:
        """Let the blocks of a chain live on, and of the snapshots at their ends the deepest one that is held."""
        self.touch(keys, now, life_s)
        for end in range(len(keys), 0, -CHUNK_KEYS):
            ids = [key + b"snapshot" for key in keys[max(0, end - CHUNK_KEYS) : end]]
            if self._touch_last(args=[self._prefix, now, life_s, *ids]):
                break

    def forget(self, which: NamespaceFilter) -> tuple[int, int]:
        """Remove records; returns how many, and their bytes."""
        records = nbytes = 0
        for scope, about in self._client.hgetall(self._name("scopes")).items():
            tenant, model, *namespace = json.loads(about)  # a version before wrote no namespace: it may be any
            if which.matches(tenant, model, bytes.fromhex(namespace[0]) if namespace else which.namespace):
                gone = self._clear(scope, "+inf")
                records, nbytes = records + gone[0], nbytes + gone[1]
        return records, nbytes

    def sweep(self, now: float) -> int:
        """Take records whose life is over off the lists; returns how many the server still had."""
        return sum(self._clear(scope, f"{now:.3f}")[0] for scope in self._client.hkeys(self._name("scopes")))

    def _clear(self, scope: bytes, latest: str) -> tuple[int, int]:
        records = nbytes = 0
        while True:
            listed, gone, freed = self._forget(args=[self._prefix, scope, latest, CHUNK_MEMBERS])
            records, nbytes = records + gone, nbytes + freed
            if listed < CHUNK_MEMBERS:
                return records, nbytes

    def _record(self, id_: bytes) -> bytes:
        return self._prefix + b":r:" + id_

    def _name(self, what: str) -> bytes:
        return self._prefix + b":" + what.encode()
