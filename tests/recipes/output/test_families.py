from __future__ import annotations

import json
import random
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from deepinfra.core.conversation import ToolCall, ToolDefinition
from deepinfra.core.events import TextDelta, ToolStart
from deepinfra.recipes.output.families import FAMILIES, family_of
from deepinfra.recipes.output.family import output_grammar
from deepinfra.testing.answers import WRITERS, answer_of
from deepinfra.testing.recipe import merged

SHARED = settings(
    max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
TEMPLATES = Path(__file__).parents[2] / "data" / "templates"

plain = ("a", "Paris", " ", "\n", "\t", '"', "\\", "é", "日本", "🙂", "{", "}", "\\n", "\\u0041", "null", "1", "`", "]")
partial = (
    "2>&1",
    "<",
    "</",
    "</tool_call",
    "</parameter",
    "\n</param",
    "</arg_value",
    "</｜DSM",
    "<|tool_call_end|",
    "[ARG",
)
pieces = st.one_of(st.sampled_from(plain), st.sampled_from(partial))
strings = st.lists(pieces, max_size=6).map("".join)
numbers = st.sampled_from([0, -1, 12345678901234567890123, 2**53 + 1, 1.5, -0.25, 1e300])
values: st.SearchStrategy[Any] = st.recursive(
    st.one_of(strings, numbers, st.booleans(), st.none()),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(strings, inner, max_size=3)),
    max_leaves=6,
)
weather = st.fixed_dictionaries(
    {},
    optional={
        "city": strings,
        "days": st.sampled_from([0, 7, 12345678901234567890123]),
        "ok": st.booleans(),
        "where": st.dictionaries(strings, values, max_size=2),
        "tags": st.lists(values, max_size=3),
        "ratio": st.sampled_from([0.5, -3, 1e300]),
    },
)
calls = st.lists(
    st.one_of(
        st.tuples(st.just("get_weather"), weather),
        st.tuples(st.just("f"), st.fixed_dictionaries({}, optional={"s": strings})),
        st.tuples(st.just("none"), st.just({})),
    ),
    min_size=1,
    max_size=3,
)


@SHARED
@given(calls=calls, data=st.data())
def test_calls_written_in_a_familys_syntax_are_parsed_back_exactly(each, calls, data) -> None:
    lead = "" if each.name == "llama3-json" or each.whole else data.draw(st.sampled_from(["", "Let me see.", "a <b"]))
    text = lead + ("\n" if lead else "") + WRITERS[each.name](calls)
    answer = answer_of(each.events(each.ids(text)))
    assert answer.text == lead
    assert [(call.name, json.loads(call.arguments), call.ended) for call in answer.calls] == [
        (name, arguments, True) for name, arguments in calls
    ]


@SHARED
@given(calls=calls, data=st.data())
def test_every_cut_gives_the_same_events_with_and_without_stop_strings(each, calls, data) -> None:
    noise = st.lists(st.one_of(pieces, st.sampled_from(each.markers)), max_size=4).map("".join)
    text = data.draw(noise) + WRITERS[each.name](calls) + data.draw(noise)
    ids = each.ids(text)
    ids = ids[: data.draw(st.integers(0, len(ids)))] if data.draw(st.booleans()) else ids
    cuts = sorted(data.draw(st.lists(st.integers(0, len(ids)), max_size=5)))
    stops = data.draw(st.sampled_from([(), ("a",), ("\n", "Paris"), ("see.", "🙂2")]))
    whole = each.events(ids, stops=stops)
    assert each.events(ids, list(range(len(ids))), stops) == whole
    assert each.events(ids, cuts, stops) == whole
    answer_of(whole)


@SHARED
@given(calls=calls, data=st.data())
def test_the_same_text_in_other_tokens_says_the_same(each, calls, data) -> None:
    noise = st.lists(st.one_of(pieces, st.sampled_from(each.markers)), max_size=4).map("".join)
    text = data.draw(noise) + WRITERS[each.name](calls) + data.draw(noise)
    text = text[: data.draw(st.integers(0, len(text)))] if data.draw(st.booleans()) else text
    sizes = data.draw(st.lists(st.integers(1, 40), min_size=1, max_size=8))
    reason = data.draw(st.sampled_from(["stop", "length"]))
    assert each.in_tokens(text, sizes, reason) == answer_of(each.events(each.ids(text), reason=reason))


@SHARED
@given(data=st.data())
def test_noise_of_markers_gives_no_invalid_events(each, data) -> None:
    text = WRITERS[each.name]([("f", {"s": "a", "x": [1]})])
    shards = [text[at : at + 9] for at in range(0, len(text), 5)]
    ids = each.ids("".join(data.draw(st.lists(st.sampled_from([*each.markers, *shards, "a", "\n", " "]), max_size=30))))
    reason = data.draw(st.sampled_from(["stop", "length"]))
    answer_of(each.events(ids, reason=reason))


