"""Steps computed by torch, operation by operation: on any machine, for any family."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deepinfra.executors.torch.batch import build_batch
from deepinfra.executors.torch.decoder import DecoderConfig
from deepinfra.executors.torch.families.decoder import Decoder
from deepinfra.executors.torch.kv import PagedKV
from deepinfra.executors.torch.ops import warm_allocator
from deepinfra.executors.torch.rows import Drawn, Row, Rows, StepModel
from deepinfra.executors.torch.sampler import sample
from deepinfra.executors.torch.weights.read import WeightReader
from deepinfra.executors.torch.windows import Windows
from deepinfra.models import TensorSource

__all__ = ("Eager", "load_eager")


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
        return sample(self.logits(), rows)

    def logits(self) -> NDArray[np.float32]:
        """See `StepModel.logits`."""
        assert self._logits is not None
        kept: NDArray[np.float32] = self._logits.float().numpy()
        return kept

    def seconds(self) -> dict[str, float]:
        """See `StepModel.seconds`: torch's operations are not measured one by one."""
        return {}


def load_eager(
    tensors: TensorSource,
    config: DecoderConfig,
    *,
    dtype: str,
    num_blocks: int,
    num_pages: int,
    block_size: int,
    threads: int | None,
    checkpoint: Callable[[], None],
) -> tuple[Eager, PagedKV, Windows | None]:
    """Read a model's weights and make room for its KV; to be called on the thread that will run its steps.

    Args:
        tensors: The model's files.
        config: What it is made of.
        dtype: Element type.
        num_blocks: Blocks of KV.
        num_pages: Pages of windows.
        block_size: Positions of each.
        threads: Of torch; default: its own choice.
        checkpoint: Called before each tensor; raises to give up.
    """
    if threads is not None:
        torch.set_num_threads(threads)
    warm_allocator()
    kind = {"float32": torch.float32, "bfloat16": torch.bfloat16}[dtype]
    with torch.inference_mode():
        decoder = Decoder(config, WeightReader(tensors, kind, checkpoint), kind)
    tensors.release()
    kv = PagedKV(config, kind, num_blocks, block_size)
    windows = Windows(config, kind, num_pages, block_size) if config.sliding else None
    return Eager(decoder, kv, windows, kind), kv, windows
