"""`POST /v1/chat/completions`: chunks, and the completion they fold into."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any

from deepinfra.api.chunks import Chunks, folded
from deepinfra.api.protocol import Frame, Head, Json
from deepinfra.api.wire import finish_of, token_json
from deepinfra.core.events import (
    Event,
    Finished,
    ReasoningDelta,
    TextDelta,
    TokenLogprobs,
    ToolArgumentsDelta,
    ToolStart,
)
from deepinfra.core.request import Usage

__all__ = ("ChatFold", "ChatWriter")


class ChatWriter(Chunks):
    """See `Writer`: the first delta of a choice carries its role, the last one is empty and has the finish reason.

    The roles of all choices come before anything else, in order: the official client's stream helper fails if the
    first chunk it sees is not that of choice 0.

    Args:
        n: Number of choices.
        include_usage: See `Chunks`.
        calls_end: Finish reason of an answer that made calls and ended by itself.
    """

    kind = "chat.completion.chunk"

    def __init__(self, n: int, *, include_usage: bool, calls_end: str = "tool_calls") -> None:
        super().__init__(n, include_usage=include_usage)
        self._n, self._calls_end = n, calls_end
        self._called: set[int] = set()

    def begin(self, head: Head, usage: Usage) -> Sequence[Frame]:
        """See `Writer.begin`."""
        super().begin(head, usage)
        return [self.chunk(_choice(index, {"role": "assistant", "content": ""})) for index in range(self._n)]

    def write(self, prompt: int, event: Event) -> Sequence[Frame]:
        """See `Writer.write`."""
        index = event.choice
        match event:
            case TextDelta():
                return (self.chunk(_choice(index, {"content": event.text}, _logprobs("content", event.tokens))),)
            case ReasoningDelta():
                logprobs = _logprobs("reasoning_content", event.tokens)
                return (self.chunk(_choice(index, {"reasoning_content": event.text}, logprobs)),)
            case ToolStart():
                self._called.add(index)
                function: Json = {"name": event.name, "arguments": ""}
                begun: Json = {
                    "index": event.index,
                    "id": event.id or f"call_{secrets.token_hex(12)}",
                    "type": "function",
                    "function": function,
                }
                return (self.chunk(_choice(index, {"tool_calls": [begun]})),)
            case ToolArgumentsDelta():
                more: Json = {"index": event.index, "function": {"arguments": event.arguments}}
                return (self.chunk(_choice(index, {"tool_calls": [more]})),)
            case Finished():
                finish = finish_of(event.reason, self._calls_end if index in self._called else "stop")
                return self.finish(_choice(index, {}, finish=finish))
        return ()

    def fold(self) -> ChatFold:
        """See `Writer.fold`."""
        return ChatFold()


def _choice(index: int, delta: Json, logprobs: Json | None = None, finish: str | None = None) -> Json:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}


def _logprobs(kind: str, tokens: Sequence[TokenLogprobs]) -> Json | None:
    """DeepSeek's `reasoning_content` beside OpenAI's `content`; refusals have no tokens of their own here."""
    if not tokens:
        return None
    return {"content": None, "refusal": None, kind: [token_json(token) for token in tokens]}


class _Message:
    """One answer while it is put together."""

    def __init__(self) -> None:
        self.text: list[str] = []
        self.reasoning: list[str] = []
        self.calls: list[dict[str, Any]] = []
        self.logprobs: dict[str, list[Any]] = {}
        self.finish: str | None = None

    def add(self, choice: dict[str, Any]) -> None:
        delta = choice["delta"]
        if text := delta.get("content"):
            self.text.append(text)
        if text := delta.get("reasoning_content"):
            self.reasoning.append(text)
        for call in delta.get("tool_calls", ()):
            function = call["function"]
            if "id" in call:
                begun = {**function, "arguments": [function["arguments"]]}
                self.calls.append({"id": call["id"], "type": call["type"], "function": begun})
            else:
                self.calls[call["index"]]["function"]["arguments"].append(function["arguments"])
        for kind, entries in (choice["logprobs"] or {}).items():
            if entries:
                self.logprobs.setdefault(kind, []).extend(entries)
        self.finish = choice["finish_reason"] or self.finish

    def json(self, index: int) -> Json:
        text = "".join(self.text)
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        if self.reasoning:
            message["reasoning_content"] = "".join(self.reasoning)
        if self.calls:
            message["content"] = text or None
            message["tool_calls"] = [
                {**call, "function": {**call["function"], "arguments": "".join(call["function"]["arguments"])}}
                for call in self.calls
            ]
        logprobs = {"content": None, "refusal": None, **self.logprobs} if self.logprobs else None
        return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": self.finish}


class ChatFold:
    """See `Fold`."""

    def __init__(self) -> None:
        self._messages: dict[int, _Message] = {}
        self._rest: Json = {}

    def add(self, frame: Frame) -> None:
        """See `Fold.add`."""
        for choice in folded(self._rest, frame.data):
            self._messages.setdefault(choice["index"], _Message()).add(choice)

    def answer(self) -> Json:
        """See `Fold.answer`."""
        choices = [self._messages[index].json(index) for index in sorted(self._messages)]
        return {**self._rest, "object": "chat.completion", "choices": choices}
