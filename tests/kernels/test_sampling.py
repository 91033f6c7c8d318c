"""Kernels draw what numpy draws, always, and a row's results do not depend on what is beside it."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from deepinfra_kernels import cpu
from deepinfra_kernels.library import Library
from deepinfra_kernels.sampling import Sampler, blank_draws
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from deepinfra.core.sampling import SamplingParams
from deepinfra.executors.torch.rows import Row
from deepinfra.executors.torch.sampler import sample

PATHS = list(cpu.paths())


@pytest.fixture(scope="module", params=PATHS)
def sampler(request: pytest.FixtureRequest, kernels: Callable[[str], Library]) -> Sampler:
    return Sampler(kernels(request.param), threads=2)


def random_logits(random: np.random.Generator, rows: int, vocab: int) -> NDArray[np.float32]:
    """Rows from flat to peaked, some with few distinct values, some masked."""
    spread = random.choice([0.01, 1.0, 3.0, 8.0], (rows, 1))
    logits = random.normal(0, 1, (rows, vocab)) * spread
    coarse = random.choice([0.0, 0.25], (rows, 1), p=[0.7, 0.3])
    logits = np.where(coarse > 0, np.round(logits * 4) / 4, logits)
    masked = (random.random((rows, 1)) < 0.1) & (random.random((rows, vocab)) < 0.9)
    masked[:, 0] = False
    return np.float32(np.where(masked, -np.inf, logits))


def random_row(random: np.random.Generator) -> Row:
    params = SamplingParams(
        temperature=float(random.choice([0.0, 0.01, 0.6, 1.0, 2.5])),
        top_k=int(random.choice([0, 0, 0, 1, 3, 50, 600])),
        top_p=float(random.choice([1.0, 1.0, 0.99, 0.9, 0.5, 0.001])),
        min_p=float(random.choice([0.0, 0.0, 0.01, 0.2, 1.0])),
        logprobs=[None, 0, 5, 20][random.integers(4)],
    )
    return Row(params, int(random.integers(2**64, dtype=np.uint64)), np.empty(0, np.int64), 0)


def differing(sampler: Sampler, rows: int, vocab: int, seed: int) -> list[tuple[int, object, object]]:
    random = np.random.default_rng(seed)
    logits = random_logits(random, rows, vocab)
    asked = [random_row(random) for _ in range(rows)]
    ours, theirs = sample(logits.copy(), asked, sampler), sample(logits, asked)
    return [(i, a, b) for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b]


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), vocab=st.sampled_from([1, 2, 15, 16, 17, 31, 64, 511, 2000, 4099]))
def test_kernels_draw_what_numpy_draws(sampler: Sampler, seed: int, vocab: int) -> None:
    """Tokens, and logprobs to the bit: both round one sum in float64."""
    assert not differing(sampler, 6, vocab, seed)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(4))
def test_kernels_draw_what_numpy_draws_of_a_whole_vocabulary(part: int, kernels: Callable[[str], Library]) -> None:
    """10,240 rows in all."""
    random = np.random.default_rng(part)
    samplers = [Sampler(kernels(path), threads=2) for path in PATHS]
    noise, spreads = random.standard_normal((64, 49_152), np.float32), np.float32([0.02, 1.0, 3.0, 6.0])
    for turn in range(40):
        logits = np.roll(noise, turn * 311, 1) * random.choice(spreads, (64, 1))
        if turn % 4 == 0:
            logits = np.round(logits * 4) / 4
        rows = [random_row(random) for _ in range(64)]
        wanted = sample(logits, rows)
        for sampler in samplers:
            assert sample(logits, rows, sampler) == wanted


def test_it_is_seldom_that_only_numpy_can_tell(sampler: Sampler) -> None:
    random = np.random.default_rng(1)
    logits = np.float32(random.normal(0, 3, (64, 49_152)))
    draws = blank_draws(64)
    draws["heat"], draws["key"] = 0.8, random.integers(2**63, size=64)
    for top_k, top_p, min_p in [(0, 1.0, 0.0), (0, 0.95, 0.0), (50, 0.9, 0.01)]:
        draws["top_k"], draws["top_p"], draws["least"] = top_k, top_p, math.log(min_p) if min_p else -np.inf
        assert (sampler.sample(logits, draws).draws["token"] >= 0).all()


def test_a_tie_is_left_to_numpy(sampler: Sampler) -> None:
    """Two tokens whose scores differ by less than a logarithm is exact."""
    logits = np.full((1, 40), -np.inf, np.float32)
    logits[0, [3, 7]] = 1e6
    draws = blank_draws(1)
    draws["heat"] = 1e-10
    assert sampler.sample(logits, draws).draws["token"][0] == -1
    row = Row(SamplingParams(temperature=1e-10), 0, np.empty(0, np.int64), 0)
    assert sample(logits.copy(), [row], sampler) == sample(logits, [row])


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("path", PATHS)
def test_a_row_gives_the_same_bits_in_any_batch_order_thread_and_path(
    path: str, threads: int, kernels: Callable[[str], Library]
) -> None:
    random = np.random.default_rng(9)
    logits = random_logits(random, 32, 3001)
    draws = blank_draws(32)
    draws["heat"] = random.choice([0.0, 0.7, 1.3], 32)
    draws["key"] = random.integers(2**63, size=32)
    draws["top_p"], draws["likeliest"] = random.choice([1.0, 0.9], 32), 4
    alone = Sampler(kernels(PATHS[0]))
    wanted = [alone.sample(logits[i : i + 1], draws[i : i + 1].copy()) for i in range(32)]
    sampler = Sampler(kernels(path), threads)
    for rows in range(1, 33):
        order = random.permutation(32)[:rows]
        found = sampler.sample(logits[order], draws[order])
        for at, i in enumerate(order):
            assert found.draws[at].tobytes() == wanted[i].draws[0].tobytes()
            assert found.ids[at].tobytes() == wanted[i].ids.tobytes()
            assert found.values[at].tobytes() == wanted[i].values.tobytes()


def test_likeliest_tokens_are_in_order_and_equals_by_id(sampler: Sampler) -> None:
    logits = np.float32(np.random.default_rng(3).integers(0, 4, (5, 300)))
    draws = blank_draws(5)
    draws["likeliest"] = [1, 2, 40, 300, 0]
    found = sampler.sample(logits, draws)
    for row, count in enumerate(draws["likeliest"]):
        wanted = np.argsort(-logits[row], kind="stable")[:count]
        assert found.ids[row, :count].tolist() == wanted.tolist()
        assert found.values[row, :count].tolist() == logits[row, wanted].tolist()
    totals = np.log(np.exp(logits.astype(np.float64)).sum(1))
    assert np.allclose(found.draws["total"], totals, rtol=1e-14)


def test_a_row_with_a_number_that_is_none_says_so(sampler: Sampler) -> None:
    logits = np.zeros((3, 100), np.float32)
    logits[0, 77], logits[1, 5], logits[2] = np.nan, np.inf, -np.inf
    assert np.isnan(sampler.sample(logits, blank_draws(3)).draws["best"][0])
    assert sampler.sample(logits, blank_draws(3)).draws["best"][1:].tolist() == [np.inf, -np.inf]


def test_what_does_not_fit_is_refused(sampler: Sampler) -> None:
    for logits, draws, word in (
        (np.zeros((2, 4)), blank_draws(2), "float32"),
        (np.zeros(4, np.float32), blank_draws(1), "vocab"),
        (np.zeros((2, 8), np.float32)[:, ::2], blank_draws(2), "gaps"),
        (np.zeros((2, 4), np.float32), blank_draws(3), "draws"),
    ):
        with pytest.raises(ValueError, match=word):
            sampler.sample(logits, draws)
