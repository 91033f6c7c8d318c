"""`POST /v1/messages`: the stream's events, and the message they fold into."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec
import pydantic_core

from deepinfra.api.errors import WireError
from deepinfra.api.messages.errors import anthropic_error
from deepinfra.api.messages.signature import sealed
from deepinfra.api.protocol import Extension, Frame, Head, Json
from deepinfra.core.events import (
    Event,
    Finished,
    ReasoningDelta,
    TextDelta,
    ToolArgumentsDelta,
    ToolEnd,
    ToolStart,
)
from deepinfra.core.request import FinishReason, Usage

__all__ = ("MessagesFold", "MessagesWriter")

_REASONS: Mapping[FinishReason, str] = {
    "stop": "end_turn",
    "tool_calls": "tool_use",
    "length": "max_tokens",
    "context": "model_context_window_exceeded",
    "content_filter": "refusal",
}


class MessagesWriter:
    """See `Writer`: blocks one after the other, each opened with its real type when there is something to put into it.

    Args:
        shows_thinking: Reasoning is sent as text; else its block is empty and the signature carries it.
        hour: What is written to the cache was marked to be kept for an hour.
    """

    keepalive = b'event: ping\ndata: {"type": "ping"}\n\n'
    closing = b""

    def __init__(self, *, shows_thinking: bool = True, hour: bool = False) -> None:
        self._shows_thinking, self._hour = shows_thinking, hour
        self._blocks = 0
        self._open: Literal["text", "thinking", "tool_use"] | None = None
        self._thought: list[str] = []
        self._called = False
        self._finished: Finished | None = None

    def begin(self, head: Head, usage: Usage) -> Sequence[Frame]:
        """See `Writer.begin`; cache counts are left out while there are none: they may not be known yet."""
        known = usage.cached.total + usage.cache_write_tokens > 0
        message: Json = {
            "id": head.id,
            "type": "message",
            "role": "assistant",
            "model": head.model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": self._usage(usage, known),
        }
        return (_frame("message_start", message=message),)

    def write(self, prompt: int, event: Event) -> Sequence[Frame]:
        """See `Writer.write`."""
        match event:
            case TextDelta(text=text) if text:
                return [
                    *self._opened("text", {"type": "text", "text": ""}),
                    self._delta({"type": "text_delta", "text": text}),
                ]
            case ReasoningDelta(text=text) if text:
                return self._thinking(text)
            case ToolStart():
                self._called = True
                name = event.id or f"toolu_{secrets.token_hex(12)}"
                block: Json = {"type": "tool_use", "id": name, "name": event.name, "input": {}}
                return [*self._closed(), *self._opened("tool_use", block)]
            case ToolArgumentsDelta(arguments=arguments) if arguments:
                return (self._delta({"type": "input_json_delta", "partial_json": arguments}),)
            case ToolEnd():
                return self._closed()
            case Finished():
                self._finished = event
                return self._closed()
        return ()

    def end(self, usage: Usage, extension: Extension) -> Sequence[Frame]:
        """See `Writer.end`."""
        finished = self._finished
        assert finished is not None, "an answer ends with `Finished`"
        reason = _REASONS[finished.reason]
        if finished.reason == "stop":
            reason = "stop_sequence" if finished.stop is not None else "tool_use" if self._called else reason
        return (
            _frame(
                "message_delta",
                delta={"stop_reason": reason, "stop_sequence": finished.stop},
                usage=self._usage(usage, known=True),
                deepinfra=extension.json(),
            ),
            _frame("message_stop"),
        )

    def failed(self, error: WireError, request_id: str) -> Frame:
        """See `Writer.failed`."""
        return Frame(anthropic_error(error, request_id)[1], "error")

    def fold(self) -> MessagesFold:
        """See `Writer.fold`."""
        return MessagesFold()

    # -- blocks -----------------------------------------------------------------------------------

    def _thinking(self, text: str) -> Sequence[Frame]:
        frames = self._opened("thinking", {"type": "thinking", "thinking": "", "signature": ""})
        if self._shows_thinking:
            return [*frames, self._delta({"type": "thinking_delta", "thinking": text})]
        self._thought.append(text)
        return frames

    def _opened(self, kind: Literal["text", "thinking", "tool_use"], block: Json) -> list[Frame]:
        """Frames that leave a block of this kind open, a new one if another kind was."""
        if self._open == kind and kind != "tool_use":
            return []
        frames = self._closed()
        self._open = kind
        return [*frames, _frame("content_block_start", index=self._blocks, content_block=block)]

    def _closed(self) -> list[Frame]:
        if self._open is None:
            return []
        frames = []
        if self._open == "thinking":
            signature = sealed("".join(self._thought), shown=self._shows_thinking)
            frames.append(self._delta({"type": "signature_delta", "signature": signature}))
            self._thought.clear()
        frames.append(_frame("content_block_stop", index=self._blocks))
        self._blocks += 1
        self._open = None
        return frames

    def _delta(self, delta: Json) -> Frame:
        return _frame("content_block_delta", index=self._blocks, delta=delta)

    def _usage(self, usage: Usage, known: bool) -> Json:
        """Counts so far: the three kinds of input sum to the prompt, whether the cache's are known or left out."""
        read, written = usage.cached.total, usage.cache_write_tokens
        cache: Json = {}
        if known:
            hour = written if self._hour else 0
            cache = {
                "cache_read_input_tokens": read,
                "cache_creation_input_tokens": written,
                "cache_creation": {"ephemeral_5m_input_tokens": written - hour, "ephemeral_1h_input_tokens": hour},
            }
        return {
            "input_tokens": usage.prompt_tokens - read - written,
            **cache,
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"thinking_tokens": usage.reasoning_tokens},
        }


def _frame(kind: str, **fields: Any) -> Frame:
    return Frame({"type": kind, **fields}, kind)


class MessagesFold:
    """See `Fold`."""

    def __init__(self) -> None:
        self._message: dict[str, Any] = {}
        self._blocks: list[dict[str, Any]] = []
        self._pieces: list[str] = []

    def add(self, frame: Frame) -> None:
        """See `Fold.add`."""
        data: dict[str, Any] = frame.data
        match data["type"]:
            case "message_start":
                self._message = dict(data["message"])
            case "content_block_start":
                self._blocks.append(dict(data["content_block"]))
                self._pieces = []
            case "content_block_delta":
                self._add(data["delta"])
            case "content_block_stop":
                self._finish(self._blocks[-1], "".join(self._pieces))
            case "message_delta":
                self._message |= {**data["delta"], "usage": data["usage"], "deepinfra": data["deepinfra"]}

    def answer(self) -> Json:
        """See `Fold.answer`."""
        return {**self._message, "content": self._blocks}

    def _add(self, delta: Mapping[str, str]) -> None:
        if delta["type"] == "signature_delta":
            self._blocks[-1]["signature"] = delta["signature"]
        else:
            self._pieces += (text for key, text in delta.items() if key != "type")

    @staticmethod
    def _finish(block: dict[str, Any], text: str) -> None:
        if block["type"] == "tool_use":
            block["input"] = _input(text)
        else:
            block[block["type"]] = text


def _input(text: str) -> object:
    """A call's input, verbatim where it is complete: numbers keep their digits. What was cut is read as far as it goes.

    Anthropic's client reads cut inputs with the same parser.
    """
    if not text:
        return {}
    try:
        msgspec.json.decode(text)
    except msgspec.DecodeError:
        return pydantic_core.from_json(text, allow_partial=True)
    return msgspec.Raw(text.encode())
