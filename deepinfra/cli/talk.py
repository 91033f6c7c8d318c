"""One answer of an in-process engine, written as it comes."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from deepinfra.errors import EngineError

if TYPE_CHECKING:
    from deepinfra.core.request import GenerateRequest, Usage
    from deepinfra.engine import Engine

__all__ = ("Answered", "answer", "write")


class Answered(NamedTuple):
    """A whole answer."""

    text: str
    reasoning: str
    reason: str
    seed: int
    usage: Usage


async def answer(engine: Engine, request: GenerateRequest, show: Callable[[str], None]) -> Answered:
    """Run a request with one choice and show its text piece by piece.

    Raises:
        EngineError: The answer could not be finished.
        RequestError: The request is wrong for this model.
    """
    from deepinfra.core.events import Failed, Finished, ReasoningDelta, TextDelta

    text: list[str] = []
    reasoning: list[str] = []
    async with engine.generate(request) as stream:
        async for event in stream:
            match event:
                case TextDelta():
                    text.append(event.text)
                    show(event.text)
                case ReasoningDelta():
                    reasoning.append(event.text)
                case Finished():
                    return Answered("".join(text), "".join(reasoning), event.reason, event.seed, stream.usage)
                case Failed():
                    raise EngineError(event.message)
    raise EngineError("the answer ended without saying why")


def write(text: str) -> None:
    """Put text on standard output at once."""
    sys.stdout.write(text)
    sys.stdout.flush()
