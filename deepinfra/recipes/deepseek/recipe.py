"""`DeepSeek`: the native recipe of DeepSeek V4 and V4.1."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from deepinfra.core.conversation import Conversation
from deepinfra.core.report import RecipeReport
from deepinfra.core.request import Prompt, TextInput
from deepinfra.errors import ModelError
from deepinfra.interfaces import OutputParser, Tokenizer
from deepinfra.models import open_model
from deepinfra.recipes.building import BuiltOnce
from deepinfra.recipes.deepseek.dialect import DIALECTS, EOS, THINK, THINK_END, Version
from deepinfra.recipes.deepseek.rendering import render
from deepinfra.recipes.deepseek.strict import with_strict_tools
from deepinfra.recipes.encoding.loading import TokenizerModel, Vocabulary, load_vocabulary
from deepinfra.recipes.output.constraint import compose
from deepinfra.recipes.output.families.dsml import DSML, DSML_41
from deepinfra.recipes.output.family import ToolFamily, output_grammar
from deepinfra.recipes.output.grammar import Grammar
from deepinfra.recipes.output.parser import GrammarParser

__all__ = ("DeepSeek",)

_RULES = "deepseek-1"
"""Goes into `version`: raise it when the same conversation gets other ids."""

_REASONING = (THINK, THINK_END)
_FAMILIES: dict[Version, ToolFamily] = {
    "v4": DSML,
    "v4.1": DSML_41,
}

_FENCES = (
    "<tool_result>…</tool_result> around what a tool returned",
    'name="…" string="…" of a call\'s arguments',
)
_QUIRKS = (
    "reasoning of earlier turns is shown only while tools are offered; without them an answer is computed again",
    "results of tools stand in the order of their calls, whatever order they came in",
    "a participant's name is not shown",
)
_OF_VERSION: dict[Version, tuple[str, ...]] = {
    "v4": (
        "a later system message moves to the beginning, so that the whole prompt is computed again",
        "a developer's message is a user's",
        "an image is only mentioned: [Unsupported Image]",
    ),
    "v4.1": (),
}
_FALLBACKS = (
    "a failed tool's result begins with 'Error: '",
    "arguments of an earlier call that are no JSON object are shown as one argument named 'arguments'",
    "a call demanded while the model reasons is forced by a constraint after the reasoning; else its block is opened",
)


@dataclass(frozen=True, slots=True)
class _Loaded:
    """Everything that is built once from a model's tokenizer.

    Attributes:
        control: The tokens of the format alone, of more than a thousand.
        plain: How an answer is read that may call no tools.
        calling: How one is read that may.
    """

    vocabulary: Vocabulary
    control: Mapping[str, int]
    family: ToolFamily
    plain: Grammar
    calling: Grammar
    version: str

    @property
    def tokenizer(self) -> Tokenizer:
        """The vocabulary's."""
        return self.vocabulary.tokenizer


class DeepSeek(BuiltOnce[_Loaded]):
    """Writes DeepSeek's own format, without a template; nothing a user typed becomes a control token.

    The text and its control ranges come from a pure function of conversation and version; the ranges alone become
    control ids. Calls of tools and the end of reasoning are recognised by id, so the same characters in an answer
    stay text.

    Differs from DeepSeek's own library where that loses something: numbers keep their digits, a failed tool's result
    says so, a quote cannot end the name of an argument, and a call can be demanded while the model reasons: it
    reasons first, and a constraint makes it call then.

    Args:
        model: A model, or the name of one for `deepinfra.models.open_model`; only its tokenizer is read.
        version: Which of the formats.
        effort: Reasoning effort of requests that ask for none.
        cache_chars: Characters of encoded text kept for the next turns of chats; 0 turns it off.

    Raises:
        ModelError: The model cannot be opened; when entered or first used: its tokenizer lacks a control token.

    Source: deepseek-recipe 0.2.0 (MIT), by its behaviour.
    """

    def __init__(
        self,
        model: str | TokenizerModel,
        *,
        version: Version = "v4",
        effort: Literal["none", "low", "high", "max"] = "high",
        cache_chars: int = 8_000_000,
    ) -> None:
        self._model: TokenizerModel = open_model(model) if isinstance(model, str) else model
        self._format, self._effort, self._cache_chars = version, effort, cache_chars
        super().__init__()

    def render(self, conversation: Conversation) -> Prompt:
        """See `Recipe.render`."""
        loaded = self.built
        if conversation.effort is None:
            conversation = replace(conversation, effort=self._effort)
        conversation = with_strict_tools(conversation)
        rendered = render(conversation, self._format)
        ids, control = loaded.vocabulary.encoder.encode(rendered.text, rendered.ranges)
        return Prompt(
            ids=tuple(ids),
            control=tuple(control),
            text=rendered.text,
            stop_ids=loaded.vocabulary.tokenizer.eos_ids,
            start=rendered.start,
            constraint=compose(
                conversation,
                control=loaded.control,
                start=rendered.start,
                reasoning=_REASONING if rendered.start == "reasoning" else None,
                family=loaded.family,
            ),
            breakpoints=tuple(control[index] for index in rendered.turns),
            media=tuple((control[index], digest) for index, digest in rendered.media),
            ranges=rendered.ranges,
            tools=rendered.tools,
        )

    def text(self, text: TextInput) -> Prompt:
        """See `Recipe.text`; begins with BOS if the model's tokenizer does so. All output is text."""
        return self.built.vocabulary.bare(text)

    def parser(self, prompt: Prompt, choice: int = 0) -> OutputParser:
        """See `Recipe.parser`."""
        loaded = self.built
        grammar = loaded.calling if prompt.tools else loaded.plain
        return GrammarParser(grammar, prompt.start, loaded.vocabulary.tokenizer.token_bytes, choice, prompt.tools)

    def report(self) -> RecipeReport:
        """See `Recipe.report`."""
        control = self.built.vocabulary.control
        return RecipeReport(
            recipe=type(self).__name__,
            control=tuple(sorted(control.items(), key=lambda item: item[1])),
            fences=_FENCES,
            quirks=(*_QUIRKS, *_OF_VERSION[self._format]),
            fallbacks=_FALLBACKS,
            reasoning=_REASONING,
            tools=_FAMILIES[self._format].name,
        )

    def build(self) -> _Loaded:
        """See `BuiltOnce.build`."""
        return _load(self._model, self._format, self._cache_chars)


def _load(model: TokenizerModel, version: Version, cache_chars: int) -> _Loaded:
    needed = DIALECTS[version].control
    vocabulary = load_vocabulary(model, needed, cache_chars, ends=(EOS,))
    missing = [token for token in needed if token not in vocabulary.control]
    if missing:
        raise ModelError(
            f"the tokenizer of {model.name!r} is not that of DeepSeek {version}: it lacks {', '.join(missing)}"
        )
    family = _FAMILIES[version]
    control = {token: vocabulary.control[token] for token in needed}
    plain, calling = output_grammar(control, _REASONING), output_grammar(control, _REASONING, family)
    fingerprint = hashlib.sha256(json.dumps([_RULES, version, vocabulary.definition]).encode()).hexdigest()
    return _Loaded(vocabulary, control, family, plain, calling, fingerprint)
