"""The least recipe there is: prompts come as token ids, and what is generated is nobody's text."""

from __future__ import annotations

from collections.abc import Sequence

from deepinfra.core.conversation import Conversation
from deepinfra.core.events import Event, TokenLogprobs
from deepinfra.core.request import FinishReason, Prompt
from deepinfra.errors import RequestError
from deepinfra.interfaces.recipe import OutputParser, Recipe, Tokenizer

__all__ = ("RawTokens",)


class _Tokens(Tokenizer):
    vocab_size = 1  # every token has a name of no bytes, the executor's others too
    eos_ids: frozenset[int] = frozenset()

    def encode(self, text: str) -> list[int]:
        raise RequestError("a simulation takes token ids only", "prompt")

    def token_bytes(self, token: int) -> bytes:
        return b""


class _Silent(OutputParser):
    space = ""

    def feed(self, ids: Sequence[int], logprobs: Sequence[TokenLogprobs] = ()) -> Sequence[Event]:
        return ()

    def finish(self, reason: FinishReason) -> Sequence[Event]:
        return ()


class RawTokens(Recipe):
    """Serves `GenerateRequest.input` of token ids; an answer has no events but its last."""

    _tokens, _silent = _Tokens(), _Silent()

    @property
    def tokenizer(self) -> Tokenizer:
        """See `Recipe.tokenizer`."""
        return self._tokens

    @property
    def version(self) -> str:
        """See `Recipe.version`."""
        return "raw"

    def render(self, conversation: Conversation) -> Prompt:
        """See `Recipe.render`; refuses everything."""
        raise RequestError("a simulation takes token ids only", "messages")

    def parser(self, prompt: Prompt, choice: int = 0) -> OutputParser:
        """See `Recipe.parser`."""
        return self._silent
