import random

import pydantic
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepinfra.core.drafts import DraftOutcome, TokenView
from deepinfra.speculators import Ngram, NgramOptions
from deepinfra.speculators.ngram import INDEX_BUDGET


def drafts_of(ngram: Ngram, tokens: list[int], limit: int = 4) -> tuple[int, ...]:
    drafts = ngram.propose([TokenView(1, tokens, limit)])
    return drafts[0].tokens if drafts else ()


def test_what_followed_before_is_drafted():
    assert drafts_of(Ngram(), [1, 2, 3, 4, 5, 6, 1, 2]) == (3, 4, 5, 6)


def test_new_tokens_get_no_draft():
    assert drafts_of(Ngram(), [1, 2, 3, 4, 5, 6]) == ()


def test_the_longest_earlier_match_wins_over_the_newest():
    tokens = [7, 1, 2, 50, 9, 1, 2, 60, 7, 1, 2]
    assert drafts_of(Ngram(max_drafts=1), tokens) == (50,)


def test_of_equal_matches_the_newest_wins():
    assert drafts_of(Ngram(max_drafts=1), [1, 2, 50, 1, 2, 60, 1, 2]) == (60,)


def test_a_repetition_goes_on_into_itself():
    assert drafts_of(Ngram(max_drafts=6), [5, 6, 5, 6, 5, 6], limit=6) == (5, 6, 5, 6, 5, 6)


def test_matches_shorter_than_min_match_do_not_count():
    tokens = [1, 2, 3, 9, 2, 3]
    assert drafts_of(Ngram(min_match=2), tokens) == (9, 2, 3, 9)
    assert drafts_of(Ngram(min_match=3), tokens) == ()


@given(tokens=st.lists(st.integers(0, 3), min_size=1, max_size=80), cuts=st.lists(st.integers(1, 20), max_size=10))
def test_drafts_do_not_depend_on_how_the_tokens_came(tokens: list[int], cuts: list[int]):
    whole = drafts_of(Ngram(), tokens)
    grown, ngram = [], Ngram()
    for cut in cuts:
        grown.extend(tokens[len(grown) : len(grown) + cut])
        drafts_of(ngram, grown) if grown else None
    grown.extend(tokens[len(grown) :])
    assert drafts_of(ngram, grown) == whole


@given(tokens=st.lists(st.integers(0, 2), min_size=3, max_size=60))
def test_a_draft_continues_an_earlier_occurrence_of_the_longest_suffix(tokens: list[int]):
    ngram = Ngram(max_drafts=1, min_match=2, max_match=4)
    found = drafts_of(ngram, tokens)
    best: dict[int, set[int]] = {}
    for end in range(1, len(tokens)):
        match = 0
        while match < min(4, end) and tokens[end - 1 - match] == tokens[-1 - match]:
            match += 1
        if match >= 2:
            best.setdefault(match, set()).add(tokens[end])
    if not best:
        assert found == ()
    else:
        # Among the newest candidates only, so any length may win, but it is one that occurred.
        assert found[0] in set().union(*best.values())


def test_confidence_follows_what_was_accepted_for_that_match_length():
    ngram = Ngram(max_drafts=2, min_match=2, max_match=4)
    assert ngram.confidence(2) == 0.5
    for _ in range(50):
        ngram.propose([TokenView(1, [8, 9, 1, 2, 3, 4, 0, 9, 1, 2], 2)])
        ngram.observe([DraftOutcome(1, 2, 2)])
    assert ngram.confidence(3) > 0.9
    assert ngram.confidence(2) == 0.5
    for _ in range(400):
        ngram.propose([TokenView(1, [8, 9, 1, 2, 3, 4, 0, 9, 1, 2], 2)])
        ngram.observe([DraftOutcome(1, 2, 0)])
    assert ngram.confidence(3) < 0.2


def test_a_match_length_that_is_no_longer_verified_gets_another_chance():
    ngram = Ngram(min_match=2, max_match=2)
    tokens = [1, 2, 3, 1, 2]
    for _ in range(100):
        ngram.propose([TokenView(1, tokens, 4)])
        ngram.observe([DraftOutcome(1, 4, 0)])
    low = ngram.confidence(2)
    for _ in range(1000):
        ngram.propose([TokenView(1, tokens, 4)])
    assert low < 0.1
    assert ngram.confidence(2) > 0.25


def test_confidence_follows_what_came_where_the_gate_held_drafts_back():
    ngram, tokens = Ngram(min_match=2, max_match=2), [5, 6, 5, 6]
    for _ in range(20):
        ngram.propose([TokenView(1, tokens, 4)])
        tokens.append(tokens[-2])
    assert ngram.confidence(2) > 0.9
    for token in range(100, 200, 5):
        tokens += [token, 5, 6]  # never what followed before
        ngram.propose([TokenView(1, tokens, 4)])
        tokens.append(token + 1)
        ngram.propose([TokenView(1, tokens, 4)])
    assert ngram.confidence(2) < 0.6


def test_a_draft_that_was_verified_is_learned_from_once():
    ngram, tokens = Ngram(min_match=2, max_match=2), [5, 6, 5, 6]
    ngram.propose([TokenView(1, tokens, 4)])
    ngram.observe([DraftOutcome(1, 1, 1)])
    once = ngram.confidence(2)
    ngram.propose([TokenView(1, [*tokens, 5, 0], 4)])
    assert ngram.confidence(2) == once


def test_a_long_prompt_is_indexed_over_several_calls():
    draw = random.Random(0)
    prompt = [draw.randrange(10**6) for _ in range(3 * INDEX_BUDGET)]
    tokens = prompt + prompt[-50:-40]
    ngram = Ngram()
    calls = 1
    while not drafts_of(ngram, tokens):
        calls += 1
    assert calls == 3


def test_forgetting_frees_the_index():
    ngram = Ngram()
    for seq in range(20):
        ngram.propose([TokenView(seq, [1, 2, 3, 1, 2], 4)])
        ngram.forget(seq)
    assert not ngram._indices
    assert not ngram._drafted


def test_options_have_the_parts_own_defaults():
    assert Ngram().max_drafts == NgramOptions().max_drafts
    with pytest.raises(pydantic.ValidationError):
        NgramOptions(min_match=5, max_match=4)
