"""Translates the metadata of a GGUF file into the content of a Hugging Face `config.json`.

Every key is translated, known to change nothing, or refused by name: a key that is skipped in silence would give a
model that answers, only worse.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from deepinfra.errors import ModelError, UnsupportedModelError
from deepinfra.models.gguf_rope import rope_scaling

if TYPE_CHECKING:
    from collections.abc import Mapping

    from deepinfra.models.gguf_file import GgufFile, MetaValue
    from deepinfra.models.records import JsonValue

__all__ = ("check_architecture", "config_from_gguf")

ARCHITECTURES: Final[Mapping[str, tuple[str, str]]] = {
    # architecture: (model_type, class). llama.cpp writes Mistral as "llama".
    "llama": ("llama", "LlamaForCausalLM"),
    "qwen2": ("qwen2", "Qwen2ForCausalLM"),
    "qwen3": ("qwen3", "Qwen3ForCausalLM"),
}

# Say where a file comes from and how it was made; `tokenizer.` is checked by the tokenizer's own reader.
_HARMLESS_PREFIXES = ("general.", "tokenizer.", "quantize.")

# Keys (without "<architecture>.") that `config_from_gguf` translates or compares.
_TRANSLATED = frozenset(
    {
        "attention.head_count",
        "attention.head_count_kv",
        "attention.key_length",
        "attention.layer_norm_rms_epsilon",
        "attention.sliding_window",
        "attention.value_length",
        "block_count",
        "context_length",
        "embedding_length",
        "feed_forward_length",
        "rope.dimension_count",
        "rope.freq_base",
        "vocab_size",
    }
)

# Keys that mean "as usual" at these values, and something that is not implemented at any other.
_ONLY_AT: Final[Mapping[str, tuple[MetaValue, ...]]] = {
    "attention.causal": (True,),
    "expert_count": (0,),
    "expert_used_count": (0,),
    "pooling_type": (0,),
    "tensor_data_layout": ("Meta AI original pth",),
    "use_parallel_residual": (False,),
}


def config_from_gguf(file: GgufFile) -> dict[str, JsonValue]:
    """Builds the config of a file's model.

    Args:
        file: An opened file, of an architecture in `ARCHITECTURES`.

    Returns:
        The content of the `config.json` that the same model has on the hub, as far as the metadata tells it.

    Raises:
        UnsupportedModelError: The architecture or one of the keys has an effect that is not implemented.
        ModelError: A key is missing, of the wrong type, or contradicts another.
    """
    keys = _Keys(file)
    arch = keys.arch
    model_type, class_name = ARCHITECTURES[arch]
    _refuse_unknown(file, arch)

    heads = keys.integer("attention.head_count")
    hidden = keys.integer("embedding_length")
    head_dim = keys.integer("attention.key_length", hidden // heads)
    for name in ("attention.value_length", "rope.dimension_count"):
        if (other := keys.integer(name, head_dim)) != head_dim:
            raise UnsupportedModelError(f"{arch}.{name}", other, f"differs from the head size {head_dim}")
    if head_dim % 2:
        raise ModelError(f"{file.path} contradicts itself: its head size {head_dim} is odd")

    theta = keys.number("rope.freq_base", 10_000.0)
    config: dict[str, JsonValue] = {
        "architectures": [class_name],
        "model_type": model_type,
        "vocab_size": _vocab_size(file, keys),
        "hidden_size": hidden,
        "intermediate_size": keys.integer("feed_forward_length"),
        "num_hidden_layers": keys.integer("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": keys.integer("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": keys.integer("context_length"),
        "rms_norm_eps": keys.number("attention.layer_norm_rms_epsilon"),
        "rope_theta": theta,
        "rope_scaling": rope_scaling(file, arch, head_dim, theta),
        "hidden_act": "silu",
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_down.bias" in file.tensors,
    }
    for name in ("bos", "eos", "pad"):
        config[f"{name}_token_id"] = keys.token(name)
    if "attention.sliding_window" in keys and (window := keys.integer("attention.sliding_window")):
        if arch == "llama":
            config |= {"model_type": "mistral", "architectures": ["MistralForCausalLM"]}
        config |= {"sliding_window": window, "use_sliding_window": True}
    return config


def check_architecture(file: GgufFile) -> str:
    """Returns the architecture of a file that can be served.

    Raises:
        UnsupportedModelError: It is not in `ARCHITECTURES`, or the model is split over several files.
    """
    arch = file.metadata.get("general.architecture")
    if not isinstance(arch, str) or arch not in ARCHITECTURES:
        raise UnsupportedModelError(
            "general.architecture", arch, f"is not implemented for GGUF files; known: {', '.join(ARCHITECTURES)}"
        )
    if (kind := file.metadata.get("general.type", "model")) != "model":
        raise UnsupportedModelError("general.type", kind, "is not a whole model")
    return arch


def _refuse_unknown(file: GgufFile, arch: str) -> None:
    for key, value in file.metadata.items():
        if key.startswith(_HARMLESS_PREFIXES):
            continue
        name = key.removeprefix(f"{arch}.")
        if name != key and (name in _TRANSLATED or name.startswith("rope.scal")):
            continue
        if name != key and name in _ONLY_AT:
            if value in _ONLY_AT[name]:
                continue
        elif (key == "split.count" and value in (0, 1)) or key in ("split.no", "split.tensors.count"):
            continue
        shown = value if not isinstance(value, list) else f"[{len(value)} values]"
        raise UnsupportedModelError(key, shown)


def _vocab_size(file: GgufFile, keys: _Keys) -> int:
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise ModelError(f"{file.path} has no tensor token_embd.weight: it holds no weights")
    size = embedding.shape[0]
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    claims = {"tokenizer.ggml.tokens": len(tokens)} if isinstance(tokens, list) else {}
    claims[f"{keys.arch}.vocab_size"] = keys.integer("vocab_size", size)
    for key, claim in claims.items():
        if claim != size:
            raise ModelError(f"{file.path} contradicts itself: {key} says {claim} tokens, the embedding has {size}")
    return size


def shortest(value: float) -> float:
    """Returns the decimal a float32 was written from: 1e-05 for 9.999999747378752e-06."""
    return float(str(np.float32(value)))


class _Keys:
    """The keys of one architecture, with their types checked."""

    def __init__(self, file: GgufFile) -> None:
        self.file, self.arch = file, check_architecture(file)

    def __contains__(self, name: str) -> bool:
        return f"{self.arch}.{name}" in self.file.metadata

    def _get(self, name: str, default: MetaValue | None) -> MetaValue:
        value = self.file.metadata.get(f"{self.arch}.{name}", default)
        if value is None:
            raise ModelError(f"{self.file.path} lacks the metadata key {self.arch}.{name}")
        if isinstance(value, list) and value:  # one number for each layer
            if any(other != value[0] for other in value):
                raise UnsupportedModelError(f"{self.arch}.{name}", "[...]", "differs from layer to layer")
            return value[0]
        return value

    def integer(self, name: str, default: int | None = None) -> int:
        value = self._get(name, default)
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**31:
            raise ModelError(f"{self.file.path} is damaged: {self.arch}.{name} is {value!r}")
        if value == 0 and name != "attention.sliding_window":
            raise ModelError(f"{self.file.path} is damaged: {self.arch}.{name} is 0")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        value = self._get(name, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < float("inf"):
            raise ModelError(f"{self.file.path} is damaged: {self.arch}.{name} is {value!r}")
        return shortest(value)

    def token(self, name: str) -> int | None:
        value = self.file.metadata.get(f"tokenizer.ggml.{'padding' if name == 'pad' else name}_token_id")
        return value if isinstance(value, int) else None
