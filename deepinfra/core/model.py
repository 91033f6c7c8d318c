"""What an executor says about the model it runs."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ("Computing", "ExecutorIdentity", "ExecutorLimits")


class ExecutorIdentity(NamedTuple):
    """What decides the bits an executor writes: goes into every KV namespace.

    `weights` is a fingerprint of content, never a path; `numerics` names modes and forms of computing that change what
    the bits are worth, or, where bits are promised, all that decides them.
    """

    model: str
    weights: str
    kv_dtype: str
    numerics: str = "ordinary"
    adapter: str = ""


class Computing(NamedTuple):
    """How an executor computes, as far as the last bits of a logit depend on it; told in receipts.

    Two that differ in any of these may differ in bits although model, weights and numerics are the same.

    Attributes:
        dtype: Element type in which activations enter products.
        weights: Form in which weights are multiplied: `dense`, or `stored` for the blocks of the model's own file.
        path: Whose kernels run: `avx512`, `avx2`, `torch`.
        kernels: Fingerprint of their code and how it was compiled; empty for those of a library.
        library: Library and version, such as `torch 2.13.0+cpu`.
        machine: Kind of machine: its architecture and the extensions that decide which instructions run.
    """

    dtype: str
    weights: str = "dense"
    path: str = ""
    kernels: str = ""
    library: str = ""
    machine: str = ""


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
