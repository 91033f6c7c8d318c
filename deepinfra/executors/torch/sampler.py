"""From logits to tokens, as `core.sampling` defines it: with kernels where there are some, else with numpy.

Both give the same tokens always: where rounding decides, the kernels say so and the row is drawn here. What a row gives
does not depend on the rows beside it nor on threads.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from deepinfra.core.sampling import SamplingParams
from deepinfra.core.step import TokenProbs
from deepinfra.executors.torch.rows import Drawn, Row

if TYPE_CHECKING:
    from deepinfra_kernels.sampling import Sampler

__all__ = ("sample",)

_CANDIDATES = 512
"""Likeliest tokens looked at first for top_p and min_p; the whole vocabulary is sorted only for rows that need more."""

_TINY, _HUGE = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)
"""A temperature that float32 would round to 0 or infinity, which divide to NaN, is taken as one of these: as near to
greedy, or to all tokens alike, as can be."""

_GOLDEN = 0x9E3779B97F4A7C15


def sample(logits: NDArray[np.float32], rows: Sequence[Row], kernels: Sampler | None = None) -> list[Drawn]:
    """Choose a token for every row.

    A logprob is the logit minus the logarithm of the sum of `e**logit`, all in float64, rounded to float32.

    Args:
        logits: `[rows, vocab]`; overwritten where a row has penalties, biases or a mask.
        rows: One per row of logits.
        kernels: Draws without a sort and almost without logarithms; `None`: numpy draws.
    """
    for line, row in zip(logits, rows, strict=True):
        if _edited(row):
            _edit(line, row)
    if kernels is not None:
        return _sample(logits, rows, kernels)
    return [_drawn(line, row) for line, row in zip(logits, rows, strict=True)]


def _sample(logits: NDArray[np.float32], rows: Sequence[Row], kernels: Sampler) -> list[Drawn]:
    from deepinfra_kernels.sampling import blank_draws

    draws = blank_draws(len(rows))
    params = [row.params for row in rows]
    if any(p.temperature > 0 for p in params):
        draws["key"] = [row.key for row in rows]
        draws["heat"] = [_heat(p) if p.temperature > 0 else 0.0 for p in params]
    if any(_filtered(p) for p in params):
        draws["top_k"], draws["top_p"] = [p.top_k for p in params], [p.top_p for p in params]
        draws["least"] = [_least(p) for p in params]
    draws["likeliest"] = [-1 if p.logprobs is None else p.logprobs for p in params]
    found = kernels.sample(logits, draws)
    drawn = []
    tokens, bests, totals = (draws[name].tolist() for name in ("token", "best", "total"))
    for i, (row, token, best) in enumerate(zip(rows, tokens, bests, strict=True)):
        if not math.isfinite(best):
            drawn.append(_failed(best))
            continue
        if token < 0:
            token = _draw(logits[i], row, best)
        wanted, probs = row.params.logprobs, None
        if wanted is not None:
            probs = _probs(logits[i, token], totals[i], found.ids[i, :wanted], found.values[i, :wanted])
        drawn.append(Drawn(token, probs))
    return drawn


def _drawn(line: NDArray[np.float32], row: Row) -> Drawn:
    """What one row `[vocab]` gives, without kernels."""
    token = int(line.argmax())  # the first of equals, or of what is no number
    best, wanted = float(line[token]), row.params.logprobs
    if not math.isfinite(best):
        return _failed(best)
    if row.params.temperature > 0:
        token = _draw(line, row, best)
    if wanted is None:
        return Drawn(token)
    total = best + math.log(np.exp(np.subtract(line, best, dtype=np.float64)).sum())
    ids = _likeliest(line, min(wanted, len(line)))
    return Drawn(token, _probs(line[token], total, ids, line[ids]))


def _failed(best: float) -> Drawn:
    return Drawn(-1, failed=f"the model's largest logit is {best}")


def _edited(row: Row) -> bool:
    p = row.params
    penalised = p.repetition_penalty != 1.0 or p.presence_penalty != 0.0 or p.frequency_penalty != 0.0
    return penalised or bool(p.logit_bias) or row.allowed is not None


def _filtered(params: SamplingParams) -> bool:
    return params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0


def _heat(params: SamplingParams) -> float:
    return min(max(params.temperature, _TINY), _HUGE)


def _least(params: SamplingParams) -> float:
    return math.log(params.min_p) if params.min_p > 0.0 else -math.inf


def _edit(line: NDArray[np.float32], row: Row) -> None:
    """Apply bias, penalties and mask to one row `[vocab]`, in place."""
    params = row.params
    if params.logit_bias:
        biased, biases = zip(*params.logit_bias, strict=True)
        np.add.at(line, np.array(biased), np.array(biases, np.float32))
    if params.repetition_penalty != 1.0:
        seen = np.unique(row.history)
        values, penalty = line[seen], np.float32(params.repetition_penalty)
        line[seen] = np.where(values > 0, values / penalty, values * penalty)
    if params.presence_penalty != 0.0 or params.frequency_penalty != 0.0:
        output, counts = np.unique(row.history[row.prompt_len :], return_counts=True)
        line[output] -= np.float32(params.presence_penalty) + counts.astype(np.float32) * np.float32(
            params.frequency_penalty
        )
    if row.allowed is not None:
        line[~row.allowed] = -np.inf


def _draw(line: NDArray[np.float32], row: Row, best: float) -> int:
    """The token that wins the race of one row `[vocab]` whose largest logit is `best`."""
    if not _filtered(row.params):
        return _race(line, np.arange(len(line), dtype=np.uint64) * _GOLDEN, row)
    ids = _keep(line, row.params, best)
    return int(ids[_race(line[ids], ids.astype(np.uint64) * _GOLDEN, row)])


def _race(line: NDArray[np.float32], steps: NDArray[np.uint64], row: Row) -> int:
    """Index of the smallest `-log(token_uniform) / p`, as the largest of logarithms: p needs no normalisation.

    Measured for 49,152 tokens: 0.23 ms, of which the two logarithms take 0.08; without working in place it takes 0.28.

    Args:
        line: Logits `[tokens]`.
        steps: Each token's id times `_GOLDEN`, `[tokens]`.
        row: How to draw.
    """
    z = steps + np.uint64((row.key + _GOLDEN) & (2**64 - 1))
    other = z >> 30
    z ^= other
    z *= 0xBF58476D1CE4E5B9
    z ^= np.right_shift(z, 27, out=other)
    z *= 0x94D049BB133111EB
    z ^= np.right_shift(z, 31, out=other)
    # As the mantissa of a number in [1, 2), the upper 52 bits are a float without a conversion.
    z >>= 12
    z |= 0x3FF0000000000000
    wait = np.subtract(z.view(np.float64), 1 - 2.0**-53, out=other.view(np.float64))  # token_uniform, exactly
    for step in (np.log, np.negative, np.log):
        step(wait, out=wait)
    scores = np.divide(line, _heat(row.params), out=z.view(np.float64), dtype=np.float64)
    scores -= wait
    return int(scores.argmax())


def _keep(line: NDArray[np.float32], params: SamplingParams, best: float) -> NDArray[np.int64]:
    """Ids of the tokens that pass a row's filters, likeliest first and equals by id."""
    values = (line - np.float32(best)) / np.float32(_heat(params))
    vocab = len(values)
    whole = float(np.exp(values, dtype=np.float64).sum()) if params.top_p < 1.0 and not params.top_k else math.nan
    most = min(vocab, max(_CANDIDATES, params.top_k))
    ids = _likeliest(values, most)
    kept = _kept(values[ids], whole, params)
    if kept == most < vocab and kept != params.top_k:  # what is kept may go on beyond the candidates
        ids = _likeliest(values, vocab)
        kept = _kept(values[ids], whole, params)
    return ids[:kept]


