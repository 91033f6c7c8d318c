"""`ChatTemplate`: the recipe of any Hugging Face model."""

from __future__ import annotations

import hashlib
import json
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from threading import Lock
from typing import Any, Protocol, Self

import tokenizers

from deepinfra.core.conversation import Conversation
from deepinfra.core.request import Prompt, TextInput
from deepinfra.errors import ModelError, TemplateError
from deepinfra.interfaces import OutputParser, Recipe, Tokenizer
from deepinfra.models import SpecialTokens, open_model
from deepinfra.recipes.chat_template.environment import MarkedTemplate, PlainTemplate
from deepinfra.recipes.chat_template.rendering import Rendered, Renderer
from deepinfra.recipes.chat_template.selftest import check, probe
from deepinfra.recipes.chat_template.variables import Traits
from deepinfra.recipes.encoding.tokenizer import SafeTokenizer, bytes_of_tokens
from deepinfra.recipes.encoding.vocabulary import SafeEncoder, control_tokens
from deepinfra.recipes.output.family import output_grammar
from deepinfra.recipes.output.grammar import REASONING, Grammar
from deepinfra.recipes.output.parser import GrammarParser

__all__ = ("ChatTemplate", "TextModel")

_RULES = "chat-template-1"
"""Goes into `version`: raise it when the same conversation gets other ids."""


class TextModel(Protocol):
    """What the recipe needs of a model; `deepinfra.models.Model` has it."""

    name: str

    def tokenizer(self) -> tokenizers.Tokenizer:
        """The model's own tokenizer, a new object."""
        ...

    def chat_template(self) -> str | None:
        """Jinja source, if the model has one."""
        ...

    def special_tokens(self) -> SpecialTokens:
        """Tokens that mean something beyond their text."""
        ...


@dataclass(frozen=True, slots=True)
class _Loaded:
    """Everything that is built once from a model."""

    tokenizer: SafeTokenizer
    encoder: SafeEncoder
    renderer: Renderer | None
    grammar: Grammar
    reasoning: tuple[str, str] | None
    prepend: int | None
    bos: int | None
    version: str


class ChatTemplate(Recipe):
    """Renders with the model's own chat template; nothing a user typed becomes a control token.

    The template is rendered with provenance, the control tokens it wrote itself are encoded under private names, and
    the result is asserted. A model whose template or tokenizer does not pass the self-test is not served. The
    tokenizer is built when the recipe is entered, or at first use, in about a second.

    A template's `strftime_now` needs a date, and a recipe has no clock: `date` is used, else the conversation's `now`;
    without either the name is undefined, and templates that do not check for it refuse. Tools are rendered if the
    template knows them and refused by name otherwise.

    Args:
        model: A model, or the name of one for `deepinfra.models.open_model`.
        template: Jinja source to use instead of the model's own.
        date: See above.
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
        cache_chars: int = 8_000_000,
    ) -> None:
        self._model: TextModel = open_model(model) if isinstance(model, str) else model
        self._template, self._date, self._cache_chars = template, date, cache_chars
        self._built: _Loaded | None = None
        self._lock = Lock()

    @asynccontextmanager
    async def __asynccontextmanager__(self) -> AsyncGenerator[Self]:
        await self.offload(self._load)
        try:
            yield self
        finally:
            self._built = None

    @property
    def tokenizer(self) -> Tokenizer:
        """See `Recipe.tokenizer`."""
        return self._load().tokenizer

    @property
    def version(self) -> str:
        """SHA-256 over the tokenizer's definition, the template and this module's rules."""
        return self._load().version

    def render(self, conversation: Conversation) -> Prompt:
        """See `Recipe.render`."""
        loaded = self._load()
        if loaded.renderer is None:
            raise TemplateError(f"The model {self._model.name!r} has no chat template.", "messages")
        rendered = loaded.renderer.render(conversation)
        ids, control = rendered.ids, rendered.positions
        if loaded.prepend is not None:
            ids, control = [loaded.prepend, *ids], [0, *(position + 1 for position in control)]
        known = set(control)
        return Prompt(
            ids=tuple(ids),
            control=tuple(control),
            text=rendered.text,
            stop_ids=loaded.tokenizer.eos_ids,
            start=_start(rendered, loaded.reasoning),
            constraint=conversation.constraint,
            breakpoints=tuple(position for position in control if position and position - 1 not in known),
            ranges=tuple(rendered.ranges),
            tools=conversation.tools if conversation.tool_choice.mode != "none" else (),
        )

    def text(self, text: TextInput) -> Prompt:
        """See `Recipe.text`; begins with BOS if the model's tokenizer does so. All output is text."""
        loaded = self._load()
        ids = loaded.tokenizer.encode(text.text)
        if loaded.bos is not None:
            ids = [loaded.bos, *ids]
        control = () if loaded.bos is None else (0,)
        stop_ids = loaded.tokenizer.eos_ids
        return Prompt(ids=tuple(ids), control=control, text=text.text, stop_ids=stop_ids, start="raw")

    def parser(self, prompt: Prompt, choice: int = 0) -> OutputParser:
        """See `Recipe.parser`."""
        loaded = self._load()
        return GrammarParser(loaded.grammar, prompt.start, loaded.tokenizer.token_bytes, choice)

    def _load(self) -> _Loaded:
        with self._lock:
            if self._built is None:
                self._built = _load(self._model, self._template, self._date, self._cache_chars)
            return self._built


