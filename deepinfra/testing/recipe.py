"""Conformance of recipes: the laws that let a server hand them whatever a person typed."""

from __future__ import annotations

import itertools
import random
from abc import abstractmethod
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from typing import Any

import pytest

from deepinfra.core.conversation import Conversation, Message, TextPart, ToolCall, ToolDefinition
from deepinfra.core.events import Event, ReasoningDelta, TextDelta, TokenLogprobs, ToolArgumentsDelta
from deepinfra.core.request import Prompt, TextInput
from deepinfra.errors import RequestError
from deepinfra.interfaces.given import ThreadOffload
from deepinfra.interfaces.recipe import Recipe
from deepinfra.testing.answers import answer_of

__all__ = ("RecipeConformance", "merged")

_TEXTS = (
    "",
    "Hello",
    " leading and trailing ",
    "line\n\n\tline\r\n",
    "12 + 30 = 42, 1000000",
    "naïve Ünïcödé 日本語 한국어 🙂🤷🏽‍♀️",
    'def f(x):\n    return {"a": [1, 2]}  # <b>&amp;</b>',
    "</s> <s> <|im_end|> [INST] <think> </think>",
    "\ue000\ue0f0 private \uf8ff",
)

_ARGUMENTS = (
    "",
    "null",
    "[1, 2]",
    "not JSON",
    '{"a": "\\ud800"}',
    '{"\\udfff": 1}',
    '{"a": NaN, "b": 1e999}',
    '{"a": ' + "9" * 5000 + "}",
    '{"a": ' * 2000 + "1" + "}" * 2000,
    '{"a": 1, "a": "\\u0000\\u2028"}',
)
"""Arguments of calls as models and clients write them now and then."""


def merged(events: Sequence[Event]) -> list[Event]:
    """Neighbouring deltas of one kind joined: what a client can tell apart."""
    joined: list[Event] = []
    for event in events:
        last = joined[-1] if joined else None
        if isinstance(event, (TextDelta, ReasoningDelta)) and type(last) is type(event):
            assert isinstance(last, (TextDelta, ReasoningDelta))
            joined[-1] = replace(last, text=last.text + event.text, tokens=last.tokens + event.tokens)
        elif isinstance(event, ToolArgumentsDelta) and isinstance(last, ToolArgumentsDelta):
            joined[-1] = replace(last, arguments=last.arguments + event.arguments)
        else:
            joined.append(event)
    return joined


def _ask(text: str, **more: Any) -> Message:
    return Message(role="user", content=(TextPart(text),), **more)


def _answer(text: str) -> Message:
    return Message(role="assistant", content=(TextPart(text),))


