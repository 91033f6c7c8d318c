"""Norms, gates and embeddings of rows are those of float64 and of the file."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from deepinfra_kernels import cpu
from deepinfra_kernels.library import Library
from deepinfra_kernels.linear import embed, gate, norm
from gguf import GGMLQuantizationType, quants

PATHS = list(cpu.paths())


@pytest.fixture(scope="module", params=PATHS)
def library(request: pytest.FixtureRequest, kernels: Callable[[str], Library]) -> Library:
    return kernels(request.param)


@pytest.mark.parametrize("n", [1, 15, 16, 64, 65, 113, 576, 1537])
def test_norm_is_that_of_float64(library: Library, n: int) -> None:
    random = np.random.default_rng(n)
    x, weight = np.asarray(random.normal(0, 3, (5, n)), np.float32), np.asarray(random.normal(1, 0.2, n), np.float32)
    exact = x / np.sqrt((np.asarray(x, np.float64) ** 2).mean(-1, keepdims=True) + 1e-5) * weight
    assert np.allclose(norm(library, x, weight, 1e-5), exact, rtol=1e-6, atol=0)


@pytest.mark.parametrize("activation", ["silu", "gelu"])
def test_gate_is_that_of_float64_near_and_far_from_zero(library: Library, activation: str) -> None:
    random = np.random.default_rng(0)
    gates = np.asarray(
        np.concatenate([np.linspace(-30, 30, 4001), random.normal(0, 1, 3000), [0.0, 1e30, -1e4]]), np.float32
    )[None]
    up = np.asarray(random.normal(0, 1, gates.shape), np.float32)
    x = np.asarray(gates, np.float64)
    if activation == "silu":
        exact = x / (1 + np.exp(np.minimum(-x, 700)))
    else:
        exact = x / (1 + np.exp(np.clip(-2 * np.sqrt(2 / np.pi) * (x + 0.044715 * x**3), -700, 700)))
    # An error of the exponent's argument grows with it: |x| units in the last place.
    bound = np.abs(exact * up) * (8 + 4 * np.abs(np.clip(x, -30, 30)) ** (1 if activation == "silu" else 3)) * 2.0**-24
    assert (np.abs(gate(library, activation, gates, up) - exact * up) <= bound + 1e-37).all()


def test_gate_keeps_what_is_not_finite(library: Library) -> None:
    gates, up = np.asarray([[np.nan, np.inf, 1.0]], np.float32), np.asarray([[1.0, 1.0, np.nan]], np.float32)
    for activation in ("silu", "gelu"):
        assert not np.isfinite(gate(library, activation, gates, up)).any()


def test_paths_agree_in_every_bit(kernels: Callable[[str], Library]) -> None:
    random = np.random.default_rng(5)
    x, y = (np.asarray(random.normal(0, 2, (7, 999)), np.float32) for _ in range(2))
    libraries = [kernels(path) for path in PATHS]
    assert len({norm(library, x, y[0], 1e-5).tobytes() for library in libraries}) == 1
    for activation in ("silu", "gelu"):
        assert len({gate(library, activation, x, y).tobytes() for library in libraries}) == 1


@pytest.mark.parametrize("name", ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K"])
def test_embedding_is_the_files_row_in_every_bit(library: Library, name: str) -> None:
    source = GGMLQuantizationType[name]
    random = np.random.default_rng(1)
    block, nbytes = {"Q4_K": (256, 144), "Q5_K": (256, 176), "Q6_K": (256, 210)}.get(name, (1, 0))
    if block == 1:
        table = (
            quants.quantize(np.asarray(random.normal(0, 1, (10, 512)), np.float32), source)
            .view(np.uint8)
            .reshape(10, -1)
        )
    else:
        table = random.integers(0, 256, (10, 512 // block * nbytes), dtype=np.uint8)
        begin = 208 if name == "Q6_K" else 0
        table.reshape(-1, nbytes)[:, begin + 1 : begin + 4 : 2] = 0x24  # factors that are finite
    tokens = np.array([3, 0, 9, 3])
    expected = np.asarray(quants.dequantize(table, source), np.float32)[tokens]
    assert (embed(library, int(source), table.reshape(-1), 10, 512, tokens) == expected).all()


def test_wrong_arguments_are_refused_by_name(library: Library) -> None:
    x = np.zeros((2, 32), np.float32)
    with pytest.raises(ValueError, match="weight is float32"):
        norm(library, x, np.zeros(31, np.float32), 1e-5)
    with pytest.raises(ValueError, match="activation 'relu'"):
        gate(library, "relu", x, x)
    with pytest.raises(ValueError, match="up is float32"):
        gate(library, "silu", x, x[:1])
    with pytest.raises(ValueError, match="outside a table of 10"):
        embed(library, 0, np.zeros(10 * 128, np.uint8), 10, 32, np.array([10]))
    with pytest.raises(ValueError, match="source type 2 has no rows of 31"):
        embed(library, 2, np.zeros(18, np.uint8), 1, 31, np.array([0]))
