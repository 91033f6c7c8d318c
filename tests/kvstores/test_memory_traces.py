"""MemoryStore on traces: hit rates exactly those of independent programs, and what the default policy gains."""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

import pytest

from deepinfra.core.kv import Retention
from deepinfra.interfaces.given import InlineOffload
from deepinfra.kvstores import MemoryStore
from deepinfra.kvstores.leaves import cost
from deepinfra.testing.clock import ManualClock
from deepinfra.testing.traces import TRACE_BLOCK_TOKENS, TraceRequest, agent_trace, read_trace, replay

DATA = Path(__file__).parents[1] / "data" / "traces"
NAMES = ("conversation", "synthetic")
KNOWN = {row["trace"]: row for row in json.loads((DATA / "hit_rate.json").read_text())}
NBYTES = 8
ONE = cost(NBYTES, TRACE_BLOCK_TOKENS)
JUST = 0.0005
"""A life in the figures includes its last millisecond, ours does not."""

pytestmark = pytest.mark.parametrize("anyio_backend", ["asyncio"])


AGENTS = {
    (1, 0.0): "7922c021b9d27bd8d7b102cf366b237a0b4a1536861d8307ea05d4c59da203ba",
    (2, 0.0): "75d4935098ac609bb1a924327de22b64f83a4b801478c737cb19532cab04d76e",
    (3, 0.0): "f135068a3d1196aa8f81dc0000ab08033faedce1f316b2806602114cb32f679e",
    (1, 0.02): "6e061cc55d9f26acd303edede92f9377dab4343c98f22835df97cd131f3af2ae",
}
"""SHA-256 of what the independent program that agents were first made up by prints, by seed and chance of a summary."""


def trace(name: str) -> list[TraceRequest]:
    return read_trace(DATA / f"mooncake_{name}.jsonl.xz")


def known(name: str) -> dict[str, dict[str, float]]:
    return KNOWN[f"mooncake_{name}.jsonl.xz"]  # type: ignore[no-any-return]


def percent(hits: Sequence[int], requests: Sequence[TraceRequest]) -> float:
    return round(100 * sum(hits) / sum(len(request.blocks) for request in requests), 2)


def token_hits(hits: Sequence[int], requests: Sequence[TraceRequest]) -> int:
    return sum(min(hit * TRACE_BLOCK_TOKENS, r.tokens) for hit, r in zip(hits, requests, strict=True))


async def hits_of(
    requests: Sequence[TraceRequest], blocks: int, policy: str = "reuse", ttl_s: float | None = None
) -> list[int]:
    clock = ManualClock()
    store = MemoryStore(capacity_nbytes=blocks * ONE, policy=policy)  # type: ignore[arg-type]
    store.give(clock, InlineOffload())
    async with store:
        hits = await replay(store, clock, requests, nbytes=NBYTES, retention=lambda _: Retention(ttl_s=ttl_s))
        assert store.stats().records <= blocks
    return hits


def lru(requests: Sequence[TraceRequest], blocks: int) -> list[int]:
    """Blocks one by one, last used last out, the tail of a prompt touched before its head."""
    held: OrderedDict[int, None] = OrderedDict()
    hits = []
    for request in requests:
        hits.append(next((i for i, block in enumerate(request.blocks) if block not in held), len(request.blocks)))
        for block in reversed(request.blocks):
            held[block] = None
            held.move_to_end(block)
        while len(held) > blocks:
            held.popitem(last=False)
    return hits


def sliding(requests: Sequence[TraceRequest], seconds: float) -> list[int]:
    """Blocks that were asked for at most so long ago, however many."""
    seen: dict[int, int] = {}
    hits = []
    for r in requests:
        alive = (r.at_ms - seen.get(block, r.at_ms - 10**9) <= seconds * 1000 for block in r.blocks)
        hits.append(next((i for i, is_alive in enumerate(alive) if not is_alive), len(r.blocks)))
        seen.update(dict.fromkeys(r.blocks, r.at_ms))
    return hits


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("blocks", [500, 1_500])
async def test_lru_hits_block_for_block_as_lists_do(name: str, blocks: int) -> None:
    requests = trace(name)[:600]
    assert await hits_of(requests, blocks, "lru") == lru(requests, blocks)


@pytest.mark.parametrize("name", NAMES)
async def test_lives_hit_block_for_block_as_a_dictionary_of_times_does(name: str) -> None:
    requests = trace(name)[:600]
    assert await hits_of(requests, 10**6, ttl_s=60 + JUST) == sliding(requests, 60)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("blocks", [500, 1_000, 2_000, 5_000, 10_000, 20_000, 50_000, 100_000])
async def test_lru_has_the_published_hit_rates(name: str, blocks: int) -> None:
    requests = trace(name)
    assert percent(await hits_of(requests, blocks, "lru"), requests) == known(name)["lru_tail_first_pct"][str(blocks)]


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("seconds", [60, 300, 600, 1_200, 1_800, 3_600])
async def test_sliding_lives_have_the_published_hit_rates(name: str, seconds: int) -> None:
    requests = trace(name)
    hits = await hits_of(requests, 10**6, ttl_s=seconds + JUST)
    assert percent(hits, requests) == known(name)["sliding_ttl_pct"][str(seconds)]


@pytest.mark.parametrize(("name", "blocks", "gain"), [("conversation", 1_000, 1.4), ("synthetic", 1_000, 1.4)])
async def test_the_default_policy_hits_more_than_lru(name: str, blocks: int, gain: float) -> None:
    requests = trace(name)[:800]
    assert sum(await hits_of(requests, blocks)) > gain * sum(lru(requests, blocks))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "whole", "halves"), [("conversation", 17.1, (16.4, 17.8)), ("synthetic", 32.0, (12.4, 45.4))]
)
async def test_the_default_policy_reaches_what_is_claimed_for_5000_blocks_in_both_halves(
    name: str, whole: float, halves: tuple[float, float]
) -> None:
    requests = trace(name)
    half = len(requests) // 2
    hits = await hits_of(requests, 5_000)
    assert percent(hits, requests) >= whole
    assert percent(hits[:half], requests[:half]) >= halves[0]
    assert percent(hits[half:], requests[half:]) >= halves[1]


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("blocks", [1_000, 20_000])
async def test_the_default_policy_hits_no_less_than_lru_at_any_size(name: str, blocks: int) -> None:
    requests = trace(name)
    assert sum(await hits_of(requests, blocks)) >= sum(lru(requests, blocks))


@pytest.mark.parametrize(("seed", "compact"), AGENTS)
async def test_days_of_agents_are_those_of_the_program_they_are_compared_by(seed: int, compact: float) -> None:
    digest = hashlib.sha256()
    for request in agent_trace(seed, compact=compact):
        digest.update(json.dumps(list(request[:4]), separators=(",", ":")).encode() + b"\n")
    assert digest.hexdigest() == AGENTS[seed, compact]


@pytest.mark.parametrize(
    ("seed", "sessions", "blocks"),
    [
        (1, 20, 500),
        *(
            pytest.param(seed, 400, blocks, marks=pytest.mark.slow)
            for seed, blocks in ((1, 5_000), (2, 5_000), (3, 5_000))
        ),
    ],
)
async def test_on_days_of_agents_the_default_policy_loses_no_tokens_to_lru(
    seed: int, sessions: int, blocks: int
) -> None:
    requests = agent_trace(seed, sessions=sessions)
    hits = await hits_of(requests, blocks, ttl_s=30 * 86_400.0)
    assert token_hits(hits, requests) >= token_hits(lru(requests, blocks), requests)
