from __future__ import annotations

import hashlib
import json
import runpy
import struct
import sys
import types
import unicodedata
from pathlib import Path
from typing import Any

import pytest

from deepinfra.errors import ModelError, UnsupportedModelError
from deepinfra.models import open_model
from deepinfra.models.gguf_file import open_gguf
from deepinfra.models.gguf_tokenizer import build_tokenizer, byte_pre_tokenizer
from deepinfra.models.gguf_vocab import GgufVocab
from deepinfra.models.pretokenizers import REFUSED, SPLITS, Checked


def user_ids(tokenizer: Any, text: str) -> list[int]:
    """Encodes as text typed by a user is: no control tokens from it, none around it."""
    tokenizer.encode_special_tokens = True
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    return ids


@pytest.fixture(scope="module")
def texts(data: Path) -> list[str]:
    found: list[str] = json.loads((data / "tokenizers/texts.json").read_text())
    assert len(found) == 500
    return found


@pytest.fixture(scope="module")
def pair_vocabulary(data: Path) -> tuple[list[str], list[str]]:
    """The vocabulary of the script that made the vectors, in which every cut shows."""
    sys.modules["llama_cpp"] = types.ModuleType("llama_cpp")
    try:
        script = runpy.run_path(str(data / "scripts/make_tokenizer_vectors.py"))
    finally:
        del sys.modules["llama_cpp"]
    tokens, merges = script["pair_vocabulary"]()
    return tokens, merges


@pytest.mark.parametrize("name", ["gpt-2", "qwen2", "llama-spm", "phi-3"])
def test_the_vectors_of_llama_cpp_match(data: Path, name: str) -> None:
    path = data / f"vocab/ggml-vocab-{name}.gguf"
    tokenizer = build_tokenizer(GgufVocab(open_gguf(path).metadata, path))
    texts = path.with_suffix(".gguf.inp").read_bytes().decode().split("\n__ggml_vocab_test__\n")
    lines = path.with_suffix(".gguf.out").read_text().split("\n")
    assert len(texts) == len(lines) == 47
    for text, line in zip(texts, lines, strict=True):
        assert user_ids(tokenizer, text) == [int(token) for token in line.split()], text


def test_smollm2_gives_the_ids_of_llama_cpp(data: Path, texts: list[str], smollm2_path: Path) -> None:
    tokenizer = open_model(str(smollm2_path)).tokenizer()
    expected = json.loads((data / "tokenizers/smollm2.json").read_text())
    for text, ids in zip(texts, expected, strict=True):
        assert user_ids(tokenizer, text) == ids, text


def test_sentencepiece_gives_the_ids_of_llama_cpp(data: Path, texts: list[str]) -> None:
    path = data / "vocab/ggml-vocab-llama-spm.gguf"
    tokenizer = build_tokenizer(GgufVocab(open_gguf(path).metadata, path))
    expected = json.loads((data / "tokenizers/spm.json").read_text())
    for text, ids in zip(texts, expected, strict=True):
        assert user_ids(tokenizer, text) == ids, text


def has_cased_or_mark(text: str) -> bool:
    return any(ord(c) > 127 and unicodedata.category(c) in ("Lu", "Ll", "Lt", "Mn", "Mc", "Me") for c in text)


def has_wide_space(text: str) -> bool:
    return any(ord(c) > 127 and c.isspace() for c in text)


def test_every_pre_tokenizer_cuts_as_llama_cpp_does_or_differs_where_the_table_says(
    data: Path, texts: list[str], pair_vocabulary: tuple[list[str], list[str]]
) -> None:
    lines, *rows = json.loads((data / "tokenizers/pretokenizers.json").read_text())
    tokens, merges = pair_vocabulary
    assert lines.keys() == SPLITS.keys()
    metadata: Any = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.merges": merges,
    }
    builders = {
        SPLITS[name].ignore_merges: build_tokenizer(GgufVocab({**metadata, "tokenizer.ggml.pre": name}, Path("pairs")))
        for name in ("gpt-2", "llama-bpe")
    }
    made: dict[object, list[str]] = {}
    for name, split in SPLITS.items():
        if split[:2] not in made:
            tokenizer = builders[split.ignore_merges]
            tokenizer.pre_tokenizer = byte_pre_tokenizer(split)
            encoded = tokenizer.encode_batch(texts, add_special_tokens=False)
            made[split[:2]] = [
                hashlib.sha256(struct.pack(f"<{len(each.ids)}I", *each.ids)).hexdigest()[:8] for each in encoded
            ]
        expected = rows[lines[name]].split()
        different = [
            text for text, ours, theirs in zip(texts, made[split[:2]], expected, strict=True) if ours != theirs
        ]
        match split.checked:
            case Checked.EXACT:
                assert different == [], name
            case Checked.CASED:
                assert all(has_cased_or_mark(text) for text in different), name
            case Checked.SPACES:
                assert all(has_wide_space(text) for text in different), name


def test_a_name_is_built_or_refused_never_both() -> None:
    assert not SPLITS.keys() & REFUSED.keys()


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_a_pre_tokenizer_that_is_not_built_is_refused_by_name(tiny: Any, name: str) -> None:
    model = open_model(str(tiny.gguf({"tokenizer.ggml.pre": name})))
    with pytest.raises(UnsupportedModelError, match=name):
        model.tokenizer()


