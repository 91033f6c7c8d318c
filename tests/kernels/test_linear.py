"""Products of packed weights give what float64 gives of the same rounded inputs, and a row's bits stand alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from deepinfra_kernels import cpu
from deepinfra_kernels.library import Library
from deepinfra_kernels.linear import (
    Compute,
    PackedMatrix,
    Packing,
    Room,
    linear,
    multiply,
    packed_nbytes,
    prepare,
    row_nbytes,
)
from gguf import GGMLQuantizationType, quants
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

PATHS = list(cpu.paths())
SOURCES = {
    "F32": 0,
    "F16": 1,
    "Q4_0": 2,
    "Q4_1": 3,
    "Q5_0": 6,
    "Q5_1": 7,
    "Q8_0": 8,
    "Q4_K": 12,
    "Q5_K": 13,
    "Q6_K": 14,
    "BF16": 30,
}
IN_BLOCKS = [name for name in SOURCES if name.startswith("Q")]
FORMS = [(name, form) for name in SOURCES for form in Compute if form != Compute.I8 or name in IN_BLOCKS]
K_SCALES = {"Q4_K": 0, "Q5_K": 0, "Q6_K": 208}
"""Where a block of 256 has its factors in half precision."""

half = 2.0**-24
"""The largest relative error of one rounding to float32."""


@pytest.fixture(scope="module", params=PATHS)
def library(request: pytest.FixtureRequest, kernels: Callable[[str], Library]) -> Library:
    return kernels(request.param)


def stored(name: str, out: int, inputs: int, seed: int = 0) -> NDArray[np.uint8]:
    """Random weights as a file holds them, `[out, bytes of a row]`."""
    random = np.random.default_rng(seed)
    if name not in K_SCALES:
        weights = np.asarray(random.normal(0, 0.05, (out, inputs)), np.float32)
        blocks: NDArray[np.uint8] = quants.quantize(weights, GGMLQuantizationType[name]).view(np.uint8)
        return blocks.reshape(out, -1)
    block = {"Q4_K": 144, "Q5_K": 176, "Q6_K": 210}[name]
    rows = random.integers(0, 256, (out, inputs // 256 * block), dtype=np.uint8)
    factors = np.asarray(random.uniform(1e-4, 2e-3, (rows.size // block, 1 if name == "Q6_K" else 2)), np.float16)
    begin = K_SCALES[name]
    rows.reshape(-1, block)[:, begin : begin + factors.itemsize * factors.shape[1]] = factors.view(np.uint8)
    return rows


def dense(name: str, rows: NDArray[np.uint8]) -> NDArray[np.float64]:
    return np.asarray(quants.dequantize(rows, GGMLQuantizationType[name]), np.float64)


def packed(
    library: Library, name: str, form: Compute, rows: NDArray[np.uint8], inputs: int, bias: Any = None
) -> PackedMatrix:
    return PackedMatrix.pack(library, SOURCES[name], form, len(rows), inputs, rows.reshape(-1), bias)


def bfloat16(x: NDArray[Any]) -> NDArray[np.float64]:
    bits = np.asarray(x, np.float32).view(np.uint32).astype(np.uint64)
    return np.asarray(((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16 << 16).astype(np.uint32).view(np.float32), np.float64)


def quantised(x: NDArray[np.float32]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Each group of 32 as integers, and its scale."""
    groups = x.reshape(len(x), -1, 32)
    largest = np.abs(groups).max(-1, keepdims=True)
    inverse = np.divide(np.float32(127), largest, out=np.zeros_like(largest), where=largest > 0)
    return np.asarray(np.rint(groups * inverse), np.float64), np.asarray(largest / np.float32(127), np.float64)


def rounded(form: Compute, x: NDArray[np.float32]) -> NDArray[np.float64]:
    if form == Compute.F32:
        return np.asarray(x, np.float64)
    if form == Compute.BF16:
        return bfloat16(x)
    integers, scales = quantised(x)
    return (integers * scales).reshape(x.shape)


def inputs_of(rows: int, n: int, seed: int = 1) -> NDArray[np.float32]:
    random = np.random.default_rng(seed)
    return np.asarray(
        random.normal(0, 1, (rows, n)) * random.choice([0.01, 1.0, 30.0], (rows, n), p=[0.3, 0.6, 0.1]), np.float32
    )