def _likeliest(values: NDArray[np.float32], count: int) -> NDArray[np.int64]:
    """Ids of the `count` largest, largest first, equals by id."""
    if not count:
        return np.empty(0, np.int64)
    ids = np.flatnonzero(values >= np.partition(values, -count)[-count]) if count < len(values) else np.arange(count)
    order: NDArray[np.int64] = ids[np.argsort(-values[ids], kind="stable")]
    return order[:count]


def _kept(values: NDArray[np.float32], whole: float, params: SamplingParams) -> int:
    """How many leading candidates pass the filters.

    Args:
        values: Logits of the candidates less the largest, over the temperature.
        whole: Sum of `e**value` of all tokens, where `top_k` does not cut first.
        params: The filters.
    """
    kept = min(len(values), params.top_k or len(values))
    if params.top_p < 1.0:
        cumulative = np.cumsum(np.exp(values[:kept], dtype=np.float64))
        target = params.top_p * (cumulative[-1] if params.top_k else whole)
        kept = min(kept, int(np.searchsorted(cumulative, target)) + 1)
    if params.min_p > 0.0:
        kept = min(kept, max(1, int(np.count_nonzero(values[:kept] >= np.float64(_least(params))))))
    return kept


def _probs(logit: np.float32, total: float, ids: NDArray[np.int64], logits: NDArray[np.float32]) -> TokenProbs:
    logprobs = (logits.astype(np.float64) - total).astype(np.float32)
    return TokenProbs(float(np.float32(float(logit) - total)), tuple(zip(ids.tolist(), logprobs.tolist(), strict=True)))
