"""Paged keys and values."""

from __future__ import annotations

import resource
from pathlib import Path
from typing import Any

import torch

from deepinfra.executors.torch.blocks import KVBlocks
from deepinfra.executors.torch.config import decoder_config
from deepinfra.executors.torch.kv import PagedKV
from deepinfra.models import open_model


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def test_blocks_take_no_memory_before_they_are_written(made: Any) -> None:
    config = decoder_config(open_model(str(made("llama")[0])).config)
    before = resident()
    kv = PagedKV(config, torch.float32, 200_000, 4)  # 293 MiB
    assert resident() - before < 64 * 2**20
    kv.clear([0, 199_999])
    assert resident() - before < 64 * 2**20


def test_a_block_takes_its_own_memory_alone(made: Any) -> None:
    """Planes of heads and layers are far larger than a huge page, of which a block would take one each."""
    config = decoder_config(open_model(str(made("llama")[0])).config)
    kv = KVBlocks(config, 4, 200_000, 4)
    before = resident()
    kv.words[:, :, :, 7] = 1
    assert resident() - before < 2 * 2**20
