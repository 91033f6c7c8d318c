"""Everything that is built once from a model, and proved, before its template serves."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Protocol

import tokenizers

from deepinfra.core.conversation import Conversation
from deepinfra.core.report import RecipeReport
from deepinfra.errors import ModelError, RequestError
from deepinfra.interfaces import Tokenizer
from deepinfra.models import SpecialTokens
from deepinfra.recipes.chat_template.answer import Answers
from deepinfra.recipes.chat_template.environment import MarkedTemplate, PlainTemplate
from deepinfra.recipes.chat_template.rendering import Renderer
from deepinfra.recipes.chat_template.report import describe
from deepinfra.recipes.chat_template.selftest import check, plain_text
from deepinfra.recipes.chat_template.traits import Traits, probe
from deepinfra.recipes.encoding.loading import TokenizerModel, Vocabulary, load_vocabulary
from deepinfra.recipes.output.families import family_of
from deepinfra.recipes.output.families.harmony import HARMONY
from deepinfra.recipes.output.families.hermes import HERMES
from deepinfra.recipes.output.family import Shown
from deepinfra.recipes.output.grammar import REASONING

__all__ = ("FALLBACK", "Loaded", "TextModel", "load")

assert HERMES.shown is not None
FALLBACK: Shown = HERMES.shown
"""How tools, calls and results are written where a template does not write them."""

_HARMONY_ENDS = ("<|return|>", "<|call|>")
_RULES = "chat-template-3"
"""Goes into `version`: raise it when the same conversation gets other ids."""


class TextModel(TokenizerModel, Protocol):
    """What the recipe needs of a model; `deepinfra.models.Model` has it."""

    def chat_template(self) -> str | None:
        """Jinja source, if the model has one."""
        ...


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model as its recipe uses it.

    Attributes:
        renderer: `None` for a model without a template.
        stop_ids: Ids that end an answer to a conversation.
        prepend: The BOS that the tokenizer adds because the template writes none.
    """

    vocabulary: Vocabulary
    renderer: Renderer | None
    traits: Traits
    answers: Answers
    stop_ids: frozenset[int]
    prepend: int | None
    version: str
    report: RecipeReport

    @property
    def tokenizer(self) -> Tokenizer:
        """The vocabulary's."""
        return self.vocabulary.tokenizer


def load(model: TextModel, source: str | None, date: str | None, cache_chars: int) -> Loaded:
    """Build and prove it; see `ChatTemplate` for what may be wrong."""
    original, special = model.tokenizer(), model.special_tokens()
    source = source if source is not None else model.chat_template()
    template = None if source is None else MarkedTemplate(source)
    literals = frozenset() if template is None else template.literals()
    whole = None if source is None else family_of(source, {})
    whole = None if whole is None or whole.entries else whole
    harmony = whole is HARMONY
    vocabulary = load_vocabulary(model, literals, cache_chars, _HARMONY_ENDS if harmony else (), original)
    version = hashlib.sha256(json.dumps([_RULES, vocabulary.definition, source]).encode()).hexdigest()
    names = frozenset() if template is None else template.names()
    traits = Traits(names=names, literals=literals)
    control = vocabulary.control
    pair = _reasoning(control, literals) if whole is None else whole.reasoning
    family, counting = HERMES, {marker: control[marker] for marker in pair or () if marker in control}
    prepend, renderer = vocabulary.bos, None
    if template is not None and source is not None:
        constants = _constants(original, special)
        plain = PlainTemplate(source)

        def text(conversation: Conversation, traits: Traits) -> str | None:
            try:
                return plain_text(plain, conversation, traits, FALLBACK, constants)
            except RequestError:
                return None

        traits = probe(text, traits)
        known = family_of(source, control)
        if traits.tools == "template" and known is not None:
            family, counting = known, dict(control)
        elif traits.tools == "template":
            traits = replace(traits, tools="fallback", known=False)
        renderer = Renderer(template, vocabulary.encoder, traits, FALLBACK, constants, date)
        original.no_padding()
        original.no_truncation()
        original.encode_special_tokens = False
        first = check(
            renderer,
            lambda conversation: plain_text(plain, conversation, traits, FALLBACK, constants),
            lambda text: original.encode(text, add_special_tokens=False).ids,
            "".join(vocabulary.control),
        )
        if first[:1] == [special.bos_id]:
            prepend = None
            if first[1:2] == [special.bos_id]:
                raise ModelError("the chat template begins with two BOS tokens")
    answers = Answers.of(counting, pair, family)
    report = describe(renderer, traits, vocabulary, pair, family)
    # `<|end|>` ends a message of harmony and not the answer, whatever the model's files say.
    stop_ids = vocabulary.tokenizer.eos_ids - ({control.get("<|end|>", -1)} if harmony else set())
    return Loaded(vocabulary, renderer, traits, answers, stop_ids, prepend, version, report)


def _constants(tokenizer: tokenizers.Tokenizer, special: SpecialTokens) -> dict[str, str]:
    """The special tokens that a template may name; those the model lacks stay undefined."""
    values = {
        "bos_token": special.bos_token,
        "eos_token": special.eos_token,
        "unk_token": None if special.unk_id is None else tokenizer.id_to_token(special.unk_id),
        "pad_token": None if special.pad_id is None else tokenizer.id_to_token(special.pad_id),
    }
    return {name: value for name, value in values.items() if value is not None}


def _reasoning(control: Mapping[str, int], literals: frozenset[str]) -> tuple[str, str] | None:
    """How this model marks its reasoning: by its tokens, else by what its template writes."""
    written = "\0".join(literals)
    pairs = [pair for pair in REASONING if all(marker in control for marker in pair)]
    pairs += [pair for pair in REASONING if pair[1] in written]
    return pairs[0] if pairs else None
