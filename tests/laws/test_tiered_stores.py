"""The whole-engine law over tiers that lie, truncate, flip bits, raise, hang and come back."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import anyio
import pytest

from deepinfra.kvstores import MemoryStore, Tier, TieredStore
from deepinfra.kvstores.tiered import guard
from deepinfra.testing.engine import Coverage, random_scenario, run_scenario
from deepinfra.testing.faults import BrokenStore, FlakyStore

BACKENDS = ("asyncio", "trio")


class Fickle(BrokenStore):
    """Raises or hangs in some calls."""

    def __init__(self, inner: FlakyStore, rng: random.Random) -> None:
        super().__init__(inner)
        self.rng, self.struck = rng, Counter[str]()

    async def _called(self, method: str) -> None:
        self.mode = self.rng.choices(("works", "raises", "hangs"), (40, 2, 1))[0]
        self.struck[self.mode] += 1
        await super()._called(method)


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "FIRST_PAUSE_S", 0.002)
    monkeypatch.setattr(guard, "LONGEST_PAUSE_S", 0.01)


def soak(first: int, count: int) -> Counter[str]:
    """Run scenarios over three tiers; returns what was exercised."""
    coverage = Coverage()
    for seed in range(first, first + count):
        rng = random.Random(seed)
        scenario = replace(random_scenario(rng), executor="sound")
        fast, slow = (Fickle(FlakyStore(MemoryStore(), rng, rate=0.25), rng) for _ in range(2))
        slow.durable = True
        write = rng.choice(("all", "second-touch", "prefix-depth:3"))
        small = MemoryStore(capacity_nbytes=rng.choice((2_000, 10_000, 1 << 20)))
        tiers = [fast, slow] if seed % 4 == 0 else [small, fast, Tier(slow, write)]
        store = TieredStore(tiers, queue_nbytes=rng.choice((1_000, 1 << 20)), timeout_s=0.02, drain_s=0.1)
        wrong = anyio.run(
            lambda scenario=scenario, store=store: run_scenario(scenario, coverage, store=store),
            backend=BACKENDS[seed % 2],
        )
        assert wrong == [], (seed, scenario)
        for tier in (fast, slow):
            coverage.counts.update(tier.struck)
            coverage.counts.update(tier.inner.injected)
    return coverage.counts


FAULTS = ("raises", "hangs", "lie", "shorten", "truncate", "flip", "swap", "phantom", "drop", "stall")


def missing(counts: Counter[str]) -> list[str]:
    """What was to be exercised and was not."""
    cached = sum(number for name, number in counts.items() if name.startswith("cached ") and name != "cached device")
    wanted = {name: counts[name] for name in (*FAULTS, "records damaged")} | {"cached below the device": cached}
    return [name for name, number in wanted.items() if not number]


def test_tiers_that_break_change_no_text_and_keep_nothing_of_the_engine() -> None:
    counts = soak(0, 40)
    for first in range(40, 400, 20):  # time limits decide how far a scenario comes, and so which faults strike
        if missing(counts):
            counts += soak(first, 20)
    assert missing(counts) == [], counts


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_long_soak_of_tiers_that_break_finds_nothing() -> None:
    counts = soak(20_000, 300)
    assert missing(counts) == [], counts
