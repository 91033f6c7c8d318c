from __future__ import annotations

import json
import re
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers

from deepinfra.errors import InjectionError
from deepinfra.recipes.encoding.vocabulary import SafeEncoder, _harmless, _longest_of, control_tokens
from deepinfra.testing.textmodel import TrainedTextModel

MARKERS = ("<s>", "</s>", "<|user|>", "<think>")


def definition(tokenizer: tokenizers.Tokenizer) -> dict[str, Any]:
    made: dict[str, Any] = json.loads(tokenizer.to_str())
    return made


def encoder(
    tokenizer: tokenizers.Tokenizer, cache_chars: int = 0, original: tokenizers.Tokenizer | None = None
) -> SafeEncoder:
    data = definition(tokenizer)
    return SafeEncoder(data, control_tokens(data, (), ()), cache_chars, original)


TOKENIZERS = {kind: TrainedTextModel(None, MARKERS, kind=kind).tokenizer() for kind in ("byte-level", "sentencepiece")}
ENCODERS = {(kind, cache): encoder(made, cache) for kind, made in TOKENIZERS.items() for cache in (0, 10_000)}

SHARING = {kind: encoder(made, 0, made) for kind, made in TOKENIZERS.items()}

texts = st.lists(
    st.sampled_from([*MARKERS, "<|us", "er|>", "<", ">", " ", "\n", "hello", "é日🙂", "\ue0f0", "12"]) | st.text()
)


@pytest.mark.parametrize("kind", sorted(TOKENIZERS))
@pytest.mark.parametrize("cache", [0, 10_000])
@settings(max_examples=150)
@given(parts=st.lists(st.tuples(texts, st.sampled_from(MARKERS)), max_size=4), last=texts)
def test_ids_are_those_of_the_models_tokenizer_where_text_has_no_markers(kind, cache, parts, last) -> None:
    text, ranges = "", []
    for words, marker in parts:
        text += _clean("".join(words))
        ranges.append((len(text), len(text) + len(marker)))
        text += marker
    text += _clean("".join(last))
    ids, positions = ENCODERS[kind, cache].encode(text, ranges)
    spans = [(start, end) for start, end in _found(text) if (start, end) not in ranges]
    if not spans:
        assert ids == TOKENIZERS[kind].encode(text, add_special_tokens=False).ids
    assert [ids[at] for at in positions] == [TOKENIZERS[kind].token_to_id(text[a:b]) for a, b in ranges]


def _clean(text: str) -> str:
    for marker in MARKERS:
        text = text.replace(marker, "")
    return text


def _found(text: str) -> list[tuple[int, int]]:
    return ENCODERS["byte-level", 0].ranges(text, b"\x01" * len(text))


@pytest.mark.parametrize("key", sorted(ENCODERS))
@settings(max_examples=150)
@given(words=texts)
def test_text_makes_no_control_token_and_loses_no_character(key, words) -> None:
    text = "".join(words)
    ids, positions = ENCODERS[key].encode(text)
    assert positions == []
    assert not ENCODERS[key].control_ids.intersection(ids)
    if key[0] == "byte-level":
        assert TOKENIZERS[key[0]].decode(ids, skip_special_tokens=False) == text


@pytest.mark.parametrize("kind", sorted(TOKENIZERS))
@settings(max_examples=150)
@given(parts=st.lists(st.tuples(texts, st.sampled_from(MARKERS)), max_size=4), last=texts)
def test_an_encoder_that_shares_the_models_merges_gives_the_ids_of_one_with_its_own(kind, parts, last) -> None:
    text, ranges = "", []
    for words, marker in parts:
        text += "".join(words)
        ranges.append((len(text), len(text) + len(marker)))
        text += marker
    text += "".join(last)
    assert SHARING[kind].encode(text, ranges) == ENCODERS[kind, 0].encode(text, ranges)


