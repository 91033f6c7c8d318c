"""Turns the scores of a sentencepiece vocabulary into the ranked merges that the `tokenizers` BPE model wants."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

__all__ = ("merges_from_scores",)


def merges_from_scores(pieces: Mapping[str, int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """Lists the merges of a sentencepiece BPE vocabulary, first merge first.

    Sentencepiece joins, again and again, the two neighbours that make the best-scored piece, leftmost of equals. The
    BPE model ranks pairs, not results: the pairs that make one piece differ in rank, so their order has to make up
    for "leftmost". It matters only when two of them share their middle (`x y` and `y z` in `x y z`), see `_ordered`.

    Args:
        pieces: Text to id of the pieces that text may become (no control, unknown or byte tokens).
        scores: Score by id; higher merges first.

    Returns:
        Pairs of pieces by falling score of what they make, then by id.
    """
    ranked = sorted(
        (piece for piece in pieces if len(piece) > 1), key=lambda piece: (-scores[pieces[piece]], pieces[piece])
    )
    return [pair for piece in ranked for pair in _ordered(piece, pieces)]


def _ordered(piece: str, pieces: Mapping[str, int]) -> Iterator[tuple[str, str]]:
    """Yields the ways to make `piece` from two pieces, in an order that stands in for "leftmost first".

    In `x y z` with `x + y == y + z == piece`, `x y` is the leftmost. Then `y` is both head and tail of the piece, so a
    split whose right part also begins the piece has to come before the split whose left part is that text.
    """
    size = len(piece)
    cuts = [cut for cut in range(1, size) if piece[:cut] in pieces and piece[cut:] in pieces]
    cuts.sort(key=lambda cut: (not piece.startswith(piece[cut:]), cut))
    for cut in cuts:
        yield piece[:cut], piece[cut:]
