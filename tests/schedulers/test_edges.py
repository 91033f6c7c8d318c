"""Where learned buckets begin."""

from __future__ import annotations

from deepinfra.core.buckets import DEFAULT_EDGES
from deepinfra.schedulers.edges import Edges

MIX = [100] * 40 + [1000] * 16 + [4000] * 6 + [9000] * 2


def test_edges_are_learned_from_the_first_prompts() -> None:
    edges = Edges(None)
    for length in MIX[:-1]:
        edges.saw(length)
    assert edges.now == DEFAULT_EDGES
    edges.saw(MIX[-1])
    assert edges.now == (100, 1000, 4000)


def test_learned_edges_move_by_a_tenth_at_most() -> None:
    edges = Edges(None)
    for length in MIX * 4:
        edges.saw(length)
    before = edges.now
    for _ in range(64):
        edges.saw(50_000)
    assert before != edges.now
    assert all(new <= 1.1 * old + 1 for old, new in zip(before, edges.now, strict=True))


def test_given_edges_stay() -> None:
    edges = Edges((7, 70))
    for length in MIX * 5:
        edges.saw(length)
    assert edges.now == (7, 70)
