"""Mistral's tokenizers, sentencepiece and tekken, as `deepinfra.interfaces.Tokenizer`; and their files."""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from pathlib import Path
from threading import Lock, local
from typing import Any, NamedTuple

from mistral_common.tokens.tokenizers.base import Tokenizer as TextTokenizer
from mistral_common.tokens.tokenizers.sentencepiece import SentencePieceTokenizer
from mistral_common.tokens.tokenizers.tekken import Tekkenizer

from deepinfra.errors import InjectionError, ModelError, UnsupportedModelError

__all__ = ("CachedTokenizer", "MistralText", "tokenizer_file")

_VERSIONED = re.compile(r"tokenizer\.model\.v(\d+)")

_ENTRY = 100
"""Characters that a kept text counts for besides its own: many short ones take the memory of fewer long ones."""


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


class Piece(NamedTuple):
    """A text that was encoded: its ids, and what they say (sentencepiece puts a space before it)."""

    ids: list[int]
    text: str


class CachedTokenizer:
    """What mistral-common encodes each piece of a prompt with: its own tokenizer, and a memory for the next turn.

    Args:
        inner: The tokenizer.
        text: The same, for bytes.
        cache_chars: Characters of text whose ids are kept.
    """

    def __init__(self, inner: TextTokenizer, text: MistralText, cache_chars: int) -> None:
        self._inner, self._text, self._cache_chars = inner, text, cache_chars
        self._cache: OrderedDict[str, Piece] = OrderedDict()
        self._chars, self._lock = 0, Lock()
        self._heard = local()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def listen(self) -> list[Piece]:
        """What this thread encodes from now on, in order."""
        pieces: list[Piece] = []
        self._heard.pieces = pieces
        return pieces

    def encode(self, s: str, bos: bool, eos: bool) -> list[int]:
        """Ids of a text, of which no part becomes a control token."""
        with self._lock:
            piece = self._cache.get(s)
            if piece is not None:
                self._cache.move_to_end(s)
        if piece is None:
            piece = self._made(s)
        self._heard.pieces.append(piece)
        return [*([self._inner.bos_id] if bos else ()), *piece.ids, *([self._inner.eos_id] if eos else ())]

    def _made(self, s: str) -> Piece:
        ids = self._inner.encode(s, bos=False, eos=False)
        if not self._text.control.keys().isdisjoint(ids):
            raise InjectionError("text became a control token; the prompt is not served")
        piece = Piece(ids, self._text.decoded(ids))
        with self._lock:
            if s not in self._cache:
                self._cache[s] = piece
                self._chars += _ENTRY + len(s)
            while self._chars > self._cache_chars:
                self._chars -= _ENTRY + len(self._cache.popitem(last=False)[0])
        return piece

    def decode(self, tokens: list[int], special_token_policy: object = None) -> str:
        """Nothing: mistral-common keeps the text of each prompt this way, which the recipe makes from the pieces."""
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

    def decoded(self, ids: Iterable[int]) -> str:
        """What ids say; control tokens say nothing."""
        return b"".join(map(self._table.__getitem__, ids)).decode(errors="replace")

    def shown(self, ids: list[int], pieces: Sequence[Piece]) -> tuple[str, list[int], list[tuple[int, int]]]:
        """A prompt's text with its control tokens spelled out, their positions, and where they stand in the text.

        Args:
            ids: The prompt.
            pieces: What it was made of, about in order; saves reading it id by id.
        """
        waiting = [piece for piece in pieces if piece.ids]
        parts: list[str] = []
        positions: list[int] = []
        ranges: list[tuple[int, int]] = []
        length = at = 0
        while at < len(ids):
            marker = self.control.get(ids[at])
            if marker is not None:
                positions.append(at)
                ranges.append((length, length + len(marker)))
                text, size = marker, 1
            else:
                near = (i for i, (known, _) in enumerate(waiting[:8]) if ids[at : at + len(known)] == known)
                index = next(near, None)
                piece = self._read(ids, at) if index is None else waiting.pop(index)
                text, size = piece.text, len(piece.ids)
            parts.append(text)
            length, at = length + len(text), at + size
        return "".join(parts), positions, ranges

    def _read(self, ids: list[int], at: int) -> Piece:
        """What stands between here and the next control token."""
        end = next((i for i in range(at, len(ids)) if ids[i] in self.control), len(ids))
        return Piece(ids[at:end], self.decoded(ids[at:end]))


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
