"""Blocks of keys and values come back as they were put, whatever their size, and lie apart from each other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from deepinfra_kernels import cpu
from deepinfra_kernels.cache import Cache, shape_of
from deepinfra_kernels.library import Library
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray


@pytest.fixture(scope="module", params=cpu.paths())
def library(request: pytest.FixtureRequest, kernels: Callable[[str], Library]) -> Library:
    return kernels(request.param)


def numbers(shape: tuple[int, ...], dtype: str, seed: int) -> NDArray[np.number]:
    """Random bits, among them those of numbers that are not finite."""
    words = np.dtype(dtype).itemsize
    return np.random.default_rng(seed).integers(0, 256, (*shape, words), np.uint8).view(dtype)[..., 0]


@settings(max_examples=40, deadline=None)
@given(
    layers=st.integers(1, 3),
    heads=st.integers(1, 3),
    size=st.integers(1, 70),
    dim=st.sampled_from([16, 48, 64, 256]),
    dtype=st.sampled_from(["uint16", "float32"]),
    seed=st.integers(0, 100),
)
@example(layers=30, heads=3, size=16, dim=64, dtype="uint16", seed=0)
def test_a_block_comes_back_as_it_was_put_and_touches_no_other(
    library: Library, layers: int, heads: int, size: int, dim: int, dtype: str, seed: int
) -> None:
    kv = numbers(shape_of(blocks=3, layers=layers, kv_heads=heads, block_size=size, head_dim=dim), dtype, seed)
    before, payload = kv.copy(), numbers((layers, 2, size, heads, dim), dtype, seed + 1)
    cache, back = Cache(library, kv), np.zeros_like(payload)
    cache.put(1, payload)
    cache.get(1, back)
    assert back.tobytes() == payload.tobytes()
    assert kv[[0, 2]].tobytes() == before[[0, 2]].tobytes()
    # Each bit has one place: a block holds nothing but its payload.
    assert sorted(kv[1].tobytes()) == sorted(payload.tobytes())


def test_paths_keep_the_same_order(kernels: Callable[[str], Library]) -> None:
    payload = numbers((2, 2, 19, 2, 32), "uint16", 0)
    held = []
    for path in cpu.paths():
        kv = np.zeros(shape_of(blocks=1, layers=2, kv_heads=2, block_size=19, head_dim=32), np.uint16)
        Cache(kernels(path), kv).put(0, payload)
        held.append(kv.tobytes())
    assert set(held) == {held[0]}


@pytest.mark.parametrize("block", [-1, 3, 2**62])
def test_a_block_that_does_not_exist_is_refused(library: Library, block: int) -> None:
    kv = np.zeros(shape_of(blocks=3, layers=1, kv_heads=1, block_size=2, head_dim=16), np.float32)
    payload = np.ones((1, 2, 2, 1, 16), np.float32)
    cache = Cache(library, kv)
    for copy in (cache.put, cache.get):
        with pytest.raises(IndexError, match="out of range"):
            copy(block, payload)
    assert not kv.any()


@pytest.mark.parametrize(
    "payload",
    [
        np.ones((1, 2, 2, 1, 32), np.float32),
        np.ones((2, 1, 2, 1, 16), np.float32),
        np.ones((1, 2, 2, 1, 16)),
        np.ones((1, 2, 2, 1, 32), np.float32)[..., ::2],
    ],
)
def test_a_payload_that_does_not_fit_is_refused(library: Library, payload: Any) -> None:
    kv = np.zeros(shape_of(blocks=3, layers=1, kv_heads=1, block_size=2, head_dim=16), np.float32)
    cache = Cache(library, kv)
    for copy in (cache.put, cache.get):
        with pytest.raises(ValueError, match="payload"):
            copy(0, payload)
    assert not kv.any()


def test_nothing_is_read_into_what_cannot_be_written(library: Library) -> None:
    kv = np.zeros(shape_of(blocks=3, layers=1, kv_heads=1, block_size=2, head_dim=16), np.float32)
    payload = np.ones((1, 2, 2, 1, 16), np.float32)
    payload.flags.writeable = False
    Cache(library, kv).put(0, payload)
    with pytest.raises(ValueError, match="cannot be written"):
        Cache(library, kv).get(0, payload)
