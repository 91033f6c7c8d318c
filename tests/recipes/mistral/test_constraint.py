"""What an answer must match, in the formats that Mistral's versions write."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from deepinfra.core.conversation import Constraint, Conversation, Message, TextPart, ToolChoice, ToolDefinition
from deepinfra.recipes import Mistral

TOOL = ToolDefinition(
    name="f", parameters={"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
)
ASK = Conversation(messages=(Message(role="user", content=(TextPart("a"),)),), tools=(TOOL,))
FORCED = replace(ASK, tool_choice=ToolChoice(mode="required"))


class Words:
    """A recipe's vocabulary as llguidance reads it."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, recipe: Mistral) -> None:
        self._encode = recipe.tokenizer.encode
        self.eos_token_id = size = recipe.tokenizer.vocab_size
        data = [recipe.tokenizer.token_bytes(token) for token in range(size)]
        self.tokens = [text or f"<[{i}]>".encode() for i, text in enumerate([*data, b""])]
        self.special_token_ids = [i for i, text in enumerate([*data, b""]) if not text]

    def __call__(self, text: str | bytes) -> list[int]:
        return self._encode(text if isinstance(text, str) else text.decode())


def accepts(recipe: Mistral, conversation: Conversation, *parts: str) -> bool:
    constraint = recipe.render(conversation).constraint
    assert constraint is not None
    assert constraint.kind == "grammar"
    words = Words(recipe)
    vocabulary = LLTokenizer(TokenizerWrapper(words), n_vocab=len(words.tokens))
    matcher = LLMatcher(vocabulary, LLMatcher.grammar_from_lark(constraint.source), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    control = dict(recipe.report().control)
    for part in parts:
        for token in [control[part]] if part in control else recipe.tokenizer.encode(part):
            if matcher.try_consume_tokens([token]) != 1:
                return False
    return bool(matcher.is_accepting())


@pytest.mark.parametrize(
    ("numbered", "head"),
    [("v11", ("f", "[CALL_ID]", "AbC123xyz", "[ARGS]")), ("v13", ("f", "[ARGS]")), ("v15", ("f", "[ARGS]"))],
)
def test_a_demanded_call_is_written_as_the_version_writes_it(
    numbered: str, head: tuple[str, ...], recipe_of: Callable[[str], Mistral]
) -> None:
    recipe = recipe_of(numbered)
    assert accepts(recipe, FORCED, "[TOOL_CALLS]", *head, '{"n": 1}')
    assert not accepts(recipe, FORCED, "[TOOL_CALLS]", *head, '{"n": "x"}')
    assert not accepts(recipe, FORCED, "no call")


def test_a_demanded_call_in_a_list_is_a_list(recipe_of: Callable[[str], Mistral]) -> None:
    recipe = recipe_of("v3-tekken")
    assert accepts(recipe, FORCED, "[TOOL_CALLS]", '[{"name": "f", "arguments": {"n": 1}}]')
    assert not accepts(recipe, FORCED, "[TOOL_CALLS]", '[{"name": "g", "arguments": {"n": 1}}]')


def test_reasoning_stays_free_before_a_schema(recipe_of: Callable[[str], Mistral]) -> None:
    recipe = recipe_of("v13")
    wanted = replace(ASK, tools=(), constraint=Constraint(kind="json"))
    assert accepts(recipe, wanted, "[THINK]", "What {", "[/THINK]", '{"a": 1}')
    assert accepts(recipe, wanted, '{"a": 1}')
    assert not accepts(recipe, wanted, "[THINK]", "What {", "[/THINK]", "Sure")
    assert recipe_of("v7").render(wanted).constraint == Constraint(kind="json")
