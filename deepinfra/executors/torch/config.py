"""From a Hugging Face `config.json` to a `DecoderConfig`: every field with an effect is implemented or refused."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Final

from deepinfra.errors import ModelError, UnsupportedModelError
from deepinfra.executors.torch.decoder import DecoderConfig, Experts
from deepinfra.executors.torch.fields import HARMLESS, ONLY_AT, READ, READ_BY_FAMILY
from deepinfra.executors.torch.rope import rope_from_config

__all__ = ("decoder_config",)

_CLASSES: Final[Mapping[str, str]] = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
}

_PATTERN = 6
"""Of Gemma 3: every sixth layer sees everything."""


def decoder_config(config: Mapping[str, object]) -> DecoderConfig:
    """Translates a `config.json`.

    A field of value null counts as absent; any other field must be read here, be known to change nothing, or hold the
    one value that means "as usual".

    Raises:
        UnsupportedModelError: A field has, or may have, an effect that is not implemented.
        ModelError: A field is missing, of the wrong type, or contradicts another.
    """
    family = config.get("model_type")
    if not isinstance(family, str) or family not in _CLASSES:
        raise UnsupportedModelError("model_type", family, f"is not implemented; known: {', '.join(_CLASSES)}")
    architectures = config.get("architectures")
    if isinstance(architectures, Sequence) and architectures and _CLASSES[family] not in architectures:
        raise UnsupportedModelError("architectures", list(architectures), f"is not {_CLASSES[family]}")
    for field, value in config.items():
        if value is None or field in READ or field in READ_BY_FAMILY[family] or field in HARMLESS:
            continue
        if field not in ONLY_AT:
            raise UnsupportedModelError(field, value, "is a field of unknown effect")
        if value not in ONLY_AT[field]:
            raise UnsupportedModelError(field, value)
    made = {"gemma3_text": _gemma, "gpt_oss": _gpt_oss}.get(family, _llama)(config, family)
    if made.num_heads % made.num_kv_heads or made.head_dim % 2:
        heads = f"{made.num_heads} heads over {made.num_kv_heads} key-value heads"
        raise ModelError(f"the model has {heads} of size {made.head_dim}")
    return made


def _llama(config: Mapping[str, object], family: str) -> DecoderConfig:
    """Llama, Mistral, Qwen2, Qwen3."""
    _only(config, "hidden_act", ("silu", "swish"))
    heads, hidden = _integer(config, "num_attention_heads"), _integer(config, "hidden_size")
    head_dim = _integer(config, "head_dim", 128 if family == "qwen3" else max(1, hidden // heads))
    max_positions, layers = _integer(config, "max_position_embeddings"), _integer(config, "num_hidden_layers")
    attention_bias = _flag(config, "attention_bias", family == "qwen2")
    if family == "mistral" and attention_bias:
        raise UnsupportedModelError("attention_bias", True)
    if family != "llama" and _flag(config, "mlp_bias", False):
        raise UnsupportedModelError("mlp_bias", True)
    return DecoderConfig(
        family=family,
        vocab_size=_integer(config, "vocab_size"),
        hidden_size=hidden,
        intermediate_size=_integer(config, "intermediate_size"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=_integer(config, "num_key_value_heads", heads),
        head_dim=head_dim,
        max_positions=max_positions,
        rms_eps=_eps(config, 1e-6),
        rope=rope_from_config(config, head_dim, max_positions),
        query_scale=head_dim**-0.5,
        windows=_windows(config, family, layers),
        tied=_flag(config, "tie_word_embeddings", False),
        qkv_bias=family == "qwen2" or attention_bias,
        o_bias=family in ("llama", "qwen3") and attention_bias,
        mlp_bias=_flag(config, "mlp_bias", False),
        qk_norm=family == "qwen3",
    )


def _gemma(config: Mapping[str, object], family: str) -> DecoderConfig:
    """Gemma 3, text only."""
    _only(config, "hidden_activation", ("gelu_pytorch_tanh",))
    hidden, head_dim = _integer(config, "hidden_size"), _integer(config, "head_dim")
    max_positions, layers = _integer(config, "max_position_embeddings"), _integer(config, "num_hidden_layers")
    pattern = _integer(config, "sliding_window_pattern", _integer(config, "_sliding_window_pattern", _PATTERN))
    usual = ["full_attention" if (i + 1) % pattern == 0 else "sliding_attention" for i in range(layers)]
    bias = _flag(config, "attention_bias", False)
    tables = _rope_tables(config)
    return DecoderConfig(
        family=family,
        vocab_size=_integer(config, "vocab_size"),
        hidden_size=hidden,
        intermediate_size=_integer(config, "intermediate_size"),
        num_layers=layers,
        num_heads=_integer(config, "num_attention_heads"),
        num_kv_heads=_integer(config, "num_key_value_heads"),
        head_dim=head_dim,
        max_positions=max_positions,
        rms_eps=_eps(config, 1e-6),
        rope=rope_from_config({"rope_parameters": tables["full_attention"]}, head_dim, max_positions),
        local_rope=rope_from_config({"rope_parameters": tables["sliding_attention"]}, head_dim, max_positions),
        query_scale=_integer(config, "query_pre_attn_scalar") ** -0.5,
        windows=_alternating(config, usual),
        tied=_flag(config, "tie_word_embeddings", True),
        qkv_bias=bias,
        o_bias=bias,
        qk_norm=True,
        embedding_scale=hidden**0.5,
        norm_offset=1.0,
        sandwich=True,
        activation="gelu_tanh",
    )


def _gpt_oss(config: Mapping[str, object], family: str) -> DecoderConfig:
    """gpt-oss, with weights in a plain type."""
    _only(config, "hidden_act", ("silu",))
    if config.get("rope_parameters") is None and config.get("rope_scaling") is None:
        raise ModelError("model field rope_parameters is missing")
    head_dim, layers = _integer(config, "head_dim"), _integer(config, "num_hidden_layers")
    max_positions = _integer(config, "max_position_embeddings")
    experts, active = _integer(config, "num_local_experts"), _integer(config, "num_experts_per_tok")
    if active > experts or config.get("experts_per_token") not in (None, active):
        raise ModelError(f"the model has {experts} experts and uses {active} or {config.get('experts_per_token')}")
    bias = _flag(config, "attention_bias", True)
    usual = ["full_attention" if i % 2 else "sliding_attention" for i in range(layers)]
    return DecoderConfig(
        family=family,
        vocab_size=_integer(config, "vocab_size"),
        hidden_size=_integer(config, "hidden_size"),
        intermediate_size=_integer(config, "intermediate_size"),
        num_layers=layers,
        num_heads=_integer(config, "num_attention_heads"),
        num_kv_heads=_integer(config, "num_key_value_heads"),
        head_dim=head_dim,
        max_positions=max_positions,
        rms_eps=_eps(config, 1e-5),
        rope=rope_from_config(
            {**config, "rope_theta": _number(config, "rope_theta", 150_000.0)}, head_dim, max_positions
        ),
        query_scale=head_dim**-0.5,
        windows=_alternating(config, usual),
        tied=_flag(config, "tie_word_embeddings", False),
        qkv_bias=bias,
        o_bias=bias,
        sinks=True,
        experts=Experts(
            count=experts,
            active=active,
            alpha=_number(config, "swiglu_alpha", 1.702),
            limit=_number(config, "swiglu_limit", 7.0),
        ),
    )


def _rope_tables(config: Mapping[str, object]) -> dict[str, dict[str, object]]:
    """Positions of both kinds of layers: `rope_parameters` has a table for each; older fields scale the full ones."""
    given, scaling = config.get("rope_parameters"), config.get("rope_scaling")
    tables: dict[str, dict[str, object]] = {}
    thetas = {
        "full_attention": _number(config, "rope_theta", 1_000_000.0),
        "sliding_attention": _number(config, "rope_local_base_freq", 10_000.0),
    }
    if given is not None and (not isinstance(given, Mapping) or not given.keys() <= thetas.keys()):
        raise ModelError(f"model field rope_parameters is {given!r}, not a table for each of {', '.join(thetas)}")
    if scaling is not None and not isinstance(scaling, Mapping):
        raise ModelError(f"model field rope_scaling is {scaling!r}, not a table")
    for kind, theta in thetas.items():
        table = (given or {}).get(kind) or {}
        if not isinstance(table, Mapping):
            raise ModelError(f"model field rope_parameters.{kind} is {table!r}, not a table")
        tables[kind] = {"rope_theta": theta, **table}
    tables["full_attention"].update(scaling or {})
    return tables


def _kinds(config: Mapping[str, object], layers: int) -> list[str] | None:
    kinds = config.get("layer_types")
    if kinds is None:
        return None
    if not isinstance(kinds, Sequence) or len(kinds) != layers:
        raise ModelError(f"model field layer_types does not list {layers} layers")
    for kind in kinds:
        if kind not in ("full_attention", "sliding_attention"):
            raise UnsupportedModelError("layer_types", kind)
    return list(kinds)


def _alternating(config: Mapping[str, object], usual: list[str]) -> tuple[int, ...]:
    """Windows of a family whose layers are of both kinds, `usual` where the configuration does not say."""
    kinds = _kinds(config, len(usual)) or usual
    window = _integer(config, "sliding_window") if "sliding_attention" in kinds else 0
    return tuple(window if kind == "sliding_attention" else 0 for kind in kinds)


def _windows(config: Mapping[str, object], family: str, layers: int) -> tuple[int, ...]:
    """Sliding windows as transformers means them, which differs between families."""
    window = config.get("sliding_window")
    if family.startswith("qwen") and not config.get("use_sliding_window", False):
        window = None
    if window is not None and (isinstance(window, bool) or not isinstance(window, int) or window < 1):
        raise ModelError(f"model field sliding_window is {window!r}")
    if family == "llama" and window is not None:
        raise UnsupportedModelError("sliding_window", window, "is no field of a Llama model")
    if family == "mistral" and window is not None and config.get("use_sliding_window") is False:
        raise UnsupportedModelError("use_sliding_window", False, "is no field of a Mistral model")
    if (kinds := _kinds(config, layers)) is not None:
        usual = "sliding_attention" if window is not None else "full_attention"
        if family in ("llama", "mistral") and set(kinds) != {usual}:
            raise UnsupportedModelError("layer_types", kinds, f"is not {usual} everywhere, as this family is")
        if "sliding_attention" in kinds and window is None:
            raise ModelError("model field layer_types has sliding_attention, but there is no sliding_window")
        return tuple(window or 0 if kind == "sliding_attention" else 0 for kind in kinds)
    if window is None:
        return (0,) * layers
    first = _integer(config, "max_window_layers", 28, least=0) if family.startswith("qwen") else 0
    return tuple(window if index >= first else 0 for index in range(layers))


def _only(config: Mapping[str, object], key: str, values: Sequence[str]) -> None:
    if (value := config.get(key)) is not None and value not in values:
        raise UnsupportedModelError(key, value)


def _integer(config: Mapping[str, object], key: str, default: int | None = None, *, least: int = 1) -> int:
    value = config.get(key)
    if value is None:
        value = default
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value < 2**31:
        raise ModelError(f"model field {key} is {value!r}, where a whole number from {least} is needed")
    return value


def _number(config: Mapping[str, object], key: str, default: float) -> float:
    value = config.get(key)
    if value is None:
        value = default
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        raise ModelError(f"model field {key} is {value!r}, where a positive number is needed")
    return float(value)


def _eps(config: Mapping[str, object], default: float) -> float:
    eps = config.get("rms_norm_eps", default)
    if isinstance(eps, bool) or not isinstance(eps, (int, float)) or not 0 <= eps < 1:
        raise ModelError(f"model field rms_norm_eps is {eps!r}")
    return float(eps)


def _flag(config: Mapping[str, object], key: str, default: bool) -> bool:
    value = config.get(key)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise ModelError(f"model field {key} is {value!r}, where true or false is needed")
    return value
