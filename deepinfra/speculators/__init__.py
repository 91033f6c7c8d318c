"""Speculators: guesses at next tokens, with how sure they are."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from deepinfra.speculators.ngram import Ngram
    from deepinfra.speculators.options import NgramOptions

__all__ = ("Ngram", "NgramOptions")

_HOME = {"Ngram": "deepinfra.speculators.ngram", "NgramOptions": "deepinfra.speculators.options"}


def __getattr__(name: str) -> object:
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module 'deepinfra.speculators' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
