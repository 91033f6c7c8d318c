"""`Mistral`: the recipe of models with Mistral's own tokenizer files."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib.metadata import version as version_of
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deepinfra.core.conversation import Conversation
from deepinfra.core.report import RecipeReport
from deepinfra.core.request import Prompt, TextInput
from deepinfra.errors import ConfigError, ModelError
from deepinfra.interfaces import OutputParser
from deepinfra.models import pull
from deepinfra.recipes.building import BuiltOnce
from deepinfra.recipes.output.constraint import compose, offered
from deepinfra.recipes.output.families.json_list import MISTRAL_LIST
from deepinfra.recipes.output.families.tokens import MISTRAL, MISTRAL_IDS
from deepinfra.recipes.output.family import ToolFamily, output_grammar
from deepinfra.recipes.output.grammar import Grammar
from deepinfra.recipes.output.parser import GrammarParser

if TYPE_CHECKING:
    from mistral_common.tokens.tokenizers.mistral import MistralTokenizer

    from deepinfra.recipes.mistral.tokenizer import CachedTokenizer, MistralText

__all__ = ("Mistral",)

_RULES = "mistral-1"
"""Goes into `version`: raise it when the same conversation gets other ids."""


_THINK = ("[THINK]", "[/THINK]")


@dataclass(frozen=True, slots=True)
class _Loaded:
    """Everything that is built once from a tokenizer's file; `number` is its version, 1 to 15."""

    encoder: MistralTokenizer[Any, Any, Any, Any, Any]
    cache: CachedTokenizer
    tokenizer: MistralText
    number: int
    thinks: bool
    family: ToolFamily | None
    grammars: Mapping[bool, Grammar]
    version: str


class Mistral(BuiltOnce[_Loaded]):
    """Prompts by the package mistral-common, which the extra `mistral` installs.

    Their ids are mistral-common's own: text that a user typed never becomes a control token. What it refuses is
    refused in its words. The tokenizer is loaded when the recipe is entered, or at first use, in about a second.

    Args:
        model: A model's name or folder, whose `tekken.json` or `tokenizer.model.vN` is used; or such a file itself.
        cache_chars: Characters of encoded text kept for the next turns of chats.

    Raises:
        ConfigError: mistral-common or sentencepiece is not installed.
        ModelError: When entered or first used: the model has no such file, or it is damaged.
    """

    def __init__(self, model: str | Path, *, cache_chars: int = 8_000_000) -> None:
        for package in ("mistral_common", "sentencepiece"):
            if find_spec(package) is None:
                raise ConfigError(
                    f"the recipe 'mistral' needs the package {package.replace('_', '-')}: "
                    "pip install 'deepinfra-serve[mistral]'"
                )
        self._model, self._cache_chars = model, cache_chars
        super().__init__()

    def render(self, conversation: Conversation) -> Prompt:
        """See `Recipe.render`."""
        from mistral_common.exceptions import MistralCommonException

        from deepinfra.recipes.mistral.request import refused, request_of

        loaded = self.built
        start = _start(conversation, loaded.thinks)
        try:
            request = request_of(conversation, offered(conversation), number=loaded.number, thinks=loaded.thinks)
            pieces = loaded.cache.listen()
            ids = list(loaded.encoder.encode_chat_completion(request).tokens)
        except (
            MistralCommonException,
            ValueError,
            AssertionError,
            RuntimeError,
        ) as error:  # sentencepiece raises those
            raise refused(error) from error
        text, positions, ranges = loaded.tokenizer.shown(ids, pieces)
        known = set(positions)
        return Prompt(
            ids=tuple(ids),
            control=tuple(positions),
            text=text,
            stop_ids=loaded.tokenizer.eos_ids,
            start=start,
            constraint=compose(
                conversation,
                control=loaded.tokenizer.spellings,
                start="reasoning" if start == "reasoning" else "text",
                reasoning=_THINK if loaded.thinks and start != "continued" else None,
                family=loaded.family,
            ),
            breakpoints=tuple(position for position in positions if position and position - 1 not in known),
            ranges=tuple(ranges),
            tools=offered(conversation),
        )

    def text(self, text: TextInput) -> Prompt:
        """See `Recipe.text`; begins with `<s>`. All output is text."""
        tokenizer = self.built.tokenizer
        ids = (tokenizer.bos_id, *tokenizer.encode(text.text))
        return Prompt(ids=ids, control=(0,), text=text.text, stop_ids=tokenizer.eos_ids, start="raw")

    def report(self) -> RecipeReport:
        """See `Recipe.report`."""
        loaded = self.built
        number = loaded.number
        tokenizer = loaded.tokenizer
        fences = ["[INST] and [/INST]: in version 1 they are text that a user can type"] if number == 1 else []
        fences += ["JSON around calls, and around results up to version 3"] if number in (2, 3) else []
        quirks = [
            "consecutive messages of one role are one, joined by an empty line",
            "names of participants are not shown",
        ]
        if number < 7:
            place = "first" if number == 1 else "last"
            quirks.append(f"system messages stand in the {place} user message, wherever they were")
        if number in range(2, 13):
            quirks.append("tools stand before the last user message, so that a new turn moves them")
        if number in (2, 3):
            quirks.append("an answer is text or calls, never both")
        if number in range(3, 11):
            quirks.append("the id that the model writes behind a call is replaced, because its arguments came first")
        if number == 2:
            quirks.append("calls before the last user message are left out")
        if number >= 13:
            quirks.append("a call's id is not shown: results stand in the order of their calls")
        if not tokenizer.tekken:
            quirks.append("a typed ▁ (U+2581) is a space to the model")
        fallbacks = [
            "developer messages and reminders are system messages",
            "an id of a call that is not nine letters and digits is replaced by a hash of it",
            "a result that is an error begins with 'Error: '",
        ]
        fallbacks += [] if loaded.thinks else ["reasoning of earlier turns is left out"]
        return RecipeReport(
            recipe=f"Mistral, tokenizer version {number}",
            control=tuple((text, token) for token, text in tokenizer.control.items()),
            fences=tuple(fences),
            quirks=tuple(quirks),
            fallbacks=tuple(fallbacks),
            reasoning=_THINK if loaded.thinks else None,
            tools=None if loaded.family is None else loaded.family.name,
        )

    def parser(self, prompt: Prompt, choice: int = 0) -> OutputParser:
        """See `Recipe.parser`."""
        loaded = self.built
        grammar = loaded.grammars[bool(prompt.tools)]
        return GrammarParser(grammar, prompt.start, loaded.tokenizer.token_bytes, choice, prompt.tools)

    def build(self) -> _Loaded:
        """See `BuiltOnce.build`."""
        return _load(self._model, self._cache_chars)


