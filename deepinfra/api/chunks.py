"""The stream that OpenAI's two completion protocols share: chunks of one head, each with the choice it speaks of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from deepinfra.api.errors import WireError
from deepinfra.api.protocol import Extension, Frame, Head, Json
from deepinfra.api.wire import KEEPALIVE, openai_error, usage_json
from deepinfra.core.request import Usage

__all__ = ("Chunks", "folded")


class Chunks:
    """What is the same in both protocols' writers; a protocol adds `write` and `fold`.

    The finish reason of the last choice waits for `end`, whose extension it carries.

    Attributes:
        kind: The chunks' `object`.

    Args:
        choices: Answers in all.
        include_usage: Say usage in a chunk of its own after the last choice, and in all others that it is to come.
    """

    kind: ClassVar[str]
    keepalive = KEEPALIVE
    closing = b"data: [DONE]\n\n"

    def __init__(self, choices: int, *, include_usage: bool) -> None:
        self._include_usage = include_usage
        self._open = choices
        self._last: Json | None = None
        self._head: Json = {}

    def begin(self, head: Head, usage: Usage) -> Sequence[Frame]:
        """See `Writer.begin`."""
        self._head = {
            "id": head.id,
            "object": self.kind,
            "created": head.created,
            "model": head.model,
            "system_fingerprint": head.fingerprint,
        }
        return ()

    def chunk(self, choice: Json) -> Frame:
        """A chunk with one choice."""
        chunk: Json = {**self._head, "choices": [choice]}
        if self._include_usage:
            chunk["usage"] = None
        return Frame(chunk)

    def finish(self, choice: Json) -> Sequence[Frame]:
        """The chunk with a choice's finish reason, unless it is the last one's."""
        self._open -= 1
        if self._open:
            return (self.chunk(choice),)
        self._last = choice
        return ()

    def end(self, usage: Usage, extension: Extension) -> Sequence[Frame]:
        """See `Writer.end`."""
        assert self._last is not None, "an answer ends after its last choice has"
        last = self.chunk(self._last)
        last.data["deepinfra"] = extension.json()
        if not self._include_usage:
            return (last,)
        return (last, Frame({**self._head, "choices": [], "usage": usage_json(usage)}))

    def failed(self, error: WireError, request_id: str) -> Frame:
        """See `Writer.failed`."""
        return Frame(openai_error(error, request_id)[1])


def folded(rest: Json, chunk: dict[str, Any]) -> list[dict[str, Any]]:
    """Add to `rest` what a chunk says of the whole answer, and return what it says of choices."""
    rest |= {key: value for key, value in chunk.items() if key != "choices"}
    choices: list[dict[str, Any]] = chunk["choices"]
    return choices
