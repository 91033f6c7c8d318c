"""`ChatTemplate`: the recipe of any Hugging Face model."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from deepinfra.core.conversation import Conversation
from deepinfra.core.report import RecipeReport
from deepinfra.core.request import Prompt, TextInput
from deepinfra.errors import TemplateError, UnsupportedFieldError
from deepinfra.interfaces import OutputParser
from deepinfra.models import open_model
from deepinfra.recipes.building import BuiltOnce
from deepinfra.recipes.chat_template.answer import Continued
from deepinfra.recipes.chat_template.hygiene import admit
from deepinfra.recipes.chat_template.loading import Loaded, TextModel, load
from deepinfra.recipes.chat_template.report import without_fallback
from deepinfra.recipes.output.constraint import offered
from deepinfra.recipes.output.parser import GrammarParser

__all__ = ("ChatTemplate", "TextModel")


class ChatTemplate(BuiltOnce[Loaded]):
    """Renders with the model's own chat template; nothing a user typed becomes a control token.

    The template is rendered with provenance, the control tokens it wrote itself are encoded under private names, and
    the result is asserted. A model whose template or tokenizer does not pass the self-test is not served. The
    tokenizer is built when the recipe is entered, or at first use, in about a second.

    A template's `strftime_now` needs a date, and a recipe has no clock: `date` is used, else the conversation's `now`;
    without either the name is undefined, and templates that do not check for it refuse.
    Tools are shown as the template shows them. To a model whose template ignores them they are shown in the system
    text, and calls and results of earlier turns in the text of their messages; `report` says so.

    Args:
        model: A model, or the name of one for `deepinfra.models.open_model`.
        template: Jinja source to use instead of the model's own.
        date: See above.
        tool_fallback: Whether tools are shown where the template ignores them; else they are refused by name.
        cache_chars: Characters of encoded text kept for the next turns of chats; used where a probe shows that text
            between control tokens has the ids it has alone.

    Raises:
        ModelError: The model cannot be opened; when entered or first used: it cannot be served exactly and safely.
    """

    def __init__(
        self,
        model: str | TextModel,
        *,
        template: str | None = None,
        date: str | None = None,
        tool_fallback: bool = True,
        cache_chars: int = 8_000_000,
    ) -> None:
        self._model: TextModel = open_model(model) if isinstance(model, str) else model
        self._template, self._date, self._cache_chars = template, date, cache_chars
        self._tool_fallback = tool_fallback
        super().__init__()

    def report(self) -> RecipeReport:
        """See `Recipe.report`."""
        loaded = self.built
        report = replace(loaded.report, recipe=type(self).__name__)
        return report if self._tool_fallback else without_fallback(report, loaded.traits)

    def render(self, conversation: Conversation) -> Prompt:
        """See `Recipe.render`."""
        loaded = self.built
        if loaded.renderer is None:
            raise TemplateError(f"The model {self._model.name!r} has no chat template.", "messages")
        admit(conversation, loaded.traits, self._tool_fallback)
        rendered = loaded.renderer.render(conversation)
        ids, control = rendered.ids, rendered.positions
        if loaded.prepend is not None:
            ids, control = [loaded.prepend, *ids], [0, *(position + 1 for position in control)]
        known = set(control)
        start, opens = loaded.answers.start(rendered)
        constraint = loaded.answers.constraint(conversation, start, opens)
        if rendered.begun and constraint is not None:
            why = "cannot be combined with a demand on the answer (a response format, a tool choice, strict tools)"
            raise UnsupportedFieldError(f"messages[{len(conversation.messages) - 1}].prefix", why)
        return Prompt(
            ids=tuple(ids),
            control=tuple(control),
            text=rendered.text,
            stop_ids=loaded.stop_ids,
            start=start,
            constraint=constraint,
            breakpoints=tuple(position for position in control if position and position - 1 not in known),
            ranges=tuple(rendered.ranges),
            tools=offered(conversation),
            begun=rendered.begun,
        )

    def text(self, text: TextInput) -> Prompt:
        """See `Recipe.text`; begins with BOS if the model's tokenizer does so. All output is text."""
        return self.built.vocabulary.bare(text)

    def parser(self, prompt: Prompt, choice: int = 0) -> OutputParser:
        """See `Recipe.parser`."""
        loaded = self.built
        tokenizer, answers = loaded.vocabulary.tokenizer, loaded.answers
        grammar = answers.calling if prompt.tools else answers.plain
        make = partial(GrammarParser, grammar, prompt.start, tokenizer.token_bytes, choice, prompt.tools)
        return Continued(make, prompt.begun, tokenizer.encode(prompt.begun)) if prompt.begun else make()

    def build(self) -> Loaded:
        """See `BuiltOnce.build`."""
        return load(self._model, self._template, self._date, self._cache_chars)
