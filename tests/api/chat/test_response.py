from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.lib.streaming.chat import ChatCompletionStreamState
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from deepinfra.api.chat.response import ChatWriter
from deepinfra.api.protocol import Extension, Frame, Head
from deepinfra.core.events import (
    Event,
    Finished,
    ReasoningDelta,
    TextDelta,
    TokenLogprobs,
    ToolArgumentsDelta,
    ToolEnd,
    ToolStart,
    TopLogprob,
)
from deepinfra.core.request import CachedTokens, FinishReason, Usage

HEAD = Head(id="chatcmpl-1", created=1_800_000_000, model="toy")
USAGE = Usage(
    prompt_tokens=10,
    completion_tokens=7,
    reasoning_tokens=2,
    cached=CachedTokens(device=4, store={"ssd": 2}, age_s={"ssd": 12.3456}),
    cache_write_tokens=3,
)
EXTENSION = Extension(seed=5, cached=USAGE.cached)


def frames(writer: ChatWriter, events: Sequence[Event]) -> list[Frame]:
    said = [*writer.begin(HEAD, USAGE)]
    for event in events:
        said += writer.write(0, event)
    return [*said, *writer.end(USAGE, EXTENSION)]


def chunks(events: Sequence[Event], n: int = 1) -> list[dict[str, Any]]:
    return [frame.data for frame in frames(ChatWriter(n, include_usage=False), events)]


def folded(events: Sequence[Event], n: int = 1) -> dict[str, Any]:
    writer = ChatWriter(n, include_usage=True)
    fold = writer.fold()
    for frame in frames(writer, events):
        fold.add(frame)
    return fold.answer()


def finished(choice: int = 0, reason: FinishReason = "stop") -> Finished:
    return Finished(choice=choice, reason=reason, usage=USAGE)


CALLS: list[Event] = [
    ReasoningDelta(choice=0, text="hm"),
    ToolStart(choice=0, index=0, id="call_a", name="f"),
    ToolArgumentsDelta(choice=0, index=0, arguments='{"x"'),
    ToolArgumentsDelta(choice=0, index=0, arguments=": 1}"),
    ToolEnd(choice=0, index=0),
    ToolStart(choice=0, index=1, id="call_b", name="g"),
    ToolArgumentsDelta(choice=0, index=1, arguments="{}"),
    ToolEnd(choice=0, index=1),
    finished(),
]


def test_the_role_comes_first_and_once_and_the_reason_last_with_nothing_else() -> None:
    deltas = [chunk["choices"][0] for chunk in chunks([TextDelta(choice=0, text="a"), finished()])]
    assert [(d["delta"], d["finish_reason"]) for d in deltas] == [
        ({"role": "assistant", "content": ""}, None),
        ({"content": "a"}, None),
        ({}, "stop"),
    ]


def test_an_empty_answer_still_has_a_role_and_a_reason() -> None:
    assert [chunk["choices"][0]["delta"] for chunk in chunks([finished()])] == [
        {"role": "assistant", "content": ""},
        {},
    ]
    assert folded([finished()])["choices"][0]["message"]["content"] == ""


def test_id_and_name_of_a_call_come_only_with_its_first_delta() -> None:
    calls = [c for chunk in chunks(CALLS) for c in chunk["choices"][0]["delta"].get("tool_calls", ())]
    assert [("id" in call, "type" in call, "name" in call["function"]) for call in calls] == [
        (True, True, True),
        (False, False, False),
        (False, False, False),
        (True, True, True),
        (False, False, False),
    ]


def test_a_normal_end_after_calls_is_tool_calls_and_being_cut_is_not() -> None:
    assert chunks(CALLS)[-1]["choices"][0]["finish_reason"] == "tool_calls"
    assert chunks([*CALLS[:-1], finished(reason="length")])[-1]["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize(
    ("reason", "told"),
    [("stop", "stop"), ("length", "length"), ("context", "length"), ("content_filter", "content_filter")],
)
def test_finish_reasons_are_openais(reason: FinishReason, told: str) -> None:
    assert chunks([TextDelta(choice=0, text="a"), finished(reason=reason)])[-1]["choices"][0]["finish_reason"] == told


