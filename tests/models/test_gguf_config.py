from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from deepinfra.errors import ModelError, UnsupportedModelError
from deepinfra.models import open_model
from deepinfra.models.gguf_rope import llama3_divisors


def config_of(tiny: Any, changes: dict[str, object] | None = None, **more: Any) -> Any:
    return open_model(str(tiny.gguf(changes, **more))).config


def test_llama_metadata_becomes_a_hugging_face_config(tiny: Any) -> None:
    assert config_of(tiny) == {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 260,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": 256,
        "eos_token_id": 257,
        "pad_token_id": None,
    }


def test_smollm2_has_the_config_of_its_hub_page(smollm2_path: Any) -> None:
    config = open_model(str(smollm2_path)).config
    expected = {
        "model_type": "llama",
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-05,
        "rope_theta": 100000.0,
        "rope_scaling": None,
        "vocab_size": 49152,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
    }
    assert {key: config[key] for key in expected} == expected


@pytest.mark.parametrize(("arch", "bias"), [("qwen2", True), ("qwen3", False)])
def test_qwen_models_keep_their_own_type(tiny: Any, arch: str, bias: bool) -> None:
    config = config_of(tiny, arch=arch)
    assert (config["model_type"], config["attention_bias"]) == (arch, bias)


def test_an_output_tensor_means_untied_embeddings(tiny: Any) -> None:
    config = config_of(tiny, extra=[("output.weight", (260, 64), "F32", bytes(260 * 64 * 4))])
    assert config["tie_word_embeddings"] is False


def test_a_sliding_window_makes_a_llama_file_a_mistral_model(tiny: Any) -> None:
    config = config_of(tiny, {"llama.attention.sliding_window": 64})
    assert (config["model_type"], config["sliding_window"]) == ("mistral", 64)


@pytest.mark.parametrize(
    ("changes", "scaling"),
    [
        ({"llama.rope.scaling.type": "none"}, None),
        (
            {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0},
            {"rope_type": "linear", "factor": 4.0},
        ),
        ({"llama.rope.scale_linear": 2.0}, {"rope_type": "linear", "factor": 2.0}),
        (
            {
                "llama.rope.scaling.type": "yarn",
                "llama.rope.scaling.factor": 4.0,
                "llama.rope.scaling.original_context_length": 32768,
            },
            {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 32768,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
            },
        ),
    ],
)
def test_position_scaling_is_translated(tiny: Any, changes: dict[str, object], scaling: object) -> None:
    assert config_of(tiny, changes)["rope_scaling"] == scaling


def test_the_divisors_of_llama_3_are_recognised(tiny: Any) -> None:
    divisors = llama3_divisors(32, 10000.0, 8.0, 1.0, 4.0, 8192).astype("<f4")
    config = config_of(tiny, extra=[("rope_freqs.weight", (16,), "F32", divisors.tobytes())])
    assert config["rope_scaling"] == {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }


def test_unknown_divisors_are_refused(tiny: Any) -> None:
    divisors = np.linspace(1, 8, 16).astype("<f4")
    with pytest.raises(UnsupportedModelError, match=r"rope_freqs\.weight"):
        config_of(tiny, extra=[("rope_freqs.weight", (16,), "F32", divisors.tobytes())])


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("llama.expert_count", 8),
        ("llama.attention.scale", 0.5),
        ("llama.logit_scale", 2.0),
        ("llama.rope.dimension_count", 16),
        ("llama.attention.value_length", 16),
        ("llama.rope.scaling.type", "longrope"),
        ("llama.rope.scaling.attn_factor", 1.5),
        ("llama.rope.scaling.factor", 8.0),
        ("llama.attention.causal", False),
        ("llama.something.new", 1),
        ("other.key", 1),
        ("split.count", 3),
        ("general.type", "adapter"),
        ("general.architecture", "mamba"),
        ("tokenizer.ggml.suppress_tokens", [1]),
        ("tokenizer.ggml.add_sep_token", True),
        ("tokenizer.ggml.model", "t5"),
        ("tokenizer.ggml.pre", "kimi-k2"),
        ("tokenizer.ggml.pre", "my-own"),
    ],
)
def test_a_key_with_an_effect_that_is_not_implemented_is_refused_by_name(tiny: Any, key: str, value: object) -> None:
    with pytest.raises(UnsupportedModelError) as caught:
        open_model(str(tiny.gguf({key: value}))).tokenizer()
    assert key in str(caught.value)


def test_a_missing_pre_tokenizer_name_is_not_guessed(tiny: Any) -> None:
    with pytest.raises(UnsupportedModelError, match=r"tokenizer\.ggml\.pre"):
        open_model(str(tiny.gguf({"tokenizer.ggml.pre": None}))).tokenizer()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("llama.block_count", None),
        ("llama.block_count", "many"),
        ("llama.block_count", 0),
        ("llama.block_count", 2**31 - 1),
        ("llama.embedding_length", 2**32 - 1),
        ("llama.attention.layer_norm_rms_epsilon", -1.0),
        ("llama.vocab_size", 259),
        ("llama.feed_forward_length", 97),
    ],
)
def test_metadata_that_contradicts_the_file_is_refused(tiny: Any, key: str, value: object) -> None:
    with pytest.raises(ModelError, match=r"lacks|damaged|contradicts|incomplete"):
        open_model(str(tiny.gguf({key: value})))
