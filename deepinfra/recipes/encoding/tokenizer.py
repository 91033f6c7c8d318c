"""A Hugging Face tokenizer as `deepinfra.interfaces.Tokenizer`: text in without control tokens, bytes out."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from deepinfra.errors import UnsupportedModelError
from deepinfra.recipes.encoding.vocabulary import SafeEncoder

__all__ = ("SafeTokenizer", "bytes_of_tokens")

_BYTE = re.compile(r"<0x([0-9A-F]{2})>")


class SafeTokenizer:
    """See `deepinfra.interfaces.Tokenizer`; thread-safe."""

    def __init__(self, encoder: SafeEncoder, table: tuple[bytes, ...], eos_ids: frozenset[int]) -> None:
        self._encoder, self._table, self._eos_ids = encoder, table, eos_ids

    @property
    def vocab_size(self) -> int:
        """One more than the highest id."""
        return len(self._table)

    @property
    def eos_ids(self) -> frozenset[int]:
        """The model's own end tokens."""
        return self._eos_ids

    def encode(self, text: str) -> list[int]:
        """See `Tokenizer.encode`."""
        return self._encoder.encode(text)[0]

    def token_bytes(self, token: int) -> bytes:
        """See `Tokenizer.token_bytes`; tokens such as `<tool_call>` that are not special have their text."""
        if token < 0:
            raise IndexError(f"no token {token}")
        return self._table[token]


def bytes_of_tokens(definition: Mapping[str, Any], hidden: frozenset[int]) -> tuple[bytes, ...]:
    """What each id adds to the output, by id; nothing for `hidden` ids and for holes in the vocabulary.

    Raises:
        UnsupportedModelError: The decoder is neither byte-level nor sentencepiece-like.
    """
    model = definition["model"]
    vocab = model["vocab"]
    pieces = vocab if isinstance(vocab, dict) else {piece[0]: index for index, piece in enumerate(vocab)}
    added = {token["id"]: token["content"] for token in definition["added_tokens"]}
    steps = _steps(definition.get("decoder"))
    table = [b""] * (max((*pieces.values(), *added)) + 1)
    kinds = {step["type"] for step in steps}
    if "ByteLevel" in kinds:
        alphabet = _byte_alphabet()
        for piece, token in pieces.items():
            try:
                table[token] = piece.translate(alphabet).encode("latin-1")
            except UnicodeEncodeError:  # spelled as it is
                table[token] = piece.encode()
    elif "Metaspace" in kinds or ("Replace" in kinds and kinds <= {"Replace", "ByteFallback", "Fuse", "Strip"}):
        space = next((step["replacement"] for step in steps if step["type"] == "Metaspace"), "▁")
        for piece, token in pieces.items():
            byte = _BYTE.fullmatch(piece)
            table[token] = bytes((int(byte[1], 16),)) if byte else piece.replace(space, " ").encode()
    else:
        raise UnsupportedModelError("tokenizer.decoder", sorted(kinds))
    for token, content in added.items():
        table[token] = content.encode()
    for token in hidden:
        table[token] = b""
    return tuple(table)


def _steps(decoder: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    if decoder is None:
        return []
    if decoder["type"] == "Sequence":
        return [step for inner in decoder["decoders"] for step in _steps(inner)]
    return [decoder]


def _byte_alphabet() -> dict[int, int]:
    """The byte that each character stands for, by its number; to those below 256 that stand for none, one above.

    Source: GPT-2's encoder.py (`bytes_to_unicode`), for `str.translate`.
    """
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in shown]
    alphabet = dict.fromkeys(hidden, 0xFFFF) | {byte: byte for byte in shown}
    return alphabet | {256 + index: byte for index, byte in enumerate(hidden)}
