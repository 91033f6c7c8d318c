"""Every field of Anthropic's request types is honoured, ignored on purpose, or refused by name."""

from __future__ import annotations

from typing import Any, Required, get_args, get_origin, get_type_hints

import anthropic.types as sdk
import pytest
from anthropic.types import message_count_tokens_params, message_create_params

from deepinfra.api.messages import blocks, request, tools
from deepinfra.api.messages.request import MESSAGES, MessagesRequest
from deepinfra.api.protocol import Call, Received
from deepinfra.api.wire import Options
from deepinfra.core.conversation import Conversation, ToolChoice
from deepinfra.core.kv import Retention
from deepinfra.core.request import GenerateRequest
from deepinfra.errors import RequestError, UnsupportedFieldError


def parsed(body: dict[str, Any], **headers: str) -> Call:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return MESSAGES.parse(body, Received(headers=named, now="2026-01-02", max_choices=8))


def asked(**fields: Any) -> GenerateRequest:
    return parsed(body(**fields)).requests[0]


def conversation(**fields: Any) -> Conversation:
    made = asked(**fields).input
    assert isinstance(made, Conversation)
    return made


def body(**fields: Any) -> dict[str, Any]:
    return {"model": "toy", "max_tokens": 10, "messages": [{"role": "user", "content": "x"}], **fields}


def user(*content: Any, **fields: Any) -> dict[str, Any]:
    return body(messages=[{"role": "user", "content": list(content)}], **fields)


def tool(name: str = "f", **fields: Any) -> dict[str, Any]:
    return {"name": name, "input_schema": {"type": "object"}, **fields}


MARK = {"type": "ephemeral"}
ONE = {"cache_control": MARK}
MARKED = {"type": "text", "text": "x", **ONE}