def _load(model: str | Path, cache_chars: int) -> _Loaded:
    from mistral_common.exceptions import MistralCommonException
    from mistral_common.protocol.instruct.validator import ValidationMode
    from mistral_common.tokens.tokenizers.mistral import MistralTokenizer

    from deepinfra.recipes.mistral.tokenizer import CachedTokenizer, MistralText, tokenizer_file

    path = tokenizer_file(pull(str(model)))
    try:
        encoder = MistralTokenizer.from_file(path, mode=ValidationMode.serving)
        data = path.read_bytes()
    except (MistralCommonException, ValueError, AssertionError, KeyError, RuntimeError, OSError) as error:
        raise ModelError(f"{path} is no tokenizer that mistral-common can read: {error}") from error
    inner = encoder.instruct_tokenizer.tokenizer
    tokenizer, number = MistralText(inner), inner.version.version_num
    cache = CachedTokenizer(inner, tokenizer, cache_chars)
    encoder.instruct_tokenizer.tokenizer = cache  # type: ignore[assignment]
    thinks = number >= 13 and all(marker in tokenizer.spellings for marker in _THINK)
    family = _family(number)
    grammars = {tools: _grammar(tokenizer, thinks, family if tools else None) for tools in (False, True)}
    digest = hashlib.sha256(f"{_RULES} {version_of('mistral-common')} {path.name}\n".encode())
    digest.update(data)
    return _Loaded(encoder, cache, tokenizer, number, thinks, family, grammars, digest.hexdigest())


def _family(number: int) -> ToolFamily | None:
    if number == 1:
        return None
    return MISTRAL_LIST if number < 11 else MISTRAL_IDS if number == 11 else MISTRAL


def _grammar(tokenizer: MistralText, thinks: bool, family: ToolFamily | None) -> Grammar:
    """An answer; sentencepiece writes a space before its first word, which is not the answer's."""
    grammar = output_grammar(tokenizer.spellings, _THINK if thinks else None, family)
    states = dict(grammar.states)
    states["continued"] = states["text"]
    if not tokenizer.tekken:
        states["text"] = replace(states["text"], lead=" ")
    return Grammar(states, tokenizer.spellings)


def _start(conversation: Conversation, thinks: bool) -> str:
    last = conversation.messages[-1] if conversation.messages else None
    if last is None or not last.prefix:
        return "text"
    return "reasoning" if thinks and last.reasoning is not None and not last.text else "continued"
