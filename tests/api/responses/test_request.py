"""What a request body becomes."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from openai.types.responses import (
    Response,
    ResponseFunctionToolCallItem,
    ResponseFunctionToolCallOutputItem,
    ResponseInputMessageItem,
    ResponseOutputMessage,
    ResponseReasoningItem,
)

from deepinfra.api.errors import wire_error_of
from deepinfra.api.protocol import Call, Extension, Frame, Head, Received
from deepinfra.api.responses.items import sealed
from deepinfra.api.responses.queries import ResponseQueries
from deepinfra.api.responses.store import ResponseStore
from deepinfra.core.conversation import Constraint, Conversation, Message, TextPart, ToolCall, ToolChoice
from deepinfra.core.events import Event, Finished, ReasoningDelta, TextDelta, ToolArgumentsDelta, ToolEnd, ToolStart
from deepinfra.core.kv import Retention
from deepinfra.core.request import CachedTokens, GenerateRequest, Usage
from deepinfra.errors import NotStoredError, RequestError, UnsupportedFieldError

Parse = Callable[..., Call]
Talk = Callable[..., Conversation]
Asked = Callable[..., GenerateRequest]

FUNCTION = {"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": True}
OTHER = {"type": "function", "name": "g", "parameters": None, "strict": None}


def said(*turns: tuple[str, str]) -> list[Message]:
    return [Message(role=role, content=(TextPart(text),)) for role, text in turns]  # type: ignore[arg-type]


def shape(conversation: Conversation) -> list[tuple[str, str]]:
    return [(message.role, message.text) for message in conversation.messages]


def test_a_string_is_a_users_message(talk: Talk) -> None:
    assert talk(input="hi").messages == tuple(said(("user", "hi")))
    assert talk(input="hi").now == "2026-02-03"


def test_instructions_come_first_as_the_systems(talk: Talk) -> None:
    asked = talk(instructions="INS", input=[{"role": "developer", "content": "D"}, {"role": "user", "content": "U"}])
    assert shape(asked) == [("system", "INS"), ("developer", "D"), ("user", "U")]


def test_parts_stay_apart(talk: Talk) -> None:
    parts = [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]
    (message,) = talk(input=[{"type": "message", "role": "user", "content": parts, "status": "completed"}]).messages
    assert message.content == (TextPart("a"), TextPart("b"))


def test_what_the_model_said_is_one_turn(talk: Talk) -> None:
    asked = talk(
        input=[
            {"role": "user", "content": "q"},
            {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "R"}]},
            {"role": "assistant", "content": [{"type": "output_text", "text": "A", "annotations": []}]},
            {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "f", "arguments": '{"n": 1e400}'},
            {"type": "function_call", "call_id": "c2", "name": "g", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "r2"}]},
            {"type": "function_call_output", "call_id": "c1", "output": "r1"},
        ]
    )
    calls = (ToolCall(id="c1", name="f", arguments='{"n": 1e400}'), ToolCall(id="c2", name="g", arguments="{}"))
    assert asked.messages[1] == Message(role="assistant", content=(TextPart("A"),), reasoning="R", tool_calls=calls)
    assert [(each.role, each.text, each.tool_call_id) for each in asked.messages[2:]] == [
        ("tool", "r2", "c2"),
        ("tool", "r1", "c1"),
    ]


def test_turns_of_the_model_end_where_a_new_one_begins(talk: Talk) -> None:
    call = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "c1", "output": "r"}
    reasoning = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "R"}]}
    one, two = {"role": "assistant", "content": "1"}, {"role": "assistant", "content": "2"}
    assert shape(talk(input=[one, two])) == [("assistant", "1"), ("assistant", "2")]
    assert shape(talk(input=[one, reasoning, two])) == [("assistant", "1"), ("assistant", "2")]
    assert shape(talk(input=[one, call, output, two])) == [("assistant", "1"), ("tool", "r"), ("assistant", "2")]
    assert shape(talk(input=[reasoning, one, call, output, two]))[0] == ("assistant", "1")


def test_outputs_stand_behind_the_turn_that_called(talk: Talk) -> None:
    def call(name: str) -> dict[str, Any]:
        return {"type": "function_call", "call_id": name, "name": "f", "arguments": "{}"}

    def output(name: str) -> dict[str, Any]:
        return {"type": "function_call_output", "call_id": name, "output": name}

    text, user = {"role": "assistant", "content": "A"}, {"role": "user", "content": "U"}
    reasoning = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "R"}]}
    asked = talk(input=[call("1"), text, user, output("1")])
    assert shape(asked) == [("assistant", "A"), ("tool", "1"), ("user", "U")]
    asked = talk(input=[call("1"), reasoning, call("2"), user, output("2"), output("1")])
    assert shape(asked) == [("assistant", ""), ("tool", "1"), ("assistant", ""), ("tool", "2"), ("user", "U")]
    assert shape(talk(input=[call("1"), output("1"), call("1"), output("1")]))[1::2] == [("tool", "1")] * 2


def test_refusals_are_text_and_empty_turns_are_kept(talk: Talk) -> None:
    refusal = {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]}
    empty = {"role": "assistant", "content": []}
    assert shape(talk(input=[refusal, empty])) == [("assistant", "No."), ("assistant", "")]


def test_reasoning_comes_back_from_either_form(talk: Talk) -> None:
    for item in (
        {"type": "reasoning", "id": "rs", "summary": [], "encrypted_content": sealed("R"), "content": None},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "R"}]},
        {
            "type": "reasoning",
            "summary": [],
            "content": [{"type": "reasoning_text", "text": "R"}],
            "encrypted_content": "of another server",
        },
    ):
        (message,) = talk(input=[item, {"role": "assistant", "content": "A"}]).messages
        assert message.reasoning == "R"


def test_reasoning_of_which_only_an_id_or_a_summary_is_left_is_nothing(talk: Talk) -> None:
    bare = {"type": "reasoning", "id": "rs", "summary": [{"type": "summary_text", "text": "about R"}]}
    assert talk(input=[{"role": "user", "content": "q"}, bare]).messages == tuple(said(("user", "q")))


def test_sampling_and_lengths_are_passed_on(asked: Asked) -> None:
    request = asked(input="hi", max_output_tokens=9, temperature=0.5, top_p=0.9, seed=3, top_k=4, stop="x")
    assert (request.max_tokens, request.seed, request.stop) == (9, 3, ("x",))
    assert (request.sampling.temperature, request.sampling.top_p, request.sampling.top_k) == (0.5, 0.9, 4)
    assert request.sampling.logprobs is None


def test_logprobs_are_included_on_demand(asked: Asked) -> None:
    include = ["message.output_text.logprobs"]
    assert asked(input="hi", include=include).sampling.logprobs == 0
    assert asked(input="hi", include=include, top_logprobs=5).sampling.logprobs == 5
    assert asked(input="hi", top_logprobs=0).sampling.logprobs is None


def test_tools_are_flat(talk: Talk) -> None:
    one, two = talk(input="hi", tools=[FUNCTION, OTHER]).tools
    assert (one.name, one.parameters, one.strict) == ("f", {"type": "object"}, True)
    assert (two.name, two.parameters, two.strict) == ("g", None, False)


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        (None, ToolChoice()),
        ("auto", ToolChoice()),
        ("none", ToolChoice(mode="none")),
        ("required", ToolChoice(mode="required")),
        ({"type": "function", "name": "g"}, ToolChoice(mode="required", names=("g",), parallel=False)),
        (
            {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "f"}]},
            ToolChoice(names=("f",)),
        ),
        (
            {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "f"}]},
            ToolChoice(mode="required", names=("f",)),
        ),
    ],
)
def test_choices_of_tools(talk: Talk, choice: Any, expected: ToolChoice) -> None:
    assert talk(input="hi", tools=[FUNCTION, OTHER], tool_choice=choice).tool_choice == expected


def test_calls_can_be_limited_to_one_at_a_time(talk: Talk) -> None:
    assert not talk(input="hi", tools=[FUNCTION], parallel_tool_calls=False).tool_choice.parallel


def test_formats_become_constraints(talk: Talk) -> None:
    assert talk(input="hi", text={"format": {"type": "text"}}).constraint is None
    assert talk(input="hi", text={"format": None, "verbosity": "medium"}).constraint is None
    assert talk(input="JSON!", text={"format": {"type": "json_object"}}).constraint == Constraint(kind="json")
    schema = {"type": "object", "properties": {"z": {}, "a": {}}}
    wanted = {"type": "json_schema", "name": "n", "schema": schema, "strict": True}
    constraint = talk(input="hi", text={"format": wanted}).constraint
    assert constraint is not None
    assert constraint.kind == "json_schema"
    assert json.dumps(json.loads(constraint.source)) == json.dumps(schema)


def test_effort_is_the_recipes_business(talk: Talk) -> None:
    assert talk(input="hi", reasoning={"effort": "low", "summary": "auto"}).effort == "low"
    assert talk(input="hi", reasoning={}).effort is None


def test_how_long_a_prompt_is_cached(asked: Asked) -> None:
    assert asked(input="hi").retention == Retention()
    assert asked(input="hi", prompt_cache_retention="24h").retention == Retention(ttl_s=86400.0)
    assert asked(input="hi", prompt_cache_retention="in_memory").retention == Retention(disk=False)
    assert asked(input="hi", prompt_cache_options={"ttl": "12h"}).retention == Retention(least_s=43200.0)
    assert asked(input="hi", prompt_cache_options={"ttl": "30m", "mode": "explicit"}).retention == Retention(
        least_s=1800
    )


def test_a_salt_reaches_the_engine(asked: Asked) -> None:
    assert (asked(input="hi").salt, asked(input="hi", cache_salt="s").salt) == ("", "s")


def test_the_answer_repeats_what_it_was_asked(parse: Parse) -> None:
    frames = answer(parse(input="hi", instructions="I", tools=[OTHER], metadata={"k": "v"}, temperature=0), [])
    told: Any = frames[0].data["response"]
    assert told["tools"] == [
        {"type": "function", "name": "g", "description": None, "parameters": None, "strict": False}
    ]
    assert (told["instructions"], told["metadata"], told["temperature"], told["top_p"]) == ("I", {"k": "v"}, 0, 1)
    assert (told["tool_choice"], told["parallel_tool_calls"], told["store"]) == ("auto", True, True)
    assert told["text"] == {"format": {"type": "text"}, "verbosity": "medium"}


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": [FUNCTION, OTHER], "tool_choice": {"type": "function", "name": "f"}},
        {
            "tools": [FUNCTION],
            "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "f"}]},
        },
        {"text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}, "strict": True}}},
        {"text": {"format": {"type": "json_object"}}, "reasoning": {"effort": "xhigh"}},
        {"prompt_cache_retention": "24h", "prompt_cache_key": "k", "max_tool_calls": 3, "max_output_tokens": 9},
    ],
)
def test_what_is_repeated_fits_the_official_clients_types(parse: Parse, fields: dict[str, Any]) -> None:
    told: Any = answer(parse(input="json", **fields), [])[-1].data["response"]
    read = Response.model_validate(told).to_dict()
    assert {name: read[name] for name in fields if name not in ("tools", "reasoning", "text")} == {
        name: value for name, value in fields.items() if name not in ("tools", "reasoning", "text")
    }
    assert read["text"] == {"format": {"type": "text"}, **fields.get("text", {}), "verbosity": "medium"}


async def test_items_are_listed_as_the_official_client_types_them(parse: Parse, store: ResponseStore) -> None:
    items = [
        {"role": "user", "content": "one"},
        {"role": "developer", "content": [{"type": "input_text", "text": "D"}]},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "R"}]},
        {"role": "assistant", "content": "A"},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
        {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "r"},
        {"role": "user", "content": [{"type": "input_image", "image_url": "data:image/png;base64,iVBORw0KGgo="}]},
    ]
    answer(parse(input=items), [TextDelta(choice=0, text="B")])
    received = Received(headers={}, now="2026-02-03", max_choices=1)
    listed = await ResponseQueries(store).input_items({}, received, {"response_id": "resp_1", "order": "asc"})
    classes = (
        ResponseInputMessageItem,
        ResponseInputMessageItem,
        ResponseReasoningItem,
        ResponseOutputMessage,
        ResponseOutputMessage,
        ResponseFunctionToolCallItem,
        ResponseFunctionToolCallOutputItem,
        ResponseInputMessageItem,
    )
    for each, told in zip(classes, listed["data"], strict=True):  # type: ignore[arg-type]
        each.model_validate(told)
    assert parse(input=listed["data"]).requests[0].input == parse(input=items).requests[0].input


# -- going on by id -------------------------------------------------------------------------------

USAGE = Usage(prompt_tokens=1, completion_tokens=1)


def answer(call: Call, events: Sequence[Event], response_id: str = "resp_1") -> list[Frame]:
    """What a call's writer says of an answer; the answer is stored if the call wants it."""
    frames = [*call.writer.begin(Head(id=response_id, created=1, model="toy"), USAGE)]
    for event in [*events, Finished(choice=0, reason="stop", usage=USAGE)]:
        frames += call.writer.write(0, event)
    return [*frames, *call.writer.end(USAGE, Extension(seed=1, cached=CachedTokens()))]


