"""Tiny models made by transformers, the oracle of these tests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

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
}


@pytest.fixture(params=list(FAMILIES))
def family(request: pytest.FixtureRequest) -> str:
    """Every kind of model, one after the other."""
    name: str = request.param
    return name


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Made]:
    """Gives the folder of a tiny model and the model itself, as transformers runs it in float32."""
    known: dict[str, Made] = {}

    def make(name: str) -> Made:
        if name not in known:
            family, changes = FAMILIES[name]
            torch.manual_seed(sum(name.encode()))
            config = getattr(transformers, f"{family}Config")(**{**SHAPE, **changes})
            model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
            with torch.no_grad():
                for key, value in model.named_parameters():
                    if key.endswith(("bias", "norm.weight")):  # initialised to what has no effect
                        value.add_(torch.randn_like(value) * 0.2)
            path = tmp_path_factory.mktemp(name)
            model.save_pretrained(path)
            known[name] = (path, model)
        return known[name]

    return make
