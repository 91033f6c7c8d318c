"""`POST /v1/chat/completions`: chunks, and the completion they fold into."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from deepinfra.api.wire import Extension, Head, Json, finish_of, logprob_json, usage_json
from deepinfra.core.events import (
    Event,
    Finished,
    ReasoningDelta,
    TextDelta,
    TokenLogprobs,
    ToolArgumentsDelta,
    ToolStart,
    TopLogprob,
)
from deepinfra.core.request import Usage

__all__ = ("ChatFold", "ChatWriter")


class ChatWriter:
    """See `Writer`: the first delta of a choice carries its role, the last one is empty and has the finish reason.

    The roles of all choices come before anything else, in order: the official client's stream helper fails if the
    first chunk it sees is not that of choice 0.
    """

    def __init__(self, n: int) -> None:
        self._n = n
        self._begun = False
        self._called: set[int] = set()

    def choices(self, prompt: int, event: Event) -> Sequence[Json]:
        """See `Writer.choices`."""
        index = event.choice
        said: list[Json] = []
        if not self._begun:
            self._begun = True
            said.extend(_choice(each, {"role": "assistant", "content": ""}) for each in range(self._n))
        match event:
            case TextDelta():
                said.append(_choice(index, {"content": event.text}, _logprobs("content", event.tokens)))
            case ReasoningDelta():
                said.append(
                    _choice(index, {"reasoning_content": event.text}, _logprobs("reasoning_content", event.tokens))
                )
            case ToolStart():
                self._called.add(index)
                function: Json = {"name": event.name, "arguments": ""}
                begun: Json = {"index": event.index, "id": event.id, "type": "function", "function": function}
                said.append(_choice(index, {"tool_calls": [begun]}))
            case ToolArgumentsDelta():
                more: Json = {"index": event.index, "function": {"arguments": event.arguments}}
                said.append(_choice(index, {"tool_calls": [more]}))
            case Finished():
                said.append(_choice(index, {}, finish=finish_of(event.reason, called=index in self._called)))
        return said

    def chunk(self, head: Head, choices: Sequence[Json]) -> Json:
        """See `Writer.chunk`."""
        return {
            "id": head.id,
            "object": "chat.completion.chunk",
            "created": head.created,
            "model": head.model,
            "choices": choices,
        }

    def fold(self) -> ChatFold:
        """See `Writer.fold`."""
        return ChatFold()


def _choice(index: int, delta: Json, logprobs: Json | None = None, finish: str | None = None) -> Json:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}


def _logprobs(kind: str, tokens: Sequence[TokenLogprobs]) -> Json | None:
    """DeepSeek's `reasoning_content` beside OpenAI's `content`; refusals have no tokens of their own here."""
    if not tokens:
        return None
    entries = [{**_entry(token), "top_logprobs": [_entry(top) for top in token.top]} for token in tokens]
    return {"content": None, "refusal": None, kind: entries}


def _entry(token: TokenLogprobs | TopLogprob) -> Json:
    return {
        "token": token.data.decode("utf-8", "replace"),
        "bytes": list(token.data),
        "logprob": logprob_json(token.logprob),
    }


class _Message:
    """One answer while it is put together."""

    def __init__(self) -> None:
        self.text: list[str] = []
        self.reasoning: list[str] = []
        self.calls: list[dict[str, Any]] = []
        self.logprobs: dict[str, list[Any]] = {}
        self.finish: str | None = None

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

    def add(self, choice: dict[str, Any]) -> None:
        """See `Fold.add`."""
        message = self._messages.setdefault(choice["index"], _Message())
        delta = choice["delta"]
        if text := delta.get("content"):
            message.text.append(text)
        if text := delta.get("reasoning_content"):
            message.reasoning.append(text)
        for call in delta.get("tool_calls", ()):
            function = call["function"]
            if "id" in call:
                begun = {**function, "arguments": [function["arguments"]]}
                message.calls.append({"id": call["id"], "type": call["type"], "function": begun})
            else:
                message.calls[call["index"]]["function"]["arguments"].append(function["arguments"])
        for kind, entries in (choice["logprobs"] or {}).items():
            if entries:
                message.logprobs.setdefault(kind, []).extend(entries)
        message.finish = choice["finish_reason"] or message.finish

    def answer(self, head: Head, usage: Usage, extension: Extension) -> Json:
        """See `Fold.answer`."""
        return {
            "id": head.id,
            "object": "chat.completion",
            "created": head.created,
            "model": head.model,
            "choices": [self._messages[index].json(index) for index in sorted(self._messages)],
            "usage": usage_json(usage),
            "deepinfra": extension.json(),
        }
