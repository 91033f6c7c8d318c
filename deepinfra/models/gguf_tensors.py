"""The tensors of a GGUF file under their Hugging Face names and in Hugging Face row order."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

import numpy as np

from deepinfra.errors import ModelError, UnsupportedModelError
from deepinfra.models.ggml_types import decode
from deepinfra.models.gguf_file import drop_pages
from deepinfra.models.gguf_rope import FREQS_TENSOR
from deepinfra.models.records import TensorInfo

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from deepinfra.models.gguf_file import GgufFile, GgufTensor
    from deepinfra.models.records import JsonValue

__all__ = ("GgufTensors",)

_TOP: Final[Mapping[str, str]] = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER: Final[Mapping[str, str]] = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_ROW = re.compile(r"blk\.(\d{1,5})\.([a-z_]+)\.(weight|bias)")


class GgufTensors:
    """A `TensorSource` over a GGUF file of a llama-like architecture.

    Args:
        file: The opened file.
        config: The config made from it.

    Raises:
        UnsupportedModelError: The file has a tensor that these architectures do not use.
        ModelError: A tensor is missing or has another shape than the config says.
    """

    def __init__(self, file: GgufFile, config: Mapping[str, JsonValue]) -> None:
        self._file = file
        self._rows: dict[str, GgufTensor] = {}
        for row in file.tensors.values():
            if row.name != FREQS_TENSOR:
                self._rows[_translate(row.name)] = row
        self._check_shapes(config)
        # Only "llama" files hold rows of q and k in interleaved order: llama.cpp rotates neighbours there, and halves
        # (as Hugging Face does everywhere) for qwen.
        interleaved = file.metadata["general.architecture"] == "llama"
        self._heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
        if not interleaved:
            self._heads = {}

    def names(self) -> Sequence[str]:
        """Returns every tensor's name, in file order."""
        return tuple(self._rows)

    def info(self, name: str) -> TensorInfo:
        """Returns the header's description of a tensor."""
        row = self._row(name)
        return TensorInfo(row.type.name, row.shape, row.nbytes)

    def raw(self, name: str) -> memoryview:
        """Returns the stored bytes; q and k of a "llama" file are a reordered copy, the rest is mapped."""
        row = self._row(name)
        data = self._file.data[row.start : row.start + row.nbytes]
        parts = name.split(".")
        heads = self._heads.get(parts[-2])
        if not isinstance(heads, int):
            return data
        return halves_from_pairs(np.frombuffer(data, np.uint8), row.shape[0], heads).data

    def read(self, name: str) -> NDArray[np.float32]:
        """Returns a tensor decoded to float32."""
        row = self._row(name)
        return decode(name, self.raw(name), row.type.name, row.shape)

    def release(self) -> None:
        """Gives back the memory of what was read."""
        drop_pages(self._file.data)

    def _row(self, name: str) -> GgufTensor:
        try:
            return self._rows[name]
        except KeyError:
            raise ModelError(f"{self._file.path} has no tensor for {name}") from None

    def _check_shapes(self, config: Mapping[str, JsonValue]) -> None:
        expected: set[str] = set()
        for name, shape in _expected(config):
            expected.add(name)
            row = self._rows.get(name)
            if row is None:
                raise ModelError(f"{self._file.path} is incomplete: it has no tensor for {name}; download it again")
            if row.shape != shape:
                raise ModelError(
                    f"{self._file.path} contradicts itself: {row.name} has shape {list(row.shape)}, "
                    f"its metadata says {list(shape)}"
                )
        for name, row in self._rows.items():
            if name not in expected:
                raise UnsupportedModelError("tensor", row.name, f"has no place in a {config['model_type']} model")


def halves_from_pairs(rows: NDArray[np.uint8], count: int, heads: int) -> NDArray[np.uint8]:
    """Reorders the rows of a q or k projection from llama.cpp's pairs to Hugging Face's halves.

    Within a head of `2n` rows, pair order holds row `i` and row `n + i` of half order next to each other.

    Args:
        rows: The bytes of `count` equal rows, in any format (blocks never cross rows).
        count: Number of rows.
        heads: Number of heads they belong to.

    Returns:
        A copy in half order, flat.
    """
    pairs = rows.reshape(heads, count // heads // 2, 2, -1)
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(-1)


def _translate(name: str) -> str:
    if name in _TOP:
        return _TOP[name]
    match = _ROW.fullmatch(name)
    if match is None or match[2] not in _LAYER:
        raise UnsupportedModelError("tensor", name)
    return f"model.layers.{int(match[1])}.{_LAYER[match[2]]}.{match[3]}"


def _expected(config: Mapping[str, JsonValue]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yields name and shape of every tensor; lazily, because the number of layers is not yet known to be true."""

    def size(key: str) -> int:
        return int(str(config[key]))

    hidden, ffn, vocab, dim = (size(key) for key in ("hidden_size", "intermediate_size", "vocab_size", "head_dim"))
    q, kv = size("num_attention_heads") * dim, size("num_key_value_heads") * dim
    yield "model.embed_tokens.weight", (vocab, hidden)
    yield "model.norm.weight", (hidden,)
    if not config["tie_word_embeddings"]:
        yield "lm_head.weight", (vocab, hidden)
    layer: dict[str, tuple[int, ...]] = {
        "self_attn.q_proj": (q, hidden),
        "self_attn.k_proj": (kv, hidden),
        "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, q),
        "mlp.gate_proj": (ffn, hidden),
        "mlp.up_proj": (ffn, hidden),
        "mlp.down_proj": (hidden, ffn),
    }
    biased = [name for name in layer if config["attention_bias" if name.startswith("self") else "mlp_bias"]]
    if config["model_type"] == "qwen2":  # its output projection never has one
        biased = [name for name in biased if name != "self_attn.o_proj"]
    norms = {"input_layernorm": hidden, "post_attention_layernorm": hidden}
    if config["model_type"] == "qwen3":
        norms |= {"self_attn.q_norm": dim, "self_attn.k_norm": dim}
    for number in range(size("num_hidden_layers")):
        prefix = f"model.layers.{number}."
        for name, shape in layer.items():
            yield f"{prefix}{name}.weight", shape
        for name in biased:
            yield f"{prefix}{name}.bias", layer[name][:1]
        for name, width in norms.items():
            yield f"{prefix}{name}.weight", (width,)
