"""Models by name, built from published configs."""

from __future__ import annotations

from collections.abc import Mapping

from deepinfra.bench.simulate.plan.shape import NBYTES, ModelShape, transformer
from deepinfra.errors import ConfigError

__all__ = ("MODELS", "deepseek_v3", "deepseek_v41", "model_named")


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
