"""Attention over blocks gives what float64 gives, and a row's bits depend on its position and keys alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pytest
import torch
from deepinfra_kernels import cpu
from deepinfra_kernels.attention import attend, rotate
from deepinfra_kernels.cache import Cache, shape_of
from deepinfra_kernels.decoder import Step
from deepinfra_kernels.library import Library
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor


@pytest.fixture(scope="module", params=cpu.paths())
def library(request: pytest.FixtureRequest, kernels: Callable[[str], Library]) -> Library:
    return kernels(request.param)


class Shape(NamedTuple):
    """What is attended to, by which heads."""

    kv_heads: int = 2
    group: int = 3
    dim: int = 64
    block_size: int = 16
    window: int = 0
    bf16: bool = True


@dataclass
class Known:
    """Keys and values `[seqs, kv_heads, positions, dim]` of some sequences, queries `[seqs, positions, heads, dim]`."""

    shape: Shape
    keys: Tensor
    values: Tensor
    queries: Tensor

    @classmethod
    def random(cls, shape: Shape, seqs: int, positions: int, seed: int = 0) -> Known:
        made = torch.Generator().manual_seed(seed)
        dtype = torch.bfloat16 if shape.bf16 else torch.float32
        size = (seqs, shape.kv_heads, positions, shape.dim)
        keys, values = (torch.randn(size, generator=made).to(dtype) for _ in range(2))
        queries = torch.randn(seqs, positions, shape.kv_heads * shape.group, shape.dim, generator=made)
        return cls(shape, keys, values, queries)

    def expected(self) -> Tensor:
        """By definition, in float64."""
        shape, count = self.shape, self.queries.shape[1]
        queries = self.queries.double().unflatten(2, (shape.kv_heads, shape.group))
        scores = torch.einsum("snhgd,shtd->shgnt", queries, self.keys.double()) * shape.dim**-0.5
        age = torch.arange(count)[:, None] - torch.arange(count)
        hidden = (age < 0) | (age >= (shape.window or math.inf))
        weights = scores.masked_fill(hidden, -math.inf).softmax(-1)
        return torch.einsum("shgnt,shtd->snhgd", weights, self.values.double()).flatten(2, 3)

    def attended(
        self,
        library: Library,
        rows: Sequence[tuple[int, int, int]],
        *,
        threads: int = 1,
        block_size: int | None = None,
        seed: int = 0,
    ) -> list[Tensor]:
        """By the kernels, of `(sequence, first position, rows)` in one step, each `[rows, heads, dim]`.

        Blocks lie in random places, and every cell that no row may see holds NaN.
        """
        shape, size = self.shape, block_size or self.shape.block_size
        tables, kv = self._written(library, rows, size, seed)
        step = Step.of(
            [(range(count), start, 0, table) for (_, start, count), table in zip(rows, tables, strict=True)], []
        )
        queries = torch.cat([self.queries[seq, start : start + count] for seq, start, count in rows])
        out = attend(library, kv, 1, queries.numpy(), step, window=shape.window, threads=threads)
        return list(torch.from_numpy(out).split([count for _, _, count in rows]))

    def _written(
        self, library: Library, rows: Sequence[tuple[int, int, int]], size: int, seed: int
    ) -> tuple[list[list[int]], Tensor]:
        shape = self.shape
        needed = [-(-(start + count) // size) for _, start, count in rows]
        order = np.random.default_rng(seed).permutation(sum(needed) + 3)
        cells = shape_of(blocks=len(order), layers=2, kv_heads=shape.kv_heads, block_size=size, head_dim=shape.dim)
        kv = torch.full(cells, math.nan, dtype=self.keys.dtype)
        cache, tables, at = Cache(library, kv), [], 0
        for (seq, start, count), blocks in zip(rows, needed, strict=True):
            table = order[at : at + blocks].tolist()
            at += blocks
            whole = torch.full((2, 2, blocks * size, shape.kv_heads, shape.dim), math.nan, dtype=self.keys.dtype)
            for which, numbers in enumerate((self.keys, self.values)):
                whole[1, which, : start + count] = numbers[seq, :, : start + count].transpose(0, 1)
            for block, payload in zip(table, whole.split(size, 2), strict=True):
                cache.put(block, payload.contiguous())
            tables.append(table)
        return tables, kv


def bits(numbers: Tensor) -> NDArray[np.int32]:
    return numbers.numpy().view(np.int32)


SHAPES = st.builds(
    Shape,
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 9),
    dim=st.sampled_from([32, 48, 64, 80, 128, 256]),
    block_size=st.integers(1, 40),
    window=st.sampled_from([0, 1, 5, 64, 100, 300]),
    bf16=st.booleans(),
)


@settings(max_examples=25, deadline=None)
@given(shape=SHAPES, positions=st.integers(1, 330), seed=st.integers(0, 100))
@example(shape=Shape(), positions=1, seed=0)
@example(shape=Shape(group=1, bf16=False), positions=257, seed=0)
def test_it_equals_the_definition(library: Library, shape: Shape, positions: int, seed: int) -> None:
    known = Known.random(shape, 1, positions, seed)
    (given_,) = known.attended(library, [(0, 0, positions)], seed=seed)
    # Queries and weights are rounded to bfloat16 where keys and values are: 2**-9 of each product.
    assert (given_ - known.expected()[0]).abs().max() < (3e-2 if shape.bf16 else 5e-6)


@settings(max_examples=25, deadline=None)
@given(shape=SHAPES, data=st.data())
def test_a_rows_bits_are_the_same_however_the_rest_is_cut(library: Library, shape: Shape, data: st.DataObject) -> None:
    positions = data.draw(st.integers(2, 300))
    known = Known.random(shape, 3, positions)
    whole = [known.attended(library, [(seq, 0, positions)])[0] for seq in range(3)]
    parts = []
    for seq in range(3):
        start = data.draw(st.integers(0, positions - 1))
        parts.append((seq, start, data.draw(st.integers(1, positions - start))))
    threads, size = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 70))
    seed = data.draw(st.integers(0, 9))
    together = known.attended(library, parts, threads=threads, block_size=size, seed=seed)
    for (seq, start, count), part in zip(parts, together, strict=True):
        assert np.array_equal(bits(part), bits(whole[seq][start : start + count]))


def test_single_rows_give_the_bits_of_the_whole_prompt(library: Library) -> None:
    for shape in (Shape(), Shape(bf16=False, group=2, dim=32), Shape(group=5, window=70)):
        known = Known.random(shape, 1, 300)
        (whole,) = known.attended(library, [(0, 0, 300)])
        singles = known.attended(library, [(0, position, 1) for position in range(0, 300, 7)])
        assert np.array_equal(bits(torch.cat(singles)), bits(whole[::7]))


def test_scores_far_apart_stay_finite_and_exact(library: Library) -> None:
    known = Known.random(Shape(bf16=False), 1, 100)
    known.queries *= 1e4
    (given_,) = known.attended(library, [(0, 0, 100)])
    assert torch.isfinite(given_).all()
    assert (given_ - known.expected()[0]).abs().max() < 2e-2


def test_a_row_that_is_not_finite_disturbs_no_other(library: Library) -> None:
    known = Known.random(Shape(), 2, 90)
    clean = known.attended(library, [(0, 0, 90), (1, 0, 90)])
    known.queries[0, 50], known.queries[0, 60] = math.nan, math.inf
    first, second = known.attended(library, [(0, 0, 90), (1, 0, 90)])
    assert torch.isnan(first[[50, 60]]).all()
    others = [row for row in range(90) if row not in (50, 60)]
    assert np.array_equal(bits(first[others]), bits(clean[0][others]))
    assert np.array_equal(bits(second), bits(clean[1]))


@pytest.mark.parametrize("shape", [Shape(), Shape(bf16=False, group=1), Shape(group=7, window=20)])
def test_values_that_are_not_finite_reach_only_rows_that_see_them(library: Library, shape: Shape) -> None:
    known = Known.random(shape, 1, 150)
    (clean,) = known.attended(library, [(0, 0, 150)])
    known.values[0, 0, 100], known.values[0, 0, 101] = math.nan, math.inf
    (given_,) = known.attended(library, [(0, 0, 150)])
    assert np.array_equal(bits(given_[:100]), bits(clean[:100]))
    assert not torch.isfinite(given_[100 : min(150, 100 + (shape.window or 150)), : shape.group]).any()


@pytest.mark.parametrize("factor", [1.0, 1.25])
def test_rotation_equals_the_definition(library: Library, factor: float) -> None:
    rng = np.random.default_rng(0)
    rows, heads, dim = 40, 3, 48
    x = rng.standard_normal((rows, heads, dim), np.float32)
    positions = rng.integers(0, 100_000, rows)
    frequencies = (1e4 ** -(np.arange(0, dim, 2) / dim)).astype(np.float32)
    y = rotate(library, x, positions, frequencies, factor=factor, scale=0.125)
    angles = (positions.astype(np.float32)[:, None] * frequencies).astype(np.float64)[:, None]
    low, high = x[..., : dim // 2].astype(np.float64), x[..., dim // 2 :].astype(np.float64)
    cos, sin = np.cos(angles) * factor, np.sin(angles) * factor
    turned = np.concatenate((low * cos - high * sin, high * cos + low * sin), -1) * 0.125
    assert np.abs(y - turned).max() < 5e-7