def test_a_conversation_goes_on_by_id(parse: Parse, talk: Talk) -> None:
    thought: list[Event] = [ReasoningDelta(choice=0, text="R"), TextDelta(choice=0, text="A")]
    answer(parse(input="one", instructions="I"), thought, "resp_1")
    second = talk(input="two", previous_response_id="resp_1")
    assert shape(second) == [("user", "one"), ("assistant", "A"), ("user", "two")]
    assert second.messages[1].reasoning == "R"
    answer(parse(input="two", previous_response_id="resp_1"), [TextDelta(choice=0, text="B")], "resp_2")
    third = talk(input="three", previous_response_id="resp_2", instructions="J")
    assert [role for role, _ in shape(third)] == ["system", "user", "assistant", "user", "assistant", "user"]
    assert "".join(text for _, text in shape(third)) == "JoneAtwoBthree"


def test_a_branch_goes_on_from_where_it_left(parse: Parse, talk: Talk) -> None:
    answer(parse(input="one"), [TextDelta(choice=0, text="A")], "resp_1")
    answer(parse(input="two", previous_response_id="resp_1"), [TextDelta(choice=0, text="B")], "resp_2")
    assert shape(talk(input="else", previous_response_id="resp_1"))[-1] == ("user", "else")
    assert len(talk(input="else", previous_response_id="resp_1").messages) == 3


