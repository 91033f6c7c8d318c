"""Ranks: which record goes first, by policy."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepinfra.core.ids import BlockKey
from deepinfra.kvstores.policy import CAME_BACK_S, CAME_BACK_WHOLE_S, GHOSTS, LITTLE_TOKENS, RANKINGS, Lru, Reuse

MICRO = 1e-6


def keys(count: int, start: int = 0) -> list[BlockKey]:
    return [BlockKey(i.to_bytes(8, "big").ljust(32, b"k")) for i in range(start, start + count)]


@given(st.lists(st.tuples(st.floats(0, 100), st.sampled_from(["asked", "used", "saved"])), max_size=40))
def test_lru_ranks_by_last_use_even_while_the_clock_stands_still(uses: list[tuple[float, str]]) -> None:
    ranks, now, last = Lru(), 1_000.0, -1
    for pause, use in uses:
        now += round(pause)
        if use == "asked":
            rank = ranks.asked(keys(3), 2, 16, now)
        else:
            rank = ranks.used(now) if use == "used" else ranks.saved(b"k" * 32, now)
        assert rank > last
        last = rank


@pytest.mark.parametrize("policy", list(RANKINGS))
def test_of_two_first_prompts_the_later_stays_longer(policy: str) -> None:
    ranks = RANKINGS[policy]()  # type: ignore[index]
    assert ranks.saved(b"a" * 32, 1.0) < ranks.saved(b"b" * 32, 1.0) < ranks.saved(b"c" * 32, 2.0)


def test_what_came_back_outlasts_minutes_of_first_prompts() -> None:
    ranks = Reuse()
    back = ranks.asked(keys(100), 50, 512, 1_000.0)
    assert ranks.saved(b"a" * 32, 1_000.0 + CAME_BACK_S - 1) < back
    assert ranks.saved(b"b" * 32, 1_000.0 + CAME_BACK_S + 1) > back


def test_a_prompt_with_little_new_stays_longer_yet() -> None:
    ranks = Reuse()
    many, few = 100, LITTLE_TOKENS // 512
    much = ranks.asked(keys(many), many - few - 1, 512, 0.0)
    little = ranks.asked(keys(many), many - few, 512, 0.0)
    assert (little - much) * MICRO == pytest.approx(CAME_BACK_WHOLE_S - CAME_BACK_S, abs=0.001)


def test_little_is_counted_in_tokens_not_in_blocks() -> None:
    ranks = Reuse()
    blocks_of_16 = ranks.asked(keys(200), 200 - LITTLE_TOKENS // 16, 16, 0.0)
    assert blocks_of_16 * MICRO == pytest.approx(CAME_BACK_WHOLE_S, abs=0.001)


def test_what_was_evicted_and_is_saved_again_has_come_back() -> None:
    ranks = Reuse()
    ranks.evicted(b"a" * 32)
    assert ranks.saved(b"a" * 32, 0.0) * MICRO == pytest.approx(CAME_BACK_S, abs=0.001)
    assert ranks.saved(b"a" * 32, 0.0) * MICRO < 1, "it was remembered until it was held again"


def test_what_was_evicted_counts_as_known_of_the_prompt_that_asks_for_it() -> None:
    ranks, prompt = Reuse(), keys(20)
    for key in reversed(prompt[4:]):
        ranks.evicted(key)
    held = ranks.asked(prompt, 4, 512, 0.0)
    assert held * MICRO == pytest.approx(CAME_BACK_WHOLE_S, abs=0.001)
    assert ranks.saved(prompt[4], 0.0) == held


def test_a_first_prompt_of_a_few_tokens_is_not_taken_for_one_that_came_back() -> None:
    ranks = Reuse()
    ranks.asked(keys(1), 0, 512, 0.0)
    assert ranks.saved(keys(1)[0], 0.0) * MICRO < 1


def test_the_memory_of_what_was_evicted_is_bounded() -> None:
    ranks, gone = Reuse(), keys(GHOSTS + 100)
    for key in gone:
        ranks.evicted(key)
    assert len(ranks._ghosts) == GHOSTS
    assert ranks.saved(gone[0], 0.0) < ranks.saved(gone[-1], 0.0) - 1e6
