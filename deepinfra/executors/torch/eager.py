"""Steps computed by torch, operation by operation: on any machine, for any family."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from deepinfra.executors.torch.batch import build_batch
from deepinfra.executors.torch.families.decoder import Decoder
from deepinfra.executors.torch.kv import PagedKV
from deepinfra.executors.torch.rows import Drawn, Row, Rows, StepModel
from deepinfra.executors.torch.sampler import sample
from deepinfra.executors.torch.windows import Windows

__all__ = ("Eager",)


class Eager(StepModel):
    """A `Decoder` with its KV.

    Args:
        decoder: With its weights.
        kv: Its blocks.
        windows: Its sequences' windows, if it has layers that keep them.
        dtype: Compute type.
    """

    def __init__(self, decoder: Decoder, kv: PagedKV, windows: Windows | None, dtype: torch.dtype) -> None:
        self._decoder, self._kv, self._windows, self._dtype = decoder, kv, windows, dtype
        self._sizes = tuple(sorted(set(decoder.config.windows)))
        self._logits: Tensor | None = None

    @torch.inference_mode()
    def compute(self, items: Sequence[Rows]) -> list[bool]:
        """See `StepModel.compute`."""
        batch = build_batch(items, self._kv, self._sizes, self._dtype, self._windows)
        hidden = self._decoder.forward(batch)
        finite = torch.isfinite(hidden.sum(-1)).tolist()
        wanted: list[int] = []
        for first, item in zip(batch.first, items, strict=True):
            last = first + len(item.tokens)
            wanted.extend(range(last - item.wanted, last))
        self._logits = None
        if wanted:
            whole = len(wanted) == len(hidden) and wanted == sorted(wanted)
            self._logits = self._decoder.logits(hidden if whole else hidden[wanted])
        return [all(finite[at : at + len(item.tokens)]) for at, item in zip(batch.first, items, strict=True)]

    @torch.inference_mode()
    def sample(self, rows: Sequence[Row]) -> list[Drawn]:
        """See `StepModel.sample`."""
        assert self._logits is not None
        return sample(self._logits, rows)
