"""Draws are those of `core.sampling`: against a slow reference in float64, and one fact at a time."""

from __future__ import annotations

import math

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from deepinfra.core.sampling import SamplingParams
from deepinfra.executors.torch.sampler import Row, sample

GREEDY = SamplingParams(temperature=0.0)


def row(params: SamplingParams, uniform: float = 0.5, history: tuple[int, ...] = (), prompt_len: int = 0) -> Row:
    return Row(params, uniform, np.array(history, np.int64), prompt_len)


def reference(logits: NDArray[np.float64], params: SamplingParams) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Ids in the order they are drawn in, and their probabilities."""
    z = logits / params.temperature
    probs = np.exp(z - z.max())
    probs /= probs.sum()
    if not (params.top_k or params.top_p < 1 or params.min_p):
        return np.arange(len(probs)), probs
    order = np.argsort(-z, kind="stable")
    kept = probs[order]
    if params.top_k:
        kept = kept[: params.top_k]
    kept = kept / kept.sum()
    if params.top_p < 1:
        kept = kept[: int(np.searchsorted(np.cumsum(kept), params.top_p)) + 1]
    if params.min_p:
        kept = kept[kept >= params.min_p * kept[0]]
    return order[: len(kept)], kept / kept.sum()


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    vocab=st.sampled_from([7, 256, 700, 2000]),
    spread=st.sampled_from([0.1, 1.0, 5.0]),
    levels=st.sampled_from([4, 1000]),
    temperature=st.floats(0.2, 3.0),
    top_k=st.sampled_from([0, 1, 5, 600]),
    top_p=st.sampled_from([1.0, 0.97, 0.5, 0.01]),
    min_p=st.sampled_from([0.0, 0.05, 0.7]),
    uniform=st.floats(0, 1, exclude_max=True),
)
def test_the_token_drawn_is_where_the_number_falls(
    seed: int,
    vocab: int,
    spread: float,
    levels: int,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    uniform: float,
) -> None:
    random = np.random.default_rng(seed)
    # Few levels make many equal logits, as bfloat16 does.
    logits = np.round(random.normal(0, 1, vocab) * levels) / levels * spread
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    others = [row(GREEDY), row(SamplingParams(), 0.3), row(SamplingParams(top_p=0.9), 0.3)]
    lines = torch.from_numpy(logits).float().repeat(4, 1)
    token = sample(lines, [*others, row(params, uniform)])[3].token
    ids, probs = reference(logits, params)
    ends = np.cumsum(probs)
    # A cut that floating point may place one token further on or back.
    where = np.flatnonzero(ids == token)
    assert len(where) == 1
    slack = 2e-4 + 2 * probs[where[0]] * (uniform > 0.999)
    edge = probs.min() / probs.sum() if top_p < 1 or min_p else 0.0
    assert ends[where[0]] - probs[where[0]] - slack - edge <= uniform <= ends[where[0]] + slack + edge


def test_greedy_takes_the_lowest_id_of_equals() -> None:
    logits = torch.zeros(2, 900, dtype=torch.bfloat16)
    logits[0, [700, 30, 31]] = 2.0
    assert [drawn.token for drawn in sample(logits, [row(GREEDY), row(GREEDY)])] == [30, 0]


def test_top_k_of_one_takes_the_lowest_id_of_equals() -> None:
    logits = torch.zeros(1, 900)
    assert sample(logits, [row(SamplingParams(top_k=1), 0.99)])[0].token == 0


def test_a_token_of_probability_zero_is_never_drawn() -> None:
    logits = torch.full((1, 1000), -math.inf)
    logits[0, [300, 301]] = 1.0
    for uniform in (0.0, 0.4999, 0.5, 1 - 2**-53):
        for params in (SamplingParams(), SamplingParams(top_p=0.999), SamplingParams(top_k=50)):
            assert sample(logits, [row(params, uniform)])[0].token == (300 if uniform < 0.5 else 301)


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
        rows = [row(SamplingParams(temperature=5e-324, **more), uniform) for uniform in (0.0, 0.5, 0.999)]
        assert [drawn.token for drawn in sample(logits.clone(), rows)] == [1, 1, 1]
