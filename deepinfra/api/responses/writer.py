"""The events of a response, and the object that they end with."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from deepinfra.api.errors import WireError
from deepinfra.api.protocol import Extension, Frame, Head, Json
from deepinfra.api.responses.items import sealed
from deepinfra.api.wire import KEEPALIVE, token_json
from deepinfra.core.events import (
    Event,
    Finished,
    ReasoningDelta,
    TextDelta,
    TokenLogprobs,
    ToolArgumentsDelta,
    ToolEnd,
    ToolStart,
)
from deepinfra.core.request import FinishReason, Usage
from deepinfra.interfaces.given import Clock

__all__ = ("ResponseFold", "ResponseWriter")

_REASONS: Mapping[FinishReason, str] = {
    "length": "max_output_tokens",
    "context": "max_output_tokens",
    "content_filter": "content_filter",
}
"""Ends that leave a response incomplete, in OpenAI's words; it has none for a full context."""


class ResponseWriter:
    """See `Writer`. One item is open at a time; an event of another kind closes it.

    An item that is still open when an answer is cut short is `incomplete`, as is a call that never ended. Ids of items
    are made of the response's own, so that they are the same in every event and in the final object. An answer of
    nothing has no items.

    Args:
        echo: Fields of the request that the object repeats.
        clock: Time of `completed_at`.
        seal: Whether reasoning also comes as `encrypted_content`.
        keep: Takes the finished object, if it is to be stored.
    """

    keepalive = KEEPALIVE
    closing = b""

    def __init__(
        self, echo: Mapping[str, Any], clock: Clock, *, seal: bool = False, keep: Callable[[Json], None] | None = None
    ) -> None:
        self._echo, self._clock, self._seal, self._keep = echo, clock, seal, keep
        self._sequence = 0
        self._head: Head | None = None
        self._output: list[Json] = []
        self._item: _Text | _Call | None = None
        self._reason: FinishReason = "stop"

    def begin(self, head: Head, usage: Usage) -> Sequence[Frame]:
        """See `Writer.begin`."""
        self._head = head
        return [
            self._frame(f"response.{event}", response=self._response("in_progress"))
            for event in ("created", "in_progress")
        ]

    def write(self, prompt: int, event: Event) -> Sequence[Frame]:
        """See `Writer.write`."""
        match event:
            case ReasoningDelta():
                return self._say("reasoning", event.text, ()) if event.text else ()
            case TextDelta():
                return self._say("message", event.text, event.tokens) if event.text or event.tokens else ()
            case ToolStart():
                frames = self._close()
                call = _Call(self._new_id("fc"), event.id or self._new_id("call"), event.name)
                return [*frames, self._open(call)]
            case ToolArgumentsDelta():
                assert isinstance(self._item, _Call)
                self._item.arguments.append(event.arguments)
                return [self._delta("response.function_call_arguments.delta", delta=event.arguments)]
            case ToolEnd():
                return self._close(ended=True)
            case Finished():
                self._reason = event.reason
        return ()

    def end(self, usage: Usage, extension: Extension) -> Sequence[Frame]:
        """See `Writer.end`."""
        reason = _REASONS.get(self._reason)
        status = "incomplete" if reason else "completed"
        frames = self._close(cut=reason is not None)
        response = self._response(
            status,
            completed_at=None if reason else int(self._clock.wall()),
            incomplete_details={"reason": reason} if reason else None,
            usage=_usage_json(usage),
            deepinfra=extension.json(),
        )
        if self._keep is not None:
            self._keep(response)
        return [*frames, self._frame(f"response.{status}", response=response)]

    def failed(self, error: WireError, request_id: str) -> Frame:
        """See `Writer.failed`: `response.failed`, or `error` if not even the response was created."""
        if self._head is None:
            return self._frame("error", code=error.code, message=error.message, param=error.param)
        if self._item is not None:
            self._output.append(self._item.json("incomplete"))
        code = "rate_limit_exceeded" if error.status == 429 else "server_error"
        told: Json = {"code": code, "message": error.message}
        return self._frame("response.failed", response=self._response("failed", error=told))

    def fold(self) -> ResponseFold:
        """See `Writer.fold`."""
        return ResponseFold()

    # -- items --------------------------------------------------------------------------------

    def _say(self, kind: str, text: str, tokens: Sequence[TokenLogprobs]) -> list[Frame]:
        """Text of an item of `kind`, opened if the open one is another."""
        frames: list[Frame] = []
        item = self._item
        if not isinstance(item, _Text) or item.kind != kind:
            frames += self._close()
            item = _Text(kind, self._new_id("rs" if kind == "reasoning" else "msg"), seal=self._seal)
            frames.append(self._open(item))
            frames.append(self._delta("response.content_part.added", content_index=0, part=item.part("")))
        item.texts.append(text)
        logprobs = [token_json(token) for token in tokens]
        item.logprobs += logprobs
        more: Json = {"logprobs": logprobs} if kind == "message" else {}
        frames.append(self._delta(f"response.{item.word}.delta", content_index=0, delta=text, **more))
        return frames

    def _open(self, item: _Text | _Call) -> Frame:
        self._item = item
        return self._frame("response.output_item.added", output_index=len(self._output), item=item.json("in_progress"))

    def _close(self, *, ended: bool = False, cut: bool = False) -> list[Frame]:
        """The open item's last events. A call is complete only if it `ended`, other items unless they were `cut`."""
        item = self._item
        if item is None:
            return []
        if isinstance(item, _Call):
            frames = [self._delta("response.function_call_arguments.done", name=item.name, arguments=item.text)]
        else:
            more: Json = {"logprobs": item.logprobs} if item.kind == "message" else {}
            frames = [
                self._delta(f"response.{item.word}.done", content_index=0, text=item.text, **more),
                self._delta("response.content_part.done", content_index=0, part=item.part(item.text)),
            ]
        complete = ended if isinstance(item, _Call) else not cut
        whole = item.json("completed" if complete else "incomplete")
        frames.append(self._frame("response.output_item.done", output_index=len(self._output), item=whole))
        self._output.append(whole)
        self._item = None
        return frames

    def _new_id(self, prefix: str) -> str:
        assert self._head is not None
        return f"{prefix}_{self._head.id.rpartition('_')[2]}{len(self._output):04x}"

    # -- frames -------------------------------------------------------------------------------

    def _delta(self, kind: str, **fields: Any) -> Frame:
        """An event about the open item."""
        assert self._item is not None
        return self._frame(kind, item_id=self._item.id, output_index=len(self._output), **fields)

    def _frame(self, kind: str, **fields: Any) -> Frame:
        frame = Frame({"type": kind, "sequence_number": self._sequence, **fields}, kind)
        self._sequence += 1
        return frame

    def _response(self, status: str, **fields: Any) -> Json:
        assert self._head is not None
        return {
            "id": self._head.id,
            "object": "response",
            "created_at": self._head.created,
            "status": status,
            "completed_at": None,
            "error": None,
            "incomplete_details": None,
            "model": self._head.model,
            "output": list(self._output),
            "usage": None,
            **self._echo,
            **fields,
        }


