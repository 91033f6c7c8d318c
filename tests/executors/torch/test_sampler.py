"""Draws are those of `core.sampling`: against a slow reference in float64, and one fact at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from deepinfra_kernels import cpu
from deepinfra_kernels.library import Library
from deepinfra_kernels.sampling import Sampler
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from deepinfra.core.sampling import Purpose, SamplingParams, stream_key, token_uniform
from deepinfra.executors.torch.rows import Drawn, Row
from deepinfra.executors.torch.sampler import sample as sample_rows

GREEDY = SamplingParams(temperature=0.0)

SAMPLERS: list[Sampler | None] = [None]


@pytest.fixture(scope="module", autouse=True, params=["numpy", *cpu.paths()])
def sampler(request: pytest.FixtureRequest, kernels: Callable[[str], Library]) -> None:
    """Every test runs without kernels and on every path; two threads share the rows."""
    SAMPLERS[0] = None if request.param == "numpy" else Sampler(kernels(request.param), threads=2)


def sample(logits: torch.Tensor, rows: Sequence[Row]) -> list[Drawn]:
    return sample_rows(logits.float().numpy().copy(), rows, SAMPLERS[0])


def row(params: SamplingParams, key: int = 5, history: tuple[int, ...] = (), prompt_len: int = 0) -> Row:
    return Row(params, key, np.array(history, np.int64), prompt_len)


def reference(logits: NDArray[np.float64], params: SamplingParams) -> dict[int, float]:
    """The tokens that may be drawn, and their probabilities."""
    z = logits / params.temperature
    probs = np.exp(z - z.max())
    order = np.argsort(-z, kind="stable")
    kept = probs[order] / probs.sum()
    if params.top_k:
        kept = kept[: params.top_k]
    kept = kept / kept.sum()
    if params.top_p < 1:
        kept = kept[: int(np.searchsorted(np.cumsum(kept), params.top_p)) + 1]
    if params.min_p:
        kept = kept[kept >= params.min_p * kept[0]]
    kept = kept / kept.sum()
    return dict(zip(order[: len(kept)].tolist(), kept.tolist(), strict=True))


@settings(max_examples=80, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    vocab=st.sampled_from([7, 256, 700, 2000]),
    spread=st.sampled_from([0.1, 1.0, 5.0]),
    levels=st.sampled_from([4, 1000]),
    temperature=st.floats(0.2, 3.0),
    top_k=st.sampled_from([0, 1, 5, 600]),
    top_p=st.sampled_from([1.0, 0.97, 0.5, 0.01]),
    min_p=st.sampled_from([0.0, 0.05, 0.7]),
    key=st.integers(0, 2**64 - 1),
)
def test_the_token_drawn_is_the_one_that_wins_the_race(
    seed: int,
    vocab: int,
    spread: float,
    levels: int,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    key: int,
) -> None:
    random = np.random.default_rng(seed)
    # Few levels make many equal logits, as bfloat16 does.
    logits = np.float32(np.round(random.normal(0, 1, vocab) * levels) / levels * spread)
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    others = [row(GREEDY), row(SamplingParams(), 3), row(SamplingParams(top_p=0.9), 3)]
    lines = torch.from_numpy(logits).repeat(4, 1)
    token = sample(lines, [*others, row(params, key)])[3].token
    # A cut that floating point may place one token further on or back.
    exact = logits.astype(np.float64)
    surely = reference(exact, replace(params, top_p=top_p - 1e-5 * (top_p < 1), min_p=min_p * (1 + 1e-5)))
    perhaps = reference(exact, replace(params, top_p=top_p + 1e-5 * (top_p < 1), min_p=min_p * (1 - 1e-5)))
    assert token in perhaps
    scores = {t: exact[t] / temperature - math.log(-math.log(token_uniform(key, t))) for t in {token, *surely}}
    assert scores[token] >= max(scores.values()) - 1e-9


DRAWS = 3000


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(temperature=0.6),
        SamplingParams(top_k=12),
        SamplingParams(top_p=0.8),
        SamplingParams(min_p=0.1),
        SamplingParams(temperature=1.5, top_k=25, top_p=0.9, min_p=0.05),
    ],
    ids=["plain", "cool", "top-k", "top-p", "min-p", "all"],
)
def test_draws_follow_the_distribution(params: SamplingParams) -> None:
    logits = np.float32(np.random.default_rng(8).normal(0, 2, 40))
    probs = reference(logits.astype(np.float64), params)
    rows = [row(params, stream_key(1, 0, position, Purpose.SAMPLE)) for position in range(DRAWS)]
    tokens = [drawn.token for drawn in sample(torch.from_numpy(logits).repeat(DRAWS, 1), rows)]
    assert set(tokens) <= set(probs)
    # Cells of at least ten draws; the rest is one cell.
    cells = [[token] for token, prob in probs.items() if prob * DRAWS >= 10]
    cells.append([token for token, prob in probs.items() if prob * DRAWS < 10])
    chi_squared = 0.0
    for cell in cells:
        if expected := sum(probs[token] for token in cell) * DRAWS:
            chi_squared += (sum(tokens.count(token) for token in cell) - expected) ** 2 / expected
    degrees = len(cells) - 1
    assert chi_squared < degrees + 4 * math.sqrt(2 * degrees) + 8  # beyond p = 0.0001


def test_a_filter_that_keeps_the_token_drawn_changes_nothing() -> None:
    logits = torch.randn(1, 900, generator=torch.Generator().manual_seed(2)).mul_(3)
    changed = 0
    for key in range(300):
        plain = sample(logits.clone(), [row(SamplingParams(), key)])[0].token
        likelier = int((logits[0] > logits[0, plain]).sum())
        for k in {likelier, likelier + 1, 899} - {0}:
            token = sample(logits.clone(), [row(SamplingParams(top_k=k), key)])[0].token
            changed += k == likelier
            assert (token == plain) == (k != likelier)
    assert changed > 200


def test_rounding_in_all_logits_changes_almost_no_draw() -> None:
    """Inverting the cumulative distribution in order of ids changes 20 to 40 of these."""
    generator = torch.Generator().manual_seed(4)
    logits = torch.randn(1, 20_000, generator=generator).mul_(2)
    noisy = logits + torch.randn(logits.shape, generator=generator) * 1e-4
    rows = [row(SamplingParams(), stream_key(0, 0, position, Purpose.SAMPLE)) for position in range(1500)]
    lines = (logits.expand(1500, -1), noisy.expand(1500, -1))
    one, other = ([drawn.token for drawn in sample(line, rows)] for line in lines)
    assert sum(a != b for a, b in zip(one, other, strict=True)) <= 2
    assert len(set(one)) > 500


def test_greedy_takes_the_lowest_id_of_equals() -> None:
    logits = torch.zeros(2, 900, dtype=torch.bfloat16)
    logits[0, [700, 30, 31]] = 2.0
    assert [drawn.token for drawn in sample(logits, [row(GREEDY), row(GREEDY)])] == [30, 0]


def test_top_k_of_one_takes_the_lowest_id_of_equals() -> None:
    logits = torch.zeros(1, 900)
    assert sample(logits, [row(SamplingParams(top_k=1))])[0].token == 0


def test_a_token_of_probability_zero_is_never_drawn() -> None:
    logits = torch.full((1, 1000), -math.inf)
    logits[0, [300, 301]] = 1.0
    for params in (SamplingParams(), SamplingParams(top_p=0.999), SamplingParams(top_k=50)):
        tokens = [sample(logits, [row(params, key)])[0].token for key in range(100)]
        assert 30 < tokens.count(300) < 70
        assert tokens.count(300) + tokens.count(301) == 100


def test_the_smallest_number_that_there_is_loses_its_race() -> None:
    key = -0x9E3779B97F4A7C15 % 2**64
    assert token_uniform(key, 0) == 2.0**-53
    assert sample(torch.zeros(1, 2), [row(SamplingParams(), key)])[0].token == 1
    assert sample(torch.zeros(1, 1), [row(SamplingParams(), key)])[0].token == 0


def test_repetition_penalty_divides_positive_and_multiplies_negative_logits_once() -> None:
    logits = torch.tensor([[2.0, -1.0, 1.5, -1.2]])
    params = SamplingParams(temperature=0.0, repetition_penalty=2.0, logprobs=4)
    drawn = sample(logits, [row(params, history=(0, 0, 1), prompt_len=2)])[0]
    expected = torch.tensor([1.0, -2.0, 1.5, -1.2]).log_softmax(-1)
    assert drawn.token == 2
    assert drawn.probs is not None
    assert [token for token, _ in drawn.probs.top] == [2, 0, 3, 1]
    for token, logprob in drawn.probs.top:
        assert math.isclose(logprob, float(expected[token]), abs_tol=1e-6)


def test_presence_and_frequency_count_the_output_only() -> None:
    logits = torch.tensor([[1.0, 1.0, 1.0, 1.0]])
    params = SamplingParams(temperature=0.0, presence_penalty=0.5, frequency_penalty=0.25, logprobs=4)
    drawn = sample(logits, [row(params, history=(0, 1, 1, 1, 2), prompt_len=2)])[0]
    expected = torch.tensor([1.0, 0.0, 0.25, 1.0]).log_softmax(-1)
    assert drawn.probs is not None
    assert drawn.token == 0
    for token, logprob in drawn.probs.top:
        assert math.isclose(logprob, float(expected[token]), abs_tol=1e-6)


def test_logit_bias_decides() -> None:
    drawn = sample(torch.zeros(1, 10), [row(SamplingParams(temperature=0.0, logit_bias=((7, 3.0), (8, 2.0))))])
    assert drawn[0].token == 7


def test_logprobs_are_before_temperature_and_filters() -> None:
    logits = torch.randn(1, 600, generator=torch.Generator().manual_seed(1))
    params = SamplingParams(temperature=0.3, top_k=2, logprobs=5)
    drawn = sample(logits.clone(), [row(params)])[0]
    assert drawn.probs is not None
    expected = logits[0].log_softmax(-1)
    assert math.isclose(drawn.probs.logprob, float(expected[drawn.token]), abs_tol=1e-5)
    assert [token for token, _ in drawn.probs.top] == expected.argsort(descending=True)[:5].tolist()


def test_plain_draws_leave_the_logits_for_logprobs() -> None:
    logits = torch.randn(2, 600, generator=torch.Generator().manual_seed(1))
    params = SamplingParams(temperature=0.5, logprobs=0)
    for drawn, expected in zip(sample(logits.clone(), [row(params)] * 2), logits.log_softmax(-1), strict=True):
        assert drawn.probs is not None
        assert math.isclose(drawn.probs.logprob, float(expected[drawn.token]), abs_tol=1e-5)


def test_a_mask_leaves_what_it_allows() -> None:
    allowed = np.zeros(300, np.bool_)
    allowed[[17, 250]] = True
    for params in (GREEDY, SamplingParams(), SamplingParams(top_p=0.5)):
        assert sample(torch.randn(1, 300), [row(params)._replace(allowed=allowed)])[0].token in (17, 250)


def test_numbers_that_are_not_finite_fail_their_row_alone() -> None:
    logits = torch.zeros(3, 20)
    logits[0, 4] = math.nan
    logits[1, 5] = 1.0
    logits[2] = -math.inf
    drawn = sample(logits, [row(SamplingParams()), row(GREEDY), row(SamplingParams(top_p=0.5))])
    assert [bool(one.failed) for one in drawn] == [True, False, True]
    assert drawn[1].token == 5


def test_a_temperature_that_float32_cannot_hold_is_greedy() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0]]).repeat(3, 1)
    for more in ({}, {"top_k": 2}, {"min_p": 0.5}):
        rows = [row(SamplingParams(temperature=5e-324, **more), key) for key in (1, 2, 3)]
        assert [drawn.token for drawn in sample(logits.clone(), rows)] == [1, 1, 1]