@pytest.mark.parametrize(
    ("change", "shared"),
    [
        ({}, True),
        ({"ignore_merges": True}, False),
        ({"end_of_word_suffix": "</w>"}, False),
        ({"merges": [["<", "s>"]]}, False),
        ({"merges": ["< s>"]}, False),
        ({"vocab": {"<": 0, "s>": 1, "<s>": 9}}, False),
        ({"type": "Unigram", "vocab": [["<s>", 0.0]]}, False),
    ],
)
def test_merges_are_shared_where_they_cannot_make_a_control_token_of_text(change, shared) -> None:
    model = {"type": "BPE", "ignore_merges": False, "vocab": {"<": 0, "s>": 1, "<s>": 2}, "merges": [["<", "s"]]}
    assert _harmless(model | change, {"<s>": 2}) == shared
    assert not _harmless(model, {"<": 0})
    assert not _harmless(model, {"<0x0A>": 3})


def test_an_added_token_beyond_the_vocabulary_keeps_its_id_where_merges_are_shared() -> None:
    tokenizer = TrainedTextModel(None, MARKERS).tokenizer()
    tokenizer.add_tokens([AddedToken("<extra>", normalized=False), AddedToken("plainword", normalized=False)])
    made = encoder(tokenizer, 0, tokenizer)
    text = "some plainword <extra>"
    wanted = tokenizer.encode(text, add_special_tokens=False).ids
    ids, positions = made.encode(text, [(15, 22)])
    assert (ids, positions) == (wanted, [len(wanted) - 1])


def test_the_cache_is_off_where_text_depends_on_its_neighbours() -> None:
    assert ENCODERS["byte-level", 10_000]._cache_chars == 10_000
    tokenizer = TrainedTextModel(None, MARKERS).tokenizer()
    tokenizer.add_tokens([AddedToken("<|end|>", rstrip=True, special=True)])
    assert encoder(tokenizer, 10_000)._cache_chars == 0
    first = TrainedTextModel(None, MARKERS, kind="sentencepiece").tokenizer()
    first.normalizer = None
    first.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    assert encoder(first, 10_000)._cache_chars == 0


def test_the_cache_stays_within_its_characters() -> None:
    safe = encoder(TOKENIZERS["byte-level"], 1000)
    for index in range(50):
        assert safe.encode(f"text {index}" * 3) == safe.encode(f"text {index}" * 3)
        assert sum(map(len, safe._cache)) < safe._cached_chars <= 1000


def test_many_short_texts_are_not_kept_as_if_they_took_no_memory() -> None:
    safe = encoder(TOKENIZERS["byte-level"], 10_000)
    for index in range(5000):
        safe.encode(str(index))
    assert 10 < len(safe._cache) < 100


def test_a_marker_that_eats_white_space_does_so_as_in_training() -> None:
    tokenizer = TrainedTextModel(None, MARKERS).tokenizer()
    tokenizer.add_tokens([AddedToken("<|end|>", rstrip=True, lstrip=True, special=True)])
    text = "a  <|end|> \n b"
    ids, positions = encoder(tokenizer).encode(text, [(3, 10)])
    assert ids == tokenizer.encode(text, add_special_tokens=False).ids
    assert len(positions) == 1


def test_a_marker_that_is_also_a_piece_of_a_unigram_vocabulary_stays_text() -> None:
    pieces = [("<unk>", 0.0), ("</s>", -1.0), ("<|user|>", -1.0), *((char, -3.0) for char in "</s>|uerab")]
    tokenizer = tokenizers.Tokenizer(models.Unigram(pieces, unk_id=0))
    tokenizer.add_special_tokens(["</s>", "<|user|>"])
    assert 1 in tokenizer.encode("a</s>").ids
    safe = encoder(tokenizer)
    assert not {1, 2}.intersection(safe.encode("a</s>b<|user|>")[0])
    assert safe.encode("a</s>", [(1, 5)])[1] == [1]


def test_a_marker_in_a_vocabulary_without_merges_stays_text() -> None:
    vocab = {char: index for index, char in enumerate("</s>ab")} | {"</s>": 9}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab, [], ignore_merges=True))
    tokenizer.add_special_tokens(["</s>"])
    assert tokenizer.encode("</s>").ids == [9]
    assert 9 not in encoder(tokenizer).encode("</s>")[0]


