"""Constraints: what an answer must match, compiled off the loop, once per text, by llguidance."""

from __future__ import annotations

import re
import threading
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import anyio

from deepinfra.core.conversation import Constraint
from deepinfra.core.request import SeqSpec
from deepinfra.engine.matcher import Matcher
from deepinfra.engine.schemas import bounded_grammar, bounded_schema
from deepinfra.errors import Overloaded, RequestError
from deepinfra.interfaces.given import Offload
from deepinfra.interfaces.recipe import Recipe

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

__all__ = ("Constraints",)

_MAX_CHARS = 524_288
"""Longest source: 128 tools with nested schemas have 100,000 to 210,000 characters, and compile in half a second."""

_MAX_KEPT = 128
"""Compiled constraints that are kept; one takes up to about 1 MB."""

_AT_ONCE, _MAX_STUCK = 2, 8
"""Constraints compiled at once, so that the model keeps its cores; and threads that may hang past their time."""

_AHEAD = 512
"""Characters of text that must follow whose ids are asked for; of 500,000 they would take a second for each mask."""


@dataclass(slots=True, eq=False)
class _Compiled:
    """A constraint's matcher at its beginning, or why there is none; `lock` is held by who compiles it."""

    lock: anyio.Lock = field(default_factory=anyio.Lock)
    library: LLMatcher | None = None
    refusal: str = ""


class Constraints:
    """Compiles an engine's constraints.

    Args:
        recipe: Whose tokenizer they are compiled for; its control tokens are reached by `<[id]>` in a grammar only.
        offload: Threads.
        time_limit_s: A constraint that takes longer to compile is refused.
    """

    def __init__(self, recipe: Recipe, offload: Offload, *, time_limit_s: float = 5.0) -> None:
        self._recipe, self._offload, self._time_limit_s = recipe, offload, time_limit_s
        self._kept: OrderedDict[Constraint, _Compiled] = OrderedDict()
        self._limiter = anyio.CapacityLimiter(_AT_ONCE)
        self._threads = threading.BoundedSemaphore(_MAX_STUCK)
        self._building = threading.Lock()
        self._tokenizer: LLTokenizer | None = None

    async def matcher(self, spec: SeqSpec) -> Matcher | None:
        """A matcher for a sequence, moved on to the end of its tokens; `None` if it is not constrained.

        Raises:
            RequestError: The constraint is wrong, too large, takes too long or cannot be enforced.
            Overloaded: Too many constraints are being compiled.
        """
        if spec.constraint is None:
            return None
        library = await self._compiled(spec.constraint)
        matcher = Matcher(library.deep_copy(), self._recipe.tokenizer.vocab_size, spec.stop_ids)
        for token in spec.tokens[spec.prompt_len :]:
            matcher.take(token)
        return matcher

    async def _compiled(self, constraint: Constraint) -> LLMatcher:
        if len(constraint.source) > _MAX_CHARS:
            raise RequestError(
                f"the constraint has {len(constraint.source)} characters; at most {_MAX_CHARS} are taken", "constraint"
            )
        entry = self._kept.setdefault(constraint, _Compiled())
        self._kept.move_to_end(constraint)
        while len(self._kept) > _MAX_KEPT:
            self._kept.popitem(last=False)
        async with entry.lock:
            if entry.library is None and not entry.refusal:
                await self._fill(entry, constraint)
        if entry.library is None:
            raise RequestError(entry.refusal, "constraint")
        return entry.library

    async def _fill(self, entry: _Compiled, constraint: Constraint) -> None:
        async with self._limiter:
            with anyio.move_on_after(self._time_limit_s):
                try:
                    await self._offload(self._compile, entry, constraint)
                except RequestError as error:
                    entry.refusal = str(error)
                return
            entry.refusal = f"the constraint takes more than {self._time_limit_s:g} s to compile"

    # -- in a worker thread -------------------------------------------------------------------------

    def _compile(self, entry: _Compiled, constraint: Constraint) -> None:
        # Kept from here, so that what came too late, on a busy machine, is there when it is asked for again.
        # Counted here and not by the limiter, which a thread past its time no longer holds.
        if not self._threads.acquire(blocking=False):
            raise Overloaded("too many constraints are being compiled")
        try:
            entry.library = self._built(constraint)
        except ValueError as error:  # what the library says of text that is no JSON for it
            raise RequestError(
                f"the constraint ({constraint.kind}) is refused: {_told(str(error))}", "constraint"
            ) from None
        finally:
            self._threads.release()

    def _built(self, constraint: Constraint) -> LLMatcher:
        from llguidance import LLMatcher  # here, because an engine without constraints does not need it

        source = constraint.source
        if constraint.kind == "regex":
            grammar = LLMatcher.grammar_from_regex(source)
        elif constraint.kind == "grammar":
            grammar = LLMatcher.grammar_from_lark(bounded_grammar(source))
        else:
            schema = bounded_schema('{"type": "object"}' if constraint.kind == "json" else source)
            grammar = LLMatcher.grammar_from_json_schema(schema)
        library = LLMatcher(self._vocabulary(), grammar, log_level=0)
        if library.is_error():
            raise RequestError(
                f"the constraint ({constraint.kind}) is refused: {_told(library.get_error())}", "constraint"
            )
        # The first mask shows whether anything matches at all, and warms what all copies share.
        if not any(library.compute_bitmask()) or library.is_error():
            raise RequestError(f"nothing matches the constraint ({constraint.kind})", "constraint")
        return library

    def _vocabulary(self) -> LLTokenizer:
        with self._building:
            if self._tokenizer is None:
                self._tokenizer = _vocabulary_of(self._recipe)
            return self._tokenizer


class _Words:
    """A tokenizer as the library reads it: every token's bytes, and which are no text.

    The library's end token is one of its own behind the vocabulary: an answer may have several end tokens, and a
    grammar may name any of them.
    """

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, recipe: Recipe) -> None:
        tokenizer = recipe.tokenizer
        self._encode = tokenizer.encode
        self.eos_token_id = size = tokenizer.vocab_size
        table = [tokenizer.token_bytes(token) for token in range(size)]
        control = {token for _, token in recipe.report().control} | {size}
        control |= {token for token, data in enumerate(table) if not data}
        # The library finds control tokens by their spelling, so each needs one of its own.
        self.tokens = [f"<[{t}]>".encode() if t in control else data for t, data in enumerate([*table, b""])]
        self.special_token_ids = sorted(control)

    def __call__(self, text: str | bytes) -> list[int]:
        """Ids of text that must follow, for every mask anew: of its beginning, which is all that a mask is about."""
        text = text[:_AHEAD]
        return self._encode(text if isinstance(text, str) else text.decode("utf-8", "replace"))


def _vocabulary_of(recipe: Recipe) -> LLTokenizer:
    from llguidance import LLTokenizer, TokenizerWrapper

    words = _Words(recipe)
    return LLTokenizer(TokenizerWrapper(words), n_vocab=len(words.tokens))


def _told(error: str) -> str:
    """The library's reason in one line, without the picture of where it is; of a long one its two ends."""
    line = " ".join(re.split(r"\n\s*\d+ \| ", error)[0].split())
    return line if len(line) <= 300 else f"{line[:100]} … {line[-200:]}"
