"""Traces of requests by the ids of their blocks, and their replay through a store in virtual time."""

from __future__ import annotations

import hashlib
import json
import lzma
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from deepinfra.core.ids import BlockKey
from deepinfra.core.kv import KVRecord, RecordRef, Retention, Traffic
from deepinfra.interfaces.kvstore import KVStore
from deepinfra.testing.clock import ManualClock

__all__ = ("TRACE_BLOCK_TOKENS", "TraceRequest", "agent_trace", "read_trace", "replay")

TRACE_BLOCK_TOKENS = 512
"""Tokens of a block in traces of the Mooncake format."""


class TraceRequest(NamedTuple):
    """A request: milliseconds from the start, prompt tokens, ids of their blocks, kind of traffic, output tokens.

    An equal id is an equal prefix up to the end of that block; the last block may be partial.
    """

    at_ms: int
    tokens: int
    blocks: tuple[int, ...]
    traffic: Traffic = "default"
    output: int = 1


def read_trace(path: Path) -> list[TraceRequest]:
    """Requests of a file in the Mooncake format (`.jsonl`, or `.jsonl.xz`), by time.

    Source: the format is that of the traces in github.com/kvcache-ai/Mooncake (FAST'25).
    """
    with lzma.open(path, "rt") if path.suffix == ".xz" else path.open() as file:
        rows = [json.loads(line) for line in file if line.strip()]
    found = [
        TraceRequest(
            int(row["timestamp"]), row["input_length"], tuple(row["hash_ids"]), output=row.get("output_length", 1)
        )
        for row in rows
    ]
    return sorted(found, key=lambda request: request.at_ms)


def agent_trace(
    seed: int, *, sessions: int = 400, days: float = 8.0, agents: float = 0.7, compact: float = 0.0
) -> list[TraceRequest]:
    """Days of agents and chats: contexts that grow turn by turn, with pauses of minutes, hours and nights.

    Made up: it shows what a mechanism does, never what a hit rate is worth. `agents` is the share of sessions with
    tools, `compact` the chance at each turn that the history is replaced by a summary.
    """
    rng = random.Random(seed)
    ids = iter(range(1, 1 << 62))
    systems = [[next(ids) for _ in range(blocks)] for blocks in (24, 16, 8, 2)]
    found: list[TraceRequest] = []
    for _ in range(sessions):
        traffic: Traffic = "agent" if rng.random() < agents else "chat"
        found += _session(rng, traffic, rng.uniform(0, days * 86_400), days, systems, compact, ids)
    return sorted(found, key=lambda request: request.at_ms)


def _session(
    rng: random.Random,
    traffic: Traffic,
    start: float,
    days: float,
    systems: Sequence[Sequence[int]],
    compact: float,
    ids: Iterator[int],
) -> Iterator[TraceRequest]:
    agent = traffic == "agent"
    head = rng.choice(systems)
    blocks, tail, at = list(head), 0, start  # whole blocks, tokens behind them
    turns = min(120, 1 + int(rng.expovariate(1 / (30 if agent else 5))))
    rng.randrange(8)  # a tenant, which nobody asks for; without it all that follows would be drawn otherwise
    for turn in range(turns):
        new = int(rng.lognormvariate(7.5, 0.7)) if agent else int(rng.lognormvariate(5.5, 1.0))
        output = max(1, int(rng.lognormvariate(5.5, 0.8)))
        if turn and rng.random() < compact:
            blocks, tail = list(head), 0
            new += 3000
        tail += new
        while tail >= TRACE_BLOCK_TOKENS:
            blocks.append(next(ids))
            tail -= TRACE_BLOCK_TOKENS
        asked = (*blocks, next(ids)) if tail else tuple(blocks)  # a partial block is one of its own
        yield TraceRequest(int(at * 1000), len(blocks) * TRACE_BLOCK_TOKENS + tail, asked, traffic, output)
        tail += output
        if len(blocks) * TRACE_BLOCK_TOKENS > 180_000:
            return
        at += rng.expovariate(1 / (12 if agent else 90)) + output / 60
        pause = rng.random()
        if pause < (0.03 if agent else 0.10):
            at += rng.uniform(8, 40) * 3600
        elif pause < (0.08 if agent else 0.30):
            at += rng.uniform(300, 3600)
        if at > start + days * 86_400:
            return


async def replay(
    store: KVStore,
    clock: ManualClock,
    trace: Sequence[TraceRequest],
    *,
    nbytes: int = 16,
    retention: Callable[[TraceRequest], Retention] = lambda request: Retention(traffic=request.traffic),
) -> list[int]:
    """Put requests through a store as a server does: match, load and touch what is held, save the rest.

    Args:
        store: Entered, with `clock` as its clock.
        clock: Moved to the time of each request.
        trace: By time.
        nbytes: Of a record, at most 32.
        retention: What a request's blocks are kept by.

    Returns:
        For each request the leading blocks that it found.

    Raises:
        AssertionError: A record came back with other bytes than were saved.
    """
    root = BlockKey(hashlib.sha256(b"trace").digest())
    tokens, start = tuple(range(TRACE_BLOCK_TOKENS)), clock.wall()
    hits: list[int] = []
    for request in trace:
        clock.advance(max(0.0, start + request.at_ms / 1000 - clock.wall()))
        keys = [BlockKey(hashlib.blake2b(b"%d" % block, digest_size=32).digest()) for block in request.blocks]
        refs = (await store.match(keys)).refs
        buffers = [bytearray(nbytes) for _ in refs]
        loaded = await store.load(refs, [memoryview(buffer) for buffer in buffers])
        assert all(buffer == key[:nbytes] for buffer, key in zip(buffers[: loaded.count], keys, strict=False))
        hits.append(loaded.count)
        kept = retention(request)
        if loaded.count:
            await store.touch(keys[: loaded.count], kept)
        await store.save(
            [
                KVRecord(
                    ref=RecordRef(key, "block", nbytes),
                    parent=keys[i - 1] if i else root,
                    namespace=root,
                    tenant="public",
                    model="trace",
                    tokens=tokens,
                    retention=kept,
                    data=memoryview(key)[:nbytes],
                )
                for i, key in enumerate(keys[loaded.count :], loaded.count)
            ]
        )
    return hits
