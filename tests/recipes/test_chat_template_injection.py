"""Whatever a person types stays text, in every field; text without markers has the ids that transformers gives it."""

from __future__ import annotations

import json
import random
import unicodedata
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from deepinfra.core.conversation import Conversation, Message, TextPart, ToolChoice
from deepinfra.core.request import Prompt
from deepinfra.models import open_model
from deepinfra.recipes import ChatTemplate
from deepinfra.recipes.chat_template.loading import TextModel
from deepinfra.testing.conversations import BENIGN, conversation, hostile_words
from deepinfra.testing.deepseek import DeepSeekTextModel
from deepinfra.testing.textmodel import TrainedTextModel

TEMPLATES = Path(__file__).parents[1] / "data" / "templates"
MODELS = ("smollm2", "deepseek-v4", "byte-level", "sentencepiece", "unigram", "folded")
QWEN = ("<|endoftext|>", "<|im_end|>", "<|im_start|>", "<tool_call>", "</tool_call>", "<|vision_start|>")


@cache
def model_of(name: str, smollm2: Path) -> tuple[TextModel, str]:
    if name == "smollm2":
        model: Any = open_model(str(smollm2))
        return model, model.chat_template()
    if name == "deepseek-v4":
        return DeepSeekTextModel(), (TEMPLATES / "deepseek-ai-DeepSeek-V4.jinja").read_text()
    source = (TEMPLATES / "Qwen-Qwen2.5-7B-Instruct.jinja").read_text()
    kind: Any = "byte-level" if name == "folded" else name
    return TrainedTextModel(source, QWEN, kind=kind, special=False, folded=name == "folded"), source


@cache
def recipe_of(name: str, smollm2: Path) -> ChatTemplate:
    model, source = model_of(name, smollm2)
    return ChatTemplate(model, template=source)


@pytest.fixture(params=MODELS)
def model_name(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def recipe(model_name: str, smollm2_path: Path) -> ChatTemplate:
    return recipe_of(model_name, smollm2_path)


def markers(recipe: ChatTemplate) -> list[str]:
    """Control tokens of the model: all that mean something, some of the thousand that only hold places."""
    spelled = [token for token, _ in recipe.report().control]
    named = [token for token in spelled if "hold" not in token]
    return [*named, *spelled[::100]]


def control(prompt: Prompt) -> list[int]:
    return [prompt.ids[position] for position in prompt.control]


def gaps(recipe: ChatTemplate, prompt: Prompt) -> Iterator[tuple[str, str]]:
    """What stands between control tokens: as text, and as its ids spell it."""
    begins, ends = (0, *(end for _, end in prompt.ranges)), (*(start for start, _ in prompt.ranges), len(prompt.text))
    places = pairwise((-1, *prompt.control, len(prompt.ids)))
    for (begin, end), (before, behind) in zip(zip(begins, ends, strict=True), places, strict=True):
        ids = prompt.ids[before + 1 : behind]
        yield prompt.text[begin:end], b"".join(map(recipe.tokenizer.token_bytes, ids)).decode()


def made(seed: int, say: Callable[[], str]) -> Conversation:
    """Without effort, which not every template reads."""
    return replace(conversation(random.Random(seed), say), effort=None)


# -- hostile ------------------------------------------------------------------------------------------------------


def folded(text: str) -> str:
    """What the model of that name makes of a text before it looks for tokens."""
    return unicodedata.normalize("NFKC", text).lower()


def check_hostile(name: str, recipe: ChatTemplate, seeds: range) -> None:
    """The same conversations said harmlessly and with markers in every field."""
    known, ids = markers(recipe), {token for _, token in recipe.report().control}
    for seed in seeds:
        hostile = made(seed, hostile_words(random.Random(-seed - 1), known))
        benign = recipe.render(made(seed, lambda: "x"))
        prompt = recipe.render(hostile)
        assert control(prompt) == control(benign), hostile
        marked = set(prompt.control)
        assert not any(token in ids for index, token in enumerate(prompt.ids) if index not in marked), hostile
        for text, said in gaps(recipe, prompt):
            text = folded(text) if name == "folded" else text
            assert said in (text, f" {text}" if name in ("sentencepiece", "unigram") else text), hostile
        for message in hostile.messages:
            if message.role in ("user", "system"):
                assert message.text.strip() in prompt.text, hostile


def test_hostile_conversations_change_no_control_token(model_name: str, recipe: ChatTemplate) -> None:
    check_hostile(model_name, recipe, range(60))


@pytest.mark.slow
def test_two_thousand_hostile_conversations_change_no_control_token(model_name: str, recipe: ChatTemplate) -> None:
    check_hostile(model_name, recipe, range(60, 2_060))


@settings(deadline=None, max_examples=100)
@given(data=st.data())
def test_any_text_comes_back_as_it_was_typed(smollm2_path: Path, data: st.DataObject) -> None:
    recipe = recipe_of("byte-level", smollm2_path)  # SmolLM2's own vocabulary lacks some bytes
    piece = st.one_of(st.text(max_size=8), st.sampled_from(markers(recipe)), st.sampled_from(("<|im_", "start|>", "|")))
    typed = st.lists(piece, min_size=1, max_size=5).map("".join)
    turns = data.draw(st.lists(st.tuples(st.lists(typed, min_size=1, max_size=3), typed), min_size=1, max_size=2))
    messages: list[Message] = []
    for question, answer in turns:
        messages.append(Message(role="user", content=tuple(map(TextPart, question))))
        messages.append(Message(role="assistant", content=(TextPart(answer),)))
    plain = tuple(replace(message, content=(TextPart("x"),)) for message in messages)
    prompt = recipe.render(Conversation(messages=tuple(messages)))
    assert control(prompt) == control(recipe.render(Conversation(messages=plain)))
    assert all(text == said for text, said in gaps(recipe, prompt))
    said = [
        prompt.text[end:start] for (_, end), (start, _) in zip(prompt.ranges[2:-1:2], prompt.ranges[3::2], strict=True)
    ]
    assert said == [f"{message.role}\n{message.text}" for message in messages]


# -- benign -------------------------------------------------------------------------------------------------------


def as_transformers_takes_it(asked: Conversation) -> dict[str, Any]:
    """The conversation as a user of transformers writes it."""
    messages = []
    names = {call.id: call.name for message in asked.messages for call in message.tool_calls}
    for message in asked.messages:
        said: dict[str, Any] = {"role": message.role, "content": message.text}
        if message.role == "tool":
            said["name"] = names.get(message.tool_call_id or "")
        if message.reasoning is not None:
            said["reasoning_content"] = message.reasoning
        if message.tool_calls:
            said["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": json.loads(call.arguments)},
                }
                for call in message.tool_calls
            ]
        messages.append(said)
    tools = [
        {"type": "function", "function": {"name": t.name, "description": t.description, "parameters": t.parameters}}
        for t in asked.tools
    ]
    return {"conversation": messages, "tools": tools or None}


