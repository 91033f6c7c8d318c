"""Random walks through a composed grammar: answers that a constraint allows, to be parsed back."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper
from numpy.typing import NDArray

from deepinfra.core.conversation import Constraint
from deepinfra.testing.answers import WRITERS, Bytes

__all__ = ("Walker", "byte_walker")

_THINK = ("<think>", "</think>")


@dataclass
class Walker:
    """A tokenizer as `deepinfra.engine.constraints` shows one to the library, and random answers that fit a grammar.

    Attributes:
        size: Ids run from 0 to `size - 1`; the library's end token stands behind them.
        control: Spelling and id of the control tokens.
    """

    size: int
    control: Mapping[str, int]
    encode: Callable[[str], list[int]]
    token_bytes: Callable[[int], bytes]

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __post_init__(self) -> None:
        self.eos_token_id = self.size
        table = [self.token_bytes(token) for token in range(self.size)]
        special = {token for token, data in enumerate(table) if not data} | set(self.control.values()) | {self.size}
        self.tokens = [f"<[{t}]>".encode() if t in special else data for t, data in enumerate([*table, b""])]
        self.special_token_ids = sorted(special)
        spelled = "|".join(re.escape(marker) for marker in sorted(self.control, key=len, reverse=True))
        self.split = re.compile(f"({spelled})" if spelled else "(?!)()")
        self.library = LLTokenizer(TokenizerWrapper(self), n_vocab=self.size + 1)

    def __call__(self, text: str | bytes) -> list[int]:
        return self.encode(text if isinstance(text, str) else text.decode("utf-8", "replace"))

    def marked(self, text: str) -> list[int]:
        """Ids of text with its markers as control tokens."""
        ids: list[int] = []
        for part in self.split.split(text):
            ids += [self.control[part]] if part in self.control else self.encode(part) if part else []
        return ids

    def matcher(self, constraint: Constraint) -> LLMatcher:
        """A new matcher; fails if the grammar does not compile."""
        assert constraint.kind == "grammar"
        matcher = LLMatcher(self.library, LLMatcher.grammar_from_lark(constraint.source), log_level=0)
        assert not matcher.is_error(), matcher.get_error() + constraint.source
        return matcher

    def walk(self, constraint: Constraint, draw: random.Random, phrases: Sequence[str], limit: int = 3000) -> list[int]:
        """A random answer that the constraint allows; `phrases` are what it would hardly find by chance."""
        matcher, ids = self.matcher(constraint), list[int]()
        known = [self.marked(phrase) for phrase in phrases]
        while len(ids) < limit:
            allowed = self.allowed(matcher)
            late = len(ids) > 60
            if matcher.is_accepting() and (late or not len(allowed) or draw.random() < 0.3):
                return ids
            fitting = [phrase for phrase in known if phrase and matcher.validate_tokens(phrase) == len(phrase)]
            if fitting and late:  # whatever leaves free text
                step = min(fitting, key=lambda phrase: (self.choices_behind(matcher, phrase), draw.random()))
            elif fitting and draw.random() < 0.8:
                step = draw.choice(fitting)
            else:
                step = [int(draw.choice(allowed))]
            assert matcher.consume_tokens(step)
            ids += step
        raise AssertionError(f"no end after {limit} tokens: {bytes(t for t in ids if t < 256)!r}")

    def allowed(self, matcher: LLMatcher) -> NDArray[np.intp]:
        """Ids that may come next."""
        bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
        assert not matcher.is_error(), matcher.get_error()
        return np.flatnonzero(bits[: self.size])

    def choices_behind(self, matcher: LLMatcher, phrase: Sequence[int]) -> int:
        """How many ids may follow a phrase; where the answer may end, less than any other."""
        assert matcher.consume_tokens(list(phrase))
        count = len(self.allowed(matcher)) - 1000 * matcher.is_accepting()
        matcher.rollback(len(phrase))
        return count


def byte_walker(name: str, tokens: bool) -> Walker:
    """One over single bytes, in which the markers of family `name` are tokens, or spelled."""
    text = WRITERS[name]([("f", {"s": "a", "x": 1})])
    found = re.findall(
        r"<[^<>]*:opensource>|<\|[^|<>]*\|?>|<[a-z_]+\|>|<｜[^｜<>]+｜>|\[[A-Z_]+\]|｜DSML｜|</?(?:tool_call|arg_key|arg_value)>",
        text,
    )
    simple = Bytes(sorted({*found, *_THINK}) if tokens else ())
    return Walker(256 + len(simple.control), simple.control, lambda text: list(text.encode()), simple.token_bytes)
