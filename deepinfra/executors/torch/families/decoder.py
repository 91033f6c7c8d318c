"""A decoder of any family: what they differ in is in `DecoderConfig`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from deepinfra.executors.torch.attention import attend
from deepinfra.executors.torch.batch import Batch
from deepinfra.executors.torch.decoder import DecoderConfig
from deepinfra.executors.torch.families.mlp import Dense, Mixture
from deepinfra.executors.torch.ops import Linear, rms_norm, rotate
from deepinfra.executors.torch.rope import Rope
from deepinfra.executors.torch.weights.read import WeightReader

__all__ = ("Decoder",)


@dataclass(slots=True)
class _Layer:
    norm: Tensor
    qkv: Linear
    qk_norm: Tensor | None  # [heads + kv_heads, head_dim]
    output: Linear
    after: Tensor | None
    mlp: Callable[[Tensor], Tensor]
    sinks: Tensor | None
    window: int
    sliding: bool  # its KV is in windows of sequences
    place: int  # which of the layers kept there
    local: bool  # it turns by the second of two ropes


class Decoder:
    """A decoder with its weights.

    One forward pass takes all rows of a step: linears see their concatenation, attention sees each sequence.

    Args:
        config: The architecture.
        read: Gives the weights; all are read here.
        dtype: Compute type.
    """

    def __init__(self, config: DecoderConfig, read: WeightReader, dtype: torch.dtype) -> None:
        self.config, self._dtype = config, dtype
        self._embedding = read.tensor("model.embed_tokens.weight")
        self._layers = [self._layer(read, index) for index in range(config.num_layers)]
        self._norm = read.norm("model.norm.weight", config.norm_offset)
        self._head = Linear(self._embedding) if config.tied else read.linear("lm_head", bias=False)
        self._scale = None if config.embedding_scale == 1 else torch.tensor(config.embedding_scale, dtype=dtype)
        scale = torch.ones(config.num_heads + config.num_kv_heads, 1)
        scale[: config.num_heads] = config.query_scale
        self._scales = scale  # of queries and keys: cosines and sines carry attention's scale for nothing

    def _layer(self, read: WeightReader, index: int) -> _Layer:
        config, at = self.config, f"model.layers.{index}."
        attention = f"{at}self_attn."
        qk_norm = after = None
        if config.qk_norm:
            query = read.norm(f"{attention}q_norm.weight", config.norm_offset).expand(config.num_heads, -1)
            key = read.norm(f"{attention}k_norm.weight", config.norm_offset).expand(config.num_kv_heads, -1)
            qk_norm = torch.cat((query, key))
        if config.sandwich:
            after = read.norm(f"{at}post_attention_layernorm.weight", config.norm_offset)
        sliding = index in config.sliding
        return _Layer(
            norm=read.norm(f"{at}input_layernorm.weight", config.norm_offset),
            qkv=read.linear(*(f"{attention}{name}_proj" for name in "qkv"), bias=config.qkv_bias),
            qk_norm=qk_norm,
            output=read.linear(f"{attention}o_proj", bias=config.o_bias),
            after=after,
            mlp=(Dense if config.experts is None else Mixture).read(config, read, at),
            sinks=read.tensor(f"{attention}sinks").float() if config.sinks else None,
            window=config.windows[index],
            sliding=sliding,
            place=(config.sliding if sliding else config.paged).index(index),
            local=config.local_rope is not None and config.windows[index] > 0,
        )

    def forward(self, batch: Batch) -> Tensor:
        """Hidden states `[rows, hidden]` before the last normalisation; writes the step's keys and values."""
        config = self.config
        heads, kv_heads, dim, eps = config.num_heads, config.num_kv_heads, config.head_dim, config.rms_eps
        turned = (heads + kv_heads) * dim
        turns = self._angles(batch.positions, config.rope)
        local = self._angles(batch.positions, config.local_rope) if config.local_rope is not None else turns
        x = F.embedding(batch.tokens, self._embedding)
        if self._scale is not None:
            x = x * self._scale
        rows = x.shape[0]
        for layer in self._layers:
            qkv = layer.qkv(rms_norm(x, layer.norm, eps))
            qk = qkv[:, :turned].view(rows, heads + kv_heads, dim)
            if layer.qk_norm is not None:
                normed = F.rms_norm(qk.to(layer.qk_norm.dtype), (dim,), None, eps).mul_(layer.qk_norm)
                qk = normed.to(self._dtype)
            qk = rotate(qk, *(local if layer.local else turns))
            keys, values = qk[:, heads:], qkv[:, turned:].view(rows, kv_heads, dim)
            lane = batch.windows if layer.sliding else batch.blocks
            if lane.written is not None:
                keys, values = keys[lane.written], values[lane.written]
            lane.kv.write(layer.place, lane.slots, keys, values)
            mixed = attend(qk[:, :heads], lane.kv, layer.place, batch, layer.window, layer.sinks)
            if layer.after is None:
                x = layer.output.add(mixed, x)
            else:
                x = rms_norm(layer.output(mixed), layer.after, eps).add_(x)
            x = layer.mlp(x)
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        """`[rows, vocab]` from rows of `forward`."""
        return self._head(rms_norm(hidden, self._norm, self.config.rms_eps))

    def _angles(self, positions: Tensor, rope: Rope) -> tuple[Tensor, Tensor]:
        """Cosines and sines `[rows, heads + kv_heads, head_dim]`."""
        angles = positions.unsqueeze(1).float() * torch.from_numpy(rope.inv_freq)
        cos, sin = angles.cos() * rope.factor, angles.sin() * rope.factor
        both = torch.stack((torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1))).unsqueeze(2) * self._scales
        turned_cos, turned_sin = both.to(self._dtype).unbind(0)
        return turned_cos, turned_sin
