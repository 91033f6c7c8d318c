"""`Harmony`: the recipe of gpt-oss."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass

from deepinfra.core.conversation import Constraint, Conversation
from deepinfra.core.report import RecipeReport
from deepinfra.core.request import Prompt, TextInput
from deepinfra.errors import ConfigError, ModelError, UnsupportedFieldError
from deepinfra.interfaces import OutputParser, Tokenizer
from deepinfra.models import open_model
from deepinfra.recipes.building import BuiltOnce
from deepinfra.recipes.encoding.loading import TokenizerModel, Vocabulary, load_vocabulary
from deepinfra.recipes.harmony.rendering import CALL, EFFORTS, END, MARKERS, RETURN, START, Voice, render
from deepinfra.recipes.output.constraint import compose
from deepinfra.recipes.output.families.harmony import HARMONY, HARMONY_REASONING
from deepinfra.recipes.output.family import output_grammar
from deepinfra.recipes.output.grammar import Grammar
from deepinfra.recipes.output.parser import GrammarParser

__all__ = ("Harmony",)

_RULES = "harmony-1"
"""Goes into `version`: raise it when the same conversation gets other ids."""


@dataclass(frozen=True, slots=True)
class _Loaded:
    vocabulary: Vocabulary
    grammar: Grammar
    stop_ids: frozenset[int]
    version: str

    @property
    def tokenizer(self) -> Tokenizer:
        """The vocabulary's."""
        return self.vocabulary.tokenizer


class Harmony(BuiltOnce[_Loaded]):
    """Renders and parses the harmony format; nothing a user typed becomes a control token.

    Prompts equal those of the package openai-harmony, which is not needed: it takes its vocabulary from the network
    or from a place named by the environment, and holds the interpreter while it renders. The vocabulary is the
    model's own, loaded when the recipe is entered, or at first use, in a few seconds.

    Args:
        model: A model, or the name of one for `deepinfra.models.open_model`.
        identity: First line of the system message; a request's `template_options.model_identity` comes before it.
        knowledge_cutoff: Month up to which the model knows the world; empty leaves the line out.
        date: The date in the system message, which keeps prompts and their cached KV the same from day to day;
            default: the conversation's `now`, and without it none.
        effort: Reasoning effort of requests that name none.
        cache_chars: Characters of encoded text kept for the next turns of chats.

    Raises:
        ModelError: The model cannot be opened; when entered or first used: its tokenizer lacks a harmony token.
    """

    def __init__(
        self,
        model: str | TokenizerModel,
        *,
        identity: str = "You are ChatGPT, a large language model trained by OpenAI.",
        knowledge_cutoff: str = "2024-06",
        date: str | None = None,
        effort: str = "medium",
        cache_chars: int = 8_000_000,
    ) -> None:
        if effort not in EFFORTS:
            raise ConfigError(f"effort = {effort!r}: known are {', '.join(EFFORTS)}")
        self._model: TokenizerModel = open_model(model) if isinstance(model, str) else model
        self._voice = Voice(identity=identity, knowledge_cutoff=knowledge_cutoff, date=date, effort=effort)
        self._cache_chars = cache_chars
        super().__init__()

    def render(self, conversation: Conversation) -> Prompt:
        """See `Recipe.render`."""
        loaded = self.built
        rendered = render(conversation, self._voice)
        text = rendered.text
        ids, control = loaded.vocabulary.encoder.encode(text, rendered.ranges)
        start = loaded.vocabulary.control[START]
        return Prompt(
            ids=tuple(ids),
            control=tuple(control),
            text=text,
            stop_ids=loaded.stop_ids,
            start=rendered.start,
            constraint=_constraint(conversation, rendered.start, loaded.vocabulary.control),
            breakpoints=tuple(position for position in control if position and ids[position] == start),
            ranges=tuple(rendered.ranges),
            tools=rendered.tools,
        )

    def text(self, text: TextInput) -> Prompt:
        """See `Recipe.text`. All output is text."""
        loaded = self.built
        ids = tuple(loaded.vocabulary.tokenizer.encode(text.text))
        return Prompt(ids=ids, text=text.text, stop_ids=loaded.stop_ids, start="raw")

    def report(self) -> RecipeReport:
        """See `Recipe.report`."""
        loaded = self.built
        return RecipeReport(
            recipe="Harmony",
            control=tuple(sorted(loaded.vocabulary.control.items(), key=lambda pair: pair[1])),
            fences=(
                "header words such as `to=functions.x`",
                "`# Instructions`, `# Tools`, `// …` in the developer text",
            ),
            quirks=(
                "a call's id is not shown to the model: results are told apart by the function's name and their order",
                "reasoning of earlier turns is left out once they were answered",
                "names of users are not shown",
            ),
            fallbacks=(
                "the reasoning efforts none and minimal are `low`, xhigh, ultra and max are `high`",
                "with the effort none and no tools the answer begins without reasoning",
                "later system messages and reminders are developer messages in their place",
                "a result that is an error begins with `Error: `",
            ),
            reasoning=("<|channel|>analysis<|message|>", "<|end|>"),
            tools="harmony",
        )

    def parser(self, prompt: Prompt, choice: int = 0) -> OutputParser:
        """See `Recipe.parser`."""
        loaded = self.built
        return GrammarParser(
            loaded.grammar, prompt.start, loaded.vocabulary.tokenizer.token_bytes, choice, prompt.tools
        )

    def build(self) -> _Loaded:
        """See `BuiltOnce.build`."""
        return _load(self._model, self._cache_chars)


def _constraint(conversation: Conversation, start: str, control: Mapping[str, int]) -> Constraint | None:
    if start == "text":  # inside the message that the user reads
        if conversation.tool_choice.mode == "required":
            raise UnsupportedFieldError("tool_choice", "cannot demand a call where the answer's text has begun")
        return conversation.constraint
    begun = "reasoning" if start == "reasoning" else "text"
    return compose(conversation, control=control, start=begun, reasoning=HARMONY_REASONING, family=HARMONY)


def _load(model: TokenizerModel, cache_chars: int) -> _Loaded:
    vocabulary = load_vocabulary(model, MARKERS, cache_chars, ends=(RETURN, CALL))
    control = vocabulary.control
    missing = [marker for marker in MARKERS if marker not in control]
    if missing:
        raise ModelError(f"the model {model.name!r} does not write harmony: its tokenizer lacks {', '.join(missing)}")
    # `<|end|>` ends a message, not the answer: whatever the model's files say, it must not stop here.
    stop_ids = vocabulary.tokenizer.eos_ids - {control[END]}
    version = hashlib.sha256(json.dumps([_RULES, vocabulary.definition]).encode()).hexdigest()
    return _Loaded(vocabulary, output_grammar(control, family=HARMONY), stop_ids, version)
