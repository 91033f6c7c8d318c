"""What follows attention in a layer: a gated layer, or a mixture of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfra.executors.torch.decoder import DecoderConfig, Experts
from deepinfra.executors.torch.ops import Linear, gelu_mul, rms_norm, silu_mul
from deepinfra.executors.torch.weights.read import WeightReader

__all__ = ("Dense", "Mixture")


@dataclass(slots=True)
class Dense:
    """Every row through one gated layer."""

    norm: Tensor
    gate_up: Linear
    down: Linear
    gate: Callable[[Tensor], Tensor]
    after: Tensor | None
    eps: float

    @classmethod
    def read(cls, config: DecoderConfig, read: WeightReader, at: str) -> Dense:
        """The layer whose tensors' names begin with `at`."""
        before, after = "post_attention_layernorm", None
        if config.sandwich:
            before = "pre_feedforward_layernorm"
            after = read.norm(f"{at}post_feedforward_layernorm.weight", config.norm_offset)
        return cls(
            norm=read.norm(f"{at}{before}.weight", config.norm_offset),
            gate_up=read.linear(f"{at}mlp.gate_proj", f"{at}mlp.up_proj", bias=config.mlp_bias),
            down=read.linear(f"{at}mlp.down_proj", bias=config.mlp_bias),
            gate=silu_mul if config.activation == "silu" else gelu_mul,
            after=after,
            eps=config.rms_eps,
        )

    def __call__(self, x: Tensor) -> Tensor:
        """Adds to `x` `[rows, hidden]`, which may be overwritten."""
        inner = self.gate(self.gate_up(rms_norm(x, self.norm, self.eps)))
        if self.after is None:
            return self.down.add(inner, x)
        return rms_norm(self.down(inner), self.after, self.eps).add_(x)


@dataclass(slots=True)
class Mixture:
    """Each row through the few experts its router likes best.

    Source: `modeling_gpt_oss.py` of transformers. Here gates and ups lie apart, not in turns.
    """

    norm: Tensor
    router: Linear
    gate_up: list[Linear]
    down: list[Linear]
    experts: Experts
    eps: float

    @classmethod
    def read(cls, config: DecoderConfig, read: WeightReader, at: str) -> Mixture:
        """The layer whose tensors' names begin with `at`."""
        assert config.experts is not None
        own = f"{at}mlp.experts."
        weights, biases = read.tensor(f"{own}gate_up_proj"), read.tensor(f"{own}gate_up_proj_bias")
        gate_up = [
            Linear(torch.cat((weight.T[::2], weight.T[1::2])), torch.cat((bias[::2], bias[1::2])))
            for weight, bias in zip(weights, biases, strict=True)
        ]
        weights, biases = read.tensor(f"{own}down_proj"), read.tensor(f"{own}down_proj_bias")
        return cls(
            norm=read.norm(f"{at}post_attention_layernorm.weight", config.norm_offset),
            router=read.linear(f"{at}mlp.router", bias=True),
            gate_up=gate_up,
            down=[Linear(weight.T.contiguous(), bias) for weight, bias in zip(weights, biases, strict=True)],
            experts=config.experts,
            eps=config.rms_eps,
        )

    def __call__(self, x: Tensor) -> Tensor:
        """Adds to `x` `[rows, hidden]`, which may be overwritten."""
        normed = rms_norm(x, self.norm, self.eps)
        best, chosen = torch.topk(self.router(normed), self.experts.active, -1)
        shares = torch.softmax(best, -1)
        for expert in sorted(set(chosen.flatten().tolist())):
            rows, rank = torch.where(chosen == expert)
            given = self.down[expert](self._gate(self.gate_up[expert](normed[rows])))
            x.index_add_(0, rows, given * shares[rows, rank].unsqueeze(-1))
        return x

    def _gate(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, -1)
        gate = gate.clamp(max=self.experts.limit)
        up = up.clamp(-self.experts.limit, self.experts.limit)
        return (up + 1) * (gate * torch.sigmoid(gate * self.experts.alpha))