def test_a_spelling_that_a_normalizer_maps_onto_a_marker_stays_text() -> None:
    tokenizer = TrainedTextModel(None, MARKERS).tokenizer()
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    tokenizer.add_tokens([AddedToken("<|end|>", normalized=True, special=True)])
    wide, end = "\uff1c|END|>", tokenizer.token_to_id("<|end|>")
    assert end in tokenizer.encode(wide).ids
    assert end not in encoder(tokenizer).encode(wide)[0]


def test_added_tokens_that_are_text_stay_added_tokens() -> None:
    tokenizer = TrainedTextModel(None, MARKERS).tokenizer()
    tokenizer.add_tokens(
        [AddedToken(text, special=False, normalized=False) for text in ("    ", "ø", "<tool>", "<x> y")]
    )
    safe = encoder(tokenizer)
    assert set(safe.control) == {*MARKERS, "<tool>", "<x> y"}
    text = "a    b ø"
    assert safe.encode(text)[0] == tokenizer.encode(text).ids


def test_a_range_that_spells_no_control_token_is_refused() -> None:
    with pytest.raises(KeyError):
        encoder(TOKENIZERS["byte-level"]).encode("abc", [(0, 1)])


def test_a_tokenizer_that_forges_a_control_token_is_caught() -> None:
    safe = encoder(TOKENIZERS["byte-level"])
    leaky = TOKENIZERS["byte-level"]
    safe._tokenizer = leaky
    with pytest.raises(InjectionError):
        safe.encode("hi</s>")


@settings(max_examples=100)
@given(markers=st.lists(st.text("ab<|", min_size=1, max_size=4), min_size=1, max_size=8), text=st.text("ab<|"))
def test_markers_are_found_from_the_left_and_the_longest_first(markers, text) -> None:
    alternatives = "|".join(map(re.escape, sorted(markers, key=len, reverse=True)))
    assert re.findall(_longest_of(markers), text) == re.findall(alternatives, text)


def test_defanged_text_has_the_same_length_and_no_marker() -> None:
    safe = encoder(TOKENIZERS["byte-level"])
    text = "<<s>s> </s><|user|></s"
    found = safe.found(text)
    defanged = safe.defang(text, dict.fromkeys(found, "\ue000"))
    assert found == {"<"}
    assert len(defanged) == len(text)
    assert not safe.found(defanged)
    assert defanged.replace("\ue000", "<") == text


def test_markers_that_share_characters_are_all_defanged() -> None:
    """Where the first is defanged the second comes to light, whatever it begins with."""
    tokenizer = TrainedTextModel(None, MARKERS).tokenizer()
    tokenizer.add_tokens([AddedToken(text, special=True) for text in ("<｜a｜", "｜b｜")])
    safe, text = encoder(tokenizer), "<｜a｜b｜"
    assert safe.found(text) == {"<", "｜"}
    defanged = safe.defang(text, {"<": "\ue000", "｜": "\ue001"})
    assert defanged == "\ue000｜a\ue001b｜"
    assert not safe.found(defanged)


@pytest.mark.parametrize("kind", sorted(TOKENIZERS))
def test_output_bytes_are_what_the_decoder_says(kind) -> None:
    from deepinfra.recipes.encoding.tokenizer import bytes_of_tokens

    tokenizer = TOKENIZERS[kind]
    table = bytes_of_tokens(definition(tokenizer), frozenset())
    tokenizer_without_strip = tokenizers.Tokenizer.from_str(tokenizer.to_str())
    if kind == "sentencepiece":
        tokenizer_without_strip.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        )
    for text in ("Hello world", " 日本語 🙂", "a\n\n b", "</s>"):
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        said = tokenizer_without_strip.decode(ids, skip_special_tokens=False)
        assert b"".join(table[token] for token in ids).decode() == said
