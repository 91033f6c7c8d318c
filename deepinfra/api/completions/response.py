"""`POST /v1/completions`: chunks, and the completion they fold into."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Any

from deepinfra.api.chunks import Chunks, folded
from deepinfra.api.protocol import Frame, Json
from deepinfra.api.wire import finish_of, logprob_json
from deepinfra.core.events import Event, Finished, ReasoningDelta, TextDelta, TokenLogprobs

__all__ = ("CompletionFold", "CompletionWriter")


class CompletionWriter(Chunks):
    """See `Writer`. A chunk has the shape of the whole object; choice `c` of prompt `p` has index `p * n + c`."""

    kind = "text_completion"

    def __init__(self, prompts: int, n: int, *, include_usage: bool) -> None:
        super().__init__(prompts * n, include_usage=include_usage)
        self._n = n
        self._offsets: dict[int, _Offsets] = {}

    def write(self, prompt: int, event: Event) -> Sequence[Frame]:
        """See `Writer.write`. Reasoning is text here, as this protocol has no other place for it."""
        index = prompt * self._n + event.choice
        match event:
            case TextDelta() | ReasoningDelta():
                logprobs = None
                if event.tokens:
                    logprobs = _logprobs(event.tokens, self._offsets.setdefault(index, _Offsets()))
                return (self.chunk(_choice(index, event.text, logprobs)),)
            case Finished():
                return self.finish(_choice(index, "", finish=finish_of(event.reason)))
        return ()

    def fold(self) -> CompletionFold:
        """See `Writer.fold`."""
        return CompletionFold()


def _choice(index: int, text: str, logprobs: Json | None = None, finish: str | None = None) -> Json:
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish}


class _Offsets:
    """Where in an answer's text each token begins, in characters; a token may be a piece of one."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._characters = 0

    def place(self, data: bytes) -> int:
        at = self._characters
        self._characters += len(self._decoder.decode(data))
        return at


def _logprobs(tokens: Sequence[TokenLogprobs], offsets: _Offsets) -> Json:
    return {
        "tokens": [_spelled(token.data) for token in tokens],
        "token_logprobs": [logprob_json(token.logprob) for token in tokens],
        "top_logprobs": [
            {_spelled(top.data): logprob_json(top.logprob) for top in token.top} or None for token in tokens
        ],
        "text_offset": [offsets.place(token.data) for token in tokens],
    }


def _spelled(data: bytes) -> str:
    r"""A token as text; one that is no whole characters as OpenAI writes it, `bytes:\xe2\x82`."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


class CompletionFold:
    """See `Fold`."""

    def __init__(self) -> None:
        self._texts: dict[int, list[str]] = {}
        self._choices: dict[int, dict[str, Any]] = {}
        self._rest: Json = {}

    def add(self, frame: Frame) -> None:
        """See `Fold.add`."""
        for choice in folded(self._rest, frame.data):
            self._add(choice)

    def _add(self, choice: dict[str, Any]) -> None:
        index = choice["index"]
        whole = self._choices.setdefault(index, dict(_choice(index, "")))
        self._texts.setdefault(index, []).append(choice["text"])
        if choice["logprobs"]:
            if whole["logprobs"] is None:
                whole["logprobs"] = {kind: [] for kind in choice["logprobs"]}
            for kind, values in choice["logprobs"].items():
                whole["logprobs"][kind].extend(values)
        whole["finish_reason"] = choice["finish_reason"] or whole["finish_reason"]

    def answer(self) -> Json:
        """See `Fold.answer`."""
        choices = [{**self._choices[index], "text": "".join(self._texts[index])} for index in sorted(self._choices)]
        return {**self._rest, "choices": choices}
