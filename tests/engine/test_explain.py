"""Where the search for a prompt's blocks ends, and what is said of it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepinfra.core.ids import BlockKey
from deepinfra.core.kv import Match, TierHit
from deepinfra.engine.explain import Miss, explanation_of, look, shared, spelled
from deepinfra.interfaces.given import InlineOffload
from deepinfra.kvstores import MemoryStore, TieredStore
from deepinfra.testing.clock import ManualClock
from deepinfra.testing.kvrecords import BLOCK_SIZE, chain, keys_of
from deepinfra.testing.tiny import BOS, USER, TinyRecipe

HELD = (1, 2, 3, 4, 5, 6, 7, 8)


def root_of(tenant: str = "public") -> BlockKey:
    return BlockKey(chain(1, 2, tenant=tenant)[0].namespace)


async def looked(
    asked: Sequence[int],
    *,
    store: MemoryStore | None = None,
    held: Sequence[int] = HELD,
    tenant: str = "public",
    device: int = 0,
) -> Miss:
    async with store or MemoryStore() as entered:
        await entered.save(chain(*held))
        keys = keys_of(chain(*asked, tenant=tenant))
        return await look(entered, root_of(tenant), keys, asked, BLOCK_SIZE, device=device)


async def test_a_search_ends_at_the_first_block_that_is_not_held() -> None:
    miss = await looked((1, 2, 3, 4, 5, 9, 7, 8))
    assert (miss.blocks, miss.missed, miss.other) == (2, "absent", (5, 6, 7, 8))
    assert [tier.tier for tier in miss.tiers] == ["ram"]


@given(st.lists(st.integers(0, 3), min_size=8, max_size=8), st.lists(st.integers(0, 3), min_size=8, max_size=8))
def test_what_is_shown_begins_as_long_as_possible_like_the_prompt(held: list[int], asked: list[int]) -> None:
    import anyio

    miss = anyio.run(lambda: looked(asked, held=held))
    common = shared(held, asked)
    assert miss.blocks == common // BLOCK_SIZE
    if common < len(asked):
        start = miss.blocks * BLOCK_SIZE
        assert shared(miss.other, asked[start:]) == common - start
        assert miss.other == tuple(held[start : start + len(miss.other)])
    else:
        assert miss.missed == ""


async def test_the_device_comes_first_and_the_tiers_behind_it_are_cut() -> None:
    miss = await looked(HELD, device=3)
    assert [(tier.tier, tier.count) for tier in miss.tiers] == [("device", 3), ("ram", 1)]


async def test_a_store_that_lost_the_beginning_is_asked_about_the_next_block() -> None:
    miss = await looked((9, 9, *HELD[2:], 1, 1), device=4)
    assert (miss.blocks, miss.missed) == (4, "absent")


async def test_nothing_of_a_stranger_is_shown_whatever_the_store_says() -> None:
    class Liar(MemoryStore):
        async def successors(self, parent: BlockKey, most: int = 64) -> Sequence[tuple[int, ...]]:
            await super().successors(parent, most)
            return [(66, 66)]

    miss = await looked((1, 2, 9, 9), store=Liar())
    assert (miss.missed, miss.other) == ("absent", ())


async def test_an_expired_block_is_told_as_such() -> None:
    clock = ManualClock()
    store = MemoryStore(default_ttl_s=10)
    store.give(clock, InlineOffload())
    async with store:
        await store.save(chain(*HELD))
        clock.advance(11)
        miss = await look(store, root_of(), keys_of(chain(*HELD)), HELD, BLOCK_SIZE)
    assert (miss.missed, miss.blocks) == ("expired", 0)


async def test_two_tiers_are_told_apart() -> None:
    class Slow(MemoryStore):
        async def match(self, keys: Sequence[BlockKey]) -> Match:
            match = await super().match(keys)
            return Match(
                refs=match.refs,
                tiers=tuple(TierHit("slow", hit.count, hit.age_s) for hit in match.tiers),
                missed=match.missed,
            )

    fast, slow = MemoryStore(), Slow()
    async with TieredStore([fast, slow]) as store:
        await slow.save(chain(*HELD))
        await fast.save(chain(*HELD[:4]))
        miss = await look(store, root_of(), keys_of(chain(*HELD)), HELD, BLOCK_SIZE, device=1)
    assert [(tier.tier, tier.count) for tier in miss.tiers] == [("device", 1), ("ram", 1), ("slow", 2)]


# -- in words -------------------------------------------------------------------------------------


def said(miss: Miss, tokens: Sequence[int] = tuple(b"abcdefgh"), cached: int | None = None) -> tuple[str, str]:
    explanation = explanation_of(miss, tokens, TinyRecipe(), cached=cached)
    return explanation.why, explanation.words


RAM = (TierHit("ram", 2, 5.0),)


@pytest.mark.parametrize("missed", ["expired", "evicted", "damaged", "tier-down", "no-store"])
def test_each_reason_has_its_own_words(missed: str) -> None:
    why, words = said(Miss(2, RAM, missed))
    assert why == missed
    assert words.endswith(".")


def test_what_could_not_be_loaded_is_told_instead_of_what_was_found() -> None:
    assert said(Miss(2, RAM, "absent"), cached=4)[0] == "never-seen"
    why, words = said(Miss(2, RAM, "absent"), cached=2)
    assert why == "damaged"
    assert "2 tokens were reused" in words


def test_held_blocks_without_a_snapshot_are_no_failed_load() -> None:
    assert said(Miss(2, RAM, "", usable=0), cached=0)[0] == "no-snapshot"
    why, words = said(Miss(2, RAM, "absent", usable=2), cached=2)
    assert why == "never-seen"
    assert words.startswith("Of what is held, 2 tokens can be reused")


def test_text_around_the_difference_is_bounded() -> None:
    tokens = tuple(b"a" * 5000)
    differs = explanation_of(Miss(8, (), "absent", (*tokens[:4], *b"bcde")), tokens, TinyRecipe()).differs
    assert differs is not None
    assert (differs.position, differs.before, differs.held) == (4, "aaaa", "bcde")
    assert len(differs.asked) == 16


def test_control_tokens_and_unknown_ids_can_be_seen() -> None:
    tokenizer = TinyRecipe().tokenizer
    assert spelled((BOS, *b"hi", USER, 99_999), tokenizer, {BOS: "<s>"}) == "<s>hi<[257]><[99999]>"
    assert spelled(tuple("é".encode()), tokenizer, {}) == "é"


def test_without_text_neither_words_nor_place_are_left() -> None:
    explanation = explanation_of(Miss(2, RAM, "absent", tuple(b"eX")), tuple(b"abcdef"), TinyRecipe())
    assert "X" in explanation.words
    bare = explanation.without_text()
    assert (bare.why, bare.differs) == ("differs", None)
    assert "X" not in bare.words
    assert "5" not in bare.words.partition("(")[0]
