"""Makes a runner: settings of the thread, weights, KV."""

from __future__ import annotations

from collections.abc import Callable

import torch

from deepinfra.executors.torch.decoder import DecoderConfig
from deepinfra.executors.torch.eager import Eager
from deepinfra.executors.torch.families.decoder import Decoder
from deepinfra.executors.torch.kv import PagedKV
from deepinfra.executors.torch.ops import warm_allocator
from deepinfra.executors.torch.runner import Runner
from deepinfra.executors.torch.weights.read import WeightReader
from deepinfra.executors.torch.windows import Windows
from deepinfra.models import TensorSource

__all__ = ("load",)


def load(
    tensors: TensorSource,
    config: DecoderConfig,
    *,
    dtype: str,
    num_blocks: int,
    num_pages: int,
    block_size: int,
    threads: int | None,
    slot: Callable[[int], memoryview],
    now: Callable[[], float],
    checkpoint: Callable[[], None],
) -> tuple[Runner, PagedKV]:
    """Read a model's weights and make room for its KV; to be called on the thread that will run its steps."""
    if threads is not None:
        torch.set_num_threads(threads)
    warm_allocator()
    kind = {"float32": torch.float32, "bfloat16": torch.bfloat16}[dtype]
    with torch.inference_mode():
        decoder = Decoder(config, WeightReader(tensors, kind, checkpoint), kind)
    kv = PagedKV(config, kind, num_blocks, block_size)
    windows = Windows(config, kind, num_pages, block_size) if config.sliding else None
    return Runner(Eager(decoder, kv, windows, kind), config, kv, windows, slot, now), kv
