"""What an error says to the person at the terminal."""

from __future__ import annotations

from collections.abc import Iterator

from deepinfra.errors import DeepinfraError

__all__ = ("sentence_for",)


def sentence_for(error: BaseException) -> str | None:
    """One sentence for an expected error, also if task groups wrapped it; `None` for a bug."""
    sentences: list[str] = []
    for leaf in _leaves(error):
        if isinstance(leaf, DeepinfraError):
            sentence = str(leaf)
        elif isinstance(leaf, OSError) and leaf.strerror:
            sentence = f"{leaf.filename}: {leaf.strerror}" if leaf.filename else leaf.strerror
        elif isinstance(leaf, ModuleNotFoundError) and leaf.name == "torch":
            sentence = "torch is not installed: install deepinfra-serve[torch]"
        else:
            return None
        if sentence not in sentences:
            sentences.append(sentence)
    return "; ".join(sentences)


def _leaves(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from _leaves(inner)
    else:
        yield error