def result(*content: Any, **fields: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": "a", "content": list(content), **fields}


# -- the official client's types ------------------------------------------------------------------

PAIRS: list[tuple[type[Options], Any]] = [
    (MessagesRequest, message_create_params.MessageCreateParamsBase),
    (MessagesRequest, message_create_params.MessageCreateParamsStreaming),
    (MessagesRequest, message_count_tokens_params.MessageCountTokensParams),
    (blocks.CacheControl, sdk.CacheControlEphemeralParam),
    (blocks.Text, sdk.TextBlockParam),
    (blocks.Image, sdk.ImageBlockParam),
    (blocks.Base64Image, sdk.Base64ImageSourceParam),
    (blocks.Document, sdk.DocumentBlockParam),
    (blocks.PlainText, sdk.PlainTextSourceParam),
    (blocks.Content, sdk.ContentBlockSourceParam),
    (blocks.Citations, sdk.CitationsConfigParam),
    (blocks.Thinking, sdk.ThinkingBlockParam),
    (blocks.RedactedThinking, sdk.RedactedThinkingBlockParam),
    (blocks.ToolUse, sdk.ToolUseBlockParam),
    (blocks.ToolResult, sdk.ToolResultBlockParam),
    (blocks.UserMessage, sdk.UserMessageParam),
    (blocks.AssistantMessage, sdk.AssistantMessageParam),
    (blocks.SystemMessage, sdk.SystemMessageParam),
    (tools.CustomTool, sdk.ToolParam),
    (tools.Free, sdk.ToolChoiceAutoParam),
    (tools.Free, sdk.ToolChoiceAnyParam),
    (tools.One, sdk.ToolChoiceToolParam),
    (tools.Never, sdk.ToolChoiceNoneParam),
    (request.Adaptive, sdk.ThinkingConfigAdaptiveParam),
    (request.Enabled, sdk.ThinkingConfigEnabledParam),
    (request.Disabled, sdk.ThinkingConfigDisabledParam),
    (request.OutputConfig, sdk.OutputConfigParam),
    (request.JsonFormat, sdk.JSONOutputFormatParam),
]


@pytest.mark.parametrize(("model", "params"), PAIRS, ids=lambda value: value.__name__)
def test_no_field_of_the_official_client_is_forgotten(model: type[Options], params: Any) -> None:
    decided = {field.alias or name for name, field in model.model_fields.items()}
    if issubclass(model, MessagesRequest):
        decided |= {*model.IGNORED, *model.NEUTRAL}
    assert set(params.__annotations__) - decided == set()


def test_a_field_is_decided_once() -> None:
    lists = [set(MessagesRequest.model_fields), set(MessagesRequest.IGNORED), set(MessagesRequest.NEUTRAL)]
    assert sum(map(len, lists)) == len(set().union(*lists))


def types_of(union: Any) -> list[tuple[str, str]]:
    """Name and `type` of every member of a union of the client's."""
    found = []
    for member in get_args(union):
        hint = get_type_hints(member, include_extras=True)["type"]
        while get_origin(hint) is Required or type(None) in get_args(hint):
            hint = get_args(hint)[0]
        found += [(member.__name__, word) for word in get_args(hint)]
    return found


CONTENT = types_of(sdk.ContentBlockParam)
SERVED = {"text", "image", "document", "thinking", "redacted_thinking", "tool_use", "tool_result"}


@pytest.mark.parametrize("kind", sorted({kind for _, kind in CONTENT} - SERVED))
def test_blocks_that_are_not_served_are_refused_by_name(kind: str) -> None:
    for role in ("user", "assistant"):
        with pytest.raises(RequestError, match=f"'{kind}'") as caught:
            asked(messages=[{"role": "user", "content": "x"}, {"role": role, "content": [{"type": kind}]}])
        assert caught.value.param == "messages.1.content.0.type"


@pytest.mark.parametrize("kind", sorted({kind for _, kind in types_of(sdk.ToolUnionParam)} - {"custom"}))
def test_tools_of_anthropics_servers_are_refused_by_name(kind: str) -> None:
    with pytest.raises(RequestError, match=f"'{kind}'") as caught:
        asked(tools=[tool(), {"type": kind, "name": "t"}])
    assert caught.value.param == "tools.1.type"


REFUSED = [
    (body(nonsense=1), "nonsense"),
    (body(max_completion_tokens=5), "max_completion_tokens"),
    (body(n=2), "n"),
    (body(container="c"), "container"),
    (body(inference_geo="eu"), "inference_geo"),
    (body(speed="fast"), "speed"),
    (body(mcp_servers=[]), "mcp_servers"),
    (user({"type": "text", "text": "x", "colour": "red"}), "messages.0.content.0.colour"),
    (body(messages=[{"role": "user", "content": "x", "name": "me"}]), "messages.0.name"),
    (body(tools=[tool(needs_approval=True)]), "tools.0.needs_approval"),
    (body(output_config={"task_budget": {}}), "output_config.task_budget"),
    (body(thinking={"type": "disabled", "budget_tokens": 2000}), "thinking.budget_tokens"),
]


@pytest.mark.parametrize(("body", "param"), REFUSED, ids=lambda value: value if isinstance(value, str) else None)
def test_what_is_not_honoured_is_refused(body: dict[str, Any], param: str) -> None:
    with pytest.raises(UnsupportedFieldError) as caught:
        parsed(body)
    assert caught.value.param == param
    assert param in str(caught.value)


def image(**source: Any) -> dict[str, Any]:
    return {"type": "image", "source": source}


WRONG = [
    ({"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}, "model"),
    ({"model": "toy", "messages": [{"role": "user", "content": "x"}]}, "max_tokens"),
    ({"model": "toy", "max_tokens": 1}, "messages"),
    (body(messages=[]), "messages"),
    (body(messages="hi"), "messages"),
    (body(messages=[7]), "messages.0.role"),
    (body(messages=[{"role": "tool", "content": "x"}]), "messages.0.role"),
    (body(messages=[{"role": "user"}]), "messages.0.content"),
    (body(messages=[{"role": "user", "content": None}]), "messages.0.content"),
    (user(), "messages.0.content"),
    (user("x"), "messages.0.content.0.type"),
    (user({"type": "text"}), "messages.0.content.0.text"),
    (user({"type": "text", "text": 5}), "messages.0.content.0.text"),
    (
        user({"type": "text", "text": "x", "cache_control": {"type": "for ever"}}),
        "messages.0.content.0.cache_control.type",
    ),
    (user({"type": "tool_use", "id": "a", "name": "f", "input": {}}), "messages.0.content.0.type"),
    (user(image(type="url", url="https://x")), "messages.0.content.0.source.type"),
    (user(image(type="file", file_id="f")), "messages.0.content.0.source.type"),
    (user(image(type="base64", media_type="image/tiff", data="aGk=")), "messages.0.content.0.source"),
    (user(image(type="base64", media_type="image/png", data="?")), "messages.0.content.0.source"),
    (
        user(
            {
                **image(type="base64", media_type="image/png", data="aGk="),
                "transformations": {"oversized_image": "error"},
            }
        ),
        "messages.0.content.0.transformations",
    ),
    (
        user({"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "x"}}),
        "messages.0.content.0.source.type",
    ),
    (
        user(
            {
                "type": "document",
                "source": {"type": "text", "media_type": "text/plain", "data": "x"},
                "citations": {"enabled": True},
            }
        ),
        "messages.0.content.0.citations.enabled",
    ),
    (body(system=7), "system"),
    (body(system=[{"type": "image"}]), "system.0.type"),
    (body(max_tokens=0), "max_tokens"),
    (body(max_tokens="5"), "max_tokens"),
    (body(temperature=1.1), "temperature"),
    (body(top_p=0), "top_p"),
    (body(top_k=-1), "top_k"),
    (body(stop_sequences="x"), "stop_sequences"),
    (body(stop_sequences=[""]), "stop_sequences.0"),
    (body(stop_sequences=["a"] * 17), "stop_sequences"),
    (body(stream="yes"), "stream"),
    (body(thinking={"type": "between_tools"}), "thinking.type"),
    (body(thinking={"type": "enabled", "budget_tokens": 1000}, max_tokens=4000), "thinking.budget_tokens"),
    (body(thinking={"type": "enabled", "budget_tokens": 2000}, max_tokens=2000), "max_tokens"),
    (body(output_config={"effort": "huge"}), "output_config.effort"),
    (body(output_config={"format": {"type": "text"}}), "output_config.format.type"),
    (body(output_config={"format": {"type": "json_schema"}}), "output_config.format.schema"),
    (body(tools=[{"name": "f"}]), "tools.0.input_schema"),
    (body(tools=[tool("bad name")]), "tools.0.name"),
    (body(tools=[tool("f"), tool("f")]), "tools.1.name"),
    (body(tools=[tool(defer_loading=True)]), "tools.0.defer_loading"),
    (body(tools=[tool(allowed_callers=["code_execution_20260120"])]), "tools.0.allowed_callers.0"),
    (body(tools=[tool(input_examples=[{}])]), "tools.0.input_examples"),
    (body(tool_choice={"type": "any"}), "tool_choice"),
    (body(tool_choice={"type": "required"}, tools=[tool()]), "tool_choice.type"),
    (body(tool_choice={"type": "tool"}, tools=[tool()]), "tool_choice.name"),
    (body(tool_choice={"type": "tool", "name": "g"}, tools=[tool()]), "tool_choice.name"),
    (body(context_management={"edits": [{"type": "clear_tool_uses_20250919"}]}), "context_management.edits.0.type"),
    (
        body(
            context_management={
                "edits": [{"type": "clear_thinking_20251015", "keep": {"type": "thinking_turns", "value": 1}}]
            }
        ),
        "context_management.edits.0.keep",
    ),
    (body(cache_control={"type": "ephemeral", "ttl": "2h"}), "cache_control.ttl"),
    (user(*[MARKED] * 5), "messages.0.content.4.cache_control"),
    (user(*[MARKED] * 4, cache_control=MARK), "cache_control"),
    (
        user(MARKED, result(MARKED), tools=[tool(cache_control=MARK)], system=[MARKED, MARKED]),
        "messages.0.content.1.content.0.cache_control",
    ),
    (
        body(
            messages=[
                {"role": "assistant", "content": [{"type": "thinking", "thinking": "t", "signature": "s", **ONE}]}
            ]
        ),
        "messages.0.content.0.cache_control",
    ),
    (body(seed=2**64), "seed"),
]


@pytest.mark.parametrize(("body", "param"), WRONG, ids=lambda value: value if isinstance(value, str) else None)
def test_the_field_that_is_wrong_is_named(body: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        parsed(body)
    assert caught.value.param == param
    assert param in str(caught.value) or param.removesuffix(".type") in str(caught.value)


# -- what is honoured -----------------------------------------------------------------------------


def test_nothing_said_is_the_models_own_default() -> None:
    request = asked()
    assert (request.max_tokens, request.fit, request.n, request.seed, request.stop) == (10, True, 1, None, ())
    assert (request.sampling.temperature, request.sampling.top_p, request.sampling.top_k) == (1.0, 1.0, 0)
    made = conversation()
    assert (made.effort, made.constraint, made.tools, made.now) == (None, None, (), "2026-01-02")
    assert made.tool_choice == ToolChoice(mode="none")


def test_sampling_stop_and_seed_are_taken_over() -> None:
    request = asked(temperature=0.5, top_p=0.9, top_k=40, stop_sequences=["a", "\n"], seed=3)
    assert (request.sampling.temperature, request.sampling.top_p, request.sampling.top_k) == (0.5, 0.9, 40)
    assert (request.stop, request.seed) == (("a", "\n"), 3)


@pytest.mark.parametrize(
    ("fields", "effort"),
    [
        ({"thinking": {"type": "disabled"}}, "none"),
        ({"thinking": {"type": "disabled"}, "output_config": {"effort": "max"}}, "none"),
        ({"thinking": {"type": "adaptive"}}, None),
        ({"thinking": {"type": "adaptive"}, "output_config": {"effort": "low"}}, "low"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "high"),
        ({"thinking": {"type": "enabled"}}, "high"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}, "output_config": {"effort": "max"}}, "max"),
        ({"output_config": {"effort": "xhigh"}}, "xhigh"),
        ({"output_config": {"effort": None, "format": None}}, None),
    ],
)
def test_thinking_and_effort_are_one_thing(fields: dict[str, Any], effort: str | None) -> None:
    made = conversation(max_tokens=2000, **fields)
    assert made.effort == effort
    assert made.effort_optional == (not fields.get("output_config", {}).get("effort"))


def test_interleaved_thinking_may_have_a_budget_beyond_one_answer() -> None:
    wanted = body(thinking={"type": "enabled", "budget_tokens": 5000})
    with pytest.raises(RequestError):
        parsed(wanted)
    assert parsed(wanted, anthropic_beta="fine-grained, interleaved-thinking-2025-05-14").requests[0].max_tokens == 10


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        (None, ToolChoice()),
        ({"type": "auto"}, ToolChoice()),
        ({"type": "auto", "disable_parallel_tool_use": True}, ToolChoice(parallel=False)),
        ({"type": "any"}, ToolChoice(mode="required")),
        ({"type": "tool", "name": "f"}, ToolChoice(mode="required", names=("f",))),
        (
            {"type": "tool", "name": "f", "disable_parallel_tool_use": True},
            ToolChoice(mode="required", names=("f",), parallel=False),
        ),
        ({"type": "none"}, ToolChoice(mode="none")),
    ],
)
def test_tool_choice_keeps_its_meaning(choice: dict[str, Any] | None, expected: ToolChoice) -> None:
    assert conversation(tools=[tool()], tool_choice=choice).tool_choice == expected


def test_tools_keep_their_schema_and_its_order() -> None:
    schema = {"type": "object", "properties": {"z": {}, "a": {}}, "required": ["z"]}
    given = tool(
        input_schema=schema,
        description="d",
        strict=True,
        type="custom",
        eager_input_streaming=True,
        allowed_callers=["direct"],
        defer_loading=False,
        cache_control={"type": "ephemeral", "ttl": "1h"},
    )
    (made,) = conversation(tools=[given]).tools
    assert (made.name, made.description, made.strict) == ("f", "d", True)
    assert made.parameters == schema
    assert list(made.parameters["properties"]) == ["z", "a"]  # type: ignore[call-overload,index]


def test_an_output_format_is_a_constraint() -> None:
    made = conversation(output_config={"format": {"type": "json_schema", "schema": {"type": "object", "title": "é"}}})
    assert made.constraint is not None
    assert (made.constraint.kind, made.constraint.source) == ("json_schema", '{"type": "object", "title": "é"}')


@pytest.mark.parametrize(
    "fields",
    [
        {"metadata": {"user_id": "u"}},
        {"service_tier": "standard_only"},
        {"service_tier": "auto"},
        {"diagnostics": {"previous_message_id": None}},
        {"user_profile_id": "u"},
        {"speed": "standard"},
        {"inference_geo": None},
        {"container": None},
        {"context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}},
        {"system": None, "tools": None, "tool_choice": None, "thinking": None, "stop_sequences": None},
        {"system": ""},
        {"system": []},
        {"tools": []},
    ],
    ids=str,
)
def test_what_changes_nothing_is_accepted_and_changes_nothing(fields: dict[str, Any]) -> None:
    assert asked(**fields) == asked()


@pytest.mark.parametrize(
    ("fields", "least_s"),
    [
        ({}, 0),
        (ONE, 300),
        ({"cache_control": {**MARK, "ttl": "5m"}}, 300),
        ({"cache_control": {**MARK, "ttl": "1h"}}, 3600),
        ({"system": [MARKED, {**MARKED, "cache_control": {**MARK, "ttl": "1h"}}]}, 3600),
        ({"tools": [tool(**ONE), tool("g")]}, 300),
        (user({"type": "text", "text": "y"}, MARKED, MARKED, MARKED, MARKED), 300),
    ],
)
def test_what_is_marked_is_kept_at_least_so_long(fields: dict[str, Any], least_s: float) -> None:
    assert asked(**fields).retention == Retention(least_s=least_s)


def test_marks_inside_results_and_documents_count() -> None:
    hour = {"cache_control": {**MARK, "ttl": "1h"}}
    source = {"type": "content", "content": [{"type": "text", "text": "x", **hour}]}
    call = {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "f", "input": {}}]}
    within = [{"type": "document", "source": source}, {"type": "text", "text": "y", **ONE}]
    turns = [{"role": "user", "content": "q"}, call, {"role": "user", "content": [result(*within, **ONE)]}]
    assert asked(messages=turns, tools=[tool()]).retention == Retention(least_s=3600)


def test_errors_name_messages_as_the_client_numbered_them() -> None:
    call = parsed(
        body(
            system="s",
            messages=[
                {"role": "user", "content": "x"},
                {"role": "user", "content": "y"},
                {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "f", "input": {}}]},
                {
                    "role": "user",
                    "content": [{"type": "tool_result", "tool_use_id": "a"}, {"type": "text", "text": "z"}],
                },
            ],
        )
    )
    names = call.param_names
    assert names.get("messages[0].content") == "system"
    assert names.get("messages[1].content") == "messages.0.content"
    assert names.get("messages[2].tool_calls") == "messages.2.tool_calls"
    assert names.get("messages[3].content") == "messages.3.content.0.content"
    assert names.get("messages[4].content") == "messages.3.content"
    assert names.get("stop") == "stop_sequences"
    assert names.get("temperature", "temperature") == "temperature"
