"""What a decoder is: every field of a Hugging Face `config.json` that has an effect, implemented or refused by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from deepinfra.errors import ModelError, UnsupportedModelError
from deepinfra.executors.torch.fields import HARMLESS, ONLY_AT, READ
from deepinfra.executors.torch.rope import Rope, rope_from_config

__all__ = ("DecoderConfig", "decoder_config")

_CLASSES: Final[Mapping[str, str]] = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    """A decoder of the Llama family.

    Attributes:
        windows: Per layer, how many positions up to its own a row sees; 0 = all.
        qkv_bias: Query, key and value projections have a bias; `o_bias`, `mlp_bias` likewise.
        qk_norm: Queries and keys are normalised per head before they are rotated (Qwen3).
    """

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int
    rms_eps: float
    rope: Rope
    windows: tuple[int, ...]
    tied: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool

    def kv_nbytes_per_token(self, itemsize: int) -> int:
        """Bytes of keys and values of one position over all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * itemsize

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor the model consists of, by its Hugging Face name."""
        hidden, inner, dim = self.hidden_size, self.intermediate_size, self.head_dim
        heads, kv_heads = self.num_heads * dim, self.num_kv_heads * dim
        linears = {
            "self_attn.q_proj": (heads, hidden, self.qkv_bias),
            "self_attn.k_proj": (kv_heads, hidden, self.qkv_bias),
            "self_attn.v_proj": (kv_heads, hidden, self.qkv_bias),
            "self_attn.o_proj": (hidden, heads, self.o_bias),
            "mlp.gate_proj": (inner, hidden, self.mlp_bias),
            "mlp.up_proj": (inner, hidden, self.mlp_bias),
            "mlp.down_proj": (hidden, inner, self.mlp_bias),
        }
        shapes: dict[str, tuple[int, ...]] = {
            "model.embed_tokens.weight": (self.vocab_size, hidden),
            "model.norm.weight": (hidden,),
        }
        if not self.tied:
            shapes["lm_head.weight"] = (self.vocab_size, hidden)
        for index in range(self.num_layers):
            layer = f"model.layers.{index}."
            for name, (out, width, bias) in linears.items():
                shapes[f"{layer}{name}.weight"] = (out, width)
                if bias:
                    shapes[f"{layer}{name}.bias"] = (out,)
            shapes[f"{layer}input_layernorm.weight"] = (hidden,)
            shapes[f"{layer}post_attention_layernorm.weight"] = (hidden,)
            if self.qk_norm:
                shapes[f"{layer}self_attn.q_norm.weight"] = (dim,)
                shapes[f"{layer}self_attn.k_norm.weight"] = (dim,)
        return shapes


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
        if value is None or field in READ or field in HARMLESS:
            continue
        if field not in ONLY_AT:
            raise UnsupportedModelError(field, value, "is a field of unknown effect")
        if value not in ONLY_AT[field]:
            raise UnsupportedModelError(field, value)
    if (act := config.get("hidden_act", "silu")) not in ("silu", "swish"):
        raise UnsupportedModelError("hidden_act", act)

    heads, hidden = _integer(config, "num_attention_heads"), _integer(config, "hidden_size")
    kv_heads = _integer(config, "num_key_value_heads", heads)
    head_dim = _integer(config, "head_dim", 128 if family == "qwen3" else max(1, hidden // heads))
    if heads % kv_heads or head_dim % 2:
        raise ModelError(f"the model has {heads} heads over {kv_heads} key-value heads of size {head_dim}")
    layers = _integer(config, "num_hidden_layers")
    max_positions = _integer(config, "max_position_embeddings")
    attention_bias = _flag(config, "attention_bias", family == "qwen2")
    if family == "mistral" and attention_bias:
        raise UnsupportedModelError("attention_bias", True)
    if family != "llama" and _flag(config, "mlp_bias", False):
        raise UnsupportedModelError("mlp_bias", True)
    eps = config.get("rms_norm_eps", 1e-6)
    if isinstance(eps, bool) or not isinstance(eps, (int, float)) or not 0 <= eps < 1:
        raise ModelError(f"model field rms_norm_eps is {eps!r}")
    return DecoderConfig(
        family=family,
        vocab_size=_integer(config, "vocab_size"),
        hidden_size=hidden,
        intermediate_size=_integer(config, "intermediate_size"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        max_positions=max_positions,
        rms_eps=float(eps),
        rope=rope_from_config(config, head_dim, max_positions),
        windows=_windows(config, family, layers),
        tied=_flag(config, "tie_word_embeddings", False),
        qkv_bias=family == "qwen2" or attention_bias,
        o_bias=family in ("llama", "qwen3") and attention_bias,
        mlp_bias=_flag(config, "mlp_bias", False),
        qk_norm=family == "qwen3",
    )


def _windows(config: Mapping[str, object], family: str, layers: int) -> tuple[int, ...]:
    """Sliding windows as transformers means them, which differs between families."""
    window = config.get("sliding_window")
    if family.startswith("qwen") and not config.get("use_sliding_window", False):
        window = None
    if window is not None and (isinstance(window, bool) or not isinstance(window, int) or window < 1):
        raise ModelError(f"model field sliding_window is {window!r}")
    kinds = config.get("layer_types")
    if family == "llama" and window is not None:
        raise UnsupportedModelError("sliding_window", window, "is no field of a Llama model")
    if family == "mistral" and window is not None and config.get("use_sliding_window") is False:
        raise UnsupportedModelError("use_sliding_window", False, "is no field of a Mistral model")
    if kinds is not None:
        if not isinstance(kinds, Sequence) or len(kinds) != layers:
            raise ModelError(f"model field layer_types does not list {layers} layers")
        for kind in kinds:
            if kind not in ("full_attention", "sliding_attention"):
                raise UnsupportedModelError("layer_types", kind)
        usual = "sliding_attention" if window is not None else "full_attention"
        if family in ("llama", "mistral") and set(kinds) != {usual}:
            raise UnsupportedModelError("layer_types", list(kinds), f"is not {usual} everywhere, as this family is")
        if "sliding_attention" in kinds and window is None:
            raise ModelError("model field layer_types has sliding_attention, but there is no sliding_window")
        return tuple(window or 0 if kind == "sliding_attention" else 0 for kind in kinds)
    if window is None:
        return (0,) * layers
    first = _integer(config, "max_window_layers", 28, least=0) if family.startswith("qwen") else 0
    return tuple(window if index >= first else 0 for index in range(layers))


def _integer(config: Mapping[str, object], key: str, default: int | None = None, *, least: int = 1) -> int:
    value = config.get(key)
    if value is None:
        value = default
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value < 2**31:
        raise ModelError(f"model field {key} is {value!r}, where a whole number from {least} is needed")
    return value


def _flag(config: Mapping[str, object], key: str, default: bool) -> bool:
    value = config.get(key)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise ModelError(f"model field {key} is {value!r}, where true or false is needed")
    return value
