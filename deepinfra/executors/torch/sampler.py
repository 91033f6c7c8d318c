"""From logits to tokens, as `core.sampling` defines it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deepinfra.core.sampling import SamplingParams
from deepinfra.core.step import TokenProbs
from deepinfra.executors.torch.rows import Drawn, Row

__all__ = ("sample",)

_CANDIDATES = 512
"""Likeliest tokens looked at first for top_p and min_p; the whole vocabulary is sorted only for rows that need more."""

_TINY = float(np.finfo(np.float32).tiny)
"""A temperature that float32 would round to 0, which divides to NaN, is taken as this, as near to greedy as can be."""

_GOLDEN = 0x9E3779B97F4A7C15


def sample(logits: Tensor, rows: Sequence[Row]) -> list[Drawn]:
    """Choose a token for every row.

    Greedy rows and the probabilities that filters need are computed for all rows at once.

    Args:
        logits: `[rows, vocab]`, in the compute type; may be overwritten.
        rows: One per row of logits.
    """
    if any(_edited(row) for row in rows):
        logits = logits.float()
        for line, row in zip(logits, rows, strict=True):
            _edit(line, row)
    best, greedy = logits.max(-1)  # the first of equals
    tokens, finite = greedy.tolist(), torch.isfinite(best).tolist()
    warm = [i for i, row in enumerate(rows) if finite[i] and row.params.temperature > 0]
    plain = [i for i in warm if not _filtered(rows[i].params)]
    if plain:
        steps = np.arange(logits.shape[-1], dtype=np.uint64) * _GOLDEN
        for i in plain:
            tokens[i] = _race(logits[i], steps, rows[i])
    filtered = [i for i in warm if _filtered(rows[i].params)]
    if filtered:
        for i, ids in zip(filtered, _keep(logits, best, rows, filtered), strict=True):
            winner = _race(logits[i][ids], ids.numpy().astype(np.uint64) * _GOLDEN, rows[i])
            tokens[i] = int(ids[winner])
    drawn = []
    for i, row in enumerate(rows):
        if not finite[i]:
            drawn.append(Drawn(-1, failed=f"the model's largest logit is {float(best[i])}"))
            continue
        wanted = row.params.logprobs
        drawn.append(Drawn(tokens[i], None if wanted is None else _probs(logits[i], tokens[i], wanted)))
    return drawn


def _edited(row: Row) -> bool:
    p = row.params
    penalised = p.repetition_penalty != 1.0 or p.presence_penalty != 0.0 or p.frequency_penalty != 0.0
    return penalised or bool(p.logit_bias) or row.allowed is not None


def _filtered(params: SamplingParams) -> bool:
    return params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0


def _edit(line: Tensor, row: Row) -> None:
    """Apply bias, penalties and mask to one row `[vocab]`, in place."""
    params = row.params
    if params.logit_bias:
        biased, biases = zip(*params.logit_bias, strict=True)
        line.index_add_(0, torch.tensor(biased), torch.tensor(biases, dtype=line.dtype))
    if params.repetition_penalty != 1.0:
        seen = torch.from_numpy(np.unique(row.history))
        values = line[seen]
        penalty = params.repetition_penalty
        line[seen] = torch.where(values > 0, values / penalty, values * penalty)
    if params.presence_penalty != 0.0 or params.frequency_penalty != 0.0:
        output, counts = np.unique(row.history[row.prompt_len :], return_counts=True)
        weight = torch.from_numpy(counts).to(line.dtype) * params.frequency_penalty + params.presence_penalty
        line[torch.from_numpy(output)] -= weight
    if row.allowed is not None:
        line.masked_fill_(torch.from_numpy(~row.allowed), float("-inf"))


def _race(line: Tensor, steps: NDArray[np.uint64], row: Row) -> int:
    """Index of the smallest `-log(token_uniform) / p`, as the largest of logarithms: p needs no normalisation.

    numpy, because its shifts are unsigned and its logarithm in float64 is faster than torch's. Measured for 49,152
    tokens: 0.23 ms, of which the two logarithms take 0.08; without working in place it takes 0.28.

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
    heat = max(row.params.temperature, _TINY)
    scores = np.divide(line.float().numpy(), heat, out=z.view(np.float64), dtype=np.float64)
    scores -= wait
    return int(scores.argmax())


def _keep(logits: Tensor, best: Tensor, rows: Sequence[Row], chosen: Sequence[int]) -> list[Tensor]:
    """Ids of the tokens that pass each row's filters, likeliest first and equals by id."""
    params = [rows[i].params for i in chosen]
    heat = torch.tensor([p.temperature for p in params]).clamp_(min=_TINY).unsqueeze(1)
    lines = (logits[chosen].float() - best[chosen].float().unsqueeze(1)).div_(heat)  # [chosen, vocab]
    vocab = lines.shape[1]
    most = min(vocab, max(_CANDIDATES, *(p.top_k + 1 for p in params)) if vocab > _CANDIDATES else vocab)
    values, ids = _likeliest(lines, most)
    # Share of the whole distribution, where no top_k cuts it first.
    total = torch.logsumexp(lines, -1)
    shares = (values - total.unsqueeze(1)).double().exp().numpy()
    raw = values.numpy()
    kept = []
    for n, p in enumerate(params):
        count, order = _kept(raw[n], shares[n], p, complete=most == vocab), ids[n]
        if count < 0:  # what must be kept goes on beyond the candidates
            line, order = torch.sort(lines[n], descending=True, stable=True)
            count = _kept(line.numpy(), (line - total[n]).double().exp().numpy(), p, complete=True)
        kept.append(order[:count])
    return kept


def _likeliest(lines: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` largest of each row, largest first, equals by id."""
    values, ids = lines.topk(count, -1)
    ids, by_id = ids.sort(-1)
    values, order = values.gather(-1, by_id).sort(dim=-1, descending=True, stable=True)
    return values, ids.gather(-1, order)


def _kept(values: NDArray[np.float32], shares: NDArray[np.float64], p: SamplingParams, *, complete: bool) -> int:
    """How many leading candidates pass the filters; -1 if more candidates are needed to know.

    A cut that falls among candidates equal to the last one cannot be made: equals with lower ids may be missing.
    """
    kept = len(values)
    if p.top_k:
        kept = min(kept, p.top_k)
    if p.top_p < 1.0:
        cumulative = np.cumsum(shares[:kept])
        whole = cumulative[-1] if p.top_k or complete else 1.0
        kept = min(kept, int(np.searchsorted(cumulative, p.top_p * whole)) + 1)
    if p.min_p > 0.0:
        kept = min(kept, max(1, int(np.count_nonzero(shares[:kept] >= p.min_p * shares[0]))))
    if not complete and values[kept - 1] == values[-1]:
        return -1
    return kept


def _probs(line: Tensor, token: int, count: int) -> TokenProbs:
    line = line.float()
    total = torch.logsumexp(line, -1)
    top: tuple[tuple[int, float], ...] = ()
    if count:
        values, ids = _likeliest(line.unsqueeze(0), min(count + 32, line.shape[0]))
        logprobs = (values[0, :count] - total).tolist()
        top = tuple(zip(ids[0, :count].tolist(), logprobs, strict=True))
    return TokenProbs(float(line[token] - total), top)
