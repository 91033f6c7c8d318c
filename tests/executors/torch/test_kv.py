"""Paged keys and values."""

from __future__ import annotations

import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from deepinfra_kernels import cpu
from deepinfra_kernels.library import Library

from deepinfra.core.ids import BlockId
from deepinfra.core.kv import FRAME_NBYTES
from deepinfra.core.step import Fill
from deepinfra.executors.torch.config import decoder_config
from deepinfra.executors.torch.kv import PagedKV
from deepinfra.executors.torch.native_kv import NativeKV
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


def test_a_block_of_torchs_takes_its_own_memory_alone(made: Any) -> None:
    """Planes of heads and layers are far larger than a huge page, of which a block would take one each."""
    config = decoder_config(open_model(str(made("llama")[0])).config)
    kv = PagedKV(config, torch.float32, 200_000, 4)
    before = resident()
    kv.words[:, :, :, 7] = 1
    assert resident() - before < 2 * 2**20


def test_blocks_of_the_kernels_take_the_memory_of_those_in_use(made: Any, kernels: Callable[[str], Library]) -> None:
    config = decoder_config(open_model(str(made("llama-wide")[0])).config)
    kv = NativeKV(kernels(cpu.paths()[0]), config, 4, 200_000, 4)
    nbytes = kv.words[0].nbytes
    before = resident()
    for count in (1, 100, 5_000):
        kv.words[:count] = 1
        assert resident() - before < count * nbytes + 3 * 2**20  # huge pages at either end, and this test's own


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("block_size", [4, 16, 21])
def test_kernels_and_torch_save_a_block_as_the_same_bytes(
    made: Any, kernels: Callable[[str], Library], dtype: torch.dtype, block_size: int
) -> None:
    config = decoder_config(open_model(str(made("llama-wide")[0])).config)
    theirs = PagedKV(config, dtype, 3, block_size)
    nbytes = FRAME_NBYTES + config.kv_nbytes_per_token(dtype.itemsize) * block_size
    given = memoryview(bytearray(np.random.default_rng(0).bytes(nbytes)))
    for path in cpu.paths():
        ours = NativeKV(kernels(path), config, dtype.itemsize, 3, block_size)
        for kv in (ours, theirs):
            kv.fill(Fill(block=BlockId(2), slot=0), given)
            saved = memoryview(bytearray(nbytes))
            kv.drain(BlockId(2), saved)
            assert saved[FRAME_NBYTES:] == given[FRAME_NBYTES:]
        assert not ours.words[:2].any()
        ours.clear([2])
        assert not ours.words.any()


@pytest.mark.parametrize("block", [-1, 3])
def test_a_block_that_does_not_exist_is_refused(made: Any, kernels: Callable[[str], Library], block: int) -> None:
    config = decoder_config(open_model(str(made("llama-wide")[0])).config)
    slot = memoryview(bytearray(FRAME_NBYTES + config.kv_nbytes_per_token(4) * 4))
    for kv in (PagedKV(config, torch.float32, 3, 4), NativeKV(kernels(cpu.paths()[0]), config, 4, 3, 4)):
        with pytest.raises(IndexError, match="out of range"):
            kv.fill(Fill(block=BlockId(block), slot=0), slot)
        with pytest.raises(IndexError, match="out of range"):
            kv.drain(BlockId(block), slot)