def test_outputs_of_calls_find_them_in_the_stored_response(parse: Parse, talk: Talk) -> None:
    events: list[Event] = [
        ToolStart(choice=0, index=0, id="", name="f"),
        ToolArgumentsDelta(choice=0, index=0, arguments="{}"),
        ToolEnd(choice=0, index=0),
    ]
    frames = answer(parse(input="one", tools=[FUNCTION]), events)
    final: Any = frames[-1].data["response"]
    call_id = final["output"][0]["call_id"]
    output = {"type": "function_call_output", "call_id": call_id, "output": "r"}
    asked = talk(input=[output], previous_response_id="resp_1")
    assert asked.messages[1].tool_calls == (ToolCall(id=call_id, name="f", arguments="{}"),)
    assert asked.messages[2].tool_call_id == call_id
    with pytest.raises(RequestError, match=f"No tool output found for function call {call_id}"):
        talk(input="never mind", previous_response_id="resp_1")


def test_items_are_found_by_reference(parse: Parse, talk: Talk) -> None:
    answer(parse(input=[{"role": "user", "content": "one", "id": "msg_mine"}]), [TextDelta(choice=0, text="A")])
    asked = talk(input=[{"type": "item_reference", "id": "msg_mine"}, {"id": "msg_10000", "type": None}])
    assert shape(asked) == [("user", "one"), ("assistant", "A")]