def is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def without(asked: Conversation, tools: bool) -> Conversation:
    """What transformers has no idea of is left out: errors, broken JSON, developers, a response format."""

    def plain(message: Message) -> Message:
        calls = tuple(call if is_json(call.arguments) else replace(call, arguments="{}") for call in message.tool_calls)
        role = "system" if message.role == "developer" else message.role
        return replace(message, role=role, is_error=False, tool_calls=calls)

    messages = tuple(map(plain, asked.messages))
    if not tools:
        messages = tuple(replace(message, tool_calls=()) for message in messages if message.role != "tool")
    declared = tuple(replace(tool, description=tool.description or "d") for tool in asked.tools) if tools else ()
    return replace(asked, messages=messages, tools=declared, constraint=None, tool_choice=ToolChoice())


def check_benign(name: str, smollm2: Path, seeds: range) -> None:
    model, source = model_of(name, smollm2)
    special = model.special_tokens()
    oracle = PreTrainedTokenizerFast(
        tokenizer_object=model.tokenizer(),
        chat_template=source,
        bos_token=special.bos_token,
        eos_token=special.eos_token,
    )
    recipe = recipe_of(name, smollm2)
    for seed in seeds:
        words = random.Random(-seed - 1)
        asked = without(made(seed, lambda words=words: words.choice(BENIGN)), tools=name != "smollm2")
        wanted = oracle.apply_chat_template(
            **as_transformers_takes_it(asked), tokenize=True, add_generation_prompt=True, return_dict=False
        )
        assert list(recipe.render(asked).ids) == wanted, asked


def test_text_without_markers_has_the_ids_of_transformers(model_name: str, smollm2_path: Path) -> None:
    check_benign(model_name, smollm2_path, range(60))


@pytest.mark.slow
def test_two_thousand_conversations_without_markers_have_the_ids_of_transformers(
    model_name: str, smollm2_path: Path
) -> None:
    check_benign(model_name, smollm2_path, range(60, 2_060))
