"""What a decoder is made of: plain numbers, without torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from deepinfra.executors.torch.rope import Rope

__all__ = ("DecoderConfig", "Experts")


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """A mixture of experts in place of each dense layer: `active` of `count` compute a row.

    Their gate is `g * sigmoid(alpha * g) * (u + 1)`, with `g` at most `limit` and `u` within `-limit .. limit`.
    """

    count: int
    active: int
    alpha: float
    limit: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    """A decoder: attention and a gated layer in turns, with what families differ in.

    Attributes:
        rope: Positions; of layers that see everything only, where sliding ones have `local_rope`.
        query_scale: What products of queries and keys are multiplied by.
        windows: Per layer, how many positions up to its own a row sees; 0 = all.
        qkv_bias: Query, key and value projections have a bias; `o_bias`, `mlp_bias` likewise.
        qk_norm: Queries and keys are normalised per head before they are rotated (Qwen3, Gemma 3).
        norm_offset: What is added to weights of normalisations as they are stored (Gemma: 1).
        sandwich: What attention and the gated layer give is normalised before it is added (Gemma 3).
        sinks: Each head has a logit that takes part in softmax and has no value (gpt-oss).
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
    query_scale: float
    windows: tuple[int, ...]
    tied: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool = False
    qk_norm: bool = False
    local_rope: Rope | None = None
    embedding_scale: float = 1.0
    norm_offset: float = 0.0
    sandwich: bool = False
    sinks: bool = False
    activation: Literal["silu", "gelu_tanh"] = "silu"
    experts: Experts | None = None

    @property
    def sliding(self) -> tuple[int, ...]:
        """Layers whose KV is kept in windows of sequences.

        In a model where every layer slides, none: its blocks hold all positions and a mask hides what is too old, so
        that any prefix can be used again without a snapshot.
        """
        return tuple(i for i, window in enumerate(self.windows) if window) if 0 in self.windows else ()

    @property
    def paged(self) -> tuple[int, ...]:
        """Layers whose KV is kept in blocks."""
        sliding = self.sliding
        return tuple(i for i in range(self.num_layers) if i not in sliding)

    @property
    def window(self) -> int:
        """Positions that `sliding` layers see; 0 without such layers."""
        return max(self.windows) if self.sliding else 0

    def layer_nbytes_per_token(self, itemsize: int) -> int:
        """Bytes of keys and values of one position in one layer."""
        return 2 * self.num_kv_heads * self.head_dim * itemsize

    def kv_nbytes_per_token(self, itemsize: int) -> int:
        """Bytes of keys and values of one position over all layers kept in blocks."""
        return len(self.paged) * self.layer_nbytes_per_token(itemsize)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor the model consists of, by its Hugging Face name."""
        shapes: dict[str, tuple[int, ...]] = {
            "model.embed_tokens.weight": (self.vocab_size, self.hidden_size),
            "model.norm.weight": (self.hidden_size,),
        }
        if not self.tied:
            shapes["lm_head.weight"] = (self.vocab_size, self.hidden_size)
        one = self._layer_shapes()
        for index in range(self.num_layers):
            shapes |= {f"model.layers.{index}.{name}": shape for name, shape in one.items()}
        return shapes

    def _layer_shapes(self) -> dict[str, tuple[int, ...]]:
        hidden, inner, dim = self.hidden_size, self.intermediate_size, self.head_dim
        heads, kv_heads = self.num_heads * dim, self.num_kv_heads * dim
        linears = {
            "self_attn.q_proj": (heads, hidden, self.qkv_bias),
            "self_attn.k_proj": (kv_heads, hidden, self.qkv_bias),
            "self_attn.v_proj": (kv_heads, hidden, self.qkv_bias),
            "self_attn.o_proj": (hidden, heads, self.o_bias),
        }
        shapes: dict[str, tuple[int, ...]] = {}
        if self.experts is None:
            linears["mlp.gate_proj"] = linears["mlp.up_proj"] = (inner, hidden, self.mlp_bias)
            linears["mlp.down_proj"] = (hidden, inner, self.mlp_bias)
        else:
            count = self.experts.count
            linears["mlp.router"] = (count, hidden, True)
            shapes["mlp.experts.gate_up_proj"] = (count, hidden, 2 * inner)
            shapes["mlp.experts.gate_up_proj_bias"] = (count, 2 * inner)
            shapes["mlp.experts.down_proj"] = (count, inner, hidden)
            shapes["mlp.experts.down_proj_bias"] = (count, hidden)
        for name, (out, width, bias) in linears.items():
            shapes[f"{name}.weight"] = (out, width)
            if bias:
                shapes[f"{name}.bias"] = (out,)
        norms = ["input_layernorm", "post_attention_layernorm"]
        if self.sandwich:
            norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
        shapes |= {f"{name}.weight": (hidden,) for name in norms}
        if self.qk_norm:
            shapes |= {f"self_attn.{name}_norm.weight": (dim,) for name in "qk"}
        if self.sinks:
            shapes["self_attn.sinks"] = (self.num_heads,)
        return shapes