def test_the_folded_answer_has_calls_and_no_content() -> None:
    (choice,) = folded(CALLS)["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"] == {
        "role": "assistant",
        "content": None,
        "refusal": None,
        "reasoning_content": "hm",
        "tool_calls": [
            {"id": "call_a", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}},
            {"id": "call_b", "type": "function", "function": {"name": "g", "arguments": "{}"}},
        ],
    }


def test_usage_counts_what_was_cached_and_reasoned() -> None:
    answer = folded([finished()])
    assert answer["usage"] == {
        "prompt_tokens": 10,
        "completion_tokens": 7,
        "total_tokens": 17,
        "prompt_tokens_details": {"cached_tokens": 6, "cache_write_tokens": 3},
        "completion_tokens_details": {"reasoning_tokens": 2},
        "prompt_cache_hit_tokens": 6,
        "prompt_cache_miss_tokens": 4,
    }
    assert answer["deepinfra"] == {"seed": 5, "cached_tokens": {"device": 4, "ssd": 2}, "cached_age_s": {"ssd": 12.346}}


def test_logprobs_carry_text_bytes_and_alternatives() -> None:
    token = TokenLogprobs(
        1, b"\xe2\x82", -0.25, (TopLogprob(1, b"\xe2\x82", -0.25), TopLogprob(2, b"x", float("-inf")))
    )
    events = [
        TextDelta(choice=0, text="€", tokens=(token,)),
        ReasoningDelta(choice=0, text="r", tokens=(token,)),
        finished(),
    ]
    logprobs = folded(events)["choices"][0]["logprobs"]
    assert logprobs["content"] == [
        {
            "token": "�",
            "bytes": [0xE2, 0x82],
            "logprob": -0.25,
            "top_logprobs": [
                {"token": "�", "bytes": [0xE2, 0x82], "logprob": -0.25},
                {"token": "x", "bytes": [120], "logprob": -9999.0},
            ],
        }
    ]
    assert logprobs["reasoning_content"] == logprobs["content"]
    assert logprobs["refusal"] is None


texts = st.builds(TextDelta, choice=st.integers(0, 2), text=st.text(min_size=1, max_size=5))
thoughts = st.builds(ReasoningDelta, choice=st.integers(0, 2), text=st.text(min_size=1, max_size=5))


@given(events=st.lists(texts | thoughts, max_size=20), call=st.booleans())
def test_the_official_client_makes_of_a_stream_what_it_makes_of_the_whole(events: list[Event], call: bool) -> None:
    if call:
        events = [*events, *CALLS[1:-1]]
    events = [*events, *(finished(choice) for choice in range(3))]
    state = ChatCompletionStreamState()
    for chunk in chunks(events, n=3):
        state.handle_chunk(ChatCompletionChunk.model_validate(chunk))
    whole = ChatCompletion.model_validate(folded(events, n=3))
    streamed = state.get_final_completion()
    assert len(streamed.choices) == len(whole.choices) == 3
    for ours, theirs in zip(whole.choices, sorted(streamed.choices, key=lambda choice: choice.index), strict=True):
        assert ours.index == theirs.index
        assert ours.finish_reason == theirs.finish_reason
        assert (ours.message.content or "") == (theirs.message.content or "")
        assert ours.message.model_extra == {
            key: value for key, value in (theirs.message.model_extra or {}).items() if key == "reasoning_content"
        }
        mine = [(each.id, each.function.name, each.function.arguments) for each in ours.message.tool_calls or ()]  # type: ignore[union-attr]
        others = [(each.id, each.function.name, each.function.arguments) for each in theirs.message.tool_calls or ()]
        assert mine == others
