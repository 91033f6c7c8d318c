"""gpt-oss's own vocabulary, and OpenAI's own renderer over it."""

from __future__ import annotations

import base64
import hashlib
import json
import struct
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import openai_harmony
import pytest
import quicktok
import tokenizers

from deepinfra.models import SpecialTokens
from deepinfra.recipes import Harmony

OFFICIAL = "446a9538cb6c348e3516120d7c08b09f57c36495e2acfffe59a5bf8b0cfb1a2d"
"""SHA-256 of the o200k vocabulary as OpenAI publishes it; openai-harmony takes no other."""

PATTERN = "|".join(
    (
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)

SPECIAL = {
    "<|startoftext|>": 199998,
    "<|endoftext|>": 199999,
    "<|reserved_200000|>": 200000,
    "<|reserved_200001|>": 200001,
    "<|return|>": 200002,
    "<|constrain|>": 200003,
    "<|reserved_200004|>": 200004,
    "<|channel|>": 200005,
    "<|start|>": 200006,
    "<|end|>": 200007,
    "<|message|>": 200008,
    "<|reserved_200009|>": 200009,
    "<|reserved_200010|>": 200010,
    "<|reserved_200011|>": 200011,
    "<|call|>": 200012,
    **{f"<|reserved_{token}|>": token for token in range(200013, 200018)},
    "<|endofprompt|>": 200018,
}


@lru_cache(maxsize=1)
def ranks() -> dict[bytes, int]:
    """o200k, from the package quicktok-v1."""
    data = (Path(quicktok.__file__).parent / "data" / "o200k.vocab").read_bytes()
    count, at, found = struct.unpack_from("<I", data)[0], 4, {}
    for _ in range(count):
        size = struct.unpack_from("<H", data, at)[0]
        found[data[at + 2 : at + 2 + size]] = struct.unpack_from("<I", data, at + 2 + size)[0]
        at += 6 + size
    return found


def merged(piece: bytes, table: Mapping[bytes, int]) -> tuple[bytes, bytes]:
    """The two tokens that the last merge of a token joins."""
    parts = [piece[i : i + 1] for i in range(len(piece))]
    limit = table[piece]
    while len(parts) > 2:
        best, at = limit, -1
        for index in range(len(parts) - 1):
            rank = table.get(parts[index] + parts[index + 1], limit)
            if rank < best:
                best, at = rank, index
        assert at >= 0
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return parts[0], parts[1]


@lru_cache(maxsize=1)
def definition() -> str:
    """The vocabulary as the `tokenizer.json` that a model brings."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    letter = {byte: chr(byte) for byte in shown}
    letter |= {byte: chr(256 + i) for i, byte in enumerate(byte for byte in range(256) if byte not in letter)}

    def spelled(piece: bytes) -> str:
        return "".join(map(letter.__getitem__, piece))

    table = ranks()
    merges = []
    for piece in sorted(table, key=table.__getitem__):
        if len(piece) > 1:
            left, right = merged(piece, table)
            merges.append([spelled(left), spelled(right)])
    flags: dict[str, Any] = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    split = {"type": "Split", "pattern": {"Regex": PATTERN}, "behavior": "Isolated", "invert": False}
    return json.dumps(
        {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": [
                {"id": token, "content": text, "special": True, **flags} for text, token in SPECIAL.items()
            ],
            "normalizer": None,
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, level]},
            "post_processor": None,
            "decoder": level,
            "model": {
                "type": "BPE",
                "dropout": None,
                "unk_token": None,
                "continuing_subword_prefix": None,
                "end_of_word_suffix": None,
                "fuse_unk": False,
                "byte_fallback": False,
                "ignore_merges": True,
                "vocab": {spelled(piece): rank for piece, rank in table.items()},
                "merges": merges,
            },
        }
    )


class GptOss:
    """What the recipe needs of gpt-oss: its tokenizer."""

    name = "gpt-oss"

    def tokenizer(self) -> tokenizers.Tokenizer:
        return tokenizers.Tokenizer.from_str(definition())

    def special_tokens(self) -> SpecialTokens:
        ends = frozenset(SPECIAL[text] for text in ("<|return|>", "<|endoftext|>", "<|call|>"))
        return SpecialTokens(eos_id=SPECIAL["<|return|>"], eos_ids=ends, control_ids=frozenset(SPECIAL.values()))


@pytest.fixture(scope="session")
def recipe_of_gpt_oss() -> Harmony:
    """Built once: half a million entries take seconds."""
    return Harmony(GptOss(), date="2025-06-28")


@pytest.fixture
def recipe(recipe_of_gpt_oss: Harmony) -> Harmony:
    return recipe_of_gpt_oss


@pytest.fixture(scope="session")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai_harmony.HarmonyEncoding]:
    """OpenAI's renderer and parser; it finds its vocabulary by a variable of the environment."""
    text = b"".join(base64.b64encode(piece) + b" %d\n" % rank for piece, rank in ranks().items())
    assert hashlib.sha256(text).hexdigest() == OFFICIAL
    folder = tmp_path_factory.mktemp("o200k")
    (folder / "o200k_base.tiktoken").write_bytes(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TIKTOKEN_ENCODINGS_BASE", str(folder))
        yield openai_harmony.load_harmony_encoding("HarmonyGptOss")
