from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import pytest

from deepinfra.core.conversation import Conversation
from deepinfra.core.events import Event, TextDelta, TokenLogprobs
from deepinfra.core.request import FinishReason, Prompt
from deepinfra.interfaces import OutputParser
from deepinfra.recipes import ChatTemplate
from deepinfra.testing.recipe import RecipeConformance
from deepinfra.testing.textmodel import TrainedTextModel
from deepinfra.testing.tiny import EOS, TinyRecipe

THINKING = TrainedTextModel(
    "{{ bos_token }}{% for m in messages %}{{ '<|' + m.role + '|>' + m.content + eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|><think>\n' }}{% endif %}",
    ("<s>", "</s>", "<|user|>", "<|assistant|>", "<think>", "</think>"),
    kind="sentencepiece",
    add_bos=True,
    special=False,
)


class TestTiny(RecipeConformance):
    def make(self) -> TinyRecipe:
        return TinyRecipe()


class TestChatTemplate(RecipeConformance):
    markers = TrainedTextModel().markers

    def make(self) -> ChatTemplate:
        return ChatTemplate(TrainedTextModel())


class TestChatTemplateWithReasoning(RecipeConformance):
    markers = THINKING.markers
    extends = False  # the reasoning that the prompt opens is not in the next turn's history

    def make(self) -> ChatTemplate:
        return ChatTemplate(THINKING)


# -- mutants: each breaks one law, and that law's test must say so ----------------------------------------------------


class EncodesMarkers(TinyRecipe):
    """test_typed_markers_change_no_control_token"""

    def render(self, conversation: Conversation) -> Prompt:
        prompt = super().render(conversation)
        ids = bytes(i for i in prompt.ids if i < 256)
        extra = ids.count(b"<|end|>")
        control = (*prompt.control, *range(len(prompt.ids), len(prompt.ids) + extra))
        return Prompt(ids=prompt.ids + (EOS,) * extra, control=control, stop_ids=prompt.stop_ids)


class CountsItsCalls(TinyRecipe):
    """test_rendering_is_pure"""

    calls = 0

    def render(self, conversation: Conversation) -> Prompt:
        self.calls += 1
        prompt = super().render(conversation)
        return Prompt(ids=(*prompt.ids, 65 + self.calls % 2), control=prompt.control, stop_ids=prompt.stop_ids)


class ForgetsHistory(TinyRecipe):
    """test_a_longer_conversation_extends_the_shorter_one"""

    def render(self, conversation: Conversation) -> Prompt:
        return super().render(Conversation(messages=conversation.messages[-1:]))


class DecodesEachCall(TinyRecipe):
    """test_events_do_not_depend_on_how_the_ids_are_cut"""

    def parser(self, prompt: Prompt, choice: int = 0) -> OutputParser:
        recipe = self

        class Parser:
            def feed(self, ids: Sequence[int], logprobs: Sequence[TokenLogprobs] = ()) -> Sequence[Event]:
                data = b"".join(map(recipe.tokenizer.token_bytes, ids))
                return [TextDelta(choice=choice, text=data.decode(errors="replace"), tokens=tuple(logprobs))]

            def finish(self, reason: FinishReason) -> Sequence[Event]:
                return ()

        return Parser()


class SharesItsParser(TinyRecipe):
    """test_answers_do_not_share_a_parser"""

    def __init__(self) -> None:
        super().__init__()
        self.only: OutputParser | None = None

    def parser(self, prompt: Prompt, choice: int = 0) -> OutputParser:
        if self.only is None or choice == 0:
            self.only = super().parser(prompt, choice)
        return self.only


MUTANTS = (EncodesMarkers, CountsItsCalls, ForgetsHistory, DecodesEachCall, SharesItsParser)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
async def test_a_mutant_breaks_its_law(mutant: type[TinyRecipe], anyio_backend: Any) -> None:
    class Kit(RecipeConformance):
        markers = ("<|end|>",)

        def make(self) -> TinyRecipe:
            return mutant()

    law = getattr(Kit(), inspect.getdoc(mutant) or "")
    async with mutant() as recipe:
        with pytest.raises(AssertionError):
            await law(recipe)
