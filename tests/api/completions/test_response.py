from __future__ import annotations

from typing import Any

from openai.types import Completion

from deepinfra.api.completions.response import CompletionWriter
from deepinfra.api.protocol import Extension, Head
from deepinfra.core.events import Event, Finished, TextDelta, TokenLogprobs, TopLogprob
from deepinfra.core.request import CachedTokens, Usage

HEAD = Head(id="cmpl-1", created=1_800_000_000, model="toy")
USAGE = Usage(prompt_tokens=3, completion_tokens=2)


def folded(n: int, events: list[tuple[int, Event]]) -> dict[str, Any]:
    writer = CompletionWriter(1 + max(prompt for prompt, _ in events), n, include_usage=True)
    fold = writer.fold()
    frames = [*writer.begin(HEAD, USAGE)]
    for prompt, event in events:
        frames += writer.write(prompt, event)
    for frame in [*frames, *writer.end(USAGE, Extension(seed=1, cached=CachedTokens()))]:
        fold.add(frame)
    return fold.answer()


def finished(choice: int = 0) -> Finished:
    return Finished(choice=choice, reason="length", usage=USAGE)


def test_answers_are_numbered_through_the_prompts() -> None:
    events: list[tuple[int, Event]] = []
    for prompt in (1, 0):
        for choice in (1, 0):
            events += [(prompt, TextDelta(choice=choice, text=f"{prompt}{choice}")), (prompt, finished(choice))]
    whole = Completion.model_validate(folded(2, events))
    assert [(choice.index, choice.text) for choice in whole.choices] == [(0, "00"), (1, "01"), (2, "10"), (3, "11")]


def test_offsets_are_where_a_tokens_text_begins() -> None:
    data = [b"a", "é".encode()[:1], "é".encode()[1:], b"bc", b"d"]
    tokens = [TokenLogprobs(i, piece, -1.0, (TopLogprob(i, piece, -1.0),)) for i, piece in enumerate(data)]
    events: list[tuple[int, Event]] = [
        (0, TextDelta(choice=0, text="a", tokens=tuple(tokens[:1]))),
        (0, TextDelta(choice=0, text="éb", tokens=tuple(tokens[1:4]))),
        (0, TextDelta(choice=0, text="cd", tokens=tuple(tokens[4:]))),
        (0, finished()),
    ]
    logprobs = folded(1, events)["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["a", "bytes:\\xc3", "bytes:\\xa9", "bc", "d"]
    assert logprobs["text_offset"] == [0, 1, 1, 2, 4]
    assert logprobs["token_logprobs"] == [-1.0] * 5
    assert logprobs["top_logprobs"][0] == {"a": -1.0}


def test_no_alternatives_are_null() -> None:
    events: list[tuple[int, Event]] = [
        (0, TextDelta(choice=0, text="a", tokens=(TokenLogprobs(0, b"a", float("-inf")),))),
        (0, finished()),
    ]
    logprobs = folded(1, events)["choices"][0]["logprobs"]
    assert logprobs["top_logprobs"] == [None]
    assert logprobs["token_logprobs"] == [-9999.0]
