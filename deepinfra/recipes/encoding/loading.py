"""What a recipe makes of a model's tokenizer, once: its control tokens, its safe encoder, its bytes."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import tokenizers

from deepinfra.core.request import Prompt, TextInput
from deepinfra.models import SpecialTokens
from deepinfra.recipes.encoding.tokenizer import SafeTokenizer, bytes_of_tokens
from deepinfra.recipes.encoding.vocabulary import SafeEncoder, control_tokens

__all__ = ("TokenizerModel", "Vocabulary", "load_vocabulary")


class TokenizerModel(Protocol):
    """What a recipe needs of a model to encode for it; `deepinfra.models.Model` has it."""

    name: str

    def tokenizer(self) -> tokenizers.Tokenizer:
        """The model's own tokenizer, a new object."""
        ...

    def special_tokens(self) -> SpecialTokens:
        """Tokens that mean something beyond their text."""
        ...


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """A tokenizer as recipes use it.

    Attributes:
        definition: The `tokenizer.json` it was made of, as text.
        control: Id of every token that no text may become, by spelling.
        bos: The token that bare text begins with, if the model's tokenizer says so.
    """

    definition: str
    control: Mapping[str, int]
    encoder: SafeEncoder
    tokenizer: SafeTokenizer
    bos: int | None

    def bare(self, text: TextInput) -> Prompt:
        """See `Recipe.text`; begins with BOS if the model's tokenizer does so. All output is text."""
        first = () if self.bos is None else (self.bos,)
        return Prompt(
            ids=(*first, *self.tokenizer.encode(text.text)),
            control=tuple(range(len(first))),
            text=text.text,
            stop_ids=self.tokenizer.eos_ids,
            start="raw",
        )


def load_vocabulary(
    model: TokenizerModel,
    literals: Iterable[str],
    cache_chars: int,
    ends: Iterable[str] = (),
    original: tokenizers.Tokenizer | None = None,
) -> Vocabulary:
    """Build it; takes a second or two for a large vocabulary.

    Args:
        model: Whose tokenizer.
        literals: What the model's template or format writes itself; see `control_tokens`.
        cache_chars: See `SafeEncoder`.
        ends: Spellings of tokens that end an answer besides those the model's files name; control tokens all.
        original: The model's tokenizer, if it was made already.

    Raises:
        ModelError: The tokenizer cannot be used exactly and safely.
    """
    original, special = original or model.tokenizer(), model.special_tokens()
    text = original.to_str()
    definition: dict[str, Any] = json.loads(text)
    control = control_tokens(definition, literals, special.control_ids)
    encoder = SafeEncoder(definition, control, cache_chars, original)
    hidden = {token["id"] for token in definition["added_tokens"] if token["special"]} | special.control_ids
    eos = special.eos_ids | {control[end] for end in ends if end in control}
    tokenizer = SafeTokenizer(encoder, bytes_of_tokens(definition, frozenset(hidden)), eos)
    return Vocabulary(text, control, encoder, tokenizer, special.bos_id if special.add_bos else None)
