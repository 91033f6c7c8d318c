"""What an executor says about the model it runs."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ("ExecutorIdentity", "ExecutorLimits")


class ExecutorIdentity(NamedTuple):
    """What decides the bits an executor writes: goes into every KV namespace.

    `weights` is a fingerprint of content, never a path; `numerics` names modes that change bits.
    """

    model: str
    weights: str
    kv_dtype: str
    numerics: str = "ordinary"
    adapter: str = ""


class ExecutorLimits(NamedTuple):
    """How much an executor takes: tokens and sequences per step, positions per sequence, blocks of KV, staging slots.

    `grid` is the granularity at which chunks and hits must end (1 = anywhere).
    """

    max_step_tokens: int
    max_seqs: int
    max_context: int
    vocab_size: int
    num_blocks: int
    num_slots: int
    grid: int = 1
