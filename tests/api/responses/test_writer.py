"""The writer's state machine: whatever an answer is made of, its stream is one that the official client can read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, get_args

from hypothesis import given
from hypothesis import strategies as st
from openai.types.responses import Response
from openai.types.responses.response_stream_event import ResponseStreamEvent

from deepinfra.api.errors import wire_error
from deepinfra.api.protocol import Extension, Frame, Head
from deepinfra.api.responses.items import Reasoning, output_items, sealed
from deepinfra.api.responses.request import ResponsesRequest
from deepinfra.api.responses.turns import turns_of
from deepinfra.api.responses.writer import ResponseWriter
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
from deepinfra.testing.clock import ManualClock

HEAD = Head(id="resp_0a1b", created=1_700_000_000, model="toy")
USAGE = Usage(
    prompt_tokens=30,
    completion_tokens=9,
    reasoning_tokens=4,
    cached=CachedTokens(device=16, store={"ssd": 8}, age_s={"ssd": 1.5}),
    cache_write_tokens=2,
)
EXTENSION = Extension(seed=7, cached=USAGE.cached)
ECHO = ResponsesRequest(model="toy", input="hi").echo()  # type: ignore[arg-type]

EVENTS: dict[str, Any] = {
    get_args(each.model_fields["type"].annotation)[0]: each for each in get_args(get_args(ResponseStreamEvent)[0])
}
"""The official client's class of each event."""


def written(events: Sequence[Event], *, seal: bool = False, kept: list[Any] | None = None) -> list[Frame]:
    writer = ResponseWriter(ECHO, ManualClock(), seal=seal, keep=None if kept is None else kept.append)
    frames = [*writer.begin(HEAD, Usage(prompt_tokens=30))]
    for event in events:
        frames += writer.write(0, event)
    return [*frames, *writer.end(USAGE, EXTENSION)]


def token(text: str) -> TokenLogprobs:
    data = text.encode()
    return TokenLogprobs(5, data, -0.5, (TopLogprob(5, data, -0.5), TopLogprob(6, b"\xe2\x82", float("-inf"))))


def text(*pieces: str, logprobs: bool = False) -> list[Event]:
    return [TextDelta(choice=0, text=piece, tokens=(token(piece),) if logprobs else ()) for piece in pieces]


def reasoning(*pieces: str) -> list[Event]:
    return [ReasoningDelta(choice=0, text=piece) for piece in pieces]


def call(index: int, *pieces: str, model_id: str = "", name: str = "f", ended: bool = True) -> list[Event]:
    arguments = [ToolArgumentsDelta(choice=0, index=index, arguments=piece) for piece in pieces]
    end = [ToolEnd(choice=0, index=index)] if ended else []
    return [ToolStart(choice=0, index=index, id=model_id, name=name), *arguments, *end]


def finished(reason: FinishReason = "stop") -> list[Event]:
    return [Finished(choice=0, reason=reason, usage=USAGE)]


@st.composite
def answers(draw: st.DrawFn) -> list[Event]:
    """Any answer: runs of reasoning, text and calls in any order; the last call may be cut short."""
    pieces = st.lists(st.text(max_size=5), min_size=1, max_size=4)
    kinds = draw(st.lists(st.sampled_from(["reasoning", "text", "call"]), max_size=6))
    events: list[Event] = []
    for at, kind in enumerate(kinds):
        said = draw(pieces)
        match kind:
            case "reasoning":
                events += reasoning(*said)
            case "text":
                events += text(*said, logprobs=draw(st.booleans()))
            case "call":
                index = sum(isinstance(event, ToolStart) for event in events)
                ended = at < len(kinds) - 1 or draw(st.booleans())
                events += call(index, *said, model_id=draw(st.sampled_from(["", f"model_{index}"])), ended=ended)
    return events + finished(draw(st.sampled_from(["stop", "length", "context", "content_filter", "tool_calls"])))


def said_by(frames: Sequence[Frame]) -> list[dict[str, Any]]:
    """What a client makes of the deltas alone: an independent reader of the stream, which checks its order."""
    output: list[dict[str, Any]] = []
    item: dict[str, Any] | None = None
    for data in (frame.data for frame in frames[2:-1]):
        kind: Any = data["type"]
        if kind == "response.output_item.added":
            assert item is None
            assert data["output_index"] == len(output)
            item = {"added": data["item"], "text": "", "part": "closed"}
            continue
        assert item is not None
        assert data["output_index"] == len(output)
        if kind == "response.output_item.done":
            assert item["part"] == "closed"
            assert item["text"] == item["done"]
            output.append(item | {"whole": data["item"]})
            item = None
            continue
        assert data["item_id"] == item["added"]["id"]  # type: ignore[index]
        match kind.rpartition(".")[2]:
            case "added":
                assert item["part"] == "closed"
                item["part"] = "open"
            case "delta":
                item["text"] += data["delta"]
            case "done" if kind == "response.content_part.done":
                assert data["part"]["text"] == item["done"]  # type: ignore[index,call-overload]
                item["part"] = "closed"
            case "done":
                item["done"] = data["arguments"] if "arguments" in data else data["text"]
    assert item is None
    return output


