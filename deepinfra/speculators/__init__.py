"""Speculators: guesses at next tokens, with how sure they are."""

from __future__ import annotations

from typing import TYPE_CHECKING

from deepinfra.lazy import lazily

if TYPE_CHECKING:
    from deepinfra.speculators.ngram import Ngram
    from deepinfra.speculators.options import NgramOptions

__all__ = ("Ngram", "NgramOptions")

__getattr__ = lazily(
    __name__,
    {"Ngram": "deepinfra.speculators.ngram", "NgramOptions": "deepinfra.speculators.options"},
)