@pytest.mark.parametrize(("name", "form"), FORMS, ids=lambda value: getattr(value, "name", value))
def test_product_is_that_of_float64_but_for_the_rounding_of_sums(library: Library, name: str, form: Compute) -> None:
    n, out = 512, 77
    rows, x = stored(name, out, n), inputs_of(9, n)
    bias = np.asarray(np.random.default_rng(2).normal(0, 1, out), np.float32)
    weights = dense(name, rows)
    if form == Compute.BF16:
        weights = bfloat16(weights)
    rounded_x = rounded(form, x)
    exact = rounded_x @ weights.T + bias
    # Each of the terms takes part in at most n roundings. Scales of K blocks are products, rounded to half precision;
    # sums of a group with a minimum are of two parts, each larger than what is left of it.
    size = np.abs(rounded_x) @ np.abs(weights).T + np.abs(bias)
    bound = size * (n + 8) * half
    if form == Compute.I8:
        parts = {"Q4_1": 16, "Q5_1": 32, "Q4_K": 16, "Q5_K": 32}.get(name, 1)
        bound = bound * parts
        if name in K_SCALES:
            steps = np.abs(rounded_x) @ np.full_like(weights, np.abs(weights).max()).T
            bound = bound + steps * parts * 2.0**-11
    error = np.abs(linear(packed(library, name, form, rows, n, bias), x, 2) - exact)
    assert (error <= bound).all(), (error / bound).max()


@pytest.mark.parametrize("name", IN_BLOCKS)
def test_quantised_inputs_cost_less_than_a_hundredth_of_a_product(library: Library, name: str) -> None:
    rows, x = stored(name, 64, 1536), np.asarray(np.random.default_rng(3).normal(0, 1, (16, 1536)), np.float32)
    exact = np.asarray(x, np.float64) @ dense(name, rows).T
    error = linear(packed(library, name, Compute.I8, rows, 1536), x) - exact
    assert np.sqrt((error**2).mean() / (exact**2).mean()) < 0.01


@pytest.mark.parametrize(("name", "form"), FORMS, ids=lambda value: getattr(value, "name", value))
def test_row_has_the_same_bits_in_every_batch_and_on_any_threads(library: Library, name: str, form: Compute) -> None:
    n, out = 256, 41
    matrix, x = packed(library, name, form, stored(name, out, n), n), inputs_of(70, n)
    alone = np.concatenate([linear(matrix, x[i : i + 1]) for i in range(70)])
    for count in range(1, 71):
        first = (count * 7) % (71 - count)
        found = linear(matrix, x[first : first + count], 1 + count % 4)
        assert found.tobytes() == alone[first : first + count].tobytes(), count


@settings(max_examples=60, deadline=None)
@given(
    form=st.sampled_from(FORMS),
    groups=st.integers(1, 20),
    out=st.integers(1, 130),
    count=st.integers(1, 230),
    threads=st.integers(1, 4),
    seed=st.integers(0, 2**32),
)
def test_order_and_number_of_rows_change_no_bit(
    library: Library, form: tuple[str, Compute], groups: int, out: int, count: int, threads: int, seed: int
) -> None:
    name, compute = form
    n = 256 * (1 + groups % 3) if name in K_SCALES else 32 * groups
    matrix, x = packed(library, name, compute, stored(name, out, n, seed), n), inputs_of(count, n, seed)
    order = np.random.default_rng(seed).permutation(count)
    whole = linear(matrix, x, threads)
    assert linear(matrix, x[order], 1).tobytes() == whole[order].tobytes()
    one = int(order[0])
    assert linear(matrix, x[one : one + 1], threads).tobytes() == whole[one : one + 1].tobytes()


def test_prepared_rows_begin_at_a_cache_line_and_are_refused_elsewhere(library: Library) -> None:
    matrix = packed(library, "Q8_0", Compute.I8, stored("Q8_0", 16, 64, 0), 64)
    kept = [prepare(library, Compute.I8, inputs_of(count, 64)) for count in range(1, 40)]
    assert {inputs.ctypes.data % 64 for inputs in kept} == {0}
    inputs, y = kept[2], np.empty((3, 16), np.float32)
    room = np.empty(inputs.nbytes + 128, np.uint8)
    at = -room.ctypes.data % 64 + 16
    askew = room[at : at + inputs.nbytes].reshape(inputs.shape)
    askew[:] = inputs
    with pytest.raises(ValueError, match="multiple of 64 bytes"):
        multiply(matrix, askew, 3, y, 1)
    multiply(matrix, inputs, 3, y, 1)
    assert y.tobytes() == linear(matrix, inputs_of(3, 64), 1).tobytes()


@pytest.mark.parametrize(("name", "form"), FORMS, ids=lambda value: getattr(value, "name", value))
def test_column_has_the_same_bits_wherever_it_lies(library: Library, name: str, form: Compute) -> None:
    n = 256
    rows, x = stored(name, 70, n), inputs_of(5, n)
    whole = linear(packed(library, name, form, rows, n), x)
    for first, count in [(0, 1), (31, 2), (45, 25), (69, 1)]:
        part = linear(packed(library, name, form, rows[first : first + count], n), x)
        assert part.tobytes() == np.ascontiguousarray(whole[:, first : first + count]).tobytes()