@pytest.mark.anyio
class RecipeConformance:
    """Every law of `Recipe` as a test: `class TestMine(RecipeConformance): def make(self): return Mine(...)`."""

    markers: Sequence[str] = ()
    """Spellings of the recipe's control tokens; typed by the tests into every field they can."""

    extends = True
    """Whether a longer conversation's ids begin with a shorter one's and its answer's, as most templates have it."""

    rounds = 300
    """Random examples of each law that draws some."""

    @abstractmethod
    def make(self) -> Recipe:
        """A new recipe, not entered; each call builds the same."""

    @pytest.fixture
    async def recipe(self, anyio_backend: object) -> AsyncGenerator[Recipe]:
        """An entered recipe."""
        async with self.make() as recipe:
            yield recipe

    # -- tokenizer --------------------------------------------------------------------------------

    @pytest.mark.parametrize("text", _TEXTS)
    async def test_bytes_of_encoded_text_are_the_text(self, recipe: Recipe, text: str) -> None:
        """A tokenizer of words may add one space in front."""
        data = b"".join(map(recipe.tokenizer.token_bytes, recipe.tokenizer.encode(text)))
        assert data.decode().removeprefix("" if text.startswith(" ") else " ") == text or data.decode() == " " + text

    async def test_ids_lie_in_the_vocabulary(self, recipe: Recipe) -> None:
        """Every id has bytes, those outside raise `IndexError`."""
        tokenizer = recipe.tokenizer
        assert all(isinstance(tokenizer.token_bytes(token), bytes) for token in range(tokenizer.vocab_size))
        for token in (-1, tokenizer.vocab_size):
            with pytest.raises(IndexError):
                tokenizer.token_bytes(token)
        assert tokenizer.eos_ids
        assert all(0 <= token < tokenizer.vocab_size for token in tokenizer.eos_ids)

    async def test_bare_text_makes_no_control_token_but_the_first(self, recipe: Recipe) -> None:
        """BOS may lead; markers in the text stay text."""
        prompt = recipe.text(TextInput("a" + "".join(self.markers)))
        assert set(prompt.control) <= {0}
        control = self.control_ids(recipe)
        assert not control.intersection(prompt.ids[len(prompt.control) :])
        assert not control.intersection(recipe.tokenizer.encode("".join(self.markers)))

    # -- rendering --------------------------------------------------------------------------------

    def control_ids(self, recipe: Recipe) -> set[int]:
        """Ids of every control token that a simple conversation shows, and of those that end an answer."""
        prompt = recipe.render(Conversation(messages=(_ask("a"), _answer("b"), _ask("c"))))
        return {prompt.ids[position] for position in prompt.control} | set(recipe.tokenizer.eos_ids)

    async def test_rendering_is_pure(self, recipe: Recipe) -> None:
        """The same conversation gives the same prompt, from any thread, whatever was rendered in between."""
        conversations = [Conversation(messages=(_ask(text),)) for text in _TEXTS]
        first = [recipe.render(conversation) for conversation in conversations]
        again = [recipe.render(conversation) for conversation in reversed(conversations)][::-1]
        threads = [await ThreadOffload()(recipe.render, conversation) for conversation in conversations]
        assert first == again == threads

    async def test_version_is_the_same_for_the_same_recipe(self, recipe: Recipe) -> None:
        """It is part of every key, so it must not depend on the process or the object."""
        assert recipe.version
        async with self.make() as other:
            assert other.version == recipe.version

    async def test_control_positions_are_ascending_and_inside(self, recipe: Recipe) -> None:
        """And nothing outside them is a control id."""
        for text in _TEXTS:
            prompt = recipe.render(Conversation(messages=(_ask(text), _answer(text), _ask(text))))
            assert list(prompt.control) == sorted(set(prompt.control))
            assert all(0 <= position < len(prompt.ids) for position in prompt.control)
            assert list(prompt.breakpoints) == sorted(set(prompt.breakpoints))
            assert all(0 < length <= len(prompt.ids) for length in prompt.breakpoints)
            assert prompt.stop_ids
            control = self.control_ids(recipe)
            assert all((index in prompt.control) == (token in control) for index, token in enumerate(prompt.ids))

    async def test_typed_markers_change_no_control_token(self, recipe: Recipe) -> None:
        """Markers whole, cut over two parts, nested and in every turn."""
        draw = random.Random(11)
        pieces = [*self.markers, *(marker[: len(marker) // 2] for marker in self.markers), *_TEXTS]
        wanted = _control(recipe.render(Conversation(messages=(_ask("a"), _answer("b"), _ask("c")))))
        for _ in range(self.rounds):
            messages = []
            for ask in (_ask, _answer, _ask):
                junk = "".join(draw.choices(pieces, k=draw.randrange(1, 6))) or "x"
                cut = draw.randrange(len(junk) + 1)
                messages.append(replace(ask(""), content=(TextPart(junk[:cut]), TextPart(junk[cut:]))))
            prompt = recipe.render(Conversation(messages=tuple(messages)))
            assert _control(prompt) == wanted, messages

    @pytest.mark.parametrize("arguments", _ARGUMENTS, ids=lambda arguments: arguments[:20])
    async def test_odd_arguments_of_a_call_are_shown_or_refused(self, recipe: Recipe, arguments: str) -> None:
        """Whatever a model wrote, and a client sends back, fails in no other way."""
        call = ToolCall(id="call00001", name="f", arguments=arguments)
        result = Message(role="tool", content=(TextPart("r"),), tool_call_id=call.id)
        turns = (_ask("a"), Message(role="assistant", tool_calls=(call,)), result, _ask("b"))
        try:
            prompt = recipe.render(Conversation(messages=turns, tools=(ToolDefinition(name="f"),)))
        except RequestError:
            return
        assert prompt.text.encode()

    async def test_a_longer_conversation_extends_the_shorter_one(self, recipe: Recipe) -> None:
        """So that the next turn finds its prefix in the cache."""
        messages: tuple[Message, ...] = (_ask("What is 12 + 30?"),)
        for turn in range(3):
            prompt = recipe.render(Conversation(messages=messages))
            answer = f"It is {42 + turn}."
            messages = (*messages, _answer(answer), _ask("And now?"))
            longer = recipe.render(Conversation(messages=messages)).ids
            known = (*prompt.ids, *recipe.tokenizer.encode(answer))
            if self.extends:
                assert longer[: len(known)] == known

    # -- parsing ----------------------------------------------------------------------------------

    def outputs(self, recipe: Recipe) -> list[list[int]]:
        """Answers to parse: sensible text, and random ids without those that end an answer."""
        draw = random.Random(5)
        tokens = [token for token in range(recipe.tokenizer.vocab_size) if token not in recipe.tokenizer.eos_ids]
        shown = [token for token in tokens if len(recipe.tokenizer.token_bytes(token)) == 1]
        made = [recipe.tokenizer.encode(text + "".join(self.markers) + text) for text in _TEXTS]
        made += [draw.choices(draw.choice((tokens, shown)), k=draw.randrange(1, 24)) for _ in range(self.rounds)]
        return made

    async def test_events_do_not_depend_on_how_the_ids_are_cut(self, recipe: Recipe) -> None:
        """One by one, all at once, and cut at random, with the logprobs of each id."""
        draw = random.Random(6)
        prompt = recipe.render(Conversation(messages=(_ask("a"),)))
        for ids in self.outputs(recipe):
            probs = [TokenLogprobs(token, recipe.tokenizer.token_bytes(token), -1.0) for token in ids]
            cuts = sorted(draw.choices(range(len(ids) + 1), k=3))
            whole = _parse(recipe, prompt, ids, probs, [])
            assert _parse(recipe, prompt, ids, probs, list(range(len(ids)))) == whole
            assert _parse(recipe, prompt, ids, probs, cuts) == whole

    async def test_calls_are_whole_or_not_ended_however_the_ids_are_cut(self, recipe: Recipe) -> None:
        """A call begins with a name, goes on one at a time, and has an object for arguments when it ends."""
        draw = random.Random(7)
        tool = ToolDefinition(name="f", parameters={"type": "object", "properties": {"a": {"type": "string"}}})
        try:
            prompt = recipe.render(Conversation(messages=(_ask("a"),), tools=(tool,)))
        except RequestError:
            return  # refused by name is honest
        for ids in self.outputs(recipe):
            cuts = sorted(draw.choices(range(len(ids) + 1), k=3))
            whole = _parse(recipe, prompt, ids, [], [])
            assert _parse(recipe, prompt, ids, [], cuts) == whole
            answer_of(whole)

    async def test_text_is_what_decoding_the_whole_gives(self, recipe: Recipe) -> None:
        """Bytes of unfinished characters included; every id's logprobs arrive once, in order."""
        prompt = recipe.text(TextInput("a"))
        for ids in self.outputs(recipe):
            probs = [TokenLogprobs(token, b"", -float(index)) for index, token in enumerate(ids)]
            events = _parse(recipe, prompt, ids, probs, list(range(0, len(ids), 2)))
            assert all(isinstance(event, TextDelta) for event in events)
            text = "".join(event.text for event in events if isinstance(event, TextDelta))
            assert text == b"".join(map(recipe.tokenizer.token_bytes, ids)).decode(errors="replace")
            entries = [entry for event in events if isinstance(event, TextDelta) for entry in event.tokens]
            assert entries == probs

    async def test_answers_do_not_share_a_parser(self, recipe: Recipe) -> None:
        """Two answers parsed in turns give what each gives alone, under its own number."""
        prompt = recipe.render(Conversation(messages=(_ask("a"),)))
        for one, two in itertools.pairwise(self.outputs(recipe)[:20]):
            first, second = recipe.parser(prompt, 0), recipe.parser(prompt, 1)
            events: tuple[list[Event], list[Event]] = ([], [])
            for a, b in itertools.zip_longest(one, two):
                events[0].extend(first.feed([a]) if a is not None else ())
                events[1].extend(second.feed([b]) if b is not None else ())
            events[0].extend(first.finish("stop"))
            events[1].extend(second.finish("length"))
            assert merged(events[0]) == _parse(recipe, prompt, one, [], [])
            assert all(event.choice == 1 for event in events[1])


def _control(prompt: Prompt) -> list[int]:
    return [prompt.ids[position] for position in prompt.control]


def _parse(
    recipe: Recipe, prompt: Prompt, ids: Sequence[int], probs: Sequence[TokenLogprobs], cuts: Sequence[int]
) -> list[Event]:
    parser = recipe.parser(prompt)
    events: list[Event] = []
    for start, end in itertools.pairwise((0, *cuts, len(ids))):
        events += parser.feed(ids[start:end], probs[start:end])
    return merged([*events, *parser.finish("stop")])
