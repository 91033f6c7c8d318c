"""Every field of the official client's request types is honoured, ignored on purpose, or refused by name."""

from __future__ import annotations

from typing import Any

import pytest
from openai.types import completion_create_params as completion_params
from openai.types.chat import completion_create_params as chat_params

from deepinfra.api.chat.request import CHAT, ChatRequest
from deepinfra.api.completions.request import COMPLETIONS, CompletionRequest
from deepinfra.api.protocol import Received
from deepinfra.api.wire import SamplingFields
from deepinfra.errors import RequestError, UnsupportedFieldError

RECEIVED = Received(headers={}, now="2026-11-29", max_choices=8)

PROTOCOLS = [
    pytest.param(ChatRequest, chat_params.CompletionCreateParamsBase, id="chat"),
    pytest.param(CompletionRequest, completion_params.CompletionCreateParamsBase, id="completions"),
]


@pytest.mark.parametrize(("model", "params"), PROTOCOLS)
def test_no_field_of_the_official_client_is_forgotten(model: type[SamplingFields], params: type) -> None:
    decided = {*model.model_fields, *model.IGNORED, *model.NEUTRAL}
    assert set(params.__annotations__) - decided == set()


@pytest.mark.parametrize(("model", "params"), PROTOCOLS)
def test_a_field_is_decided_once(model: type[SamplingFields], params: type) -> None:
    lists = [set(model.model_fields), set(model.IGNORED), set(model.NEUTRAL)]
    assert sum(map(len, lists)) == len(set().union(*lists))


def chat(**fields: Any) -> dict[str, Any]:
    return {"model": "toy", "messages": [{"role": "user", "content": "say json"}], **fields}


def user(content: Any, **fields: Any) -> dict[str, Any]:
    return chat(messages=[{"role": "user", "content": content, **fields}])


def tool(name: str = "f", **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **fields}}


PNG = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}


def called(*ids: str) -> dict[str, Any]:
    calls = [{"id": each, "type": "function", "function": {"name": "f", "arguments": "{}"}} for each in ids]
    return {"role": "assistant", "content": None, "tool_calls": calls}


def answered(call: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call, "content": "x"}


REFUSED_CHAT = [
    (chat(nonsense=1), "nonsense"),
    (chat(temprature=0.5), "temprature"),
    (chat(audio={"voice": "alloy", "format": "wav"}), "audio"),
    (chat(modalities=["text", "audio"]), "modalities"),
    (chat(functions=[{"name": "f"}]), "functions"),
    (chat(function_call="auto"), "function_call"),
    (chat(web_search_options={}), "web_search_options"),
    (chat(store=True), "store"),
    (chat(store=0), "store"),
    (chat(service_tier="priority"), "service_tier"),
    (chat(verbosity="low"), "verbosity"),
    (chat(moderation={"model": "m"}), "moderation"),
    (user("x", cache_control={}), "messages.0.cache_control"),
    (user("x", prefix=True), "messages.0.prefix"),
    (user([{"type": "image_url", "image_url": {"url": "https://a/b.png"}}]), "messages.0.content.0.image_url.url"),
    (user([{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}]), "messages.0.content.0.image_url.url"),
    (chat(structured_outputs={"structural_tag": "{}"}), "structured_outputs.structural_tag"),
    (chat(structured_outputs={"grammar": 'start: "a" <[5]>'}), "structured_outputs.grammar"),
    (chat(structured_outputs={"grammar": "start: A\nA: ~/[a-z]/"}), "structured_outputs.grammar"),
    (chat(structured_outputs={"grammar": "start: A\nA: /a.*/ & /.*b/"}), "structured_outputs.grammar"),
    (chat(structured_outputs={"grammar": 'start: /a""\n\\\\/<[2]>//\n'}), "structured_outputs.grammar"),
    (
        chat(structured_outputs={"grammar": 'start: "a"\n}\n | r0\nz: %lark {\nstart: "b"'}),
        "structured_outputs.grammar",
    ),
    (chat(structured_outputs={"grammar": "start: <|im_end|>"}), "structured_outputs.grammar"),
    (chat(structured_outputs={"grammar": 'start: "\\"" <think> "\\""'}), "structured_outputs.grammar"),
    (chat(stream=True, stream_options={"include_usage": True, "foo": 1}), "stream_options.foo"),
    (chat(tools=[{**tool(), "defer_loading": True}]), "tools.0.defer_loading"),
]