class _Text:
    """A reasoning or message item while it is open."""

    def __init__(self, kind: str, item_id: str, *, seal: bool) -> None:
        self.kind, self.id, self._seal = kind, item_id, seal
        self.word = "reasoning_text" if kind == "reasoning" else "output_text"
        self.texts: list[str] = []
        self.logprobs: list[Json] = []

    @property
    def text(self) -> str:
        return "".join(self.texts)

    def part(self, text: str) -> Json:
        if self.kind == "reasoning":
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(self.logprobs)}

    def json(self, status: str) -> Json:
        content = [] if status == "in_progress" else [self.part(self.text)]
        item: Json = {"id": self.id, "type": self.kind, "status": status, "content": content}
        if self.kind == "message":
            return {**item, "role": "assistant"}
        sealed_text = sealed(self.text) if self._seal and content else None
        return {**item, "summary": [], "encrypted_content": sealed_text}


class _Call:
    """A call while it is open."""

    def __init__(self, item_id: str, call_id: str, name: str) -> None:
        self.id, self.call_id, self.name = item_id, call_id, name
        self.arguments: list[str] = []

    @property
    def text(self) -> str:
        return "".join(self.arguments)

    def json(self, status: str) -> Json:
        return {
            "id": self.id,
            "type": "function_call",
            "status": status,
            "call_id": self.call_id,
            "name": self.name,
            "arguments": self.text,
        }


class ResponseFold:
    """See `Fold`: the object that the last event carries is the whole answer."""

    def __init__(self) -> None:
        self._last: Json = {}

    def add(self, frame: Frame) -> None:
        """See `Fold.add`."""
        self._last = frame.data

    def answer(self) -> Json:
        """See `Fold.answer`."""
        response = self._last["response"]
        assert isinstance(response, dict)
        return response


def _usage_json(usage: Usage) -> Json:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {
            "cached_tokens": usage.cached.total,
            "cache_write_tokens": usage.cache_write_tokens,
        },
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
