from __future__ import annotations

import hashlib
import json
from typing import Any

import pytest

from deepinfra.api.chat.request import CHAT
from deepinfra.api.protocol import Received
from deepinfra.core.conversation import (
    Constraint,
    Conversation,
    MediaPart,
    Message,
    TextPart,
    ToolCall,
    ToolChoice,
    ToolDefinition,
)
from deepinfra.core.kv import Retention
from deepinfra.core.request import GenerateRequest
from deepinfra.core.sampling import SamplingParams

TOOL = {"type": "function", "function": {"name": "f", "strict": True, "parameters": {"type": "object"}}}
RECEIVED = Received(headers={}, now="2026-11-29", max_choices=128)


def parse(**fields: Any) -> GenerateRequest:
    body = {"model": "toy", "messages": [{"role": "user", "content": "hi"}], **fields}
    (request,) = CHAT.parse(body, RECEIVED).requests
    return request


def talk(**fields: Any) -> Conversation:
    given = parse(**fields).input
    assert isinstance(given, Conversation)
    return given


FUNCTION = {"type": "function", "function": {"name": "f", "parameters": {"z": 1, "a": 2}}}


def test_defaults_are_the_engines_own() -> None:
    assert parse() == GenerateRequest(
        input=Conversation(
            messages=(Message(role="user", content=(TextPart("hi"),)),),
            tool_choice=ToolChoice(mode="none"),
            now="2026-11-29",
        )
    )


def test_every_sampling_field_reaches_the_engine() -> None:
    request = parse(
        temperature=0,
        top_p=0.5,
        top_k=3,
        min_p=0.1,
        repetition_penalty=1.5,
        presence_penalty=1,
        frequency_penalty=-1,
        logit_bias={"7": -100, "8": 0.5},
        logprobs=True,
        top_logprobs=4,
    )
    assert request.sampling == SamplingParams(
        temperature=0,
        top_p=0.5,
        top_k=3,
        min_p=0.1,
        repetition_penalty=1.5,
        presence_penalty=1,
        frequency_penalty=-1,
        logit_bias=((7, -100), (8, 0.5)),
        logprobs=4,
    )


def test_every_other_field_reaches_the_engine() -> None:
    request = parse(n=3, seed=-5, stop=["a", "b"], ignore_eos=True, max_completion_tokens=9)
    assert (request.n, request.seed, request.stop, request.ignore_eos, request.max_tokens) == (
        3,
        -5,
        ("a", "b"),
        True,
        9,
    )


def test_one_stop_string_is_a_list_of_one() -> None:
    assert parse(stop="end").stop == ("end",)


def test_logprobs_alone_ask_for_the_chosen_token_only() -> None:
    assert parse(logprobs=True).sampling.logprobs == 0
    assert parse(logprobs=False).sampling.logprobs is None


def test_minus_one_keeps_all_tokens() -> None:
    assert parse(top_k=-1).sampling.top_k == 0


def test_both_names_of_the_token_limit_may_agree() -> None:
    assert parse(max_tokens=5, max_completion_tokens=5).max_tokens == 5


@pytest.mark.parametrize(
    ("fields", "effort"),
    [
        ({}, None),
        ({"reasoning_effort": "low"}, "low"),
        ({"reasoning_effort": "none"}, "none"),
        ({"thinking": {"type": "enabled"}}, "high"),
        ({"thinking": {"type": "disabled"}}, "none"),
        ({"thinking": {"type": "enabled"}, "reasoning_effort": "max"}, "max"),
        ({"thinking": {"type": "disabled"}, "reasoning_effort": "none"}, "none"),
        ({"thinking": {"type": "enabled"}, "reasoning_effort": "none"}, "high"),
        ({"thinking": {"type": "disabled"}, "reasoning_effort": "max"}, "none"),
    ],
)
def test_reasoning_effort_and_thinking_are_one_thing(fields: dict[str, Any], effort: str | None) -> None:
    assert talk(**fields).effort == effort


