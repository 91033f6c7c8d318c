"""The few operations a decoder is made of, each in the form that is fastest on this device."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ("Linear", "gelu_mul", "packs", "rms_norm", "rotate", "silu_mul", "warm_allocator")

_PACK_ROWS = 8
"""Rows the packed layout is tuned for. Measured on an AVX-512 BF16 machine: as fast as any other hint from 1 to 512."""


def packs(dtype: torch.dtype) -> bool:
    """Whether linears of this type run on oneDNN's packed weights (1.5 to 2 times as fast as plain bf16 ones)."""
    return dtype == torch.bfloat16 and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


class Linear:
    """`y = x W^T + b`, with W packed once at load where the device gains from it.

    Args:
        weight: `[out, in]`, in the compute type; may be given up by the caller.
        bias: `[out]`.
    """

    __slots__ = ("_bias", "_packed", "_weight")

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self._packed = packs(weight.dtype)
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, _PACK_ROWS) if self._packed else weight
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        """`[rows, in]` to `[rows, out]`."""
        if self._packed:
            y: Tensor = torch.ops.mkldnn._linear_pointwise.default(x, self._weight, self._bias, "none", [], "")
            return y
        return F.linear(x, self._weight, self._bias)

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        """`residual + y`; `residual` `[rows, out]` may be overwritten."""
        if self._packed:
            y: Tensor = torch.ops.mkldnn._linear_pointwise.binary(x, residual, self._weight, self._bias, "add")
            return y
        return residual.add_(F.linear(x, self._weight, self._bias))


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square normalisation over the last dimension; in the weight's type, if that is another than `x`'s."""
    if weight.dtype != x.dtype:
        return F.rms_norm(x.to(weight.dtype), (x.shape[-1],), None, eps).mul_(weight).to(x.dtype)
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate pairs `(i, i + dim / 2)`; all `[rows, heads, dim]`, the first half of `sin` negated."""
    return torch.addcmul(x * cos, torch.roll(x, x.shape[-1] // 2, -1), sin)


def silu_mul(gate_up: Tensor) -> Tensor:
    """`silu(gate) * up` of `[rows, 2 * inner]`."""
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate).mul_(up)


def gelu_mul(gate_up: Tensor) -> Tensor:
    """`gelu(gate) * up` of `[rows, 2 * inner]`, by the approximation with tanh."""
    gate, up = gate_up.chunk(2, -1)
    return F.gelu(gate, approximate="tanh").mul_(up)


def warm_allocator() -> None:
    """Keep glibc from giving activations back to the kernel after each operation.

    Its thresholds adapt to the largest block ever freed, up to 32 MiB. Below them, each tensor over 128 KiB faults its
    pages in anew: normalising 512 rows of 576 took 1 050 us instead of 100.
    """
    torch.empty(31 * 2**20, dtype=torch.uint8).fill_(0)
