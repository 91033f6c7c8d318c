"""The Llama family: Llama, Mistral, Qwen2, Qwen3, SmolLM."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from deepinfra.executors.torch.attention import attend
from deepinfra.executors.torch.batch import Batch
from deepinfra.executors.torch.config import DecoderConfig
from deepinfra.executors.torch.kv import PagedKV
from deepinfra.executors.torch.ops import Linear, rms_norm, rotate, silu_mul
from deepinfra.executors.torch.weights.read import WeightReader

__all__ = ("Llama",)


@dataclass(slots=True)
class _Layer:
    attention_norm: Tensor
    qkv: Linear
    qk_norm: Tensor | None  # [heads + kv_heads, head_dim]
    output: Linear
    mlp_norm: Tensor
    gate_up: Linear
    down: Linear
    window: int


class Llama:
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
        self._norm = read.tensor("model.norm.weight")
        self._head = Linear(self._embedding) if config.tied else read.linear("lm_head", bias=False)
        self._inv_freq = torch.from_numpy(config.rope.inv_freq)

    def _layer(self, read: WeightReader, index: int) -> _Layer:
        config, at = self.config, f"model.layers.{index}."
        attention, mlp = f"{at}self_attn.", f"{at}mlp."
        qk_norm = None
        if config.qk_norm:
            query = read.tensor(f"{attention}q_norm.weight").expand(config.num_heads, -1)
            key = read.tensor(f"{attention}k_norm.weight").expand(config.num_kv_heads, -1)
            qk_norm = torch.cat((query, key))
        return _Layer(
            attention_norm=read.tensor(f"{at}input_layernorm.weight"),
            qkv=read.linear(*(f"{attention}{name}_proj" for name in "qkv"), bias=config.qkv_bias),
            qk_norm=qk_norm,
            output=read.linear(f"{attention}o_proj", bias=config.o_bias),
            mlp_norm=read.tensor(f"{at}post_attention_layernorm.weight"),
            gate_up=read.linear(f"{mlp}gate_proj", f"{mlp}up_proj", bias=config.mlp_bias),
            down=read.linear(f"{mlp}down_proj", bias=config.mlp_bias),
            window=config.windows[index],
        )

    def forward(self, batch: Batch, kv: PagedKV) -> Tensor:
        """Hidden states `[rows, hidden]` before the last normalisation; writes the step's keys and values."""
        config = self.config
        heads, kv_heads, dim, eps = config.num_heads, config.num_kv_heads, config.head_dim, config.rms_eps
        turned = (heads + kv_heads) * dim
        cos, sin = self._angles(batch.positions)
        x = F.embedding(batch.tokens, self._embedding)
        rows = x.shape[0]
        for index, layer in enumerate(self._layers):
            qkv = layer.qkv(rms_norm(x, layer.attention_norm, eps))
            qk = qkv[:, :turned].view(rows, heads + kv_heads, dim)
            if layer.qk_norm is not None:
                qk = F.rms_norm(qk, (dim,), None, eps).mul_(layer.qk_norm)
            qk = rotate(qk, cos, sin)
            keys, values = qk[:, heads:], qkv[:, turned:].view(rows, kv_heads, dim)
            if batch.written is not None:
                keys, values = keys[batch.written], values[batch.written]
            kv.write(index, batch.slots, keys, values)
            mixed = attend(qk[:, :heads], kv, index, batch, layer.window)
            x = layer.output.add(mixed, x)
            x = layer.down.add(silu_mul(layer.gate_up(rms_norm(x, layer.mlp_norm, eps))), x)
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        """`[rows, vocab]` from rows of `forward`."""
        return self._head(rms_norm(hidden, self._norm, self.config.rms_eps))

    def _angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines `[rows, heads + kv_heads, head_dim]`; queries' carry attention's scale for nothing."""
        config = self.config
        angles = positions.unsqueeze(1).float() * self._inv_freq
        cos, sin = angles.cos() * config.rope.factor, angles.sin() * config.rope.factor
        scale = torch.ones(config.num_heads + config.num_kv_heads, 1)
        scale[: config.num_heads] = config.head_dim**-0.5
        both = torch.stack((torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1))).unsqueeze(2) * scale
        turned_cos, turned_sin = both.to(self._dtype).unbind(0)
        return turned_cos, turned_sin
