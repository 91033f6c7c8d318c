"""Every field of a configuration is implemented, known to change nothing, or refused by name."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from deepinfra.errors import ModelError, UnsupportedModelError
from deepinfra.executors.torch.config import decoder_config
from deepinfra.executors.torch.weights.headers import check_headers
from deepinfra.models import TensorInfo

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "bfloat16",
}
QWEN2 = {**LLAMA, "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}
MISTRAL = {**LLAMA, "model_type": "mistral", "architectures": ["MistralForCausalLM"]}
GEMMA: dict[str, Any] = {
    **LLAMA,
    "model_type": "gemma3_text",
    "architectures": ["Gemma3ForCausalLM"],
    "num_hidden_layers": 7,
    "head_dim": 16,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 24,
    "sliding_window": 8,
    "rope_theta": 1_000_000.0,
    "rope_local_base_freq": 10_000.0,
    "cache_implementation": "hybrid",
}
GPT_OSS: dict[str, Any] = {
    **LLAMA,
    "model_type": "gpt_oss",
    "architectures": ["GptOssForCausalLM"],
    "head_dim": 16,
    "hidden_act": "silu",
    "sliding_window": 8,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "experts_per_token": 2,
    "initial_context_length": 32,
    "output_router_logits": False,
    "rope_theta": 150_000.0,
    "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "truncate": False},
}


@pytest.mark.parametrize(
    ("config", "field"),
    [
        ({**LLAMA, "model_type": "gpt2"}, "model_type"),
        ({**LLAMA, "architectures": ["LlamaForSequenceClassification"]}, "architectures"),
        ({**LLAMA, "hidden_act": "gelu"}, "hidden_act"),
        ({**LLAMA, "quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
        ({**LLAMA, "num_local_experts": 8}, "num_local_experts"),
        ({**LLAMA, "final_logit_softcapping": 30.0}, "final_logit_softcapping"),
        ({**LLAMA, "attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        ({**LLAMA, "partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({**LLAMA, "auto_map": {"AutoModel": "modeling_evil.py"}}, "auto_map"),
        ({**LLAMA, "sliding_window": 64}, "sliding_window"),
        ({**LLAMA, "frobnication_rate": 0.1}, "frobnication_rate"),
        ({**LLAMA, "rope_interleaved": True}, "rope_interleaved"),
        ({**LLAMA, "logits_scaling": 8.0}, "logits_scaling"),
        ({**QWEN2, "layer_types": ["chunked_attention"] * 4}, "layer_types"),
        ({**MISTRAL, "sliding_window": 8, "layer_types": ["full_attention"] * 4}, "layer_types"),
        ({**LLAMA, "rope_scaling": {"type": "longrope", "factor": 2.0}}, "rope_scaling.rope_type"),
        ({**LLAMA, "rope_scaling": {"type": "linear", "factor": 2.0, "low_freq_factor": 1.0}}, "low_freq_factor"),
        ({**LLAMA, "rope_parameters": {"full_attention": {"rope_type": "default"}}}, "rope_parameters"),
        ({**LLAMA, "query_pre_attn_scalar": 24}, "query_pre_attn_scalar"),
        ({**LLAMA, "swiglu_limit": 7.0}, "swiglu_limit"),
        ({**GEMMA, "model_type": "gemma3"}, "model_type"),
        ({**GEMMA, "use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ({**GEMMA, "attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        ({**GEMMA, "hidden_activation": "gelu"}, "hidden_activation"),
        ({**GEMMA, "hidden_act": "gelu"}, "hidden_act"),
        ({**GEMMA, "mlp_bias": True}, "mlp_bias"),
        ({**GEMMA, "rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "rope_scaling.rope_type"),
        ({**GPT_OSS, "quantization_config": {"quant_method": "mxfp4"}}, "quantization_config"),
        ({**GPT_OSS, "use_sliding_window": False}, "use_sliding_window"),
        ({**GPT_OSS, "hidden_act": "gelu"}, "hidden_act"),
        ({**GPT_OSS, "layer_types": ["chunked_attention"] * 4}, "layer_types"),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(config: dict[str, Any], field: str) -> None:
    with pytest.raises(UnsupportedModelError, match=field):
        decoder_config(config)


@pytest.mark.parametrize(
    "change",
    [
        {"hidden_size": None},
        {"num_hidden_layers": 0},
        {"num_attention_heads": 3},
        {"vocab_size": "many"},
        {"tie_word_embeddings": "yes"},
        {"rms_norm_eps": -1.0},
        {"rope_scaling": {"type": "linear"}},
        {"rope_scaling": {"type": "yarn", "factor": float("nan")}},
    ],
)
def test_contradictions_are_model_errors(change: dict[str, Any]) -> None:
    with pytest.raises(ModelError):
        decoder_config({**LLAMA, **change})


@pytest.mark.parametrize(
    "config",
    [
        {**GEMMA, "sliding_window": None},
        {**GEMMA, "query_pre_attn_scalar": None},
        {**GEMMA, "layer_types": ["full_attention"] * 6},
        {**GEMMA, "rope_parameters": {"rope_type": "default"}},
        {**GPT_OSS, "experts_per_token": 3},
        {**GPT_OSS, "num_experts_per_tok": 5, "experts_per_token": 5},
        {**GPT_OSS, "rope_scaling": None},
        {**GPT_OSS, "swiglu_limit": 0},
    ],
)
def test_contradictions_of_models_with_windows_are_model_errors(config: dict[str, Any]) -> None:
    with pytest.raises(ModelError):
        decoder_config(config)


def test_gemma_s_older_fields_mean_what_the_newer_ones_say() -> None:
    """As in the published files of Gemma 3: a pattern and two bases, before `layer_types` and tables of positions."""
    kinds = ["sliding_attention"] * 5 + ["full_attention", "sliding_attention"]
    scaled = {"rope_type": "linear", "factor": 8.0}
    newer = {key: value for key, value in GEMMA.items() if not key.startswith("rope_")} | {
        "layer_types": kinds,
        "rope_parameters": {
            "full_attention": {**scaled, "rope_theta": 1_000_000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
        },
    }
    config = decoder_config({**GEMMA, "rope_scaling": scaled})
    assert config.windows == (8, 8, 8, 8, 8, 0, 8)
    assert repr(config) == repr(decoder_config(newer))
    assert repr(config) != repr(decoder_config(GEMMA))
    assert decoder_config({**GEMMA, "sliding_window_pattern": 3}).windows == (8, 8, 0, 8, 8, 0, 8)


def test_gpt_oss_alternates() -> None:
    config = decoder_config(GPT_OSS)
    assert config.windows == (8, 0, 8, 0)
    assert (config.sliding, config.paged, config.window) == ((0, 2), (1, 3), 8)


def test_null_and_harmless_fields_change_nothing() -> None:
    plain = decoder_config(LLAMA)
    more = decoder_config(
        {**LLAMA, "use_cache": True, "quantization_config": None, "mystery": None, "temperature": 0.6}
    )
    assert repr(plain) == repr(more)


def test_windows_are_those_of_transformers() -> None:
    assert decoder_config({**MISTRAL, "sliding_window": 8}).windows == (8, 8, 8, 8)
    assert decoder_config({**QWEN2, "sliding_window": 8, "use_sliding_window": False}).windows == (0, 0, 0, 0)
    sliding = {**QWEN2, "sliding_window": 8, "use_sliding_window": True}
    assert decoder_config({**sliding, "max_window_layers": 3}).windows == (0, 0, 0, 8)
    kinds = ["sliding_attention", "full_attention"] * 2
    assert decoder_config({**sliding, "layer_types": kinds}).windows == (8, 0, 8, 0)


class Headers:
    """A file's table of tensors, without a file."""

    def __init__(self, shapes: dict[str, tuple[int, ...]]) -> None:
        self.shapes = shapes

    def names(self) -> list[str]:
        return list(self.shapes)

    def info(self, name: str) -> TensorInfo:
        return TensorInfo("F32", self.shapes[name], 0)

    def raw(self, name: str) -> memoryview:
        raise AssertionError(f"{name} was read")

    def read(self, name: str) -> Any:
        raise AssertionError(f"{name} was read")


def test_tensors_must_be_exactly_those_of_the_configuration() -> None:
    config = decoder_config({**LLAMA, "tie_word_embeddings": True})
    shapes = config.shapes()
    check_headers(config, Headers({**shapes, "lm_head.weight": (100, 32), "model.rotary_emb.inv_freq": (4,)}))
    with pytest.raises(ModelError, match=r"down_proj\.weight is missing"):
        check_headers(config, Headers({k: v for k, v in shapes.items() if k != "model.layers.3.mlp.down_proj.weight"}))
    with pytest.raises(ModelError, match="embed_tokens"):
        check_headers(config, Headers({**shapes, "model.embed_tokens.weight": (99, 32)}))
    with pytest.raises(UnsupportedModelError, match=r"q_proj\.bias"):
        check_headers(config, Headers({**shapes, "model.layers.0.self_attn.q_proj.bias": (32,)}))


def test_headers_are_read_without_torch(made: Any) -> None:
    code = (
        "import sys; from deepinfra.executors.torch import TorchExecutor; "
        f"ex = TorchExecutor({str(made('llama')[0])!r}); ex.provides, ex.layout, ex.identity, ex.explain(); "
        "sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
