"""Tiny models made by transformers, the oracle of these tests."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from deepinfra_kernels import cpu

from deepinfra.executors.torch.batch import build_batch
from deepinfra.executors.torch.config import decoder_config
from deepinfra.executors.torch.families.decoder import Decoder
from deepinfra.executors.torch.kv import PagedKV
from deepinfra.executors.torch.plan import window_pages
from deepinfra.executors.torch.rows import Rows
from deepinfra.executors.torch.weights.read import WeightReader
from deepinfra.executors.torch.windows import Window, Windows
from deepinfra.models import open_model

torch.set_num_threads(1)  # matrices of a few rows, on a machine that runs other tests too

Made = tuple[Path, Any]

SHAPE = {
    "vocab_size": 320,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "attn_implementation": "eager",
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}

ROPE = {"rope_type": "default", "rope_theta": 10_000.0}

# name: (configuration class, what differs from SHAPE)
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"rope_parameters": ROPE}),
    "llama-tied": ("Llama", {"rope_parameters": ROPE, "tie_word_embeddings": True}),
    "llama-biases": ("Llama", {"rope_parameters": ROPE, "attention_bias": True, "mlp_bias": True, "head_dim": 16}),
    "llama3": (
        "Llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 500.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            }
        },
    ),
    "linear": ("Llama", {"rope_parameters": {**ROPE, "rope_type": "linear", "factor": 4.0}}),
    "dynamic": ("Llama", {"rope_parameters": {**ROPE, "rope_type": "dynamic", "factor": 4.0}}),
    "yarn": (
        "Qwen2",
        {
            "rope_parameters": {
                **ROPE,
                "rope_type": "yarn",
                "factor": 8.0,
                "original_max_position_embeddings": 32,
            }
        },
    ),
    "yarn-scaled": (
        "Llama",
        {
            "rope_parameters": {
                **ROPE,
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 64,
                "mscale": 0.7,
                "mscale_all_dim": 1.2,
                "beta_fast": 16.0,
                "truncate": False,
            }
        },
    ),
    "qwen2": ("Qwen2", {"rope_parameters": ROPE}),
    "qwen2-windows": (
        "Qwen2",
        {"rope_parameters": ROPE, "use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3", {"rope_parameters": ROPE, "head_dim": 24, "tie_word_embeddings": True}),
    "mistral": ("Mistral", {"rope_parameters": ROPE, "sliding_window": 13, "head_dim": 16}),
    "gemma3": (
        "Gemma3Text",
        {
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
            "sliding_window": 8,
            "head_dim": 16,
            "query_pre_attn_scalar": 24,
            "num_hidden_layers": 6,
            "initializer_range": 0.1,  # tied and scaled, larger embeddings make every token follow itself
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1_000_000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
            },
        },
    ),
    "gemma3-wide": (
        "Gemma3Text",
        {
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "sliding_window": 90,
            "head_dim": 8,
            "query_pre_attn_scalar": 8,
            "attention_bias": True,
            "tie_word_embeddings": False,
        },
    ),
    "gpt-oss": (
        "GptOss",
        {
            "num_hidden_layers": 4,
            "sliding_window": 10,
            "head_dim": 16,
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "swiglu_limit": 1.5,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 150_000.0,
                "factor": 4.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 64,
            },
        },
    ),
}

HYBRIDS = ("gemma3", "gpt-oss")

VARIANTS: dict[str, dict[str, Any]] = {
    "-bytes": {"vocab_size": 260},  # bytes and control tokens, as `TinyRecipe` has them
    "-long": {"max_position_embeddings": 2048, "sliding_window": 128},
    "-wide": {"head_dim": 32},  # as the kernels need it
}
"""Behind a name: the same model with these changes."""


@pytest.fixture(params=("torch", *cpu.paths()))
def computes(request: pytest.FixtureRequest) -> str:
    """Everything that computes here: torch, and each path of the kernels that this CPU runs."""
    name: str = request.param
    return name


@pytest.fixture(params=cpu.paths())
def path_of_kernels(request: pytest.FixtureRequest) -> str:
    """Each path of the kernels that this CPU runs."""
    name: str = request.param
    return name


FORMATS = {
    "token_embd": "Q8_0",
    "attn_q": "Q4_0",
    "attn_k": "Q5_0",
    "attn_v": "BF16",
    "attn_output": "Q4_1",
    "ffn_gate": "Q5_1",
    "ffn_up": "Q8_0",
    "ffn_down": "F16",
}


@pytest.fixture(scope="session")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GGUF file whose matrices are in many formats, of a tied model that tells tokens apart."""
    path = tmp_path_factory.mktemp("mixed") / "mixed.gguf"
    draw = np.random.default_rng(5)
    hidden, inner, heads, vocab, layers = 64, 96, 4, 320, 3
    writer = gguf.GGUFWriter(path, "qwen2")
    writer.add_block_count(layers)
    writer.add_context_length(256)
    writer.add_embedding_length(hidden)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(heads)
    writer.add_head_count_kv(2)
    writer.add_key_length(32)
    writer.add_value_length(32)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10_000.0)
    shapes = {
        "attn_q": (heads * 32, hidden),
        "attn_k": (64, hidden),
        "attn_v": (64, hidden),
        "attn_output": (hidden, heads * 32),
        "ffn_gate": (inner, hidden),
        "ffn_up": (inner, hidden),
        "ffn_down": (hidden, inner),
    }
    tensors = {"token_embd": (vocab, hidden), "output_norm": (hidden,)}
    for layer in range(layers):
        tensors |= {f"blk.{layer}.{name}": shape for name, shape in shapes.items()}
        tensors |= {f"blk.{layer}.{name}": (hidden,) for name in ("attn_norm", "ffn_norm")}
    for name, shape in tensors.items():
        if len(shape) == 1:
            writer.add_tensor(f"{name}.weight", 1 + draw.normal(0, 0.2, shape).astype(np.float32))
            continue
        kind = gguf.GGMLQuantizationType[FORMATS[name.rpartition(".")[2]]]
        matrix = draw.normal(0, 0.3, shape).astype(np.float32)
        writer.add_tensor(f"{name}.weight", gguf.quants.quantize(matrix, kind), raw_dtype=kind)
        if name.endswith(("attn_q", "attn_k", "attn_v")):
            writer.add_tensor(f"{name}.bias", draw.normal(0, 0.2, shape[:1]).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(params=list(FAMILIES))
def family(request: pytest.FixtureRequest) -> str:
    """Every kind of model, one after the other."""
    name: str = request.param
    return name


@pytest.fixture(scope="session", params=HYBRIDS)
def hybrid(request: pytest.FixtureRequest) -> str:
    """Models that have layers with a window of their own beside layers that see everything."""
    name: str = request.param
    return name


class Passes:
    """A decoder and one sequence of it, computed by forward passes of the test's choice; gives logits of every row.

    Attributes:
        kv: Blocks; another one of the same model may share them.
        windows: Where it keeps windows, if the model has such layers.
        window: The sequence's.
    """

    def __init__(self, path: Path, *, kv: PagedKV | None = None, block_size: int = 4, max_tokens: int = 512) -> None:
        model = open_model(str(path))
        self.config = decoder_config(model.config)
        with torch.inference_mode():
            self.decoder = Decoder(self.config, WeightReader(model.tensors, torch.float32, lambda: None), torch.float32)
            blocks = max_tokens // block_size
            self.kv = kv or PagedKV(self.config, torch.float32, blocks, block_size)
            self.table = random.Random(1).sample(range(blocks), blocks)
            self.windows = None
            if self.config.sliding:
                pages = window_pages(self.config, block_size, 1, max_tokens, max_tokens)
                self.windows = Windows(self.config, torch.float32, pages, block_size)
        self.window: Window | None = None

    def __call__(self, tokens: Sequence[int], start: int = 0, write_from: int = 0) -> torch.Tensor:
        """Logits `[rows, vocab]` of `tokens` from position `start`."""
        with torch.inference_mode():
            end = start + len(tokens)
            if self.windows is not None:
                self.window = self.window or self.windows.open(start)
                assert not self.windows.why_not(self.window, start)
                self.windows.reserve(self.window, end)
            rows = Rows(np.array(tokens, np.int64), start, write_from, self.table, self.window)
            sizes = sorted(set(self.config.windows))
            hidden = self.decoder.forward(build_batch([rows], self.kv, sizes, torch.float32, self.windows))
            if self.windows is not None and self.window is not None:
                self.windows.trim(self.window, end)
            return self.decoder.logits(hidden)


@pytest.fixture(scope="session")
def passes() -> type[Passes]:
    """The class, which tests cannot import."""
    return Passes


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Made]:
    """Gives the folder of a tiny model and the model itself, as transformers runs it in float32."""
    known: dict[str, Made] = {}

    def make(name: str) -> Made:
        if name not in known:
            suffix = next((each for each in VARIANTS if name.endswith(each)), "")
            family, changes = FAMILIES[name.removesuffix(suffix)]
            changes = {**changes, **VARIANTS.get(suffix, {})}
            torch.manual_seed(sum(name.encode()))
            config = getattr(transformers, f"{family}Config")(**{**SHAPE, **changes})
            model = getattr(transformers, f"{family.removesuffix('Text')}ForCausalLM")(config).eval()
            with torch.no_grad():
                for key, value in model.named_parameters():
                    if key.endswith(("bias", "norm.weight", "sinks")):  # initialised to what has little effect
                        value.add_(torch.randn_like(value) * (1.0 if key.endswith("sinks") else 0.2))
            path = tmp_path_factory.mktemp(name)
            model.save_pretrained(path)
            known[name] = (path, model)
        return known[name]

    return make