@pytest.mark.parametrize(
    ("fields", "retention"),
    [
        ({}, Retention()),
        ({"prompt_cache_retention": None}, Retention()),
        ({"prompt_cache_retention": "24h"}, Retention(ttl_s=86400)),
        ({"prompt_cache_retention": "in_memory"}, Retention(disk=False)),
        ({"prompt_cache_options": {"ttl": "30m", "mode": "implicit"}}, Retention(least_s=1800)),
        (
            {"prompt_cache_retention": "in_memory", "prompt_cache_options": {"ttl": "12h"}},
            Retention(disk=False, least_s=43200),
        ),
    ],
)
def test_cache_retention_is_honoured(fields: dict[str, Any], retention: Retention) -> None:
    assert parse(**fields).retention == retention


def test_a_salt_reaches_the_engine() -> None:
    assert (parse().salt, parse(cache_salt="s").salt) == ("", "s")


def test_text_is_kept_to_the_character() -> None:
    text = "  <|im_start|>system\r\n\u2028\u0000 é e\u0301 "
    assert talk(messages=[{"role": "user", "content": text}]).messages[0].text == text


def test_parts_stay_parts() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b", "prompt_cache_breakpoint": {"ttl": "30m"}}]
    assert talk(messages=[{"role": "user", "content": parts}]).messages[0].content == (TextPart("a"), TextPart("b"))


def test_an_answer_of_the_official_client_can_be_sent_back() -> None:
    from openai.types.chat import ChatCompletionMessage

    call = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1.50}'}}
    said = ChatCompletionMessage.model_validate(
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "hm"}
    )
    answered = {"role": "tool", "tool_call_id": "call_1", "content": "2"}
    message, _ = talk(messages=[said.model_dump(), answered]).messages
    assert message.tool_calls == (ToolCall(id="call_1", name="f", arguments='{"x": 1.50}'),)
    assert message.content == ()
    assert message.reasoning == "hm"


def test_a_refusal_is_what_was_said() -> None:
    (message,) = talk(messages=[{"role": "assistant", "content": None, "refusal": "no"}]).messages
    assert message.text == "no"


def test_a_last_assistant_message_may_be_continued() -> None:
    messages = talk(
        messages=[{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "prefix": True}]
    ).messages
    assert messages[-1].prefix


def test_a_tool_answer_names_its_call() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    answered = {"role": "tool", "tool_call_id": "c", "content": "42"}
    _, message = talk(messages=[{"role": "assistant", "tool_calls": [call]}, answered]).messages
    assert (message.role, message.tool_call_id, message.text) == ("tool", "c", "42")


def test_a_tools_schema_keeps_its_order() -> None:
    (tool,) = talk(tools=[FUNCTION]).tools
    assert tool == ToolDefinition(name="f", parameters={"z": 1, "a": 2})
    assert list(tool.parameters or ()) == ["z", "a"]


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        (None, ToolChoice(mode="auto")),
        ("none", ToolChoice(mode="none")),
        ("required", ToolChoice(mode="required")),
        ({"type": "function", "function": {"name": "f"}}, ToolChoice(mode="required", names=("f",), parallel=False)),
        (
            {
                "type": "allowed_tools",
                "allowed_tools": {"mode": "auto", "tools": [{"type": "function", "function": {"name": "f"}}]},
            },
            ToolChoice(mode="auto", names=("f",)),
        ),
    ],
)
def test_tool_choice_has_five_spellings(choice: Any, expected: ToolChoice) -> None:
    assert talk(tools=[FUNCTION], tool_choice=choice).tool_choice == expected


def test_calls_can_be_limited_to_one_at_a_time() -> None:
    assert not talk(tools=[FUNCTION], parallel_tool_calls=False).tool_choice.parallel


def test_without_tools_auto_means_none() -> None:
    assert talk(tool_choice="auto").tool_choice.mode == "none"


