"""Models as a plan sees them, built from published configs: what a token multiplies, what a sequence keeps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from deepinfra.bench.simulate.plan.given import ZERO
from deepinfra.errors import ConfigError

__all__ = ("MODELS", "NBYTES", "ModelShape", "deepseek_v3", "deepseek_v41", "model_named", "transformer")

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


def deepseek_v41() -> ModelShape:
    """DeepSeek-V4.1-Flash: shared compressed KV with an indexer, windows in every layer, half of it for prompts only.

    Source: the released `config.json` and tensor shapes; the technical report (arXiv 2609.19969) for which layers own
    KV, select anew or reuse a selection, which a prompt passes, and 11 kernels per layer; deepinfer 0.1.0 for bytes of
    an entry.
    """
    layers, hidden, heads, head_dim, vocab, width = 40, 5120, 64, 512, 129280, 2304
    window, top, candidates = 128, 512, 16384
    main_nbytes, index_nbytes, window_entry_nbytes = 288, 68, 528
    ratios = (2, 2, 2, 1)  # of the layers that own KV: 2, 8, 14 and 20
    cut, plain, reindex = 20, 2, 4  # layers of the first half; with windows only; that select from candidates
    attention = hidden * 1280 + 1280 * heads * head_dim + hidden * head_dim + 1024 * 8 * heads * head_dim // 8
    attention += hidden * 8192
    expert = 3 * hidden * width
    streams = 2 * 24 * 4 * hidden
    per_layer = attention + expert + 384 * hidden + streams
    engram = 2 * 25600 * 6144
    head = hidden * vocab
    core = 4.0 * heads * head_dim  # FLOPs of an entry in one layer, keys and values the same 512 numbers
    pair = 2.0 * 32 * 128  # FLOPs of an indexer's entry
    draft = 3 * (attention + 4 * expert + 128 * hidden + streams)  # three blocks, top 3 of 128 experts and a shared one
    return ModelShape(
        name="deepseek-v4.1-flash",
        source="deepseek-ai/DeepSeek-V4.1-Flash config.json and tensor shapes; arXiv 2609.19969; deepinfer 0.1.0",
        layers=layers,
        hidden=hidden,
        prompt_params=cut * per_layer + engram,
        decode_params=layers * per_layer + engram + head,
        dense_nbytes=layers * (attention + expert + 4.0 * streams + 2.0 * 384 * hidden) + engram + 2.0 * head,
        embed_nbytes=2.0 * head,
        dense_precision="fp8",
        experts=384,
        top_k=6,
        expert_layers=layers,
        prompt_expert_layers=cut,
        expert_params=expert,
        expert_nbytes=18_800_640,
        expert_precision="fp8",  # 4-bit weights multiply 8-bit activations
        stored_nbytes=sum((main_nbytes + index_nbytes) / ratio for ratio in ratios),
        window_nbytes=float((layers + 3) * window * window_entry_nbytes),
        read_nbytes=float(
            (layers + 3) * window * window_entry_nbytes
            + (layers - plain) * top * main_nbytes
            + reindex * candidates * index_nbytes
        ),
        read_token_nbytes=sum(index_nbytes / ratio for ratio in ratios),
        attend_flops=core * (layers * window + (layers - plain) * top) + reindex * candidates * pair,
        attend_token_flops=pair * sum(1 / ratio for ratio in ratios),
        prompt_attend_flops=core * (cut * window + (cut - plain) * top),
        prompt_attend_token_flops=pair * sum(1 / ratio for ratio in ratios[:3]),
        attend_token_precision="fp8",
        moved_nbytes=4 * 8.0 * hidden * layers,
        kernels=11 * (layers + 3),  # and of the draft blocks
        drafts=5,
        draft_params=draft + head + 2.0 * 256 * vocab,
        draft_nbytes=7.9e9,
        replay_tokens=window,
        tail_tokens=window,
    )


def deepseek_v3() -> ModelShape:
    """DeepSeek-V3 and R1: latent attention, whose keys are absorbed into queries in decoding but not for prompts.

    Source: deepseek-ai/DeepSeek-V3 `config.json`; kernels per layer are assumed.
    """
    layers, dense, hidden, heads, vocab, width = 61, 3, 7168, 128, 129280, 2048
    rank, rope, nope, value = 512, 64, 128, 128
    attention = hidden * 1536 + 1536 * heads * (nope + rope) + hidden * (rank + rope) + rank * heads * (nope + value)
    attention += heads * value * hidden
    expert = 3 * hidden * width
    body = layers * attention + (layers - dense) * (expert + 256 * hidden) + dense * 3 * hidden * 18432
    head = hidden * vocab
    stored = layers * (rank + rope) * NBYTES["bf16"]
    return ModelShape(
        name="deepseek-v3",
        source="deepseek-ai/DeepSeek-V3 config.json",
        layers=layers,
        hidden=hidden,
        prompt_params=body,
        decode_params=body + head,
        dense_nbytes=body + 2.0 * head,
        embed_nbytes=2.0 * head,
        dense_precision="fp8",
        experts=256,
        top_k=8,
        expert_layers=layers - dense,
        prompt_expert_layers=layers - dense,
        expert_params=expert,
        expert_nbytes=expert,
        stored_nbytes=stored,
        read_token_nbytes=stored,
        attend_token_flops=2.0 * layers * heads * (2 * rank + rope),
        prompt_attend_token_flops=2.0 * layers * heads * (nope + rope + value),
        moved_nbytes=8.0 * hidden * layers,
        kernels=20 * layers,
    )


_LLAMA = "meta-llama/Llama-3.1-{}B-Instruct config.json"

_ALL = (
    deepseek_v41(),
    deepseek_v3(),
    transformer(
        name="llama-70b",
        source=f"{_LLAMA.format(70)}; weights in 8 bits",
        layers=80,
        hidden=8192,
        heads=64,
        kv_heads=8,
        head_dim=128,
        ffn=28672,
        vocab=128256,
        precision="fp8",
    ),
    transformer(
        name="llama-8b",
        source=_LLAMA.format(8),
        layers=32,
        hidden=4096,
        heads=32,
        kv_heads=8,
        head_dim=128,
        ffn=14336,
        vocab=128256,
    ),
    transformer(
        name="smollm2-135m",
        source="HuggingFaceTB/SmolLM2-135M-Instruct config.json",
        layers=30,
        hidden=576,
        heads=9,
        kv_heads=3,
        head_dim=64,
        ffn=1536,
        vocab=49152,
        tied=True,
    ),
)

MODELS = {model.name: model for model in _ALL}
"""Those known by name."""


def model_named(name: str, known: Mapping[str, ModelShape] = MODELS) -> ModelShape:
    """A model by its name.

    Raises:
        ConfigError: Nobody has that name.
    """
    try:
        return known[name]
    except KeyError:
        raise ConfigError(f"model: none is named {name!r}; known: {', '.join(known)}") from None