LAWS = {
    law.__name__: (law, more)
    for law, more in (
        (test_calls_written_in_a_familys_syntax_are_parsed_back_exactly, {"calls": calls}),
        (test_every_cut_gives_the_same_events_with_and_without_stop_strings, {"calls": calls}),
        (test_the_same_text_in_other_tokens_says_the_same, {"calls": calls}),
        (test_noise_of_markers_gives_no_invalid_events, {}),
    )
}


@pytest.mark.slow
@pytest.mark.parametrize("law", LAWS)
def test_laws_hold_in_many_examples(each, law) -> None:
    test, more = LAWS[law]
    inner = test.hypothesis.inner_test  # type: ignore[attr-defined]
    settings(SHARED, max_examples=100)(given(data=st.data(), **more)(inner))(each=each)


def test_a_call_cut_by_length_has_its_arguments_so_far_and_no_end(each) -> None:
    text = WRITERS[each.name]([("f", {"s": "a long value", "x": [1, 2]})])
    ids = each.ids(text)
    cut = ids[: len(each.ids(text[: text.index("long")]))]
    answer = answer_of(each.events(cut, reason="length"))
    assert [(call.name, call.ended) for call in answer.calls] == [("f", False)]
    assert answer.calls[0].arguments == '{"s": "a '
    assert answer.text == ""


def test_a_call_without_arguments_has_an_empty_object(each) -> None:
    answer = answer_of(each.events(each.ids(WRITERS[each.name]([("none", {})]))))
    assert [(call.name, call.arguments, call.ended) for call in answer.calls] == [("none", "{}", True)]


def test_a_call_of_no_declared_tool_is_a_call_where_the_syntax_says_so(each) -> None:
    text = WRITERS[each.name]([("unheard", {"s": "a"})])
    answer = answer_of(each.events(each.ids(text)))
    if each.name == "llama3-json":
        assert (answer.text, answer.calls) == (text, [])
    else:
        assert [(call.name, json.loads(call.arguments)) for call in answer.calls] == [("unheard", {"s": "a"})]


WHOLE = {
    "harmony": "what is <|message|>this <tool>?",
    "atem": " to=user<|message|>this <tool>?",
    "solar-open": "<|content|>this <tool>?",
    "functionary-3.2": "all\nthis <tool>?",
}
"""By family that writes whole answers: one that is text."""


def test_what_opens_a_block_and_holds_no_call_comes_out_as_text(each) -> None:
    if each.whole:
        text, told = WHOLE[each.name], "this <tool>?"
    elif each.name == "llama3-json":
        text = told = '{"answer": 42}'
    else:
        text = told = f"{each.family.entries[0].marker} {{}} what is this?"
    assert answer_of(each.events(each.ids(text))).text == told


def test_a_block_is_text_to_an_answer_without_tools(each) -> None:
    if each.whole:
        return
    text = WRITERS[each.name]([("f", {"s": "a"})])
    each.grammar, kept = output_grammar({}, ("<think>", "</think>")), each.grammar
    try:
        assert answer_of(each.events(list(text.encode()))).text == text
    finally:
        each.grammar = kept


def test_random_bytes_in_an_answer_decode_as_the_whole_does(each) -> None:
    draw = random.Random(7)
    for _ in range(400):
        data = bytes(draw.choice((draw.randrange(256), draw.randrange(0x80, 0xF8))) for _ in range(draw.randrange(24)))
        data = b"x" + data.replace(b"[", b"(").replace(b"<", b"(")
        cuts = sorted(draw.choices(range(len(data) + 1), k=3))
        events = each.events(list(data), cuts, start="text")
        assert "".join(event.text for event in events if isinstance(event, TextDelta)) == data.decode(errors="replace")


def test_random_bytes_in_an_argument_decode_as_the_whole_does(reader) -> None:
    draw = random.Random(8)
    dsml = reader("dsml", True)
    head, tail = WRITERS["dsml"]([("f", {"s": "%"})]).split("%")
    for _ in range(400):
        data = bytes(draw.choice((draw.randrange(256), draw.randrange(0x80, 0xF8))) for _ in range(draw.randrange(24)))
        ids = [*dsml.ids(head), *data, *dsml.ids(tail)]
        answer = answer_of(dsml.events(ids, sorted(draw.choices(range(len(ids) + 1), k=3))))
        assert json.loads(answer.calls[0].arguments) == {"s": data.decode(errors="replace")}


def test_a_token_costs_the_same_in_a_long_argument(each) -> None:
    def cost(pieces: int) -> float:
        value = 'some "long" value\n with </parts of > markers\\ ' * pieces
        ids = each.ids(WRITERS[each.name]([("f", {"s": value})]))
        begun = time.process_time()
        events = each.events(ids, list(range(len(ids))))
        spent = (time.process_time() - begun) / len(ids)
        assert json.loads(answer_of(events).calls[0].arguments) == {"s": value}
        return spent

    assert min(cost(160) for _ in range(2)) < 4 * min(cost(10) for _ in range(4))  # in quadratic time 16 times


