from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import pytest

from deepinfra.core.conversation import Conversation, MediaPart, Message, TextPart
from deepinfra.core.request import TextInput
from deepinfra.errors import ModelError
from deepinfra.recipes.deepseek.dialect import DIALECTS
from deepinfra.recipes.deepseek.recipe import DeepSeek
from deepinfra.testing.conversations import BENIGN
from deepinfra.testing.textmodel import TrainedTextModel

Shared = Callable[[str], DeepSeek]


def say(role: Any, text: str, **more: Any) -> Message:
    return Message(role=role, content=(TextPart(text),), **more)


def test_a_vocabulary_without_a_control_token_is_refused_when_it_is_loaded() -> None:
    old = TrainedTextModel(None, DIALECTS["v4"].control)
    assert DeepSeek(old, version="v4").version
    with pytest.raises(
        ModelError, match=r"'trained' is not that of DeepSeek v4\.1: it lacks <｜System｜>, <｜image｜>"
    ):
        _ = DeepSeek(old, version="v4.1").tokenizer


def test_versions_of_the_format_have_versions_of_their_own() -> None:
    both = TrainedTextModel(None, DIALECTS["v4.1"].control)
    versions = [DeepSeek(both, version=version).version for version in DIALECTS]
    assert len(set(versions)) == 2
    assert DeepSeek(both, version="v4.1", effort="none").version in versions


def test_a_recipe_can_ask_for_another_effort_by_default() -> None:
    model = TrainedTextModel(None, DIALECTS["v4"].control)
    quiet, usual = DeepSeek(model, effort="none"), DeepSeek(model)
    question = Conversation(messages=(say("user", "q"),))
    assert quiet.render(question).text.endswith("<｜Assistant｜></think>")
    assert usual.render(question).text.endswith("<｜Assistant｜><think>")
    wanted = Conversation(messages=question.messages, effort="low")
    assert quiet.render(wanted) == usual.render(wanted)


def test_images_are_bound_to_their_tokens(shared: Shared) -> None:
    recipe = shared("v4.1")
    images = [MediaPart(data=b"x", digest=digest, media_type="image/png") for digest in (b"1", b"2")]
    content = (TextPart("<｜image｜>"), images[0], TextPart("and"), images[1])
    prompt = recipe.render(Conversation(messages=(Message(role="user", content=content),)))
    image = dict(recipe.report().control)["<｜image｜>"]
    assert [digest for _, digest in prompt.media] == [b"1", b"2"]
    assert [position for position, _ in prompt.media] == [at for at, token in enumerate(prompt.ids) if token == image]


def test_an_answer_ends_at_the_models_end_of_sentence(recipe: DeepSeek) -> None:
    prompt = recipe.render(Conversation(messages=(say("user", "q"),)))
    assert prompt.stop_ids == recipe.tokenizer.eos_ids == {1}


def test_prefixes_worth_keeping_end_where_turns_begin(recipe: DeepSeek) -> None:
    turns = (say("system", "s"), say("user", "u"), say("assistant", "a"), say("user", "v"))
    prompt = recipe.render(Conversation(messages=turns, effort="none"))
    longer = recipe.render(Conversation(messages=(*turns, say("assistant", "b"), say("user", "w")), effort="none"))
    assert set(prompt.breakpoints) < set(longer.breakpoints)
    assert longer.ids[: len(prompt.ids)] == prompt.ids
    begin = {"<｜User｜>", "<｜Assistant｜>", "<｜System｜>"}
    spelled = {token: text for text, token in recipe.report().control}
    assert {spelled[prompt.ids[position]] for position in prompt.breakpoints} <= begin


def test_bare_text_has_no_control_token_and_all_its_output_is_text(recipe: DeepSeek) -> None:
    prompt = recipe.text(TextInput("once <think> upon"))
    assert prompt.control == ()
    assert prompt.start == "raw"
    think = dict(recipe.report().control)["<think>"]
    assert think not in prompt.ids
    assert "".join(event.text for event in recipe.parser(prompt).feed([think])) == "<think>"


def test_a_report_says_what_is_protected_and_what_cannot_be(recipe: DeepSeek, version: str) -> None:
    report = recipe.report()
    assert len(report.control) >= 1283
    assert ("<think>", 128821) in report.control
    assert any("<tool_result>" in fence for fence in report.fences)
    assert any('name="' in fence for fence in report.fences)
    assert report.reasoning == ("<think>", "</think>")
    assert report.tools == {"v4": "dsml", "v4.1": "dsml-4.1"}[version]
    assert report.injectable == ()
    assert any("Unsupported Image" in quirk for quirk in report.quirks) == (version == "v4")


def test_the_next_turn_of_a_long_chat_costs_a_tenth_of_its_first(shared: Shared) -> None:
    """200,000 characters; the processor's time of this thread, the best of ten turns. Measured: a hundredth."""
    recipe = shared("v4")
    draw = random.Random(1)
    turns: list[Message] = []
    length = 0
    while length < 200_000:
        for role in ("user", "assistant"):
            text = " ".join(draw.choices(BENIGN, k=draw.randrange(1, 120)))
            length += len(text)
            turns.append(say(role, text))
    costs: list[float] = []
    first = 0.0
    for turn in range(10):
        turns.append(say("user", f"and {turn}?"))
        conversation = Conversation(messages=tuple(turns), effort="none")
        if turn == 0:
            begin = time.thread_time()
            recipe.render(Conversation(messages=tuple(turns[:-1]), effort="none"))
            first = time.thread_time() - begin
        begin = time.thread_time()
        prompt = recipe.render(conversation)
        costs.append(time.thread_time() - begin)
        turns.append(say("assistant", f"answer {turn}"))
    assert len(prompt.text) > 200_000
    assert min(costs) * 10 < first
