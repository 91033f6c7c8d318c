"""From logits to tokens, as `core.sampling` defines it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deepinfra.core.sampling import SamplingParams
from deepinfra.core.step import TokenProbs

__all__ = ("Drawn", "Row", "sample")

_CANDIDATES = 512
"""Likeliest tokens looked at first for top_p and min_p; the whole vocabulary is sorted only for rows that need more."""

_BUCKET = 256
"""Tokens per partial sum of a plain draw, so that only the bucket drawn is summed token by token."""


class Row(NamedTuple):
    """How one row of logits becomes a token.

    Attributes:
        uniform: The draw, in [0, 1).
        history: Tokens before the one drawn, prompt included.
        prompt_len: Where the output begins in `history`.
        allowed: Mask over the vocabulary; `None` allows all.
    """

    params: SamplingParams
    uniform: float
    history: NDArray[np.int64]
    prompt_len: int
    allowed: NDArray[np.bool_] | None = None


class Drawn(NamedTuple):
    """A token, its probabilities if they were asked for, or why there is none (`failed`)."""

    token: int
    probs: TokenProbs | None = None
    failed: str = ""


def sample(logits: Tensor, rows: Sequence[Row]) -> list[Drawn]:
    """Choose a token for every row.

    Greedy rows and plain temperature draws are computed for all rows at once.

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
    plain = [i for i, row in enumerate(rows) if finite[i] and row.params.temperature > 0 and not _filtered(row.params)]
    if plain:
        for i, token in zip(plain, _draw_plain(logits, best, rows, plain), strict=True):
            tokens[i] = token
    filtered = [i for i, row in enumerate(rows) if finite[i] and row.params.temperature > 0 and _filtered(row.params)]
    if filtered:
        for i, token in zip(filtered, _draw_filtered(logits, best, rows, filtered), strict=True):
            tokens[i] = token
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


def _draw_plain(logits: Tensor, best: Tensor, rows: Sequence[Row], chosen: Sequence[int]) -> list[int]:
    """Inverse of the cumulative distribution in order of ids, by buckets of partial sums."""
    lines = logits if len(chosen) == len(rows) else logits[chosen]
    top = best[chosen].float().unsqueeze(1)
    heat = _heat([rows[i].params.temperature for i in chosen])
    weights = (lines.float() - top).div_(heat).exp_()  # [chosen, vocab]
    vocab = weights.shape[1]
    if vocab % _BUCKET:
        weights = torch.nn.functional.pad(weights, (0, _BUCKET - vocab % _BUCKET))
    buckets = weights.view(len(chosen), -1, _BUCKET)
    sums = buckets.sum(-1).double().cumsum(-1)
    target = torch.tensor([rows[i].uniform for i in chosen], dtype=torch.float64).unsqueeze(1) * sums[:, -1:]
    bucket = _first_above(sums, target, buckets.sum(-1) > 0)
    inside = buckets.gather(1, bucket.view(-1, 1, 1).expand(-1, 1, _BUCKET)).squeeze(1).double()
    before = torch.where(bucket > 0, sums.gather(1, (bucket - 1).clamp(min=0)), 0.0)
    token = bucket * _BUCKET + _first_above(inside.cumsum(-1), target - before, inside > 0)
    drawn: list[int] = token.squeeze(1).tolist()
    return drawn


def _heat(temperatures: Sequence[float]) -> Tensor:
    """`[rows, 1]`; what float32 would round to 0, which divides to NaN, is as near to greedy as it can be."""
    return torch.tensor(temperatures).clamp_(min=torch.finfo(torch.float32).tiny).unsqueeze(1)


def _first_above(cumulative: Tensor, target: Tensor, positive: Tensor) -> Tensor:
    """Index `[rows, 1]` of the first entry above `target`, or of the last positive one where rounding left none."""
    index = torch.searchsorted(cumulative, target, right=True)
    last = positive.shape[1] - 1 - positive.flip(1).int().argmax(1, keepdim=True)
    return torch.minimum(index, last)


def _draw_filtered(logits: Tensor, best: Tensor, rows: Sequence[Row], chosen: Sequence[int]) -> list[int]:
    """Inverse of the cumulative distribution of what the filters keep, likeliest first and equals by id."""
    params = [rows[i].params for i in chosen]
    heat = _heat([p.temperature for p in params])
    lines = (logits[chosen].float() - best[chosen].float().unsqueeze(1)).div_(heat)  # [chosen, vocab]
    vocab = lines.shape[1]
    most = min(vocab, max(_CANDIDATES, *(p.top_k + 1 for p in params)) if vocab > _CANDIDATES else vocab)
    values, ids = _likeliest(lines, most)
    # Share of the whole distribution, where no top_k cuts it first.
    total = torch.logsumexp(lines, -1)
    shares = (values - total.unsqueeze(1)).double().exp().numpy()
    raw = values.numpy()
    drawn = []
    for n, (i, p) in enumerate(zip(chosen, params, strict=True)):
        kept = _kept(raw[n], shares[n], p, complete=most == vocab)
        row_shares, row_ids = shares[n], ids[n].numpy()
        if kept < 0:  # what must be kept goes on beyond the candidates
            line, order = torch.sort(lines[n], descending=True, stable=True)
            row_shares, row_ids = (line - total[n]).double().exp().numpy(), order.numpy()
            kept = _kept(line.numpy(), row_shares, p, complete=True)
        cumulative = np.cumsum(row_shares[:kept])
        index = int(np.searchsorted(cumulative, rows[i].uniform * cumulative[-1], side="right"))
        drawn.append(int(row_ids[min(index, int(np.flatnonzero(row_shares[:kept])[-1]))]))
    return drawn


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