@pytest.mark.parametrize("name", SOURCES)
def test_paths_agree_in_every_bit_of_float32_and_int8(kernels: Callable[[str], Library], name: str) -> None:
    n, x = 512, inputs_of(11, 512)
    rows = stored(name, 50, n)
    for form in (Compute.F32, *([Compute.I8] if name in IN_BLOCKS else [])):
        assert len({linear(packed(kernels(path), name, form, rows, n), x).tobytes() for path in PATHS}) == 1


@pytest.mark.parametrize("name", ["Q4_0", "Q8_0", "Q5_0"])
def test_largest_integers_do_not_saturate(library: Library, name: str) -> None:
    rows = stored(name, 8, 128)
    blocks = rows.reshape(-1, rows.shape[1] // 4)
    blocks[:, 2:] = {"Q4_0": 0x00, "Q8_0": 0x80, "Q5_0": 0x00}[name]  # the lowest value of each format, everywhere
    x = np.full((3, 128), 127, np.float32)
    x[1] = -127
    x[2, ::2] = -127
    exact = np.asarray(x, np.float64) @ dense(name, rows).T
    assert np.allclose(linear(packed(library, name, Compute.I8, rows, 128), x), exact, rtol=1e-6, atol=1e-3)


@pytest.mark.parametrize(("name", "begin"), [("Q4_1", 4), ("Q5_1", 4), ("Q4_K", 16), ("Q5_K", 16)])
def test_largest_integers_above_a_minimum_do_not_wrap(library: Library, name: str, begin: int) -> None:
    rows = stored(name, 8, 256)
    block = 256 * rows.shape[1] // 256 // (1 if name in K_SCALES else 8)
    rows.reshape(-1, block)[:, begin:] = 0xFF  # every integer is the largest
    x = np.full((3, 256), 127, np.float32)
    x[1] = -127
    x[2, ::2] = -127
    exact = np.asarray(x, np.float64) @ dense(name, rows).T
    size = np.abs(np.asarray(x, np.float64)) @ np.abs(dense(name, rows)).T
    assert (np.abs(linear(packed(library, name, Compute.I8, rows, 256), x) - exact) <= size * 2e-3).all()


@pytest.mark.parametrize("form", [Compute.F32, Compute.BF16])
@pytest.mark.parametrize("n", [1, 2, 17, 255, 257, 300])
def test_dense_rows_of_any_length_are_multiplied(library: Library, form: Compute, n: int) -> None:
    rows, x = stored("F32", 33, n), inputs_of(4, n)
    weights = dense("F32", rows) if form == Compute.F32 else bfloat16(dense("F32", rows))
    found = linear(packed(library, "F32", form, rows, n), x)
    exact, size = rounded(form, x) @ weights.T, np.abs(rounded(form, x)) @ np.abs(weights).T
    assert (np.abs(found - exact) <= size * (n + 2) * half).all()


@pytest.mark.parametrize("word", [0xFFFFFFFF, 0x7FFFFFFF, 0x7F800001, 0xFFC00000])
@pytest.mark.parametrize("n", [16, 19])
def test_a_nan_is_one_after_it_is_rounded_whichever_it_is(library: Library, word: int, n: int) -> None:
    x = np.full((1, n), word, np.uint32).view(np.float32)
    assert np.isnan(
        (prepare(library, Compute.BF16, x)[0, : 2 * n].view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    ).all()
    weights = packed(library, "F32", Compute.BF16, x.view(np.uint8), n)
    assert np.isnan(linear(weights, np.ones((1, n), np.float32))).all()


def test_integers_of_rows_are_those_of_numpy_and_zero_stays_zero(library: Library) -> None:
    x = inputs_of(6, 320)
    x[2, 32:64] = 0.0
    integers, scales = quantised(x)
    groups = prepare(library, Compute.I8, x)[:, : 10 * 64].reshape(6, 10, 64)
    assert (groups[:, :, :32].view(np.int8) == integers).all()
    assert (np.ascontiguousarray(groups[:, :, 32:36]).view(np.float32) == scales).all()


@pytest.mark.parametrize("form", list(Compute))
def test_what_is_not_finite_stays_so(library: Library, form: Compute) -> None:
    matrix, x = packed(library, "Q8_0", form, stored("Q8_0", 40, 64), 64), inputs_of(3, 64)
    x[0, 5], x[1, 40] = np.nan, np.inf
    found = linear(matrix, x)
    assert not np.isfinite(found[:2]).any()
    assert np.isfinite(found[2]).all()


def test_what_cannot_be_packed_is_told_before(library: Library) -> None:
    assert packed_nbytes(library, SOURCES["F16"], Compute.I8, 64, 64) is None
    assert packed_nbytes(library, SOURCES["Q4_0"], Compute.I8, 64, 33) is None
    assert packed_nbytes(library, SOURCES["Q4_K"], Compute.BF16, 64, 96) is None
    assert packed_nbytes(library, 4, Compute.F32, 64, 64) is None
    assert packed_nbytes(library, SOURCES["F32"], Compute.F32, 0, 64) is None
    assert row_nbytes(library, SOURCES["Q8_0"], 64) == 68
    with pytest.raises(ValueError, match=r"source type 1 \[64, 64\] cannot be packed for I8 activations"):
        PackedMatrix.pack(library, SOURCES["F16"], Compute.I8, 64, 64, bytes(64 * 128))


def test_wrong_sizes_are_refused_by_name(library: Library) -> None:
    rows, x = stored("Q8_0", 40, 64), inputs_of(3, 64)
    with pytest.raises(ValueError, match="rows is uint8"):
        PackedMatrix.pack(library, SOURCES["Q8_0"], Compute.I8, 41, 64, rows.reshape(-1))
    with pytest.raises(ValueError, match="bias is float32"):
        packed(library, "Q8_0", Compute.I8, rows, 64, np.zeros(39, np.float32))
    matrix = packed(library, "Q8_0", Compute.I8, rows, 64)
    with pytest.raises(ValueError, match="x is float64"):
        linear(matrix, np.zeros((3, 64)))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="x is float32"):
        linear(matrix, x[:, :32])
    with pytest.raises(ValueError, match="no whole groups of 32"):
        prepare(library, Compute.I8, inputs_of(2, 40))
    with pytest.raises(ValueError, match="inputs is uint8"):
        multiply(matrix, np.zeros((3, 64), np.uint8), 3, np.zeros((3, 40), np.float32), 1)


def test_matrices_of_one_room_lie_side_by_side_and_outlive_it(library: Library) -> None:
    rows, room = stored("Q8_0", 33, 64), Room()
    x = inputs_of(3, 64)
    alone = linear(packed(library, "Q8_0", Compute.I8, rows, 64), x)
    several = [
        PackedMatrix.pack(library, SOURCES["Q8_0"], Compute.I8, 33, 64, rows.reshape(-1), room=room) for _ in range(3)
    ]
    del room
    begins = [matrix.data.ctypes.data for matrix in several]
    assert [begin % 64 for begin in begins] == [0, 0, 0]
    assert begins[1] - begins[0] == begins[2] - begins[1] == several[0].nbytes
    assert all(linear(matrix, x).tobytes() == alone.tobytes() for matrix in several)


def test_what_is_larger_than_a_rooms_chunk_gets_one_of_its_own() -> None:
    room = Room()
    first, large, last = room.take(100), room.take(40 << 20), room.take(100)
    assert (first.size, large.size, last.size) == (100, 40 << 20, 100)
    large[-1] = first[0] = last[0] = 7
    assert (int(large[-1]), int(first[0]), int(last[0])) == (7, 7, 7)


def test_no_rows_give_no_rows(library: Library) -> None:
    matrix = packed(library, "Q8_0", Compute.I8, stored("Q8_0", 40, 64), 64)
    assert linear(matrix, np.empty((0, 64), np.float32)).shape == (0, 40)


def test_matrices_packed_together_on_threads_are_those_packed_alone(library: Library) -> None:
    sizes = [("Q4_1", Compute.I8, 2085, 64), ("Q8_0", Compute.I8, 33, 96), ("F32", Compute.BF16, 1024, 33)]
    matrices = [
        Packing(SOURCES[name], form, out, n, stored(name, out, n).reshape(-1), np.arange(out, dtype=np.float32))
        for name, form, out, n in sizes
    ]
    together = PackedMatrix.pack_all(library, matrices, Room(), threads=3)
    for matrix, packing in zip(together, matrices, strict=True):
        alone = PackedMatrix.pack(library, *packing)
        assert (matrix.kind, matrix.out, matrix.inputs) == (alone.kind, alone.out, alone.inputs)
        assert matrix.data.tobytes() == alone.data.tobytes()
        assert alone.bias is not None
        assert matrix.bias is not None
        assert matrix.bias.tobytes() == alone.bias.tobytes()
    assert PackedMatrix.pack_all(library, []) == []
