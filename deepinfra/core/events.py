"""What an answer is made of: typed events, the only thing a wire protocol has to write."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from deepinfra.core.request import FinishReason, Usage

__all__ = (
    "Event",
    "Failed",
    "Finished",
    "ReasoningDelta",
    "TextDelta",
    "TokenLogprobs",
    "ToolArgumentsDelta",
    "ToolEnd",
    "ToolStart",
    "TopLogprob",
)


class TopLogprob(NamedTuple):
    """One alternative: id, its bytes, natural logarithm of its probability."""

    token: int
    data: bytes
    logprob: float


class TokenLogprobs(NamedTuple):
    """A chosen token with its alternatives, likeliest first."""

    token: int
    data: bytes
    logprob: float
    top: tuple[TopLogprob, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class TextDelta:
    """Answer text. `tokens` are those whose text begins in this piece (only if logprobs were asked for)."""

    choice: int
    text: str
    tokens: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningDelta:
    """Text of the model's reasoning, apart from the answer."""

    choice: int
    text: str
    tokens: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolStart:
    """A tool call begins; `index` counts the calls of one answer from 0.

    `id` is the one the model wrote, and empty if its format has none: then the protocol makes one.
    """

    choice: int
    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolArgumentsDelta:
    """A piece of the call's arguments; the pieces concatenate to JSON."""

    choice: int
    index: int
    arguments: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolEnd:
    """The call is complete."""

    choice: int
    index: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """An answer is complete. `stop` is the stop string that ended it; `usage` covers this answer alone."""

    choice: int
    reason: FinishReason
    usage: Usage
    stop: str | None = None
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """An answer cannot be finished; nothing follows for this choice. `code` is the error's.

    `retry_after_s` is when it is worth asking again, where waiting helps.
    """

    choice: int
    code: str
    message: str
    usage: Usage
    retry_after_s: float | None = None


Event: TypeAlias = TextDelta | ReasoningDelta | ToolStart | ToolArgumentsDelta | ToolEnd | Finished | Failed
