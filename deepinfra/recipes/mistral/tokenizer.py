"""Mistral's tokenizers, sentencepiece and tekken, as `deepinfra.interfaces.Tokenizer`; and their files."""

from __future__ import annotations

import re
from collections import OrderedDict
from pathlib import Path
from threading import Lock
from typing import Any

from mistral_common.tokens.tokenizers.base import Tokenizer as TextTokenizer
from mistral_common.tokens.tokenizers.sentencepiece import SentencePieceTokenizer
from mistral_common.tokens.tokenizers.tekken import Tekkenizer

from deepinfra.errors import InjectionError, ModelError, UnsupportedModelError

__all__ = ("CachedTokenizer", "MistralText", "tokenizer_file")

_VERSIONED = re.compile(r"tokenizer\.model\.v(\d+)")


def tokenizer_file(path: Path) -> Path:
    """Mistral's own tokenizer file of a model: `path` itself, or the newest in that folder or beside that file.

    Raises:
        ModelError: There is none, or only one that does not tell its version.
    """
    if path.is_file() and (path.suffix == ".json" or ".model" in path.name):
        return path
    folder = path if path.is_dir() else path.parent
    if (folder / "tekken.json").is_file():
        return folder / "tekken.json"
    versions = {int(found[1]): file for file in folder.iterdir() if (found := _VERSIONED.fullmatch(file.name))}
    if versions:
        return versions[max(versions)]
    raise ModelError(
        f"{folder} has no tokenizer of Mistral's own: no tekken.json and no tokenizer.model.v1, v2, v3 or v7 "
        "(a plain tokenizer.model does not tell its version: give the file itself as `model`, or rename it)"
    )


class CachedTokenizer:
    """What mistral-common encodes each piece of a prompt with: its own tokenizer, and a memory for the next turn.

    Args:
        inner: The tokenizer.
        cache_chars: Characters of text whose ids are kept.
    """

    def __init__(self, inner: TextTokenizer, cache_chars: int) -> None:
        self._inner, self._cache_chars = inner, cache_chars
        self._cache: OrderedDict[str, list[int]] = OrderedDict()
        self._chars, self._lock = 0, Lock()
        self._special = frozenset(inner.special_ids)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def encode(self, s: str, bos: bool, eos: bool) -> list[int]:
        """Ids of a text, of which no part becomes a control token."""
        with self._lock:
            ids = self._cache.get(s)
            if ids is not None:
                self._cache.move_to_end(s)
        if ids is None:
            ids = self._inner.encode(s, bos=False, eos=False)
            if not self._special.isdisjoint(ids):
                raise InjectionError("text became a control token; the prompt is not served")
            with self._lock:
                if s not in self._cache:
                    self._cache[s] = ids
                    self._chars += len(s)
                while self._chars > self._cache_chars:
                    self._chars -= len(self._cache.popitem(last=False)[0])
        return [*([self._inner.bos_id] if bos else ()), *ids, *([self._inner.eos_id] if eos else ())]

    def decode(self, tokens: list[int], special_token_policy: object = None) -> str:
        """Nothing: mistral-common keeps the text of each prompt this way, which the recipe makes from the ids."""
        return ""


class MistralText:
    """See `deepinfra.interfaces.Tokenizer`; thread-safe.

    Attributes:
        control: Spelling of every control token, by id.
        spellings: Their ids, by spelling.
        tekken: It is byte-level; else it is sentencepiece, which puts a space before a text.
    """

    def __init__(self, inner: TextTokenizer) -> None:
        self._inner = inner
        self._table = _bytes_of(inner)
        self.control: dict[int, str] = {token: inner.id_to_piece(token) for token in sorted(inner.special_ids)}
        self.spellings: dict[str, int] = {text: token for token, text in self.control.items()}
        self.tekken = isinstance(inner, Tekkenizer)

    @property
    def vocab_size(self) -> int:
        """All ids, control tokens included."""
        return len(self._table)

    @property
    def eos_ids(self) -> frozenset[int]:
        """`</s>`."""
        return frozenset((self._inner.eos_id,))

    @property
    def bos_id(self) -> int:
        """`<s>`."""
        return self._inner.bos_id

    def encode(self, text: str) -> list[int]:
        """See `Tokenizer.encode`."""
        return self._inner.encode(text, bos=False, eos=False)

    def token_bytes(self, token: int) -> bytes:
        """See `Tokenizer.token_bytes`."""
        if token < 0:
            raise IndexError(f"no token {token}")
        return self._table[token]

    def shown(self, ids: list[int]) -> tuple[str, list[int], list[tuple[int, int]]]:
        """A prompt's text with its control tokens spelled out, their positions, and where they stand in the text."""
        control, table = self.control, self._table
        positions = [index for index, token in enumerate(ids) if token in control]
        parts: list[str] = []
        ranges: list[tuple[int, int]] = []
        length = at = 0
        for position in positions:
            text, marker = (
                b"".join([table[token] for token in ids[at:position]]).decode(errors="replace"),
                control[ids[position]],
            )
            ranges.append((length + len(text), length + len(text) + len(marker)))
            parts += (text, marker)
            length += len(text) + len(marker)
            at = position + 1
        parts.append(b"".join([table[token] for token in ids[at:]]).decode(errors="replace"))
        return "".join(parts), positions, ranges


def _bytes_of(inner: TextTokenizer) -> tuple[bytes, ...]:
    if isinstance(inner, Tekkenizer):
        return tuple(inner.id_to_byte_piece(token) for token in range(inner.n_words))
    if isinstance(inner, SentencePieceTokenizer):
        hidden = inner.special_ids | {inner.unk_id}
        return tuple(b"" if token in hidden else _piece(inner.id_to_piece(token)) for token in range(inner.n_words))
    raise UnsupportedModelError("tokenizer", type(inner).__name__)


def _piece(piece: str) -> bytes:
    byte = re.fullmatch(r"<0x([0-9A-F]{2})>", piece)
    return bytes((int(byte[1], 16),)) if byte else piece.replace("▁", " ").encode()
