"""Every field of the official client's request types is honoured, repeated, or refused by name."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, get_args, get_type_hints

import pytest
from openai.types.responses import response_create_params, response_input_item_param
from openai.types.responses.function_tool_param import FunctionToolParam
from openai.types.responses.response_function_tool_call_param import ResponseFunctionToolCallParam
from openai.types.responses.response_includable import ResponseIncludable
from openai.types.responses.response_reasoning_item_param import ResponseReasoningItemParam
from openai.types.shared_params.reasoning import Reasoning as ReasoningParam

from deepinfra.api import responses
from deepinfra.api.protocol import Call
from deepinfra.api.responses import items, request, tools
from deepinfra.core.request import GenerateRequest
from deepinfra.errors import RequestError, UnsupportedFieldError

Asked = Callable[..., GenerateRequest]

SDK = response_create_params.ResponseCreateParamsBase.__annotations__.keys()
FIELDS = request.ResponsesRequest
ECHOED = ("metadata", "user", "safety_identifier", "prompt_cache_key", "max_tool_calls")


def test_no_field_of_the_official_client_is_forgotten() -> None:
    assert set(SDK) - {*FIELDS.model_fields, *FIELDS.NEUTRAL} == set()


def test_a_field_of_the_official_client_is_decided_once() -> None:
    assert set(SDK) & set(FIELDS.model_fields) & set(FIELDS.NEUTRAL) == set()
    assert not set(SDK) & FIELDS.IGNORED


@pytest.mark.parametrize(
    ("model", "params"),
    [
        (tools.Tool, FunctionToolParam),
        (items.FunctionCall, ResponseFunctionToolCallParam),
        (items.Reasoning, ResponseReasoningItemParam),
        (items.FunctionOutput, response_input_item_param.FunctionCallOutput),
        (items.InputMessage, response_input_item_param.Message),
        (items.OutputMessage, response_input_item_param.EasyInputMessageParam),
        (items.OutputMessage, response_input_item_param.ResponseOutputMessageParam),
        (items.ItemReference, response_input_item_param.ItemReference),
        (request.ReasoningIn, ReasoningParam),
        (request.ResponsesCacheOptions, response_create_params.PromptCacheOptions),
    ],
)
def test_no_field_of_its_objects_is_forgotten(model: Any, params: type) -> None:
    assert set(get_type_hints(params)) <= {name.rstrip("_") for name in model.model_fields}


def test_every_type_of_item_is_known() -> None:
    known = set()
    for each in get_args(response_input_item_param.ResponseInputItemParam):
        known |= set(_literals(get_type_hints(each)["type"]))
    served = {"message", "reasoning", "function_call", "function_call_output", "item_reference"}
    assert known - served <= set(items._REFUSED)
    assert not served & set(items._REFUSED)


def _literals(hint: Any) -> list[str]:
    if isinstance(hint, str):
        return [hint]
    return [name for each in get_args(hint) for name in _literals(each)]


def test_everything_that_can_be_included_is_known() -> None:
    assert get_args(request.Include) == tuple(sorted(get_args(ResponseIncludable)))


@pytest.mark.parametrize("field", sorted([*FIELDS.NEUTRAL, *FIELDS.model_fields]))
def test_null_is_the_same_as_leaving_a_field_out(asked: Asked, field: str) -> None:
    if field in ("model", "input"):
        with pytest.raises(RequestError):
            asked(**{"input": "hi", field: None})
    else:
        assert asked(input="hi", **{field: None}) == asked(input="hi")


@pytest.mark.parametrize(
    ("field", "value"), [(name, value) for name, values in FIELDS.NEUTRAL.items() for value in values]
)
def test_what_happens_anyway_is_accepted_and_changes_nothing(asked: Asked, field: str, value: Any) -> None:
    assert asked(input="hi", **{field: value}) == asked(input="hi")


@pytest.mark.parametrize("field", ECHOED)
def test_what_is_the_callers_own_is_repeated_and_changes_nothing(parse: Callable[..., Call], field: str) -> None:
    value: Any = {"metadata": {"a": "b"}, "max_tool_calls": 3}.get(field, "me")
    call = parse(input="hi", **{field: value})
    assert call.requests == parse(input="hi").requests
    assert FIELDS.model_validate({"model": "toy", "input": "hi", field: value}).echo()[field] == value


def message(*parts: Any, role: str = "user", **fields: Any) -> list[Any]:
    return [{"role": role, "content": list(parts), **fields}]


def function(name: str = "f", **fields: Any) -> dict[str, Any]:
    return {"type": "function", "name": name, "parameters": {"type": "object"}, "strict": False, **fields}


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"nonsense": 1}, "nonsense"),
    ({"messages": []}, "messages"),
    ({"max_tokens": 5}, "max_tokens"),
    ({"n": 2}, "n"),
    ({"background": True}, "background"),
    ({"background": 0}, "background"),
    ({"conversation": "conv_1"}, "conversation"),
    ({"prompt": {"id": "pmpt_1"}}, "prompt"),
    ({"truncation": "auto"}, "truncation"),
    ({"moderation": {"model": "m"}}, "moderation"),
    ({"service_tier": "flex"}, "service_tier"),
    ({"context_management": [{"type": "compaction"}]}, "context_management"),
    ({"image": {"context_compression": "enabled"}}, "image"),
    ({"input": [{"type": "custom_tool_call", "call_id": "c", "name": "n", "input": "i"}]}, "input.0.type"),
    ({"input": [{"role": "user", "content": "x"}, {"type": "web_search_call", "id": "w"}]}, "input.1.type"),
    ({"input": [{"type": "computer_call_output", "call_id": "c", "output": {}}]}, "input.0.type"),
    ({"input": message({"type": "input_text", "text": "a"}, {"type": "input_file"})}, "input.0.content.1.type"),
    ({"input": message({"type": "input_audio", "input_audio": {}})}, "input.0.content.0.type"),
    ({"input": message({"type": "input_image", "image_url": "https://a/b.png"})}, "input.0.content.0.image_url"),
    (
        {"input": message({"type": "input_image", "image_url": "data:image/bmp;base64,AA=="})},
        "input.0.content.0.image_url",
    ),
    ({"input": message({"type": "input_text", "text": "a", "cache_control": {}})}, "input.0.content.0.cache_control"),
    ({"input": message({"type": "input_text", "text": "a"}, name="ann")}, "input.0.name"),
    ({"tools": [{"type": "web_search"}]}, "tools.0.type"),
    ({"tools": [function(), {"type": "custom", "name": "g"}]}, "tools.1.type"),
    ({"tools": [{"type": "mcp", "server_label": "x"}]}, "tools.0.type"),
    ({"tools": [function(unheard_of=True)]}, "tools.0.unheard_of"),
    ({"tools": [function()], "tool_choice": {"type": "web_search_preview"}}, "tool_choice.type"),
    (
        {"tools": [function()], "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "mcp"}]}},
        "tool_choice.tools.0.type",
    ),
]


@pytest.mark.parametrize(("fields", "param"), REFUSED, ids=lambda value: value if isinstance(value, str) else None)
def test_what_is_not_honoured_is_refused_by_name(asked: Asked, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(UnsupportedFieldError) as caught:
        asked(**{"input": "hi", **fields})
    assert caught.value.param == param
    assert param in str(caught.value)


CALL = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"}
OUTPUT = {"type": "function_call_output", "call_id": "c1", "output": "r"}

WRONG: list[tuple[dict[str, Any], str]] = [
    ({"input": 7}, "input"),
    ({"input": []}, "input"),
    ({"input": ["hi"]}, "input.0.type"),
    ({"input": [{"content": "hi"}]}, "input.0.type"),
    ({"input": [{"type": "thought", "text": "hi"}]}, "input.0.type"),
    ({"input": [{"role": "tool", "content": "hi"}]}, "input.0.role"),
    ({"input": [{"role": "user"}]}, "input.0.content"),
    ({"input": [{"role": "user", "content": 7}]}, "input.0.content"),
    ({"input": message({"type": "text", "text": "a"})}, "input.0.content.0.type"),
    ({"input": message({"type": "output_text", "text": "a"})}, "input.0.content.0.type"),
    ({"input": message({"type": "input_text"})}, "input.0.content.0.text"),
    (
        {"input": message({"type": "input_image", "image_url": "data:image/png;base64,!!"})},
        "input.0.content.0.image_url",
    ),
    ({"input": [{**CALL, "arguments": {}}, OUTPUT]}, "input.0.arguments"),
    ({"input": [CALL, {**OUTPUT, "output": 5}]}, "input.1.output"),
    ({"input": [CALL, {**OUTPUT, "output": [{"type": "text", "text": "a"}]}]}, "input.1.output.0.type"),
    ({"input": [OUTPUT]}, "input.0.call_id"),
    ({"input": [CALL, OUTPUT, OUTPUT]}, "input.2.call_id"),
    ({"input": [{"role": "user", "content": "x"}, CALL]}, "input.1"),
    ({"input": [CALL, CALL, OUTPUT]}, "input.1.call_id"),
    ({"input": [{"type": "reasoning", "summary": [], "encrypted_content": "gAAAA"}]}, "input.0.encrypted_content"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"max_output_tokens": 5.0}, "max_output_tokens"),
    ({"temperature": 2.1}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_logprobs": 5}, "top_logprobs"),
    ({"top_logprobs": 21, "include": ["message.output_text.logprobs"]}, "top_logprobs"),
    ({"include": ["everything"]}, "include.0"),
    ({"store": "yes"}, "store"),
    ({"metadata": {"a": 1}}, "metadata.a"),
    ({"metadata": {str(i): "" for i in range(17)}}, "metadata"),
    ({"reasoning": {"effort": "huge"}}, "reasoning.effort"),
    ({"reasoning": {"summary": "detailed"}}, "reasoning.summary"),
    ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
    ({"text": {"format": {"type": "json_schema", "schema": {}}}}, "text.format.name"),
    ({"text": {"format": {"type": "json_object"}}}, "input"),
    ({"text": {"verbosity": "low"}}, "text.verbosity"),
    ({"tools": [function("bad name")]}, "tools.0.name"),
    ({"tools": [function(), function()]}, "tools.1.name"),
    ({"tools": [function(parameters="none")]}, "tools.0.parameters"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": 7}, "tool_choice"),
    ({"tools": [function()], "tool_choice": "sometimes"}, "tool_choice"),
    ({"tools": [function()], "tool_choice": {"type": "function", "name": "g"}}, "tool_choice"),
    ({"tools": [function()], "tool_choice": {"type": "function"}}, "tool_choice.name"),
    ({"stream_options": {"include_obfuscation": False}}, "stream_options"),
    ({"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation"),
    ({"prompt_cache_options": {"prewarm": True}}, "prompt_cache_options.prewarm"),
    ({"previous_response_id": "resp_unknown"}, "previous_response_id"),
    ({"input": [{"type": "item_reference", "id": "msg_unknown"}]}, "input.0.id"),
]


@pytest.mark.parametrize(("fields", "param"), WRONG, ids=lambda value: value if isinstance(value, str) else None)
def test_the_field_that_is_wrong_is_named(asked: Asked, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        asked(**{"input": "hi", **fields})
    assert caught.value.param == param


def test_a_value_is_never_quoted_back_in_full(asked: Asked) -> None:
    for fields in ({"temperature": "secret" * 1000}, {"tools": [{"type": "secret" * 1000}]}):
        with pytest.raises(RequestError) as caught:
            asked(input="hi", **fields)
        assert "secret" * 20 not in str(caught.value)


def test_the_documented_table_has_every_field() -> None:
    told = responses.__doc__ or ""
    assert [name for name in SDK if not re.search(rf"\b{name}\b", told)] == []