@given(answers())
def test_every_frame_is_one_of_the_official_clients_events(events: list[Event]) -> None:
    for frame in written(events):
        assert frame.event == frame.data["type"]
        EVENTS[frame.event].model_validate(frame.data)


@given(answers())
def test_events_are_numbered_from_zero_without_a_gap(events: list[Event]) -> None:
    frames = written(events)
    assert [frame.data["sequence_number"] for frame in frames] == list(range(len(frames)))


@given(answers())
def test_a_stream_opens_and_closes_once(events: list[Event]) -> None:
    kinds = [frame.event for frame in written(events)]
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] in ("response.completed", "response.incomplete")
    assert len({"response.created", "response.in_progress", kinds[-1]} & set(kinds[2:-1])) == 0


@given(answers())
def test_items_come_one_after_the_other_and_end_as_they_were_streamed(events: list[Event]) -> None:
    """Facts: Codex pairs items by id (vLLM #56285); done events in order (LiteLLM #36356) and always (ogx #5309)."""
    frames = written(events)
    output = said_by(frames)
    final: Any = frames[-1].data["response"]
    assert [item["whole"] for item in output] == final["output"]
    for item in output:
        added, whole = item["added"], item["whole"]
        assert {added[key] == whole[key] for key in ("id", "type", "call_id", "name") if key in whole} == {True}
        assert item["text"] == (whole["arguments"] if "arguments" in whole else whole["content"][0]["text"])
    assert len({item["id"] for item in final["output"]}) == len(final["output"])


@given(answers())
def test_nothing_that_was_said_is_lost(events: list[Event]) -> None:
    final: Any = written(events)[-1].data["response"]
    for kind, event in (("message", TextDelta), ("reasoning", ReasoningDelta)):
        told = "".join(item["content"][0]["text"] for item in final["output"] if item["type"] == kind)
        assert told == "".join(each.text for each in events if isinstance(each, event))
    arguments = [item["arguments"] for item in final["output"] if item["type"] == "function_call"]
    said: dict[int, str] = {event.index: "" for event in events if isinstance(event, ToolStart)}
    for event in events:
        if isinstance(event, ToolArgumentsDelta):
            said[event.index] += event.arguments
    assert arguments == list(said.values())


@given(answers())
def test_the_whole_answer_is_the_object_that_the_stream_ends_with(events: list[Event]) -> None:
    frames, kept = [*written(events)], list[Any]()
    fold = ResponseWriter(ECHO, ManualClock()).fold()
    for frame in written(events, kept=kept):
        fold.add(frame)
    assert fold.answer() == frames[-1].data["response"] == kept[0]
    Response.model_validate(fold.answer())


@given(answers())
def test_an_answer_can_be_sent_back_as_the_client_holds_it(events: list[Event]) -> None:
    final = written(events)[-1].data["response"]
    items = [item.model_dump(mode="json") for item in Response.model_validate(final).output]
    for each in (final["output"], items):  # type: ignore[index,call-overload]
        read = output_items(each)
        turns = turns_of(None, [], [item for item in read if item.type != "function_call"])
        told = "".join(event.text for event in events if isinstance(event, TextDelta))
        assert "".join(turn.message.text for turn in turns) == told


# -- single facts ---------------------------------------------------------------------------------


def kinds(frames: Sequence[Frame]) -> list[str]:
    return [str(frame.event).removeprefix("response.") for frame in frames]


def test_reasoning_text_and_calls_are_items_in_the_order_they_came() -> None:
    frames = written(
        [
            *reasoning("R"),
            *text("A", "B"),
            *call(0, "{", "}"),
            *call(1, "{}", model_id="model_7", name="g"),
            *finished(),
        ]
    )
    final: Any = frames[-1].data["response"]
    assert [item["type"] for item in final["output"]] == ["reasoning", "message", "function_call", "function_call"]
    assert [item["id"] for item in final["output"]] == ["rs_0a1b0000", "msg_0a1b0001", "fc_0a1b0002", "fc_0a1b0003"]
    assert [item["call_id"] for item in final["output"][2:]] == ["call_0a1b0002", "model_7"]
    assert kinds(frames)[2:12] == [
        "output_item.added",
        "content_part.added",
        "reasoning_text.delta",
        "reasoning_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.delta",
    ]


