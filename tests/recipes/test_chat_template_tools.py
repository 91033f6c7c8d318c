"""Tools of the chat template recipe: shown, called, demanded, answered."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from deepinfra.core.conversation import (
    Constraint,
    Conversation,
    Message,
    TextPart,
    ToolCall,
    ToolChoice,
    ToolDefinition,
)
from deepinfra.core.ids import SeqId
from deepinfra.core.request import Prompt, SeqSpec
from deepinfra.engine.constraints import Constraints
from deepinfra.errors import TemplateError, UnsupportedFieldError
from deepinfra.interfaces.given import ThreadOffload
from deepinfra.models import open_model
from deepinfra.recipes import ChatTemplate
from deepinfra.testing.answers import WRITERS, Answer, answer_of
from deepinfra.testing.textmodel import CHATML, TrainedTextModel

SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 8}, "days": {"type": "integer"}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOL = ToolDefinition(name="get_weather", description="Weather.", parameters=SCHEMA)  # type: ignore[arg-type]
OTHER = ToolDefinition(name="other", parameters={"type": "object", "properties": {}, "additionalProperties": False})
CALL = ToolCall(id="call_0123456789", name="get_weather", arguments='{"city": "Oslo", "days": 3}')


def say(role: Any, text: str, **more: Any) -> Message:
    return Message(role=role, content=(TextPart(text),), **more)


ASK = say("user", "Weather?")
LOOP = (ASK, Message(role="assistant", tool_calls=(CALL,)), say("tool", "20", tool_call_id=CALL.id))


def chat(*messages: Message, **more: Any) -> Conversation:
    return Conversation(messages=messages, tools=(TOOL, OTHER), **more)


@pytest.fixture(scope="module")
def smollm2(smollm2_path: Path) -> ChatTemplate:
    return ChatTemplate(open_model(str(smollm2_path)))


def read(recipe: ChatTemplate, prompt: Prompt, ids: list[int]) -> Answer:
    parser = recipe.parser(prompt)
    return answer_of([*parser.feed(ids), *parser.finish("stop")])


# -- what a template shows is what is read ------------------------------------------------------------------------


def test_a_call_is_read_as_the_template_writes_it(name: str, recipe: Callable[[str], ChatTemplate]) -> None:
    loaded = recipe(name)
    traits = loaded.built.traits
    if traits.tools == "fallback" or traits.calls == "text":
        return  # see below
    if "ids.append(" in (loaded._model.chat_template() or ""):
        with pytest.raises(TemplateError, match="'append'"):  # as in transformers: lists are not to be changed
            loaded.render(chat(*LOOP))
        return
    asked = loaded.render(chat(ASK))
    history = loaded.render(chat(*LOOP)).ids
    same = next(at for at, (a, b) in enumerate(zip(history, (*asked.ids, -1), strict=False)) if a != b)
    ends = {*asked.stop_ids, loaded.built.vocabulary.control.get("<|observation|>")}
    end = next((at for at in range(same, len(history)) if history[at] in ends), len(history))
    start = asked.start if same == len(asked.ids) else "text"
    answer = read(loaded, replace(asked, start=start), list(history[same:end]))
    assert [(call.name, json.loads(call.arguments)) for call in answer.calls] == [
        ("get_weather", {"city": "Oslo", "days": 3})
    ]


REASONS: dict[str, tuple[dict[str, Any], str]] = {
    "google-gemma-4-31B-it-interleaved": ({"enable_thinking": True}, "<|channel>thought\nWHY<channel|>"),
    "tencent-Hy3": ({"reasoning_effort": "high"}, "WHY</think:opensource>"),
    "Apriel-1.6-15b-Thinker-fixed": ({}, "WHY\n[BEGIN FINAL RESPONSE]\n"),
    "Apertus-8B-Instruct": ({"enable_thinking": True}, "<|inner_prefix|>WHY<|inner_suffix|>"),
    "upstage-Solar-Open-100B": ({}, "<|think|>WHY<|end|><|begin|>assistant"),
    "muse-glimmer": ({}, " to=self<|message|>WHY<|eom|><|start|>assistant"),
    "LFM2.5-8B-A1B": ({}, "<think>WHY</think>"),
    "Qwen3.5-4B": ({"enable_thinking": True}, "WHY\n</think>\n\n"),
}
"""By template: options with which it reasons, and its reasoning with what stands around it in an answer."""


@pytest.mark.parametrize("model_name", REASONS)
def test_reasoning_is_read_as_the_model_writes_it(model_name: str, recipe: Callable[[str], ChatTemplate]) -> None:
    options, reasoning = REASONS[model_name]
    loaded = recipe(model_name)
    family, control = loaded.built.answers.family, loaded.built.vocabulary.control
    spelled = re.compile(f"({'|'.join(map(re.escape, sorted(control, key=len, reverse=True)))})")

    def ids(text: str) -> list[int]:
        parts = [part for part in spelled.split(text) if part]
        return [token for part in parts for token in ([control[part]] if part in control else _ids(loaded, part))]

    for tools in ((), (TOOL,)):
        prompt = loaded.render(Conversation(messages=(ASK,), tools=tools, template_options=options))
        answer = read(loaded, prompt, ids(reasoning + family.prefix + "done"))
        assert (answer.reasoning, answer.text, answer.calls) == ("WHY", "done", [])
    answer = read(loaded, prompt, ids(reasoning + WRITERS[family.name]([("get_weather", {"city": "Oslo"})])))
    assert (answer.reasoning, answer.text) == ("WHY", "")
    assert [(call.name, json.loads(call.arguments)) for call in answer.calls] == [("get_weather", {"city": "Oslo"})]


def _ids(recipe: ChatTemplate, text: str) -> list[int]:
    return list(recipe.tokenizer.encode(text))


def test_the_fallback_shows_tools_calls_and_results_as_text_and_reads_calls(smollm2: ChatTemplate) -> None:
    prompt = smollm2.render(chat(say("system", "Be brief."), *LOOP))
    assert "Be brief.\n\n# Tools" in prompt.text
    assert '"name": "get_weather", "description": "Weather.", "parameters": {"type": "object"' in prompt.text
    call = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo", "days": 3}}\n</tool_call>'
    assert f"<|im_start|>assistant\n{call}<|im_end|>" in prompt.text
    assert "<|im_start|>user\n<tool_response>\n20\n</tool_response><|im_end|>" in prompt.text
    answer = read(smollm2, prompt, smollm2.tokenizer.encode(f"Well.\n{call}\n{call}"))
    assert answer.text == "Well."
    assert [(call.name, call.arguments, call.ended) for call in answer.calls] == 2 * [
        ("get_weather", '{"city": "Oslo", "days": 3}', True)
    ]
    assert smollm2.report().tools == "hermes"


def test_the_fallbacks_tags_are_text_also_where_the_model_has_tokens_for_them() -> None:
    recipe = ChatTemplate(
        TrainedTextModel(CHATML, ("<s>", "<|im_end|>", "<|im_start|>", "<tool_call>", "</tool_call>"))
    )
    prompt = recipe.render(chat(*LOOP))
    assert {prompt.text[start:end] for start, end in prompt.ranges} == {"<|im_start|>", "<|im_end|>"}
    spelled = recipe.tokenizer.encode('<tool_call>\n{"name": "other", "arguments": {}}\n</tool_call>')
    assert [call.name for call in read(recipe, prompt, spelled).calls] == ["other"]


def test_results_and_the_next_question_are_one_message_of_the_fallback(smollm2: ChatTemplate) -> None:
    two = (CALL, replace(CALL, id="call_2"))
    results = (say("tool", "20", tool_call_id=CALL.id), say("tool", "no", tool_call_id="call_2", is_error=True))
    text = smollm2.render(chat(ASK, Message(role="assistant", tool_calls=two), *results, say("user", "So?"))).text
    shown = "<tool_response>\n20\n</tool_response>\n<tool_response>\nError: no\n</tool_response>\n\nSo?<|im_end|>"
    assert f"<|im_start|>user\n{shown}" in text


def test_without_tools_an_answer_about_calls_is_text(smollm2: ChatTemplate) -> None:
    prompt = smollm2.render(Conversation(messages=(ASK,)))
    text = '<tool_call>\n{"name": "other", "arguments": {}}\n</tool_call>'
    assert read(smollm2, prompt, smollm2.tokenizer.encode(text)).text == text


def test_calls_that_a_template_drops_are_written_into_the_answer(recipe: Callable[[str], ChatTemplate]) -> None:
    text = recipe("ibm-granite-granite-3.3-2B-Instruct").render(chat(*LOOP)).text
    assert "<|start_of_role|>available_tools<|end_of_role|>" in text
    assert '<|start_of_role|>assistant<|end_of_role|><tool_call>\n{"name": "get_weather"' in text
    assert "<|start_of_role|>tool<|end_of_role|>20<|end_of_text|>" in text


# -- what is demanded ---------------------------------------------------------------------------------------------


def test_half_a_character_in_arguments_is_shown_as_it_was_written(recipe: Callable[[str], ChatTemplate]) -> None:
    call = ToolCall(id="call00001", name="other", arguments='{"a": "\\ud83d"}')
    result = say("tool", "r", tool_call_id=call.id)
    prompt = recipe("Qwen-Qwen2.5-7B-Instruct").render(chat(ASK, Message(role="assistant", tool_calls=(call,)), result))
    assert r"{\"a\": \"\\ud83d\"}" in prompt.text


async def written(recipe: ChatTemplate, prompt: Prompt, seed: int) -> list[int]:
    """An answer of a model that knows nothing but its constraint."""
    spec = SeqSpec(
        seq=SeqId(1),
        tokens=prompt.ids,
        prompt_len=len(prompt.ids),
        max_tokens=500,
        seed=0,
        stop_ids=prompt.stop_ids,
        constraint=prompt.constraint,
    )
    matcher = await Constraints(recipe, ThreadOffload()).matcher(spec)
    assert matcher
    draw, ids = random.Random(seed), []
    for _ in range(400):
        row = matcher.rows((), -(-recipe.tokenizer.vocab_size // 8))[0]
        if matcher.why_stuck is not None:
            break
        allowed = [8 * at + bit for at, bits in enumerate(row) for bit in range(8) if bits >> bit & 1]
        ending = [token for token in allowed if token in prompt.stop_ids]
        token = ending[0] if ending else draw.choice(allowed)
        if token in prompt.stop_ids:
            break
        assert matcher.take(token)
        ids.append(token)
    return ids


@pytest.mark.parametrize(
    "choice", [ToolChoice(mode="required"), ToolChoice(mode="required", names=("other",), parallel=False)]
)
async def test_a_demanded_call_is_one_of_the_tools_allowed_and_valid(smollm2: ChatTemplate, choice: ToolChoice) -> None:
    prompt = smollm2.render(chat(ASK, tool_choice=choice))
    assert prompt.constraint
    for seed in range(3):
        answer = read(smollm2, prompt, await written(smollm2, prompt, seed))
        assert answer.text == ""
        assert answer.calls
        for call in answer.calls:
            assert call.ended
            assert call.name in (choice.names or ("get_weather", "other"))
            assert set(json.loads(call.arguments)) <= ({"city", "days"} if call.name == "get_weather" else set())


@pytest.mark.parametrize(
    "model_name",
    [
        "Apertus-8B-Instruct",
        "GigaChat3-10B-A1.8B",
        "Kimi-K2-Instruct",
        "LFM2.5-8B-A1B",
        "MiniMax-M1",
        "Qwen-Qwen2.5-7B-Instruct",
        "google-gemma-4-31B-it-interleaved",
        "meetkai-functionary-medium-v3.2",
        "muse-glimmer",
        "tencent-Hy3",
        "upstage-Solar-Open-100B",
    ],
)
async def test_a_call_is_demanded_in_the_models_own_syntax(
    model_name: str, recipe: Callable[[str], ChatTemplate]
) -> None:
    loaded = recipe(model_name)
    prompt = loaded.render(chat(ASK, tool_choice=ToolChoice(mode="required", names=("other",))))
    assert prompt.tools == (OTHER,)
    answer = read(loaded, prompt, await written(loaded, prompt, 1))
    assert {call.name for call in answer.calls} == {"other"}


def test_a_free_choice_demands_nothing(smollm2: ChatTemplate) -> None:
    assert smollm2.render(chat(ASK)).constraint is None
    assert smollm2.render(chat(ASK, tool_choice=ToolChoice(mode="none"))).tools == ()
    assert smollm2.render(chat(ASK, tool_choice=ToolChoice(names=("other",)))).constraint is not None
    assert smollm2.render(chat(ASK, tool_choice=ToolChoice(parallel=False))).constraint is not None


async def test_a_response_format_is_told_and_enforced(smollm2: ChatTemplate) -> None:
    schema = json.dumps({"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]})
    wanted = Constraint(kind="json_schema", source=schema)
    prompt = smollm2.render(Conversation(messages=(ASK,), constraint=wanted))
    assert (
        f"<|im_start|>system\nAnswer with one JSON value that matches this JSON Schema, and nothing else:\n{schema}"
        in (prompt.text)
    )
    answer = read(smollm2, prompt, await written(smollm2, prompt, 0))
    assert isinstance(json.loads(answer.text)["a"], bool)


def test_a_response_format_comes_after_the_reasoning() -> None:
    template = CHATML.replace("assistant\n' }}", "assistant\n<think>\n' }}{{ '</think>' if false }}")
    recipe = ChatTemplate(TrainedTextModel(template, ("<s>", "<|im_end|>", "<|im_start|>", "<think>", "</think>")))
    prompt = recipe.render(Conversation(messages=(ASK,), constraint=Constraint(kind="json")))
    assert prompt.start == "reasoning"
    assert prompt.constraint
    assert prompt.constraint.kind == "grammar"
    closing = recipe.built.vocabulary.control["</think>"]
    assert f"<[{closing}]>" in prompt.constraint.source


def test_a_template_without_system_messages_is_told_in_the_first_question(
    recipe: Callable[[str], ChatTemplate],
) -> None:
    loaded = recipe("google-gemma-2-2b-it")
    text = loaded.render(chat(ASK, constraint=Constraint(kind="json"))).text
    assert "<start_of_turn>user\n# Tools" in text
    assert "Answer with one JSON object and nothing else.\n\nWeather?<end_of_turn>" in text


async def test_a_call_is_demanded_behind_the_reasoning_of_gpt_oss(recipe: Callable[[str], ChatTemplate]) -> None:
    loaded = recipe("openai-gpt-oss-120b")
    prompt = loaded.render(chat(ASK, tool_choice=ToolChoice(mode="required", names=("other",))))
    assert prompt.start == "header"
    assert prompt.stop_ids == {loaded.built.vocabulary.control[end] for end in ("<|return|>", "<|call|>")}
    answer = read(loaded, prompt, await written(loaded, prompt, 1))
    assert {call.name for call in answer.calls} == {"other"}


# -- how a template wants things ----------------------------------------------------------------------------------


def test_several_calls_are_given_one_by_one_where_the_template_shows_only_the_first(
    recipe: Callable[[str], ChatTemplate],
) -> None:
    other = replace(CALL, id="call_2", arguments='{"city": "Bergen"}')
    turn = Message(role="assistant", tool_calls=(CALL, other))
    results = (say("tool", "WET", tool_call_id="call_2"), say("tool", "DRY", tool_call_id=CALL.id))
    text = recipe("openai-gpt-oss-120b").render(chat(ASK, turn, *results)).text
    assert re.findall("Oslo|Bergen|DRY|WET", text) == ["Oslo", "DRY", "Bergen", "WET"]
    assert any("one call each" in line for line in recipe("openai-gpt-oss-120b").report().fallbacks)


def test_ids_are_made_short_where_the_template_wants_so_and_kept_elsewhere(
    recipe: Callable[[str], ChatTemplate],
) -> None:
    text = recipe("Mistral-Small-3.2-24B-Instruct-2506").render(chat(*LOOP)).text
    made = text.split("[CALL_ID]")[1].split("[ARGS]")[0]
    assert (len(made), made.isalnum()) == (9, True)
    assert f"[TOOL_RESULTS]{made}[TOOL_CONTENT]20" in text
    assert recipe("Mistral-Small-3.2-24B-Instruct-2506").render(chat(*LOOP)).text == text
    assert '"id": "call_0123456789"' in recipe("Apriel-1.6-15b-Thinker-fixed").render(chat(*LOOP)).text


def test_ids_that_a_model_wrote_are_shown_as_it_wrote_them() -> None:
    shows = "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.id }}"
    shows += "{{ c.function.arguments | tojson }}{% endfor %}{% endfor %}"
    teaches = "{{ tools | tojson }}{{ '<|tool_calls_section_begin|>' if false }}"
    recipe = ChatTemplate(TrainedTextModel(shows + teaches, ("<s>", "</s>")))
    call = replace(CALL, id="functions.get_weather:0")
    loop = (ASK, Message(role="assistant", tool_calls=(call,)), say("tool", "20", tool_call_id=call.id))
    assert "Weather?functions.get_weather:0{" in recipe.render(chat(*loop)).text


def test_a_later_system_message_stays_where_the_template_takes_it_and_is_merged_elsewhere(
    recipe: Callable[[str], ChatTemplate],
) -> None:
    messages = (say("system", "One."), ASK, say("assistant", "20"), say("developer", "Two."), say("user", "Why?"))
    kept = recipe("Qwen-Qwen2.5-7B-Instruct").render(Conversation(messages=messages)).text
    assert "20<|im_end|>\n<|im_start|>system\nTwo.<|im_end|>" in kept
    merged = recipe("Qwen3.5-4B").render(Conversation(messages=messages)).text
    assert "<|im_start|>system\nOne.\n\nTwo.<|im_end|>" in merged
    assert any("added to the first" in line for line in recipe("Qwen3.5-4B").report().fallbacks)


def test_a_reminder_is_for_templates_that_know_it() -> None:
    knows = (
        "{% for m in messages %}{{ '<|latest_reminder|>' if m.role == 'latest_reminder' }}{{ m.content }}{% endfor %}"
    )
    recipe = ChatTemplate(TrainedTextModel(knows, ("<s>", "</s>", "<|latest_reminder|>")))
    assert (
        recipe.render(Conversation(messages=(ASK, say("reminder", "note")))).text == "Weather?<|latest_reminder|>note"
    )


def test_a_prompt_that_ends_with_an_opened_block_begins_the_answer_inside() -> None:
    opens = "{{ tools | tojson if tools }}{{ messages[0].content }}{{ '</s>' + OPENER if tools }}"
    teaches = """{{ '<tool_call>{"name" "arguments"' if false }}"""
    for opener in ("'\\n<tool_call>\\n'", "'<tool_call>'"):
        recipe = ChatTemplate(
            TrainedTextModel(teaches + opens.replace("OPENER", opener), ("<s>", "</s>", "<tool_call>"))
        )
        prompt = recipe.render(chat(ASK))
        assert prompt.start == "tool"
        answer = read(recipe, prompt, recipe.tokenizer.encode('{"name": "other", "arguments": {}}\n</tool_call>'))
        assert [call.name for call in answer.calls] == ["other"]
        assert recipe.render(Conversation(messages=(say("user", "<tool_call>"),))).start == "text"


# -- answers that are begun ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("cut", range(1, 70, 3))
def test_an_answer_that_begins_anywhere_goes_on_from_there(smollm2: ChatTemplate, cut: int) -> None:
    whole = 'Well <tool_cal done.\n<tool_call>\n{"name": "other", "arguments": {"a": "b"}}\n</tool_call>'
    begun, rest = whole[:cut], whole[cut:]
    prompt = smollm2.render(chat(ASK, say("assistant", begun, prefix=True)))
    assert (prompt.begun, prompt.start) == (begun, "text")
    assert prompt.text.endswith(f"assistant\n{begun}")
    parser = smollm2.parser(prompt)
    events = [event for token in smollm2.tokenizer.encode(rest) for event in parser.feed((token,))]
    answer = answer_of([*events, *parser.finish("stop")])
    assert [(call.name, call.arguments) for call in answer.calls] == [("other", '{"a": "b"}')]
    assert begun[: whole.index("\n")] + answer.text == "Well <tool_cal done."


def test_calls_that_a_beginning_holds_whole_are_not_the_models(smollm2: ChatTemplate) -> None:
    begun = '<tool_call>\n{"name": "other", "arguments": {"a": "b"}}\n</tool_call>'
    for more, text in (("", "ok"), (" and <tool_call>", '\n{"name": "other"}')):
        prompt = smollm2.render(chat(ASK, say("assistant", begun + more, prefix=True)))
        answer = read(smollm2, prompt, smollm2.tokenizer.encode(text))
        assert answer.calls == []
        assert answer.text == text
    prompt = smollm2.render(chat(ASK, say("assistant", begun, prefix=True)))
    answer = read(smollm2, prompt, smollm2.tokenizer.encode(begun))
    assert [call.name for call in answer.calls] == ["other"]


def test_a_beginning_and_a_demand_cannot_both_be_met(smollm2: ChatTemplate) -> None:
    with pytest.raises(UnsupportedFieldError) as caught:
        smollm2.render(chat(ASK, say("assistant", "a", prefix=True), tool_choice=ToolChoice(mode="required")))
    assert caught.value.param == "messages[1].prefix"
