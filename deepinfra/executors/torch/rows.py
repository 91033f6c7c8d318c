"""What a model is asked for in a step, and what it answers; without torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from deepinfra.core.sampling import SamplingParams
from deepinfra.core.step import TokenProbs

if TYPE_CHECKING:
    from deepinfra.executors.torch.windows import Window

__all__ = ("Drawn", "Row", "Rows", "StepModel")


class Rows(NamedTuple):
    """One sequence's rows of a step: `tokens` from position `start`, its block table, its window if it has one.

    KV of positions below `write_from` is not written to blocks; the last `wanted` rows get logits.
    """

    tokens: NDArray[np.int64]
    start: int
    write_from: int
    table: Sequence[int]
    window: Window | None = None
    wanted: int = 0


class Row(NamedTuple):
    """How one row of logits becomes a token.

    Attributes:
        key: The draw's `stream_key`; greedy rows do not use it.
        history: Tokens before the one drawn, prompt included.
        prompt_len: Where the output begins in `history`.
        allowed: Mask over the vocabulary; `None` allows all.
    """

    params: SamplingParams
    key: int
    history: NDArray[np.int64]
    prompt_len: int
    allowed: NDArray[np.bool_] | None = None


class Drawn(NamedTuple):
    """A token, its probabilities if they were asked for, or why there is none (`failed`)."""

    token: int
    probs: TokenProbs | None = None
    failed: str = ""


class StepModel(Protocol):
    """A model with its weights and KV, on the thread that made it."""

    def compute(self, items: Sequence[Rows]) -> Sequence[bool]:
        """Compute the rows of a step's sequences, write their KV, and keep the logits of the rows wanted.

        Returns:
            For each sequence, whether its numbers are finite.
        """
        ...

    def sample(self, rows: Sequence[Row]) -> Sequence[Drawn]:
        """Draw a token for each row of logits that `compute` kept: item by item, each item's in order; once."""
        ...

    def logits(self) -> NDArray[np.float32]:
        """What `compute` kept, `[wanted, vocab]`; valid until it is called again."""
        ...

    def seconds(self) -> Mapping[str, float]:
        """Seconds of each part of the last `compute`; nothing where they are not measured."""
        ...
