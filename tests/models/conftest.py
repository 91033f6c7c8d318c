"""Small models made from nothing: GGUF files, safetensors files and Hugging Face folders."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import pre_tokenizers

DATA = Path(__file__).parent.parent / "data"
BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
TYPE_IDS = {"F32": 0, "F16": 1, "Q4_1": 3, "Q8_0": 8, "BF16": 30}

GgufTensors = Sequence[tuple[str, tuple[int, ...], str, bytes]]
WriteGguf = Callable[..., Path]


def _text(value: str) -> bytes:
    data = value.encode()
    return struct.pack("<Q", len(data)) + data


def _value(value: object) -> bytes:
    if isinstance(value, bool):
        return struct.pack("<I?", 7, value)
    if isinstance(value, int):
        return struct.pack("<II", 4, value) if value >= 0 else struct.pack("<Ii", 5, value)
    if isinstance(value, float):
        return struct.pack("<If", 6, value)
    if isinstance(value, str):
        return struct.pack("<I", 8) + _text(value)
    assert isinstance(value, list)
    items = [_value(item) for item in value]
    kind = items[0][:4] if items else struct.pack("<I", 4)
    return struct.pack("<I", 9) + kind + struct.pack("<Q", len(items)) + b"".join(item[4:] for item in items)


def gguf_bytes(metadata: Mapping[str, object], tensors: GgufTensors = ()) -> bytes:
    """Writes a GGUF file, independently of the reader under test."""
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata))
    for key, value in metadata.items():
        head += _text(key) + _value(value)
    body = b""
    for name, shape, dtype, data in tensors:
        head += _text(name) + struct.pack("<I", len(shape))
        head += b"".join(struct.pack("<Q", size) for size in reversed(shape))
        head += struct.pack("<IQ", TYPE_IDS[dtype], len(body))
        body += data + b"\0" * (-len(data) % 32)
    return head + b"\0" * (-len(head) % 32) + body


def llama_metadata(arch: str = "llama") -> dict[str, Any]:
    """Metadata of a one-layer model with 2 heads of 32 and one kv head."""
    tokens = [*BYTES, "<|im_start|>", "<|im_end|>", "he", "<tool>"]
    return {
        "general.architecture": arch,
        "general.name": "tiny",
        f"{arch}.block_count": 1,
        f"{arch}.context_length": 128,
        f"{arch}.embedding_length": 64,
        f"{arch}.feed_forward_length": 96,
        f"{arch}.attention.head_count": 2,
        f"{arch}.attention.head_count_kv": 1,
        f"{arch}.attention.layer_norm_rms_epsilon": 1e-5,
        f"{arch}.rope.freq_base": 10000.0,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * 256 + [3, 3, 1, 4],
        "tokenizer.ggml.merges": ["h e"],
        "tokenizer.ggml.bos_token_id": 256,
        "tokenizer.ggml.eos_token_id": 257,
        "tokenizer.chat_template": "{{ messages }}",
    }


def llama_tensors(arch: str = "llama", vocab: int = 260) -> list[tuple[str, tuple[int, ...], str, bytes]]:
    """Random tensors that fit `llama_metadata`, all F32."""
    draw = np.random.default_rng(7)
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (vocab, 64),
        "output_norm.weight": (64,),
        "blk.0.attn_norm.weight": (64,),
        "blk.0.ffn_norm.weight": (64,),
        "blk.0.attn_q.weight": (64, 64),
        "blk.0.attn_k.weight": (32, 64),
        "blk.0.attn_v.weight": (32, 64),
        "blk.0.attn_output.weight": (64, 64),
        "blk.0.ffn_gate.weight": (96, 64),
        "blk.0.ffn_up.weight": (96, 64),
        "blk.0.ffn_down.weight": (64, 96),
    }
    if arch == "qwen2":
        shapes |= {"blk.0.attn_q.bias": (64,), "blk.0.attn_k.bias": (32,), "blk.0.attn_v.bias": (32,)}
    if arch == "qwen3":
        shapes |= {"blk.0.attn_q_norm.weight": (32,), "blk.0.attn_k_norm.weight": (32,)}
    return [(name, shape, "F32", draw.standard_normal(shape).astype("<f4").tobytes()) for name, shape in shapes.items()]


class Tiny:
    """Makes tiny model files in one folder."""

    gguf_bytes = staticmethod(gguf_bytes)
    metadata = staticmethod(llama_metadata)
    tensors = staticmethod(llama_tensors)

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def gguf(
        self,
        changes: Mapping[str, object] | None = None,
        *,
        arch: str = "llama",
        without: Sequence[str] = (),
        extra: GgufTensors = (),
        name: str = "tiny.gguf",
    ) -> Path:
        """Writes a GGUF model; `changes` are applied to its metadata, a value of None removes the key."""
        metadata = llama_metadata(arch)
        for key, value in (changes or {}).items():
            if value is None:
                metadata.pop(key, None)
            else:
                metadata[key] = value
        tensors = [row for row in llama_tensors(arch) if row[0] not in without]
        path = self.folder / name
        path.write_bytes(gguf_bytes(metadata, [*tensors, *extra]))
        return path

    @staticmethod
    def safetensors(path: Path, tensors: Mapping[str, tuple[str, tuple[int, ...], bytes]]) -> Path:
        """Writes a safetensors file, independently of the reader under test."""
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        body = b""
        for name, (dtype, shape, data) in tensors.items():
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(body), len(body) + len(data)]}
            body += data
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        path.write_bytes(struct.pack("<Q", len(text)) + text + body)
        return path

    def hf_folder(self, name: str = "model", *, shards: int = 1, config: Mapping[str, object] | None = None) -> Path:
        """Writes a Hugging Face folder with `shards` weight files and a byte-level tokenizer."""
        folder = self.folder / name
        folder.mkdir()
        draw = np.random.default_rng(3)
        tensors: dict[str, tuple[str, tuple[int, ...], bytes]] = {
            f"model.layers.{layer}.mlp.up_proj.weight": (
                "F32",
                (4, 3),
                draw.standard_normal((4, 3)).astype("<f4").tobytes(),
            )
            for layer in range(4)
        }
        names = list(tensors)
        if shards == 1:
            self.safetensors(folder / "model.safetensors", tensors)
        else:
            files = {name: f"model-{number % shards + 1:05}-of-{shards:05}" for number, name in enumerate(names)}
            for file in set(files.values()):
                held = {name: tensors[name] for name in names if files[name] == file}
                self.safetensors(folder / f"{file}.safetensors", held)
            weight_map = {name: f"{file}.safetensors" for name, file in files.items()}
            self.json(folder / "model.safetensors.index.json", {"metadata": {}, "weight_map": weight_map})
        self.json(folder / "config.json", {"model_type": "llama", "eos_token_id": [257, 258], **(config or {})})
        self.json(folder / "generation_config.json", {"temperature": 0.6, "eos_token_id": 259})
        self.json(folder / "tokenizer.json", self.tokenizer_json())
        self.json(
            folder / "tokenizer_config.json",
            {"bos_token": {"content": "<s>"}, "eos_token": "</s>", "chat_template": "{{ bos_token }}"},
        )
        return folder

    @staticmethod
    def json(path: Path, value: object) -> Path:
        """Writes a JSON file."""
        path.write_text(json.dumps(value))
        return path

    @staticmethod
    def tokenizer_json() -> dict[str, object]:
        """A byte-level tokenizer that puts `<s>` (256) in front; `</s>` is 257, `<tool>` (260) is not special."""
        words = [*BYTES, "<s>", "</s>", "<|eot|>", "<|eom|>", "<tool>"]
        added = [
            {
                "id": 256 + number,
                "content": word,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": word != "<tool>",
            }
            for number, word in enumerate(words[256:])
        ]
        return {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": added,
            "normalizer": None,
            "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
            "post_processor": {
                "type": "TemplateProcessing",
                "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
                "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
                "special_tokens": {"<s>": {"id": "<s>", "ids": [256], "tokens": ["<s>"]}},
            },
            "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
            "model": {
                "type": "BPE",
                "dropout": None,
                "unk_token": None,
                "continuing_subword_prefix": None,
                "end_of_word_suffix": None,
                "fuse_unk": False,
                "byte_fallback": False,
                "ignore_merges": False,
                "vocab": {word: number for number, word in enumerate(words)},
                "merges": [],
            },
        }


@pytest.fixture
def tiny(tmp_path: Path) -> Tiny:
    """Makes tiny model files in the test's own folder."""
    folder = tmp_path / "files"
    folder.mkdir()
    return Tiny(folder)


@pytest.fixture
def cache_dir(tmp_path: Path) -> Path:
    """A cache folder of the test's own."""
    return tmp_path / "cache"


@pytest.fixture(scope="session")
def data() -> Path:
    """The folder of test data."""
    return DATA
