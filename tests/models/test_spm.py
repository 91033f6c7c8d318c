from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from deepinfra.models.gguf_file import open_gguf
from deepinfra.models.gguf_tokenizer import build_tokenizer
from deepinfra.models.gguf_vocab import GgufVocab
from deepinfra.models.spm import merges_from_scores


def reference(text: str, pieces: Mapping[str, int], scores: Sequence[float]) -> list[str]:
    """Sentencepiece BPE as it is defined: join the best-scored neighbours, the leftmost of equals."""
    parts = list(text)
    while True:
        best: tuple[float, int] | None = None
        for at in range(len(parts) - 1):
            token = pieces.get(parts[at] + parts[at + 1])
            if token is not None and (best is None or scores[token] > best[0]):
                best = (scores[token], at)
        if best is None:
            return parts
        parts[best[1] : best[1] + 2] = ["".join(parts[best[1] : best[1] + 2])]


@pytest.fixture(scope="module")
def llama(data: Path) -> GgufVocab:
    path = data / "vocab/ggml-vocab-llama-spm.gguf"
    return GgufVocab(open_gguf(path).metadata, path)


def test_merges_are_ordered_by_the_score_of_what_they_make() -> None:
    pieces = {"a": 0, "b": 1, "ab": 2, "aba": 3, "ba": 4}
    scores = [0.0, 0.0, -2.0, -3.0, -1.0]
    assert merges_from_scores(pieces, scores) == [("b", "a"), ("a", "b"), ("ab", "a"), ("a", "ba")]


def test_the_leftmost_of_two_ways_that_share_their_middle_comes_first() -> None:
    # "a" + "aa" is left of "aa" + "a" in the symbols a, aa, a: both make aaa, and they share the middle.
    pieces = {"a": 0, "aa": 1, "aaa": 2}
    merges = merges_from_scores(pieces, [0.0, -1.0, -2.0])
    assert merges.index(("a", "aa")) < merges.index(("aa", "a"))


def test_repeated_characters_are_cut_as_the_definition_says(llama: GgufVocab) -> None:
    tokenizer = build_tokenizer(llama)
    pieces = {text: token for token, text in enumerate(llama.tokens) if token > 258}
    draw = random.Random(11)
    units = ["▁", "=", "-", "*", "/", "a", "0", "ab", "aba", "ana", "▁▁a", "\\", "#", "░", "l", "ll", "ss", "xx", "._"]
    for _ in range(400):
        text = "".join(draw.choice(units) * draw.randint(1, 12) for _ in range(draw.randint(1, 5)))
        tokenizer.encode_special_tokens = True
        ids = tokenizer.encode(text.replace("▁", " "), add_special_tokens=False).ids
        expected = [piece for piece in reference("▁" + text, pieces, llama.scores) if piece in llama.ids]
        assert [llama.tokens[token] for token in ids] == expected, text