def _load(model: TextModel, source: str | None, date: str | None, cache_chars: int) -> _Loaded:
    original, special = model.tokenizer(), model.special_tokens()
    source = source if source is not None else model.chat_template()
    text = original.to_str()
    definition: dict[str, Any] = json.loads(text)
    template = None if source is None else MarkedTemplate(source)
    literals = frozenset() if template is None else template.literals()
    control = control_tokens(definition, literals, special.control_ids)
    encoder = SafeEncoder(definition, control, cache_chars)
    hidden = {token["id"] for token in definition["added_tokens"] if token["special"]} | special.control_ids
    tokenizer = SafeTokenizer(encoder, bytes_of_tokens(definition, frozenset(hidden)), special.eos_ids)
    bos = special.bos_id if special.add_bos else None
    prepend, renderer = bos, None
    if template is not None and source is not None:
        constants = _constants(original, special)
        plain = PlainTemplate(source)
        traits = probe(plain, Traits(names=template.names(), literals=literals), constants)
        renderer = Renderer(template, encoder, traits, constants, date)
        original.no_padding()
        original.no_truncation()
        original.encode_special_tokens = False
        first = check(
            renderer,
            plain,
            traits,
            constants,
            lambda text: original.encode(text, add_special_tokens=False).ids,
            control,
        )
        if first[:1] == [special.bos_id]:
            prepend = None
            if first[1:2] == [special.bos_id]:
                raise ModelError("the chat template begins with two BOS tokens")
    pair = _reasoning(control, literals)
    version = hashlib.sha256(json.dumps([_RULES, text, source]).encode()).hexdigest()
    return _Loaded(tokenizer, encoder, renderer, output_grammar(control, pair), pair, prepend, bos, version)


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


def _start(rendered: Rendered, pair: tuple[str, str] | None) -> str:
    """`reasoning` if the last thing the template wrote is an opened and not closed marker of reasoning."""
    if pair is None:
        return "text"
    text, trust = rendered.text, rendered.trust
    others = (end for start, end in rendered.ranges if text[start:end] not in pair)
    tail = max(others, default=0)
    opened, closed = (_last_trusted(text, trust, marker, tail) for marker in pair)
    return "reasoning" if opened > closed else "text"


def _last_trusted(text: str, trust: bytes, marker: str, tail: int) -> int:
    at = text.rfind(marker, tail)
    while at >= 0 and 0 in trust[at : at + len(marker)]:
        at = text.rfind(marker, tail, at + len(marker) - 1)
    return at