def test_what_is_not_stored_is_not_there(parse: Parse, talk: Talk, store: ResponseStore) -> None:
    answer(parse(input="one", store=False), [])
    with pytest.raises(NotStoredError, match="Previous response with id 'resp_1' not found"):
        talk(input="two", previous_response_id="resp_1")
    assert len(store) == 0


def test_another_tenants_response_is_not_there(parse: Parse) -> None:
    answer(parse(input="one", tenant="ann"), [TextDelta(choice=0, text="A")])
    for fields in ({"previous_response_id": "resp_1"}, {"input": [{"type": "item_reference", "id": "msg_10000"}]}):
        parse(**{"input": "two", "tenant": "ann", **fields})
        with pytest.raises(NotStoredError):
            parse(**{"input": "two", "tenant": "bob", **fields})


def test_what_is_stored_counts_against_the_limit(parse: Parse, store: ResponseStore) -> None:
    answer(parse(input="x" * 5000), [TextDelta(choice=0, text="y" * 3000)])
    assert 8000 < store.nbytes < 20000
    store.delete("public", "resp_1")
    assert store.nbytes == 0


def test_what_a_recipe_finds_in_a_message_is_told_of_its_item(parse: Parse) -> None:
    answer(parse(input="one"), [TextDelta(choice=0, text="A")])
    call = parse(input=[{"role": "user", "content": "two"}], instructions="I", previous_response_id="resp_1")
    for found, told in (
        ("messages[3].content", "input.0.content"),
        ("messages[0].content", "instructions.content"),
        ("messages", "input"),
        ("tools[1].name", "tools.1.name"),
        ("response_format", "text.format"),
    ):
        error = wire_error_of(UnsupportedFieldError(found), call.param_names)
        assert error.param == told
        assert repr(told) in error.message
