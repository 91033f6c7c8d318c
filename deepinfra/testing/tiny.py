"""A recipe over bytes: no files, no template, so that whole-engine laws need no model."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from deepinfra.core.conversation import Conversation, MediaPart
from deepinfra.core.events import Event, TextDelta, TokenLogprobs
from deepinfra.core.request import FinishReason, Prompt, TextInput
from deepinfra.errors import UnsupportedFieldError
from deepinfra.interfaces import OutputParser, Recipe, Tokenizer

__all__ = ("ASSISTANT", "BOS", "EOS", "USER", "TinyRecipe")

BOS, USER, ASSISTANT, EOS = 256, 257, 258, 259
"""The control ids; ids 0 to 255 are the bytes themselves."""


class _Bytes:
    """The byte vocabulary."""

    vocab_size = 260
    eos_ids = frozenset({EOS})

    def encode(self, text: str) -> list[int]:
        return list(text.encode("utf-8", "replace"))

    def token_bytes(self, token: int) -> bytes:
        if not 0 <= token < self.vocab_size:
            raise IndexError(f"no token {token} in a vocabulary of {self.vocab_size}")
        return bytes((token,)) if token < 256 else b""


class _Parser:
    """Bytes to text, one event per completed character."""

    space = ""

    def __init__(self, tokenizer: _Bytes, choice: int) -> None:
        self._tokenizer, self._choice = tokenizer, choice
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._pending: list[TokenLogprobs] = []

    def feed(self, ids: Sequence[int], logprobs: Sequence[TokenLogprobs] = ()) -> Sequence[Event]:
        events: list[Event] = []
        for index, token in enumerate(ids):
            if logprobs:
                self._pending.append(logprobs[index])
            self._emit(self._decoder.decode(self._tokenizer.token_bytes(token)), events)
        return events

    def finish(self, reason: FinishReason) -> Sequence[Event]:
        events: list[Event] = []
        text = self._decoder.decode(b"", True)
        if text or self._pending:
            self._emit(text, events, last=True)
        return events

    def _emit(self, text: str, events: list[Event], last: bool = False) -> None:
        if text or last:
            events.append(TextDelta(choice=self._choice, text=text, tokens=tuple(self._pending)))
            self._pending.clear()


class TinyRecipe(Recipe):
    """Role markers and bytes: `BOS (USER text | ASSISTANT text EOS)* ASSISTANT`.

    System, developer and tool turns are written as user turns. A following conversation extends the ids of the one
    before it plus its answer, so prefix reuse can be tested with it.
    """

    def __init__(self) -> None:
        self._tokenizer = _Bytes()

    @property
    def tokenizer(self) -> Tokenizer:
        """The byte vocabulary: 256 bytes and four control ids."""
        return self._tokenizer

    @property
    def version(self) -> str:
        """Changes only with this file's rules."""
        return "tiny-1"

    def render(self, conversation: Conversation) -> Prompt:
        """See `Recipe.render`; refuses tools and media by name."""
        if conversation.tools or any(message.tool_calls for message in conversation.messages):
            raise UnsupportedFieldError("tools")
        ids, control, text = [BOS], [0], []
        for message in conversation.messages:
            if any(isinstance(part, MediaPart) for part in message.content):
                raise UnsupportedFieldError("content")
            assistant = message.role == "assistant"
            control.append(len(ids))
            ids.append(ASSISTANT if assistant else USER)
            ids += self._tokenizer.encode(message.text)
            text.append(message.text)
            if assistant and not message.prefix:
                control.append(len(ids))
                ids.append(EOS)
        if not (conversation.messages and conversation.messages[-1].prefix):
            control.append(len(ids))
            ids.append(ASSISTANT)
        return Prompt(
            ids=tuple(ids),
            control=tuple(control),
            text="\n".join(text),
            stop_ids=self._tokenizer.eos_ids,
            constraint=conversation.constraint,
            breakpoints=tuple(position for position in control if position),
        )

    def text(self, text: TextInput) -> Prompt:
        """Bytes of bare text behind a BOS."""
        ids = (BOS, *self._tokenizer.encode(text.text))
        return Prompt(ids=ids, control=(0,), text=text.text, stop_ids=self._tokenizer.eos_ids)

    def parser(self, prompt: Prompt, choice: int = 0) -> OutputParser:
        """Bytes to text; there is no reasoning and there are no tool calls."""
        return _Parser(self._tokenizer, choice)
