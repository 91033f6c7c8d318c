"""Reads tensors from a model's files into torch, in the type the model computes in."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from deepinfra.executors.torch.ops import Linear
from deepinfra.models import TensorSource

__all__ = ("WeightReader",)

_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class WeightReader:
    """Reads and fuses tensors.

    Args:
        tensors: Where from.
        dtype: Compute type.
        checkpoint: Called before each tensor; raises to give up.
    """

    def __init__(self, tensors: TensorSource, dtype: torch.dtype, checkpoint: Callable[[], None]) -> None:
        self._tensors, self._dtype, self._checkpoint = tensors, dtype, checkpoint

    def tensor(self, name: str) -> Tensor:
        """One tensor, in memory of its own; block formats are decoded by way of float32."""
        self._checkpoint()
        info = self._tensors.info(name)
        plain = _PLAIN.get(info.dtype)
        if plain is None:
            return torch.from_numpy(self._tensors.read(name)).to(self._dtype)
        mapped = torch.frombuffer(self._tensors.raw(name), dtype=plain).view(info.shape)
        return mapped.to(self._dtype, copy=True)

    def norm(self, name: str, offset: float) -> Tensor:
        """A normalisation's weight; with an offset in float32, since small weights would vanish beside it."""
        weight = self.tensor(name)
        return weight.float() + offset if offset else weight

    def linear(self, *names: str, bias: bool) -> Linear:
        """One linear whose outputs are those of `names`, side by side."""
        weights = [self.tensor(f"{name}.weight") for name in names]
        offset = torch.cat([self.tensor(f"{name}.bias") for name in names]) if bias else None
        return Linear(torch.cat(weights) if len(weights) > 1 else weights[0], offset)