def test_a_call_has_its_arguments_streamed_and_then_whole() -> None:
    frames = written([*call(0, '{"a":', "1}"), *finished()])
    assert kinds(frames)[2:-1] == [
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
    ]
    assert frames[2].data["item"]["arguments"] == ""  # type: ignore[index,call-overload]
    assert frames[5].data["arguments"] == '{"a":1}'


def test_usage_has_every_field_that_the_client_requires() -> None:
    """Facts: SGLang #10012, and what deepseek-recipe leaves out (1.9)."""
    final: Any = written(finished())[-1].data["response"]
    assert final["usage"] == {
        "input_tokens": 30,
        "input_tokens_details": {"cached_tokens": 24, "cache_write_tokens": 2},
        "output_tokens": 9,
        "output_tokens_details": {"reasoning_tokens": 4},
        "total_tokens": 39,
    }
    assert final["deepinfra"] == {"seed": 7, "cached_tokens": {"device": 16, "ssd": 8}, "cached_age_s": {"ssd": 1.5}}


def test_what_is_cut_short_is_incomplete_and_so_is_the_item_that_was_open() -> None:
    for reason, told in (("length", "max_output_tokens"), ("context", "max_output_tokens"), ("content_filter",) * 2):
        final: Any = written([*reasoning("R"), *call(0, '{"a', ended=False), *finished(reason)])[-1].data["response"]
        assert final["status"] == "incomplete"
        assert final["incomplete_details"] == {"reason": told}
        assert final["completed_at"] is None
        assert [item["status"] for item in final["output"]] == ["completed", "incomplete"]


def test_what_ends_by_itself_is_completed() -> None:
    for reason in ("stop", "tool_calls"):
        final: Any = written([*text("A"), *finished(reason)])[-1].data["response"]  # type: ignore[arg-type]
        assert final["status"] == "completed"
        assert final["incomplete_details"] is None
        assert final["completed_at"] == int(ManualClock().wall())
        assert [item["status"] for item in final["output"]] == ["completed"]


def test_an_answer_of_nothing_has_no_items() -> None:
    frames = written(finished())
    assert kinds(frames) == ["created", "in_progress", "completed"]
    assert frames[-1].data["response"]["output"] == []  # type: ignore[index,call-overload]


def test_logprobs_come_with_their_text_and_again_with_the_whole() -> None:
    frames = written([*text("A", "B", logprobs=True), *finished()])
    deltas = [frame.data["logprobs"] for frame in frames if frame.event == "response.output_text.delta"]
    final: Any = frames[-1].data["response"]
    assert [*deltas[0], *deltas[1]] == final["output"][0]["content"][0]["logprobs"]  # type: ignore[misc]
    assert deltas[0][0] == {  # type: ignore[index,call-overload]
        "token": "A",
        "bytes": [65],
        "logprob": -0.5,
        "top_logprobs": [
            {"token": "A", "bytes": [65], "logprob": -0.5},
            {"token": "\ufffd", "bytes": [0xE2, 0x82], "logprob": -9999.0},
        ],
    }


def test_reasoning_is_sealed_only_when_it_was_asked_for() -> None:
    for seal in (False, True):
        frames = written([*reasoning("think \N{SNOWMAN}"), *finished()], seal=seal)
        final: Any = frames[-1].data["response"]
        (item,) = final["output"]
        assert item["encrypted_content"] == (sealed("think \N{SNOWMAN}") if seal else None)
    assert Reasoning(type="reasoning", encrypted_content=item["encrypted_content"]).text == "think \N{SNOWMAN}"


def test_a_failure_ends_the_stream_with_what_was_there() -> None:
    writer = ResponseWriter(ECHO, ManualClock())
    frames = [*writer.begin(HEAD, USAGE)]
    for event in [*reasoning("R"), *text("A")]:
        frames += writer.write(0, event)
    frames.append(writer.failed(wire_error("step-failed", "the step failed"), "req_1"))
    EVENTS["response.failed"].model_validate(frames[-1].data)
    response: Any = frames[-1].data["response"]
    assert response["status"] == "failed"
    assert response["error"] == {"code": "server_error", "message": "the step failed"}
    assert [item["status"] for item in response["output"]] == ["completed", "incomplete"]
    assert frames[-1].data["sequence_number"] == len(frames) - 1


def test_a_failure_before_the_response_was_created_is_an_error_event() -> None:
    frame = ResponseWriter(ECHO, ManualClock()).failed(wire_error("overloaded", "too much"), "req_1")
    EVENTS["error"].model_validate(frame.data)
    assert frame.event == "error"
    assert frame.data["code"] == "overloaded"
    assert frame.data["sequence_number"] == 0
