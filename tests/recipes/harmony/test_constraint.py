"""What an answer must match, channels included: what gpt-oss writes is accepted, and nothing that breaks the demand."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from deepinfra.core.conversation import Constraint, Conversation, Message, TextPart, ToolChoice, ToolDefinition
from deepinfra.core.request import Prompt
from deepinfra.errors import UnsupportedFieldError
from deepinfra.recipes import Harmony
from deepinfra.testing.textmodel import TrainedTextModel

MARKERS = ("<|start|>", "<|message|>", "<|end|>", "<|channel|>", "<|constrain|>", "<|call|>")
THOUGHT = ("<|channel|>", "analysis", "<|message|>", "Hm. <|end|> typed", "<|end|>", "<|start|>", "assistant")
FINAL = ("<|channel|>", "final", "<|message|>")
TOOLS = (
    ToolDefinition(
        name="f",
        parameters={"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]},
        strict=True,
    ),
    ToolDefinition(name="g", parameters={"type": "object", "properties": {"s": {"type": "string"}}}),
)
ASK = Conversation(messages=(Message(role="user", content=(TextPart("a"),)),), tools=TOOLS)
SCHEMA = Constraint(kind="json_schema", source=json.dumps({"type": "object", "properties": {"a": {"type": "integer"}}}))


class Words:
    """The recipe's vocabulary as llguidance reads it."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, recipe: Harmony) -> None:
        self._encode = recipe.tokenizer.encode
        self.eos_token_id = size = recipe.tokenizer.vocab_size
        control = {token for _, token in recipe.report().control} | {size}
        data = [recipe.tokenizer.token_bytes(token) for token in range(size)]
        self.tokens = [f"<[{i}]>".encode() if i in control else text for i, text in enumerate([*data, b""])]
        self.special_token_ids = sorted(control)

    def __call__(self, text: str | bytes) -> list[int]:
        return self._encode(text if isinstance(text, str) else text.decode())


@pytest.fixture(scope="module")
def small() -> Harmony:
    return Harmony(TrainedTextModel(None, ("<|endoftext|>", "<|return|>", *MARKERS)))


@pytest.fixture(scope="module")
def vocabulary(small: Harmony) -> LLTokenizer:
    words = Words(small)
    return LLTokenizer(TokenizerWrapper(words), n_vocab=len(words.tokens))


def accepts(recipe: Harmony, vocabulary: LLTokenizer, prompt: Prompt, *parts: str) -> bool:
    """Whether an answer of these parts, whole, is what the prompt's constraint allows."""
    assert prompt.constraint is not None
    assert prompt.constraint.kind == "grammar"
    matcher = LLMatcher(vocabulary, LLMatcher.grammar_from_lark(prompt.constraint.source), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    control = dict(recipe.report().control)
    for part in parts:
        for token in [control[part]] if part in control else recipe.tokenizer.encode(part):
            if matcher.try_consume_tokens([token]) != 1:
                return False
    return bool(matcher.is_accepting())


def call(name: str, arguments: str) -> tuple[str, ...]:
    return "<|channel|>", f"commentary to=functions.{name} ", "<|constrain|>", "json", "<|message|>", arguments


def test_a_demanded_call_comes_with_reasoning_or_without_and_fits_its_schema(
    small: Harmony, vocabulary: LLTokenizer
) -> None:
    prompt = small.render(replace(ASK, tool_choice=ToolChoice(mode="required")))
    early = (" to=functions.f", "<|channel|>", "commentary ", "<|constrain|>", "json", "<|message|>", '{"n": 1}')
    for parts, wanted in (
        (call("f", '{"n": 1}'), True),
        ((*THOUGHT, *call("f", '{"n": 1}')), True),
        ((*THOUGHT, *early), True),
        ((*THOUGHT, *call("g", '{"s": "x"}')), True),
        (call("f", '{"n": "1"}'), False),
        (call("f", "{}"), False),
        (call("h", "{}"), False),
        ((*THOUGHT, *FINAL, "no call"), False),
        (THOUGHT, False),
        (("plain",), False),
    ):
        assert accepts(small, vocabulary, prompt, *parts) == wanted, parts


def test_a_named_call_is_that_call(small: Harmony, vocabulary: LLTokenizer) -> None:
    prompt = small.render(replace(ASK, tool_choice=ToolChoice(mode="required", names=("g",))))
    assert accepts(small, vocabulary, prompt, *call("g", "{}"))
    assert not accepts(small, vocabulary, prompt, *call("f", '{"n": 1}'))


def test_a_strict_tool_binds_its_calls_and_leaves_answers_free(small: Harmony, vocabulary: LLTokenizer) -> None:
    prompt = small.render(ASK)
    assert accepts(small, vocabulary, prompt, *THOUGHT, *FINAL, "Any words.")
    assert accepts(small, vocabulary, prompt, *call("g", '{"other": [1]}'))
    assert not accepts(small, vocabulary, prompt, *call("f", '{"n": null}'))
    assert small.render(replace(ASK, tools=TOOLS[1:])).constraint is None


def test_a_schema_binds_the_final_channel_only(small: Harmony, vocabulary: LLTokenizer) -> None:
    prompt = small.render(replace(ASK, tools=(), constraint=SCHEMA))
    assert accepts(small, vocabulary, prompt, *THOUGHT, *FINAL, '{"a": 1}')
    assert accepts(small, vocabulary, prompt, *FINAL, '{"a": 1}')
    assert not accepts(small, vocabulary, prompt, *FINAL, '{"a": "x"}')
    assert not accepts(small, vocabulary, prompt, *FINAL, "Sure!")
    assert not accepts(small, vocabulary, prompt, '{"a": 1}')


def test_where_the_answers_text_has_begun_the_constraint_is_the_requests_own(small: Harmony) -> None:
    silent = replace(ASK, tools=(), constraint=SCHEMA, effort="none")
    assert small.render(silent).constraint == SCHEMA
    begun = Message(role="assistant", content=(TextPart("{"),), prefix=True)
    forced = replace(ASK, messages=(*ASK.messages, begun), tool_choice=ToolChoice(mode="required"))
    with pytest.raises(UnsupportedFieldError) as caught:
        small.render(forced)
    assert caught.value.param == "tool_choice"


def test_a_thought_that_was_begun_goes_on_before_the_call(small: Harmony, vocabulary: LLTokenizer) -> None:
    begun = Message(role="assistant", reasoning="Hm", prefix=True)
    prompt = small.render(replace(ASK, messages=(*ASK.messages, begun), tool_choice=ToolChoice(mode="required")))
    assert accepts(small, vocabulary, prompt, ", so.", "<|end|>", "<|start|>", "assistant", *call("f", '{"n": 1}'))
    assert not accepts(small, vocabulary, prompt, *call("f", '{"n": 1}'))
