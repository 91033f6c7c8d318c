"""FlakyStore breaks what it wraps, in every way it promises, and reproducibly."""

from __future__ import annotations

import random

import pytest

from deepinfra.interfaces.given import InlineOffload
from deepinfra.kvstores import MemoryStore
from deepinfra.testing.clock import ManualClock
from deepinfra.testing.faults import FlakyStore
from deepinfra.testing.kvrecords import chain, content, keys_of


async def history(seed: int, *, rate: float = 0.3, kinds: frozenset[str] = frozenset()) -> tuple[FlakyStore, list[str]]:
    """What a client sees of a flaky store: one word per record it was promised."""
    store = FlakyStore(MemoryStore(), random.Random(seed), rate=rate, kinds=kinds)
    store.give(ManualClock(), InlineOffload())
    seen = []
    async with store:
        for start in range(30):
            records = chain(start, *range(9))
            await store.save(records)
            match = await store.match(keys_of(records))
            buffers = [bytearray(ref.nbytes) for ref in match.refs]
            loaded = await store.load(match.refs, [memoryview(buffer) for buffer in buffers])
            for i, (ref, buffer) in enumerate(zip(match.refs, buffers, strict=True)):
                state = "missing" if i >= loaded.count else "right" if bytes(buffer) == content(ref) else "wrong"
                seen.append(state)
    return store, seen


async def test_every_kind_of_fault_strikes() -> None:
    store, seen = await history(1)
    assert set(store.injected) == FlakyStore.KINDS
    assert set(seen) == {"missing", "right", "wrong"}


async def test_equal_seeds_give_equal_faults() -> None:
    assert (await history(5))[1] == (await history(5))[1]
    assert (await history(5))[1] != (await history(6))[1]


async def test_without_faults_it_is_the_inner_store() -> None:
    store, seen = await history(1, rate=0.0)
    assert not store.injected
    assert set(seen) == {"right"}


@pytest.mark.parametrize("kind", ["flip", "swap", "phantom"])
async def test_a_corrupting_fault_gives_wrong_bytes(kind: str) -> None:
    store, seen = await history(2, kinds=frozenset((kind, "drop", "lie")))
    assert store.injected[kind]
    assert "wrong" in seen


@pytest.mark.parametrize("kind", ["shorten", "truncate", "drop", "stall"])
async def test_a_losing_fault_gives_no_wrong_bytes(kind: str) -> None:
    store, seen = await history(2, kinds=frozenset((kind,)))
    assert store.injected[kind]
    assert "wrong" not in seen


def test_an_unknown_fault_is_refused() -> None:
    with pytest.raises(ValueError, match="'fli'"):
        FlakyStore(MemoryStore(), random.Random(0), kinds=frozenset(("fli",)))
