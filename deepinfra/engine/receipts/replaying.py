"""Computing a receipt's answers again, and saying whether they are the same."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, NamedTuple

import msgspec

from deepinfra.core.events import Failed
from deepinfra.core.request import GenerateRequest, Prompt
from deepinfra.engine.receipts.record import Answered, Asked, ExecutorFacts, Receipt
from deepinfra.errors import DeepinfraError, Overloaded, RequestError
from deepinfra.interfaces.recipe import Tokenizer

if TYPE_CHECKING:
    from deepinfra.engine.engine import Engine

__all__ = ("Compared", "Obstacle", "Outcome", "replay")

_AROUND = 8
"""Tokens of text that are shown on each side of a difference."""


class Obstacle(NamedTuple):
    """What is not here as it was there, so that tokens cannot be expected to be the same."""

    name: str
    recorded: str
    here: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """One answer, computed again.

    Attributes:
        request: Number of its prompt.
        choice: Its own number.
        tokens: How many there were.
        at: Index of the first token that differs; `None` if all are the same.
        recorded: The token there; `None` if the recorded answer had ended.
        replayed: Likewise, of the answer computed here.
        before: Text before that token, where both are the same.
        recorded_text: Text from there on, as recorded.
        replayed_text: And as computed here.
        logprobs: Whether the log-probabilities are the same, bit by bit; `None` if none were recorded, or if the tokens
            differ.
    """

    request: int
    choice: int
    tokens: int
    at: int | None = None
    recorded: int | None = None
    replayed: int | None = None
    before: str = ""
    recorded_text: str = ""
    replayed_text: str = ""
    logprobs: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of one receipt.

    Attributes:
        verdict: `same` if every answer has the same tokens, and what was promised the same log-probabilities as well.
        promised: The same tokens were promised, and everything that this depends on is as it was.
        obstacles: What tokens depend on and is not as it was; with any, nothing is computed unless that was asked for.
        alike: All other settings are as they were, too. Without, ordinary mode has one more reason to differ.
        answers: Each answer that was computed.
        why: For `failed`: what went wrong.
    """

    verdict: Literal["same", "differs", "incomparable", "failed"]
    promised: bool = False
    obstacles: tuple[Obstacle, ...] = ()
    alike: bool = True
    answers: tuple[Compared, ...] = ()
    why: str = ""


async def replay(engine: Engine, receipt: Receipt, *, anyway: bool = False) -> Outcome:
    """Compute a receipt's answers again, and compare.

    Every prompt goes in as the ids it had. An answer is computed to the length it had: what ended it needs no parser.

    Args:
        engine: Entered.
        receipt: As `receipt_of` let it through.
        anyway: Compute although something differs that tokens depend on.

    Raises:
        EngineNotRunningError: Nobody entered the engine.
    """
    here = await engine.receipt()
    obstacles = tuple(_obstacles(receipt, here))
    alike = receipt.configuration == here.configuration
    if obstacles and not (anyway and all(obstacle.name != "media" for obstacle in obstacles)):
        return Outcome(verdict="incomparable", obstacles=obstacles, alike=alike)
    answers: list[Compared] = []
    try:
        for number, asked in enumerate(receipt.requests):
            made = await _computed(engine, asked)
            for choice, pair in enumerate(zip(asked.answers, made, strict=True)):
                answers.append(_compared(number, choice, *pair, engine.recipe.tokenizer))
    except (RequestError, Overloaded, _Failed) as error:
        return Outcome(verdict="failed", obstacles=obstacles, alike=alike, answers=tuple(answers), why=str(error))
    approximate = any(asked.approximate for asked in receipt.requests)
    promised = receipt.invariant and not approximate and not obstacles
    same = all(each.at is None and not (promised and each.logprobs is False) for each in answers)
    return Outcome(
        verdict="same" if same else "differs",
        promised=promised,
        obstacles=obstacles,
        alike=alike,
        answers=tuple(answers),
    )


class _Failed(DeepinfraError):
    """Raised when an answer cannot be computed."""


def _obstacles(recorded: Receipt, here: Receipt) -> list[Obstacle]:
    """What tokens depend on, compared by name; of several executors each fact is the set of theirs."""
    pairs = [(name, getattr(recorded, name), getattr(here, name)) for name in ("recipe", "tokenizer")]
    pairs += [
        (name, _told(recorded.executors, name), _told(here.executors, name)) for name in ExecutorFacts.__struct_fields__
    ]
    pairs.append(("invariant", str(recorded.invariant).lower(), str(here.invariant).lower()))
    found = [Obstacle(*pair) for pair in pairs if pair[1] != pair[2]]
    if not found and set(recorded.executors) != set(here.executors):
        found.append(Obstacle("executors", *("; ".join(map(str, one.executors)) for one in (recorded, here))))
    media = sum(len(asked.media) for asked in recorded.requests)
    return [*found, Obstacle("media", f"{media} of them", "a receipt has only their digests")] if media else found


def _told(executors: Iterable[ExecutorFacts], name: str) -> str:
    return "; ".join(sorted({getattr(executor, name) for executor in executors}))


async def _computed(engine: Engine, asked: Asked) -> list[Answered]:
    """The answers in one run, all as long as the longest one was, and cut to the length that each had."""
    lengths = [len(answer.tokens) for answer in asked.answers]
    prompt = Prompt(
        ids=asked.prompt,
        stop_ids=frozenset(asked.stop_ids),
        start="raw",
        constraint=None if asked.constraint is None else asked.constraint.constraint,
    )
    request = GenerateRequest(
        input=prompt,
        sampling=asked.sampling.params,
        n=len(lengths),
        seed=int(asked.seed),
        max_tokens=max(1, *lengths),
        receipt=True,
    )
    async with engine.generate(request) as stream:
        async for event in stream:
            if isinstance(event, Failed):
                raise _Failed(event.message)
        receipt = stream.receipt
    assert receipt is not None, "every answer is complete"
    made = zip(receipt.requests[0].answers, lengths, strict=True)
    return [
        msgspec.structs.replace(
            answer, tokens=answer.tokens[:length], logprobs=answer.logprobs and stream.logprobs_digest(choice, length)
        )
        for choice, (answer, length) in enumerate(made)
    ]


def _compared(number: int, choice: int, recorded: Answered, made: Answered, tokenizer: Tokenizer) -> Compared:
    one, other = recorded.tokens, made.tokens
    told = Compared(request=number, choice=choice, tokens=len(one))
    if one == other:
        return replace(told, logprobs=recorded.logprobs == made.logprobs if recorded.logprobs else None)
    both = min(len(one), len(other))
    at = next((index for index in range(both) if one[index] != other[index]), both)
    return replace(
        told,
        at=at,
        recorded=one[at] if at < len(one) else None,
        replayed=other[at] if at < len(other) else None,
        before=_text(tokenizer, one[max(0, at - _AROUND) : at]),
        recorded_text=_text(tokenizer, one[at : at + _AROUND]),
        replayed_text=_text(tokenizer, other[at : at + _AROUND]),
    )


def _text(tokenizer: Tokenizer, tokens: Sequence[int]) -> str:
    """Text of tokens, for people; control tokens and what is no token have none."""
    known = (token for token in tokens if token < tokenizer.vocab_size)
    return b"".join(map(tokenizer.token_bytes, known)).decode("utf-8", "replace")
