"""Recipe: request to exact tokens, tokens back to events."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Protocol

from deepinfra.core.conversation import Conversation
from deepinfra.core.events import Event, TokenLogprobs
from deepinfra.core.report import RecipeReport
from deepinfra.core.request import FinishReason, Prompt, TextInput
from deepinfra.interfaces.component import Component

__all__ = ("OutputParser", "Recipe", "Tokenizer")


class Tokenizer(Protocol):
    """Plain text to ids and back; pure and thread-safe. Nothing it encodes becomes a control token."""

    @property
    def vocab_size(self) -> int:
        """Ids run from 0 to `vocab_size - 1`; the executor's vocabulary may be padded beyond it."""

    @property
    def eos_ids(self) -> frozenset[int]:
        """Ids with which the model ends an answer."""

    def encode(self, text: str) -> list[int]:
        """Ids of `text`, without BOS or any other control token; markers in the text stay text."""

    def token_bytes(self, token: int) -> bytes:
        """Bytes that a token adds to the output; empty for control tokens. Raises IndexError for an unknown id."""


class OutputParser(Protocol):
    """Turns one answer's ids into events; one object per answer, not thread-safe, never blocks.

    Events do not depend on how the ids were cut into calls.
    """

    def feed(self, ids: Sequence[int], logprobs: Sequence[TokenLogprobs] = ()) -> Sequence[Event]:
        """Events that these ids complete. `logprobs` is empty or has one entry per id.

        Stop ids are not fed. Bytes of an unfinished character are held back.
        """

    def finish(self, reason: FinishReason) -> Sequence[Event]:
        """What was held back; called once, after the last `feed`. Never returns `Finished`."""

    @property
    def space(self) -> str:
        """White space at the end of the answer's text that was not said yet, since a block of calls takes it away.

        Stop strings are looked for in it all the same.
        """


class Recipe(Component):
    """One object per model. Pure and thread-safe: no I/O, clock or randomness in any method."""

    @property
    @abstractmethod
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""

    @property
    @abstractmethod
    def version(self) -> str:
        """Fingerprint of tokenizer, template and rendering rules; part of every KV namespace."""

    @abstractmethod
    def render(self, conversation: Conversation) -> Prompt:
        """Exact token ids of a conversation, ready for generation.

        Text that a user typed never becomes a control token. On text without markers the ids equal the model's own
        template's. A longer conversation's ids extend a shorter one's wherever the model's template does so.

        Raises:
            TemplateError: The template refuses the conversation; carries its message.
            UnsupportedFieldError: It has something (tools, media, a constraint) that this recipe cannot honour.
            InjectionError: The rendered control tokens are not those the template wrote; nothing may be served.
        """

    def text(self, text: TextInput) -> Prompt:
        """Exact token ids of bare text; default: `tokenizer.encode`, ended by the tokenizer's end ids."""
        ids = tuple(self.tokenizer.encode(text.text))
        return Prompt(ids=ids, text=text.text, stop_ids=self.tokenizer.eos_ids)

    def report(self) -> RecipeReport:
        """What this recipe protects, what it cannot, and what it does in the model's stead; default: its name."""
        return RecipeReport(recipe=type(self).__name__)

    @abstractmethod
    def parser(self, prompt: Prompt, choice: int = 0) -> OutputParser:
        """A parser for answer number `choice` to `prompt`, starting in `prompt.start`."""
