"""A model as a plan sees it: what a token multiplies, what a sequence keeps and reads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from deepinfra.bench.simulate.plan.given import ZERO
from deepinfra.errors import ConfigError

__all__ = ("NBYTES", "ModelShape", "transformer")

NBYTES = {"fp4": 0.5, "fp8": 1.0, "bf16": 2.0}
"""Of a number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """One model; where nothing else is said, figures are of all its layers together.

    Attributes:
        name: What it is asked for by.
        source: Where the config comes from.
        layers: Of the decoder.
        hidden: Width of the residual stream.
        prompt_params: Parameters that a prompt token multiplies, routed experts aside.
        decode_params: The same of a decoded token, with the output layer.
        dense_nbytes: Of those weights, which every step reads.
        embed_nbytes: Of the table of embeddings, unless it is the output layer's.
        dense_precision: Of their products.
        experts: Routed ones per layer; 0 for a dense model.
        top_k: Of them per token.
        expert_layers: Layers that have experts.
        prompt_expert_layers: Those of them that every prompt token passes.
        expert_params: Of one expert.
        expert_nbytes: Of one expert.
        expert_precision: Of its products.
        stored_nbytes: KV of a token that is kept as long as its sequence is.
        window_nbytes: What a sequence keeps besides: windows and states.
        read_nbytes: KV that a decoding sequence reads in a step, whatever its context.
        read_token_nbytes: The same per token of context.
        attend_flops: Attention of a decoded token to selected entries and windows (16 bit).
        attend_token_flops: The same per token of context.
        prompt_attend_flops: Attention of a prompt token, whatever its context (16 bit).
        prompt_attend_token_flops: The same per token of context.
        attend_token_precision: Of what grows with the context.
        moved_nbytes: Read and written per token by kernels that do little else: norms, residuals.
        kernels: Launched one after another in a decode step.
        drafts: Tokens drafted per sequence and step.
        draft_params: Parameters that a drafted token multiplies.
        draft_nbytes: Of the draft head's weights, of which its experts are spread as the others.
        replay_tokens: Rows computed again per request that hits the cache.
        tail_tokens: Last rows of a prompt that pass all layers, if others do not.
        sources: Of figures that have one of their own.
    """

    name: str
    source: str
    layers: int
    hidden: int
    prompt_params: float
    decode_params: float
    dense_nbytes: float
    dense_precision: str
    embed_nbytes: float = field(default=0.0, metadata=ZERO)
    experts: int = field(default=0, metadata=ZERO)
    top_k: int = field(default=0, metadata=ZERO)
    expert_layers: int = field(default=0, metadata=ZERO)
    prompt_expert_layers: int = field(default=0, metadata=ZERO)
    expert_params: float = field(default=0.0, metadata=ZERO)
    expert_nbytes: float = field(default=0.0, metadata=ZERO)
    expert_precision: str = "fp8"
    stored_nbytes: float
    window_nbytes: float = field(default=0.0, metadata=ZERO)
    read_nbytes: float = field(default=0.0, metadata=ZERO)
    read_token_nbytes: float
    attend_flops: float = field(default=0.0, metadata=ZERO)
    attend_token_flops: float
    prompt_attend_flops: float = field(default=0.0, metadata=ZERO)
    prompt_attend_token_flops: float
    attend_token_precision: str = "bf16"
    moved_nbytes: float
    kernels: int
    drafts: int = field(default=0, metadata=ZERO)
    draft_params: float = field(default=0.0, metadata=ZERO)
    draft_nbytes: float = field(default=0.0, metadata=ZERO)
    replay_tokens: int = field(default=0, metadata=ZERO)
    tail_tokens: int = field(default=0, metadata=ZERO)
    sources: Mapping[str, str] = field(default_factory=dict, repr=False)

    @property
    def active_decode(self) -> float:
        """Parameters that a decoded token multiplies."""
        return self.decode_params + self.top_k * self.expert_params * self.expert_layers

    @property
    def active_prompt(self) -> float:
        """Parameters that a prompt token multiplies."""
        return self.prompt_params + self.top_k * self.expert_params * self.prompt_expert_layers


def transformer(
    *,
    name: str,
    source: str,
    layers: int,
    hidden: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    ffn: int,
    vocab: int,
    tied: bool = False,
    precision: str = "bf16",
    kv_precision: str = "bf16",
    experts: int = 0,
    top_k: int = 0,
    expert_ffn: int = 0,
    kernels_per_layer: int = 12,
) -> ModelShape:
    """A transformer with full (grouped-query) attention and gated feed-forward layers, dense or of experts.

    Args:
        name: What it is asked for by.
        source: Where the config comes from.
        layers: `num_hidden_layers`.
        hidden: `hidden_size`.
        heads: `num_attention_heads`.
        kv_heads: `num_key_value_heads`.
        head_dim: `head_dim`.
        ffn: `intermediate_size` of what every token passes: of shared experts, if there are experts; may be 0 then.
        vocab: `vocab_size`.
        tied: `tie_word_embeddings`.
        precision: Of weights and their products.
        kv_precision: Of KV.
        experts: Routed ones per layer.
        top_k: Of them per token.
        expert_ffn: `moe_intermediate_size`.
        kernels_per_layer: Launched per layer in a decode step: two norms, two attention projections, rotation, cache
            write, attention, and the feed-forward layer's five.

    Raises:
        ConfigError: It has experts without a width, or fewer of them than a token wants.
    """
    if (experts or top_k or expert_ffn) and not (experts >= top_k > 0 and expert_ffn > 0):
        raise ConfigError(f"model.{name}: experts, top_k and expert_ffn go together, with top_k at most experts")
    attention = layers * hidden * head_dim * (2 * heads + 2 * kv_heads)
    body = attention + layers * (3 * hidden * ffn + hidden * experts)
    head = hidden * vocab
    size = NBYTES[precision]
    stored = 2 * layers * kv_heads * head_dim * NBYTES[kv_precision]
    pairs = 4.0 * layers * heads * head_dim
    return ModelShape(
        name=name,
        source=source,
        layers=layers,
        hidden=hidden,
        prompt_params=body,
        decode_params=body + head,
        dense_nbytes=size * body + 2.0 * head,
        embed_nbytes=0.0 if tied else 2.0 * head,
        dense_precision=precision,
        experts=experts,
        top_k=top_k,
        expert_layers=layers if experts else 0,
        prompt_expert_layers=layers if experts else 0,
        expert_params=3.0 * hidden * expert_ffn,
        expert_nbytes=size * 3.0 * hidden * expert_ffn,
        expert_precision=precision,
        stored_nbytes=stored,
        read_token_nbytes=stored,
        attend_token_flops=pairs,
        prompt_attend_token_flops=pairs,
        moved_nbytes=8.0 * hidden * layers,
        kernels=kernels_per_layer * layers,
    )