def test_neighbouring_deltas_say_what_the_pieces_say(reader) -> None:
    events = reader("hermes", False).events(list(WRITERS["hermes"]([("f", {"s": "a"})]).encode()))
    assert [type(event).__name__ for event in merged(events)] == ["ToolStart", "ToolArgumentsDelta", "ToolEnd"]


@pytest.mark.parametrize(
    ("family", "ids"), [("kimi", ["functions.f:0", "functions.f:1"]), ("mistral-ids", ["call00000", "call00001"])]
)
def test_ids_that_a_format_writes_are_kept(reader, family, ids) -> None:
    by_tokens = reader(family, True)
    events = by_tokens.events(by_tokens.ids(WRITERS[family]([("f", {}), ("f", {})])))
    assert [event.id for event in events if isinstance(event, ToolStart)] == ids


EXPECTED = {
    "Apertus-8B-Instruct": "apertus",
    "Apriel-1.6-15b-Thinker-fixed": "apriel",
    "ByteDance-Seed-OSS": "seed-oss",
    "Cohere2MoE": "command-r",
    "CohereForAI-c4ai-command-r7b-12-2024-tool_use": "command-r",
    "GLM-4.6": "glm",
    "GigaChat3-10B-A1.8B": "gigachat-3",
    "GigaChat3.1-10B-A1.8B": "gigachat-3.1",
    "Kimi-K2-Instruct": "kimi",
    "Kimi-K2-Thinking": "kimi",
    "LFM2-8B-A1B": "lfm2",
    "LFM2.5-8B-A1B": "lfm2",
    "MiMo-VL": "hermes",
    "MiniMax-M1": "minimax-m1",
    "Mistral-Small-3.2-24B-Instruct-2506": "mistral-ids",
    "NVIDIA-Nemotron-Nano-v2": "nemotron",
    "NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use": "hermes",
    "Qwen-QwQ-32B": "hermes",
    "Qwen-Qwen2.5-7B-Instruct": "hermes",
    "Qwen3-Coder": "qwen-xml",
    "Qwen3.5-4B": "qwen-xml",
    "Spark2.5": "glm",
    "StepFun3.5-Flash": "qwen-xml",
    "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B": "deepseek-r1",
    "deepseek-ai-DeepSeek-V3.1": "deepseek-v3.1",
    "deepseek-ai-DeepSeek-V4": "dsml",
    "deepseek-ai-DeepSeek-V4-Flash-0731": "dsml",
    "google-gemma-4-31B-it-interleaved": "gemma-4",
    "ibm-granite-granite-3.3-2B-Instruct": "granite-3",
    "ibm-granite-granite-4.0": "hermes",
    "inclusionai-ling-3.0-flash": "glm",
    "llama-cpp-deepseek-r1": "deepseek-r1",
    "meetkai-functionary-medium-v3.1": "functionary",
    "meetkai-functionary-medium-v3.2": "functionary-3.2",
    "meta-llama-Llama-3.2-3B-Instruct": "llama3-json",
    "meta-llama-Llama-3.3-70B-Instruct": "llama3-json",
    "mistralai-Ministral-3-14B-Reasoning-2512": "mistral",
    "mistralai-Mistral-Nemo-Instruct-2407": "mistral-list",
    "muse-glimmer": "atem",
    "openai-gpt-oss-120b": "harmony",
    "poolside-Laguna-S-2.1": "glm",
    "poolside-Laguna-XS-2.1": "glm",
    "tencent-Hy3": "hy3",
    "unsloth-Apriel-1.5": "apriel",
    "upstage-Solar-Open-100B": "solar-open",
}


def test_the_family_of_a_template_is_found_by_what_it_writes() -> None:
    found = {path.stem: family_of(path.read_text(), {}) for path in TEMPLATES.glob("*.jinja")}
    assert {name: family.name for name, family in found.items() if family is not None} == EXPECTED


def test_every_family_has_a_writer_in_the_tests() -> None:
    assert WRITERS.keys() == FAMILIES.keys()


def test_tools_are_shown_to_a_model_whose_template_ignores_them_as_it_will_write_them(reader) -> None:
    shown, hermes = FAMILIES["hermes"].shown, reader("hermes", False)
    assert shown is not None
    tool = ToolDefinition(name="wetter", description="日本 <b>", parameters={"type": "object", "b": 1, "a": 2})
    told = shown.show_tools((tool, ToolDefinition(name="none")))
    function = '{"name": "wetter", "description": "日本 <b>", "parameters": {"type": "object", "b": 1, "a": 2}}'
    assert f'<tools>\n{{"type": "function", "function": {function}}}\n' in told
    assert '{"type": "function", "function": {"name": "none"}}\n</tools>' in told
    calls = (ToolCall(id="1", name="f", arguments='{"n": 1e5}'), ToolCall(id="2", name="none", arguments=""))
    answer = answer_of(hermes.events(hermes.ids(shown.show_calls(calls))))
    assert [(call.name, call.arguments) for call in answer.calls] == [("f", '{"n": 1e5}'), ("none", "{}")]
    assert shown.show_result("f", "20 C") == "<tool_response>\n20 C\n</tool_response>"