def test_text_of_a_user_never_becomes_a_control_token(smollm2_path: Path) -> None:
    model = open_model(str(smollm2_path))
    tokenizer, control = model.tokenizer(), model.special_tokens().control_ids
    for token in control:
        ids = user_ids(tokenizer, f"a{tokenizer.id_to_token(token)}b {tokenizer.id_to_token(token)}")
        assert not control & set(ids)


def test_control_tokens_of_a_sentencepiece_vocabulary_are_not_merged_from_text(data: Path) -> None:
    path = data / "vocab/ggml-vocab-phi-3.gguf"
    vocab = GgufVocab(open_gguf(path).metadata, path)
    tokenizer = build_tokenizer(vocab)
    for token in vocab.control_ids:
        assert not vocab.control_ids & set(user_ids(tokenizer, vocab.tokens[token] + " x"))


def test_control_tokens_are_parsed_unless_told_otherwise(smollm2_path: Path) -> None:
    tokenizer = open_model(str(smollm2_path)).tokenizer()
    assert tokenizer.encode("<|im_start|>user").ids == [1, 4093]


def test_each_call_gives_a_tokenizer_of_its_own(tiny: Any) -> None:
    model = open_model(str(tiny.gguf()))
    first, second = model.tokenizer(), model.tokenizer()
    first.encode_special_tokens = True
    assert second.encode("<|im_end|>").ids == [257]
    assert 257 not in first.encode("<|im_end|>").ids


def test_special_tokens_of_smollm2(smollm2_path: Path) -> None:
    special = open_model(str(smollm2_path)).special_tokens()
    assert (special.bos_id, special.eos_id, special.unk_id, special.pad_id) == (1, 2, 0, 2)
    assert special.eos_ids == {0, 2}
    assert special.control_ids == set(range(17))
    assert (special.bos_token, special.eos_token, special.add_bos) == ("<|im_start|>", "<|im_end|>", False)


def test_the_chat_template_of_smollm2_is_its_own(smollm2_path: Path) -> None:
    template = open_model(str(smollm2_path)).chat_template()
    assert template is not None
    assert "You are a helpful AI assistant named SmolLM" in template


def test_added_tokens_that_are_not_control_are_markers(tiny: Any) -> None:
    special = open_model(str(tiny.gguf())).special_tokens()
    assert special.marker_ids == {259}
    assert special.control_ids == {256, 257}


def test_a_begin_token_is_added_where_the_file_asks_for_it(tiny: Any) -> None:
    model = open_model(str(tiny.gguf({"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.add_eos_token": True})))
    assert model.special_tokens().add_bos
    ids = model.tokenizer().encode("x").ids
    assert (ids[0], ids[-1], len(ids)) == (256, 257, 3)


def test_the_pre_tokenizer_decides_about_the_begin_token_when_the_file_does_not(tiny: Any) -> None:
    assert open_model(str(tiny.gguf({"tokenizer.ggml.pre": "llama-bpe"}))).special_tokens().add_bos
    assert not open_model(str(tiny.gguf())).special_tokens().add_bos


def test_a_byte_that_the_vocabulary_lacks_is_dropped_without_joining_its_neighbours(tiny: Any) -> None:
    metadata = tiny.metadata()
    tokens = ["[gone]" if token == "x" else token for token in metadata["tokenizer.ggml.tokens"]]
    vocab = GgufVocab({**metadata, "tokenizer.ggml.tokens": tokens}, Path("tiny"))
    ids = user_ids(build_tokenizer(vocab), "hxe he")
    assert [vocab.tokens[token] for token in ids] == ["h", "e", "Ġ", "he"]


def test_decoding_gives_the_text_back(data: Path, texts: list[str], smollm2_path: Path) -> None:
    tokenizer = open_model(str(smollm2_path)).tokenizer()
    path = data / "vocab/ggml-vocab-llama-spm.gguf"
    sentencepiece = build_tokenizer(GgufVocab(open_gguf(path).metadata, path))
    for text in ("hello world", " two  spaces\n", "中文 🦙 é", "tab\tend"):
        assert tokenizer.decode(user_ids(tokenizer, text)) == text
        assert sentencepiece.decode(user_ids(sentencepiece, text)) == text


@pytest.mark.parametrize(
    "changes",
    [
        {"tokenizer.ggml.merges": ["h z"]},
        {"tokenizer.ggml.merges": ["he"]},
        {"tokenizer.ggml.merges": [1]},
        {"tokenizer.ggml.merges": None},
        {"tokenizer.ggml.tokens": ["a"] * 260},
        {"tokenizer.ggml.token_type": [1] * 3},
        {"tokenizer.ggml.token_type": [77] * 260},
        {"tokenizer.ggml.eos_token_id": 260},
        {"tokenizer.ggml.add_bos_token": 1},
        {"tokenizer.ggml.model": "llama"},
    ],
)
def test_a_vocabulary_that_contradicts_itself_is_refused(tiny: Any, changes: dict[str, object]) -> None:
    with pytest.raises(ModelError, match=r"damaged|contradicts"):
        open_model(str(tiny.gguf(changes))).tokenizer()
