"""What an answer says of itself: how it ended, what was counted, and which of its text a stop string may end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from deepinfra.core.conversation import Conversation, Message, TextPart, ToolDefinition
from deepinfra.core.events import Event, Finished, ReasoningDelta, TextDelta
from deepinfra.core.request import GenerateRequest, PromptInput, TextInput
from deepinfra.engine import Engine, Pool
from deepinfra.errors import ContextLengthError, EngineNotRunningError
from deepinfra.recipes import ChatTemplate
from deepinfra.schedulers.fcfs import Fcfs
from deepinfra.testing.asking import ask, end_of, events_of, toy_pool
from deepinfra.testing.replay import ReplayExecutor
from deepinfra.testing.speculators import Oracle
from deepinfra.testing.textmodel import TrainedTextModel
from deepinfra.testing.tiny import EOS, TinyRecipe

TEMPLATE = Path(__file__).parents[1] / "data" / "templates" / "Qwen-QwQ-32B.jinja"
MARKERS = ("<|endoftext|>", "<|im_end|>", "<|im_start|>", "<tool_call>", "</tool_call>", "<think>", "</think>")

ASKED = Conversation(
    messages=(Message(role="user", content=(TextPart("hello there"),)),), template_options={"enable_thinking": True}
)


class Reasoner:
    """A model that reasons first (its template opens the reasoning), over a recorded answer."""

    def __init__(self, said: str) -> None:
        files = TrainedTextModel(TEMPLATE.read_text(), MARKERS)
        self.tokenizer = files.tokenizer()
        self.ids = self.ids_of(said)
        eos = files.special_tokens().eos_id
        assert eos is not None
        self._eos, self._recipe = eos, ChatTemplate(files)

    def ids_of(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False).ids)

    async def answer(self, drafts: int = 0, asked: Conversation = ASKED, **fields: Any) -> list[Event]:
        prompt = self._recipe.render(asked).ids
        line = [*prompt, *self.ids, *[self._eos] * 20]
        speculator = Oracle(lambda tokens: line[len(tokens)], max_drafts=drafts) if drafts else None
        executor = ReplayExecutor([self.ids], eos=self._eos, vocab_size=self.tokenizer.get_vocab_size())
        async with Engine(self._recipe, Pool(Fcfs(), executor, speculator=speculator)) as engine:
            return await events_of(engine, GenerateRequest(input=asked, **fields))


def text_of(events: Sequence[Event], choice: int = 0) -> str:
    return "".join(event.text for event in events if isinstance(event, TextDelta) and event.choice == choice)


def reasoning_of(events: Sequence[Event]) -> str:
    return "".join(event.text for event in events if isinstance(event, ReasoningDelta))


# -- stop strings -------------------------------------------------------------------------------------


@pytest.mark.parametrize("drafts", [0, 3])
async def test_fact_17_a_stop_string_that_comes_in_pieces_is_never_shown(drafts: int) -> None:
    events = await Reasoner("</think>ABC DEFGHI DEFGHIJ more").answer(drafts, stop=("DEFGHIJ",))
    last = end_of(events)
    assert (text_of(events), last.reason, last.stop) == ("ABC DEFGHI ", "stop", "DEFGHIJ")


async def test_fact_17_the_beginning_of_a_stop_string_is_shown_when_no_more_of_it_comes() -> None:
    events = await Reasoner("</think>ABC DEFGHI").answer(stop=("DEFGHIJ",))
    assert (text_of(events), end_of(events).stop) == ("ABC DEFGHI", None)


@pytest.mark.parametrize("drafts", [0, 3])
async def test_fact_18_a_stop_string_inside_the_reasoning_ends_nothing(drafts: int) -> None:
    events = await Reasoner("first END then END\n</think>\n\nthe answer END and more").answer(drafts, stop=("END",))
    assert reasoning_of(events).count("END") == 2
    assert text_of(events) == "the answer "
    assert end_of(events).stop == "END"


@pytest.mark.parametrize("drafts", [0, 3])
async def test_a_stop_string_of_white_space_ends_an_answer_at_once_where_tools_are_offered(drafts: int) -> None:
    call = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    for said, text in ((f"ABC. \n\n{call}", "ABC. "), ("ABC.\n\nmore", "ABC.")):
        model = Reasoner("</think>" + said)
        events = await model.answer(drafts, stop=("\n\n",), asked=replace(ASKED, tools=(ToolDefinition(name="f"),)))
        last = end_of(events)
        assert (text_of(events), last.reason, last.stop) == (text, "stop", "\n\n")
        assert len(model.ids_of(f"</think>{text}")) < last.usage.completion_tokens
        assert last.usage.completion_tokens <= len(model.ids_of(f"</think>{text}\n\n"))


async def test_white_space_before_a_call_is_no_text_of_an_answer_without_that_stop_string() -> None:
    call = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    asked = replace(ASKED, tools=(ToolDefinition(name="f"),))
    events = await Reasoner(f"</think>ABC.\n\n{call}").answer(stop=("\n\n\n",), asked=asked)
    assert (text_of(events), end_of(events).reason) == ("ABC.", "tool_calls")


async def test_fact_14_answers_to_one_request_share_neither_parser_nor_decoder() -> None:
    said = ["日本語 and é", "🙂🙂 and ü", "plain"]
    executor = ReplayExecutor([text.encode() for text in said], eos=EOS, vocab_size=260)
    async with Engine(TinyRecipe(), Pool(Fcfs(), executor)) as engine:
        events = await events_of(engine, GenerateRequest(input=TextInput("x"), n=3))
    assert [text_of(events, choice) for choice in range(3)] == said


# -- counts ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("drafts", [0, 1, 3, 16])
async def test_reasoning_is_counted_the_same_however_tokens_are_merged(drafts: int) -> None:
    model = Reasoner("let us see: 日本\n</think>\n\nthe answer is 42")
    usage = end_of(await model.answer(drafts)).usage
    assert usage.completion_tokens == len(model.ids) + 1
    assert usage.reasoning_tokens == len(model.ids_of("let us see: 日本"))


async def test_an_answer_that_ends_while_it_reasons_is_all_reasoning() -> None:
    model = Reasoner("let us see what the user asked about")
    last = end_of(await model.answer(max_tokens=5))
    assert (last.reason, last.usage.completion_tokens, last.usage.reasoning_tokens) == ("length", 5, 5)


async def test_what_a_prompt_leaves_in_the_cache_is_counted_once() -> None:
    async with Engine(TinyRecipe(), toy_pool()) as engine:
        first = end_of(await events_of(engine, ask(range(11), 4))).usage
        again = end_of(await events_of(engine, ask(range(11), 4))).usage
        longer = end_of(await events_of(engine, ask(range(17), 4))).usage
        whole = end_of(await events_of(engine, ask(range(10), 4))).usage
    assert (first.cached.total, first.cache_write_tokens) == (0, 10)
    assert (again.cached.total, again.cache_write_tokens) == (10, 0)
    assert (longer.cached.total, longer.cache_write_tokens) == (10, 6)
    assert (whole.cached.total, whole.cache_write_tokens) == (9, 0)  # the last row is computed, not written


async def test_a_stream_counts_what_its_first_answer_wrote() -> None:
    async with Engine(TinyRecipe(), toy_pool()) as engine, engine.generate(ask(range(11), 4, n=2)) as stream:
        assert [event async for event in stream]
        assert stream.usage.cache_write_tokens == 10
        assert stream.usage.cached.total + stream.usage.cache_write_tokens <= stream.usage.prompt_tokens


@pytest.mark.parametrize("given", [ASKED, TextInput("some text"), (1, 2, 3), TextInput("long " * 2000)])
async def test_a_prompt_counts_as_many_tokens_as_it_is_billed(given: PromptInput) -> None:
    async with Engine(TinyRecipe(), toy_pool(num_blocks=6000, max_context=12000)) as engine:
        events = await events_of(engine, GenerateRequest(input=given, max_tokens=1))
        assert await engine.count(given) == end_of(events).usage.prompt_tokens


async def test_an_engine_that_nobody_entered_counts_nothing() -> None:
    with pytest.raises(EngineNotRunningError):
        await Engine(TinyRecipe(), toy_pool()).count(ASKED)


# -- ends -------------------------------------------------------------------------------------------------


async def ended(prompt: int, **fields: Any) -> Finished:
    """The end of an answer in a context of 40 tokens."""
    async with Engine(TinyRecipe(), toy_pool(max_context=40)) as engine:
        request = GenerateRequest(input=tuple(range(prompt)), ignore_eos=True, **fields)
        return end_of(await events_of(engine, request))


async def test_an_answer_that_fills_the_context_says_so() -> None:
    last = await ended(30)
    assert (last.reason, last.usage.completion_tokens) == ("context", 10)


async def test_an_answer_that_reaches_its_own_limit_says_so_even_where_the_context_ends_too() -> None:
    assert (await ended(30, max_tokens=10)).reason == "length"
    assert (await ended(30, max_tokens=10, fit=True)).reason == "length"


async def test_a_limit_that_does_not_fit_is_refused_or_lowered() -> None:
    with pytest.raises(ContextLengthError):
        await ended(30, max_tokens=11)
    last = await ended(30, max_tokens=11, fit=True)
    assert (last.reason, last.usage.completion_tokens) == ("context", 10)


async def test_a_prompt_that_leaves_no_room_is_refused_even_where_a_limit_may_be_lowered() -> None:
    with pytest.raises(ContextLengthError):
        await ended(40, max_tokens=1, fit=True)
