"""What a model family writes: states, and the markers that lead from one to another."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ("REASONING", "Edge", "Grammar", "State", "reasoning_grammar")

REASONING: tuple[tuple[str, str], ...] = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<seed:think>", "</seed:think>"),
    ("<mm:think>", "</mm:think>"),
    ("<thinking>", "</thinking>"),
)
"""The spellings by which model families open and close their reasoning."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Edge:
    """A marker seen in a state, and the state it leads to.

    Attributes:
        marker: Its spelling.
        token: Its id; then only the id counts, and the same characters spelled by other tokens are text.
        to: Name of the next state.
        first: Counts only while nothing but white space was written (an answer about `<think>` is no reasoning).
    """

    marker: str
    to: str
    token: int | None = None
    first: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """One kind of output.

    Attributes:
        channel: What its text becomes.
        edges: Ways out.
        lstrip: Characters dropped at its beginning, when a marker led to it.
        rstrip: Characters dropped at its end, before the marker that ends it.
    """

    channel: Literal["text", "reasoning"]
    edges: tuple[Edge, ...] = ()
    lstrip: str = ""
    rstrip: str = ""


@dataclass(frozen=True, slots=True)
class Grammar:
    """States by name; `text` is always one of them."""

    states: dict[str, State]


def reasoning_grammar(opening: str, closing: str, opening_id: int | None, closing_id: int | None) -> Grammar:
    """Text that may begin with marked reasoning; newlines around the markers belong to neither.

    A closing marker without an opening one is dropped where it is a token, and stays text where it is a string.
    """
    to_text = Edge(marker=closing, token=closing_id, to="text")
    to_reasoning = Edge(marker=opening, token=opening_id, to="reasoning", first=opening_id is None)
    text_edges = (to_reasoning, to_text) if closing_id is not None else (to_reasoning,)
    return Grammar(
        {
            "text": State(channel="text", edges=text_edges, lstrip="\n"),
            "reasoning": State(channel="reasoning", edges=(to_text,), lstrip="\n", rstrip="\n"),
        }
    )