@pytest.mark.parametrize(("body", "param"), REFUSED_CHAT, ids=lambda value: value if isinstance(value, str) else None)
def test_chat_refuses_what_it_does_not_honour(body: dict[str, Any], param: str) -> None:
    with pytest.raises(UnsupportedFieldError) as caught:
        CHAT.parse(body, RECEIVED)
    assert caught.value.param == param
    assert param in str(caught.value)


WRONG_CHAT = [
    ({"messages": [{"role": "user", "content": "x"}]}, "model"),
    ({"model": "toy"}, "messages"),
    (chat(model=""), "model"),
    (chat(model=7), "model"),
    (chat(messages=[]), "messages"),
    (chat(messages="hi"), "messages"),
    (chat(messages=[7]), "messages.0.role"),
    (chat(messages=[{"content": "x"}]), "messages.0.role"),
    (chat(messages=[{"role": "function", "name": "f", "content": "x"}]), "messages.0.role"),
    (chat(messages=[{"role": "user"}]), "messages.0.content"),
    (user(None), "messages.0.content"),
    (user(5), "messages.0.content"),
    (user([]), "messages.0.content"),
    (
        user([{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": "u"}}]),
        "messages.0.content.1.image_url.url",
    ),
    (
        user([{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA==", "detail": "huge"}}]),
        "messages.0.content.0.image_url.detail",
    ),
    (user([{"type": "image_url"}]), "messages.0.content.0.image_url"),
    (user(["text"]), "messages.0.content.0.type"),
    (chat(messages=[{"role": "system", "content": [PNG]}]), "messages.0.content.0.type"),
    (user([{"type": "input_audio", "input_audio": {}}]), "messages.0.content.0.type"),
    (user([{"type": "text"}]), "messages.0.content.0.text"),
    (user([{"type": "text", "text": 1}]), "messages.0.content.0.text"),
    (user([{"type": "refusal", "refusal": "no"}]), "messages.0.content.0.type"),
    (chat(messages=[{"role": "tool", "content": "x"}]), "messages.0.tool_call_id"),
    (
        chat(messages=[{"role": "assistant", "tool_calls": [{"id": "a", "type": "custom"}]}]),
        "messages.0.tool_calls.0.type",
    ),
    (
        chat(messages=[{"role": "assistant", "prefix": True, "content": "x"}, {"role": "user", "content": "y"}]),
        "messages.0.prefix",
    ),
    (chat(messages=[{"role": "tool", "tool_call_id": "a", "content": "x"}]), "messages.0.tool_call_id"),
    (chat(messages=[called("a"), answered("b")]), "messages.1.tool_call_id"),
    (chat(messages=[called("a"), answered("a"), answered("a")]), "messages.2.tool_call_id"),
    (chat(messages=[called("a", "b"), answered("a"), {"role": "user", "content": "x"}]), "messages.2"),
    (chat(messages=[called("a", "a"), answered("a")]), "messages.0.tool_calls"),
    (chat(max_tokens=0), "max_tokens"),
    (chat(max_tokens="5"), "max_tokens"),
    (chat(max_tokens=5.0), "max_tokens"),
    (chat(max_tokens=True), "max_tokens"),
    (chat(max_tokens=5, max_completion_tokens=6), "max_tokens"),
    (chat(max_completion_tokens=-1), "max_completion_tokens"),
    (chat(n=0), "n"),
    (chat(n=9), "n"),
    (chat(stop=""), "stop.0"),
    (chat(stop=["a", ""]), "stop.1"),
    (chat(stop=["a"] * 17), "stop"),
    (chat(stop={"a": 1}), "stop"),
    (chat(seed=1.5), "seed"),
    (chat(temperature=-0.1), "temperature"),
    (chat(temperature=2.1), "temperature"),
    (chat(temperature="hot"), "temperature"),
    (chat(top_p=0), "top_p"),
    (chat(top_p=1.1), "top_p"),
    (chat(presence_penalty=3), "presence_penalty"),
    (chat(frequency_penalty=-3), "frequency_penalty"),
    (chat(logit_bias={"5": 101}), "logit_bias.5"),
    (chat(logit_bias={"five": 1}), "logit_bias.five"),
    (chat(logit_bias={str(i): 1 for i in range(2000)}), "logit_bias"),
    (chat(top_k=-2), "top_k"),
    (chat(min_p=1.5), "min_p"),
    (chat(repetition_penalty=0), "repetition_penalty"),
    (chat(ignore_eos="yes"), "ignore_eos"),
    (chat(logprobs=3), "logprobs"),
    (chat(top_logprobs=3), "top_logprobs"),
    (chat(logprobs=True, top_logprobs=21), "top_logprobs"),
    (chat(stream="yes"), "stream"),
    (chat(stream_options={"include_usage": True}), "stream_options"),
    (chat(stream=True, stream_options={"include_obfuscation": True}), "stream_options.include_obfuscation"),
    (chat(tools=[tool("bad name")]), "tools.0.function.name"),
    (chat(tools=[tool("f"), tool("f")]), "tools.1.function.name"),
    (chat(tools=[{"type": "custom", "custom": {"name": "f"}}]), "tools.0.type"),
    (chat(tools=[tool("f", parameters="none")]), "tools.0.function.parameters"),
    (chat(tool_choice="required"), "tool_choice"),
    (chat(tools=[tool()], tool_choice="sometimes"), "tool_choice"),
    (chat(tools=[tool()], tool_choice={"type": "function", "function": {"name": "g"}}), "tool_choice"),
    (chat(tools=[tool()], tool_choice={"type": "function"}), "tool_choice.function"),
    (chat(tools=[tool()], tool_choice={"type": "custom", "custom": {"name": "f"}}), "tool_choice.type"),
    (chat(response_format={"type": "xml"}), "response_format.type"),
    (chat(response_format={"type": "json_schema"}), "response_format.json_schema"),
    (chat(response_format={"type": "json_schema", "json_schema": {}}), "response_format.json_schema.name"),
    (chat(response_format={"type": "json_object"}, messages=[{"role": "user", "content": "x"}]), "messages"),
    (chat(reasoning_effort="huge"), "reasoning_effort"),
    (chat(thinking={"type": "maybe"}), "thinking.type"),
    (chat(prompt_cache_retention="forever"), "prompt_cache_retention"),
    (chat(stop_token_ids=[-1]), "stop_token_ids.0"),
    (chat(stop_token_ids=["5"]), "stop_token_ids.0"),
    (chat(priority=9), "priority"),
    (chat(priority=-9), "priority"),
    (chat(chat_template_kwargs=["a"]), "chat_template_kwargs"),
    (chat(structured_outputs={}), "structured_outputs"),
    (chat(structured_outputs={"regex": "a", "json_object": True}), "structured_outputs"),
    (chat(structured_outputs={"regex": "a"}, response_format={"type": "json_object"}), "structured_outputs"),
    (chat(structured_outputs={"regex": ""}), "structured_outputs.regex"),
    (chat(structured_outputs={"choice": []}), "structured_outputs.choice"),
    (chat(structured_outputs={"choice": ["a", ""]}), "structured_outputs.choice.1"),
    (chat(structured_outputs={"json": "{bad"}), "structured_outputs.json"),
    (chat(structured_outputs={"json": "[1]"}), "structured_outputs.json"),
]


@pytest.mark.parametrize(("body", "param"), WRONG_CHAT, ids=lambda value: value if isinstance(value, str) else None)
def test_chat_names_the_field_that_is_wrong(body: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        CHAT.parse(body, RECEIVED)
    assert caught.value.param == param


def completion(**fields: Any) -> dict[str, Any]:
    return {"model": "toy", "prompt": "x", **fields}


WRONG_COMPLETION = [
    ({"model": "toy"}, "prompt"),
    (completion(prompt=None), "prompt"),
    (completion(prompt=[]), "prompt"),
    (completion(prompt=[[]]), "prompt"),
    (completion(prompt=["a", 1]), "prompt"),
    (completion(prompt=[["a"]]), "prompt"),
    (completion(prompt=[True]), "prompt"),
    (completion(prompt=[-1]), "prompt"),
    (completion(prompt=[2**40]), "prompt"),
    (completion(prompt=["a"] * 5, n=2), "prompt"),
    (completion(n=9), "n"),
    (completion(echo=True), "echo"),
    (completion(suffix="end"), "suffix"),
    (completion(best_of=3), "best_of"),
    (completion(logprobs=True), "logprobs"),
    (completion(logprobs=21), "logprobs"),
    (completion(max_completion_tokens=5), "max_completion_tokens"),
    (completion(messages=[]), "messages"),
    (completion(structured_outputs={"choice": "yes"}), "structured_outputs.choice"),
    (completion(chat_template_kwargs={}), "chat_template_kwargs"),
]


@pytest.mark.parametrize(
    ("body", "param"), WRONG_COMPLETION, ids=lambda value: value if isinstance(value, str) else None
)
def test_completions_name_the_field_that_is_wrong(body: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        COMPLETIONS.parse(body, RECEIVED)
    assert caught.value.param == param


@pytest.mark.parametrize("field", sorted([*ChatRequest.NEUTRAL, *ChatRequest.model_fields]))
def test_null_is_the_same_as_leaving_a_field_out(field: str) -> None:
    if field in ("model", "messages"):
        with pytest.raises(RequestError):
            CHAT.parse(chat(**{field: None}), RECEIVED)
    else:
        assert CHAT.parse(chat(**{field: None}), RECEIVED).requests == CHAT.parse(chat(), RECEIVED).requests


@pytest.mark.parametrize(
    ("field", "value"),
    [(name, value) for name, values in ChatRequest.NEUTRAL.items() for value in values]
    + [(name, {"any": "thing"}) for name in sorted(ChatRequest.IGNORED)],
)
def test_what_changes_nothing_is_accepted_and_changes_nothing(field: str, value: Any) -> None:
    assert CHAT.parse(chat(**{field: value}), RECEIVED).requests == CHAT.parse(chat(), RECEIVED).requests


def test_a_value_is_never_quoted_back_in_full() -> None:
    with pytest.raises(RequestError) as caught:
        CHAT.parse(chat(temperature="secret" * 1000), RECEIVED)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        (chat(response_format="json"), "'response_format': must be an object"),
        (chat(messages="hi"), "'messages': must be an array"),
        (chat(temperature="hot"), "'temperature': must be a number"),
        (chat(stream="yes"), "'stream': must be true or false"),
        (chat(store=True), "'store' is not supported by this server; it may be false"),
        (chat(service_tier="flex"), '\'service_tier\' is not supported by this server; it may be "auto" or "default"'),
        (chat(temprature=1), "'temprature' is not a field of this request; did you mean 'temperature'?"),
        (chat(banana=1), "'banana' is not a field of this request"),
        (chat(stream=True, stream_options={"x": 1}), "'stream_options.x' is not a field of this request"),
    ],
)
def test_a_refusal_is_in_the_words_of_json(body: dict[str, Any], sentence: str) -> None:
    with pytest.raises(RequestError) as caught:
        CHAT.parse(body, RECEIVED)
    assert str(caught.value) == sentence
