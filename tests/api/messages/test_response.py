"""The writer's frames against the official client: its typed models, and the message its accumulator makes of them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from anthropic.lib.streaming._messages import accumulate_event
from anthropic.types import Message, RawMessageStreamEvent
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from deepinfra.api.errors import WireError
from deepinfra.api.messages.response import MessagesWriter
from deepinfra.api.messages.signature import unsealed
from deepinfra.api.protocol import Extension, Frame, Head
from deepinfra.api.sse import encoded
from deepinfra.core.events import (
    Event,
    Finished,
    ReasoningDelta,
    TextDelta,
    ToolArgumentsDelta,
    ToolEnd,
    ToolStart,
)
from deepinfra.core.request import CachedTokens, FinishReason, Usage

EVENTS: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)
USAGE = Usage(
    prompt_tokens=100,
    completion_tokens=7,
    reasoning_tokens=2,
    cached=CachedTokens(device=40, store={"ssd": 20}, age_s={"ssd": 7.0}),
    cache_write_tokens=10,
)
COLD = Usage(prompt_tokens=100)


def text(said: str) -> TextDelta:
    return TextDelta(choice=0, text=said)


def thought(said: str) -> ReasoningDelta:
    return ReasoningDelta(choice=0, text=said)


def start(index: int = 0, written: str = "") -> ToolStart:
    return ToolStart(choice=0, index=index, id=written, name="f")


def arguments(said: str, index: int = 0) -> ToolArgumentsDelta:
    return ToolArgumentsDelta(choice=0, index=index, arguments=said)


def end(index: int = 0) -> ToolEnd:
    return ToolEnd(choice=0, index=index)


def finished(reason: FinishReason = "stop", stop: str | None = None) -> Finished:
    return Finished(choice=0, reason=reason, usage=USAGE, stop=stop, seed=5)


def frames(events: Sequence[Event], first: Usage = COLD, last: Usage = USAGE, **options: Any) -> list[Frame]:
    writer = MessagesWriter(**options)
    made = [*writer.begin(Head(id="msg_1", created=1, model="toy"), first)]
    for event in events:
        made += writer.write(0, event)
    return [*made, *writer.end(last, Extension(seed=5, cached=last.cached))]


def folded(made: Sequence[Frame]) -> Any:
    fold = MessagesWriter().fold()
    for frame in made:
        fold.add(frame)
    return json.loads(msgspec.json.encode(fold.answer()))


def answer(*events: Event, **options: Any) -> Any:
    return folded(frames([*events, finished()], **options))


def accumulated(made: Sequence[Frame]) -> Message:
    """What the official client puts together."""
    snapshot: Any = None
    buffers: dict[int, bytes] = {}
    for frame in made:
        event = EVENTS.validate_json(msgspec.json.encode(frame.data), strict=True)
        snapshot = accumulate_event(event=event, current_snapshot=snapshot, json_bufs=buffers)
    return snapshot  # type: ignore[no-any-return]


def names(made: Sequence[Frame]) -> list[str]:
    return [str(frame.event) for frame in made]


# -- the stream -----------------------------------------------------------------------------------


def test_a_stream_is_the_sequence_anthropic_documents() -> None:
    made = frames(
        [thought("t"), thought("u"), text("x"), start(), arguments('{"a"'), arguments(": 1}"), end(), finished()]
    )
    assert names(made) == [
        "message_start",
        "content_block_start",
        "content_block_delta",
        "content_block_delta",
        "content_block_delta",
        "content_block_stop",
        "content_block_start",
        "content_block_delta",
        "content_block_stop",
        "content_block_start",
        "content_block_delta",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    deltas: list[Any] = [frame.data["delta"] for frame in made if frame.event == "content_block_delta"]
    assert [delta["type"] for delta in deltas] == [
        "thinking_delta",
        "thinking_delta",
        "signature_delta",
        "text_delta",
        "input_json_delta",
        "input_json_delta",
    ]
    assert all(frame.data["type"] == frame.event for frame in made)


def test_fact_20_the_first_block_has_its_real_type_and_indices_count_from_zero() -> None:
    made = frames([thought("t"), text("x"), finished()])
    opened: list[Any] = [frame.data for frame in made if frame.event == "content_block_start"]
    assert [(block["index"], block["content_block"]["type"]) for block in opened] == [(0, "thinking"), (1, "text")]
    assert opened[0]["content_block"] == {"type": "thinking", "thinking": "", "signature": ""}


def test_an_empty_answer_has_no_block() -> None:
    for events in ([], [text("")], [thought("")]):
        made = frames([*events, finished()])
        assert names(made) == ["message_start", "message_delta", "message_stop"]
        assert folded(made)["content"] == []


def test_litellm_31561_no_delta_is_empty() -> None:
    made = frames(
        [thought(""), text(""), start(), arguments(""), end(), start(1), arguments("{}", 1), end(1), finished()]
    )
    said: list[Any] = [frame.data["delta"] for frame in made if frame.event == "content_block_delta"]
    assert said == [{"type": "input_json_delta", "partial_json": "{}"}]


def test_every_frame_names_its_event() -> None:
    for frame in frames([text("x\u2028y"), finished()]):
        lines = encoded(frame).decode().splitlines()
        assert lines[0] == f"event: {frame.event}"
        assert json.loads(lines[1].removeprefix("data: ")) == frame.data


def test_a_ping_keeps_the_connection_alive() -> None:
    assert MessagesWriter().keepalive == b'event: ping\ndata: {"type": "ping"}\n\n'
    assert MessagesWriter().closing == b""


def test_a_failure_is_an_error_event() -> None:
    frame = MessagesWriter().failed(WireError(500, "server_error", "step-failed", "it failed"), "req_1")
    assert frame.event == "error"
    assert frame.data == {
        "type": "error",
        "error": {"type": "api_error", "message": "it failed"},
        "request_id": "req_1",
    }


# -- the message ----------------------------------------------------------------------------------


def test_a_message_has_every_field_the_client_knows() -> None:
    made = answer(text("hello"))
    assert made == {
        "id": "msg_1",
        "type": "message",
        "role": "assistant",
        "model": "toy",
        "content": [{"type": "text", "text": "hello"}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {
            "input_tokens": 30,
            "cache_read_input_tokens": 60,
            "cache_creation_input_tokens": 10,
            "cache_creation": {"ephemeral_5m_input_tokens": 10, "ephemeral_1h_input_tokens": 0},
            "output_tokens": 7,
            "output_tokens_details": {"thinking_tokens": 2},
        },
        "deepinfra": {"seed": 5, "cached_tokens": {"device": 40, "ssd": 20}, "cached_age_s": {"ssd": 7.0}},
    }
    assert Message.model_validate(made, strict=True).model_extra == {"deepinfra": made["deepinfra"]}


@pytest.mark.parametrize(
    ("reason", "stop", "called", "expected"),
    [
        ("stop", None, False, "end_turn"),
        ("stop", "END", False, "stop_sequence"),
        ("stop", "END", True, "stop_sequence"),
        ("stop", None, True, "tool_use"),
        ("tool_calls", None, True, "tool_use"),
        ("length", None, False, "max_tokens"),
        ("length", None, True, "max_tokens"),
        ("context", None, False, "model_context_window_exceeded"),
        ("content_filter", None, False, "refusal"),
    ],
)
def test_stop_reasons_are_anthropics(reason: FinishReason, stop: str | None, called: bool, expected: str) -> None:
    calls: list[Event] = [start(), arguments("{}"), end()] if called else []
    made = folded(frames([*calls, finished(reason, stop)]))
    assert (made["stop_reason"], made["stop_sequence"]) == (expected, stop)


def test_a_call_gets_an_id_unless_the_model_wrote_one() -> None:
    content = answer(start(), end(), start(1, "functions.f:0"), end(1))["content"]
    assert content[0]["id"].startswith("toolu_")
    assert content[1]["id"] == "functions.f:0"


def test_numbers_of_an_input_keep_their_digits() -> None:
    made = frames([start(), arguments('{"n": 12345678901234567890123, "x": 1e5}'), end(), finished()])
    fold = MessagesWriter().fold()
    for frame in made:
        fold.add(frame)
    assert b'"input":{"n": 12345678901234567890123, "x": 1e5}' in msgspec.json.encode(fold.answer())


def test_an_input_that_was_cut_is_read_as_far_as_it_goes() -> None:
    made = folded(frames([start(), arguments('{"a": [1, 2], "b": {"c": 3, "d": "hal'), finished("length")]))
    assert made["content"][0]["input"] == {"a": [1, 2], "b": {"c": 3}}
    assert made["stop_reason"] == "max_tokens"
    assert folded(frames([start(), finished("length")]))["content"][0]["input"] == {}


def test_thinking_that_is_not_shown_is_in_the_signature() -> None:
    made = frames([thought("se"), thought("cret"), text("x"), thought("more"), finished()], shows_thinking=False)
    assert b"cret" not in b"".join(map(encoded, made))
    content = folded(made)["content"]
    assert [block["type"] for block in content] == ["thinking", "text", "thinking"]
    assert [unsealed(block["thinking"], block["signature"]) for block in content[::2]] == ["secret", "more"]


# -- usage ----------------------------------------------------------------------------------------


def test_vllm_45079_what_was_cached_is_told_at_the_end_and_at_the_start_if_it_is_known() -> None:
    cold, warm = (frames([finished()], first=first)[0].data["message"]["usage"] for first in (COLD, USAGE))  # type: ignore[index,call-overload]
    assert cold == {"input_tokens": 100, "output_tokens": 0, "output_tokens_details": {"thinking_tokens": 0}}
    assert warm["cache_read_input_tokens"] == 60
    assert frames([finished()], last=COLD)[-2].data["usage"] == {
        **cold,
        "cache_read_input_tokens": 0,
        "cache_creation_input_tokens": 0,
        "cache_creation": {"ephemeral_5m_input_tokens": 0, "ephemeral_1h_input_tokens": 0},
    }


def test_what_was_marked_for_an_hour_is_counted_there() -> None:
    usage = answer(text("x"), hour=True)["usage"]
    assert usage["cache_creation"] == {"ephemeral_5m_input_tokens": 0, "ephemeral_1h_input_tokens": 10}


counts = st.integers(0, 50)


@given(plain=counts, device=counts, ssd=counts, written=counts, hour=st.booleans(), known=st.booleans())
def test_the_kinds_of_input_sum_to_the_prompt(
    plain: int, device: int, ssd: int, written: int, hour: bool, known: bool
) -> None:
    prompt = plain + device + ssd + written
    usage = Usage(
        prompt_tokens=prompt,
        cached=CachedTokens(device=device, store={"ssd": ssd}),
        cache_write_tokens=written,
    )
    made = frames([finished()], first=usage if known else Usage(prompt_tokens=prompt), last=usage, hour=hour)
    for told in (made[0].data["message"]["usage"], made[-2].data["usage"], folded(made)["usage"]):  # type: ignore[index,call-overload]
        creation = told.get("cache_creation_input_tokens", 0)
        assert told["input_tokens"] + told.get("cache_read_input_tokens", 0) + creation == prompt
        assert sum(told.get("cache_creation", {}).values()) == creation


# -- the law --------------------------------------------------------------------------------------

pieces = st.text(max_size=5)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


@st.composite
def answers(draw: st.DrawFn) -> list[Event]:
    """Any order of text, reasoning and calls; arguments in any cuts; perhaps cut short within the last call."""
    events: list[Event] = []
    for index in range(draw(st.integers(0, 6))):
        kind = draw(st.sampled_from(["text", "thought", "call"]))
        if kind == "text":
            events += [text(piece) for piece in draw(st.lists(pieces, max_size=3))]
        elif kind == "thought":
            events += [thought(piece) for piece in draw(st.lists(pieces, max_size=3))]
        else:
            written = json.dumps(
                draw(st.dictionaries(st.text(max_size=4), json_values, max_size=3)), ensure_ascii=False
            )
            cuts = sorted(draw(st.lists(st.integers(0, len(written)), max_size=4)))
            edges = list(zip([0, *cuts], [*cuts, len(written)], strict=True))
            said = [arguments(written[a:b], index) for a, b in edges]
            events += [start(index, draw(st.sampled_from(["", f"call_{index}"]))), *said, end(index)]
    if events and isinstance(events[-1], ToolEnd) and draw(st.booleans()):
        del events[-draw(st.integers(1, 2)) :]
        return [*events, finished("length")]
    return [
        *events,
        finished(*draw(st.sampled_from([("stop", None), ("stop", "END"), ("length", None), ("context", None)]))),
    ]


@given(events=answers(), shown=st.booleans(), first=st.sampled_from([COLD, USAGE]))
def test_the_official_client_makes_of_a_stream_what_it_makes_of_the_whole(
    events: list[Event], shown: bool, first: Usage
) -> None:
    made = frames(events, first=first, shows_thinking=shown)
    open_block: int | None = None
    opened = 0
    for frame in made:
        data: dict[str, Any] = frame.data
        if frame.event == "content_block_start":
            assert (open_block, data["index"]) == (None, opened)
            open_block, opened = data["index"], opened + 1
        elif frame.event == "content_block_delta":
            assert data["index"] == open_block
        elif frame.event == "content_block_stop":
            assert data["index"] == open_block
            open_block = None
    assert open_block is None
    assert names(made)[0] == "message_start"
    assert names(made)[-2:] == ["message_delta", "message_stop"]
    whole = Message.model_validate(folded(made), strict=True).model_dump(exclude={"deepinfra"})
    streamed = accumulated(made).model_dump()
    for each in (whole, streamed):  # the accumulator leaves this object out; its sum is beside it
        each["usage"].pop("cache_creation")
    assert streamed == whole