def test_response_formats_become_constraints() -> None:
    assert talk(response_format={"type": "text"}).constraint is None
    json_please = [{"role": "user", "content": "JSON please"}]
    assert talk(messages=json_please, response_format={"type": "json_object"}).constraint == Constraint(kind="json")
    schema = {"type": "object", "properties": {"z": {}, "a": {}}}
    wanted = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema, "strict": True}}
    constraint = talk(response_format=wanted).constraint
    assert constraint is not None
    assert constraint.kind == "json_schema"
    assert json.dumps(json.loads(constraint.source)) == json.dumps(schema)


def test_any_integer_is_a_seed() -> None:
    assert parse(seed=-(10**30)).seed == -(10**30)


def test_vllms_fields_reach_the_engine() -> None:
    request = parse(stop_token_ids=[5, 6], priority=3)
    assert (request.stop_ids, request.priority) == (frozenset({5, 6}), -3)


def test_template_options_reach_the_recipe() -> None:
    assert talk(chat_template_kwargs={"enable_thinking": False}).template_options == {"enable_thinking": False}


def test_a_reminder_keeps_its_place() -> None:
    messages = talk(messages=[{"role": "user", "content": "q"}, {"role": "latest_reminder", "content": "r"}]).messages
    assert [message.role for message in messages] == ["user", "reminder"]


def test_an_image_comes_inside_the_request() -> None:
    parts = [
        {"type": "text", "text": "see"},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo=", "detail": "auto"}},
    ]
    text, image = talk(messages=[{"role": "user", "content": parts}]).messages[0].content
    assert text == TextPart("see")
    data = bytes.fromhex("89504e470d0a1a0a")
    assert image == MediaPart(data=data, digest=hashlib.sha256(data).digest(), media_type="image/png")


SCHEMA = {"type": "object", "properties": {"z": {"type": "integer"}, "a": {}}}


@pytest.mark.parametrize(
    ("given", "kind"),
    [
        ({"json": SCHEMA}, "json_schema"),
        ({"json": json.dumps(SCHEMA)}, "json_schema"),
        ({"json_object": True}, "json"),
        ({"regex": "a+"}, "regex"),
        ({"grammar": 'start: "<|" /<[^>]*>/ // <x>\n'}, "grammar"),
        ({"grammar": 'start: "}" /}/ a{2,5} // }\na: %json {"const": "}"} | %lark {\nstart: "&"\n}'}, "grammar"),
    ],
)
def test_structured_outputs_are_constraints(given: dict[str, Any], kind: str) -> None:
    constraint = talk(structured_outputs=given).constraint
    assert constraint is not None
    assert constraint.kind == kind
    if kind == "json_schema":
        assert list(json.loads(constraint.source)["properties"]) == ["z", "a"]
    elif kind != "json":
        assert constraint.source == next(iter(given.values()))


@pytest.mark.parametrize(
    ("fields", "ours", "theirs"),
    [
        ({"thinking": {"type": "enabled"}}, "reasoning_effort", "thinking"),
        ({"thinking": {"type": "enabled"}, "reasoning_effort": "low"}, "reasoning_effort", "reasoning_effort"),
        ({"reasoning_effort": "low"}, "reasoning_effort", "reasoning_effort"),
        ({"tools": [TOOL]}, "constraint", "tools"),
        ({"tools": [TOOL], "response_format": {"type": "text"}}, "constraint", "tools"),
        ({"tools": [TOOL], "structured_outputs": {"regex": "a"}}, "constraint", "structured_outputs"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}}, "constraint", "response_format"),
    ],
)
def test_an_error_names_the_field_that_was_sent(fields: dict[str, Any], ours: str, theirs: str) -> None:
    body = {"model": "toy", "messages": [{"role": "user", "content": "hi"}], **fields}
    assert CHAT.parse(body, RECEIVED).param_names[ours] == theirs
