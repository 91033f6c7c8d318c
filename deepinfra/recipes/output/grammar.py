"""What a model family writes: states, and the markers that lead from one to another.

A marker is spelled as the model's template spells it. Where a part of it is a control token of the model, only that
token's id counts, and the same characters spelled by other tokens are text. The engine reads one stream in which each
such token is one character that no decoded text can contain (a lone surrogate), so a marker may mix text and tokens
(`<` + `｜DSML｜` + `tool_calls>`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias

__all__ = (
    "REASONING",
    "SPOKEN",
    "TOKENS",
    "Channel",
    "Edge",
    "Grammar",
    "Marked",
    "Notation",
    "State",
    "reasoning_states",
)

REASONING: tuple[tuple[str, str], ...] = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<seed:think>", "</seed:think>"),
    ("<mm:think>", "</mm:think>"),
    ("<thinking>", "</thinking>"),
    ("<think:opensource>", "</think:opensource>"),
    ("<|inner_prefix|>", "<|inner_suffix|>"),
    ("<|channel>thought\n", "<channel|>"),
    ("Here are my reasoning steps:\n", "[BEGIN FINAL RESPONSE]"),
)
"""The spellings by which model families open and close their reasoning."""

TOKENS = re.compile(r"[\ud800-\udfff]")
"""Characters of the stream that stand for control tokens."""

SPOKEN = ("text", "reasoning")
"""Channels that are shown as they are."""

Channel: TypeAlias = Literal["text", "reasoning", "gap", "header", "arguments", "envelope", "value"]
"""What becomes of a state's text.

- `text`, `reasoning`: events of that kind.
- `gap`: scaffolding. White space is dropped; inside a call anything else too, outside one it breaks the block.
- `header`: held until a marker whose `when` it matches; the pattern's groups `name`, `id` and `key` say what it is.
- `arguments`: one JSON value, or what `notation` says: the call's arguments; ends itself, then comes `after`.
- `envelope`: one JSON object that holds a call's name and arguments; ends itself, then comes `after`.
- `value`: the value of the parameter `key`, turned into JSON.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Notation:
    """How a family writes a call's arguments; the brackets around them are the call's.

    Attributes:
        assign: What stands between an argument's name and its value.
        close: What ends the arguments.
        comma: What stands between values, as models write it.
        colon: What stands between the key of an inner object and its value.
        bare: Such keys are written without quotes.
        quote: A marker on both sides of a string, which is written as it is; without one, a string is as Python or
            JSON has it.
        words: True, false and null; those of Python and of JSON are read in any case.
    """

    assign: str
    close: str
    comma: str
    colon: str
    bare: bool = False
    quote: str = ""
    words: tuple[str, str, str] = ("true", "false", "null")


@dataclass(frozen=True, slots=True, kw_only=True)
class Edge:
    """A marker seen in a state, and the state it leads to.

    Attributes:
        marker: Its spelling.
        to: Name of the next state.
        when: Regular expression that the whole text of a `header` must match; of edges with the same marker the first
            that matches is taken, and if none does the block is broken. Control tokens appear in it spelled out.
        first: Counts only while nothing but white space was written, reasoning aside (an answer about `<think>` is
            no reasoning).
        keep: The marker is left to the next state.
        ends: The call under way is complete.
        quiet: It, and what led to it, is the format's own: where no call follows it is not told as text.
        quoted: What `when` finds stood between quotes: `&quot;` in it is a quote.
    """

    marker: str
    to: str
    when: str | None = None
    first: bool = False
    keep: bool = False
    ends: bool = False
    quiet: bool = False
    quoted: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """One kind of output.

    Attributes:
        channel: What its text becomes.
        edges: Ways out; no marker may be the beginning of another.
        lstrip: Characters dropped at its beginning, when a marker led to it.
        rstrip: Characters dropped at its end, before the marker that ends it.
        lead: Text dropped once at its beginning, if it is there.
        after: The next state of one that ends itself.
        typed: Of a `value`: a string as it stands, JSON (what is none becomes a string), or what the tool's schema
            says.
        notation: Of `arguments`: how they are written, if not in JSON; the marker before is their opening bracket.
        declared: Of an `envelope`: it is a call only if its first key and its name say so; else it is text.
        quiet: Of a `header`: one that the answer's end cuts is not told as text.
    """

    channel: Channel
    edges: tuple[Edge, ...] = ()
    lstrip: str = ""
    rstrip: str = ""
    lead: str = ""
    after: str = ""
    typed: Literal["string", "json", "schema"] = "string"
    notation: Notation | None = None
    declared: bool = False
    quiet: bool = False


@dataclass(frozen=True, slots=True)
class Marked:
    """A state as the engine reads it: markers as they stand in the stream.

    Attributes:
        state: What was declared; its notation's quote as it stands in the stream.
        edges: By marker.
        early: Finds the markers that count while no text was written.
        late: Finds the others.
        prefixes: Every proper beginning of a marker.
        longest: Length of the longest of them.
    """

    state: State
    edges: Mapping[str, tuple[Edge, ...]]
    early: re.Pattern[str] | None
    late: re.Pattern[str] | None
    prefixes: frozenset[str]
    longest: int


@dataclass(frozen=True)
class Grammar:
    """States by name, built once per recipe; `text` is always one of them, `raw` takes everything as text.

    Args:
        states: The states. One without `edges` whose channel is text sees no control token.
        control: Spelling and id of the model's control tokens.
    """

    states: Mapping[str, State]
    control: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        spelled = "|".join(re.escape(marker) for marker in sorted(self.control, key=len, reverse=True) if marker)
        pattern = re.compile(spelled or "(?!)")
        characters: dict[str, str] = {}

        def character(found: re.Match[str]) -> str:
            return characters.setdefault(found.group(), chr(0xD800 + len(characters)))

        def read(marker: str) -> str:
            return pattern.sub(character, marker)

        states = {"raw": State(channel="text"), **self.states}
        marked = {name: _marked(state, read) for name, state in states.items()}
        for name, state in states.items():
            targets = {edge.to for edge in state.edges} | ({state.after} if state.after else set())
            if not targets <= states.keys():
                raise ValueError(f"state {name!r} leads to {sorted(targets - states.keys())}, which are not declared")
        object.__setattr__(self, "marked", marked)
        object.__setattr__(self, "by_id", {self.control[text]: char for text, char in characters.items()})
        object.__setattr__(self, "spelling", {char: text for text, char in characters.items()})
        object.__setattr__(self, "tokens", {char: self.control[text] for text, char in characters.items()})

    marked: Mapping[str, Marked] = field(init=False, repr=False, compare=False)
    """The states as the engine reads them."""
    by_id: Mapping[int, str] = field(init=False, repr=False, compare=False)
    """The character that stands for a control token in the stream; only tokens that a marker contains have one."""
    spelling: Mapping[str, str] = field(init=False, repr=False, compare=False)
    """How such a character is spelled."""
    tokens: Mapping[str, int] = field(init=False, repr=False, compare=False)
    """The token that such a character stands for."""


def _marked(state: State, read: Callable[[str], str]) -> Marked:
    edges: dict[str, tuple[Edge, ...]] = {}
    for edge in state.edges:
        marker = read(edge.marker)
        edges[marker] = (*edges.get(marker, ()), edge)
    for marker in edges:
        for other in edges:
            if marker != other and other.startswith(marker):
                raise ValueError(f"the marker {marker!r} is the beginning of {other!r}")
    if state.notation is not None:
        state = replace(state, notation=replace(state.notation, quote=read(state.notation.quote)))
    late = [marker for marker, same in edges.items() if not all(edge.first for edge in same)]
    prefixes = frozenset(marker[:size] for marker in edges for size in range(1, len(marker)))
    return Marked(state, edges, _any(edges), _any(late), prefixes, max(map(len, prefixes), default=0))


def _any(markers: Collection[str]) -> re.Pattern[str] | None:
    return re.compile("|".join(map(re.escape, markers))) if markers else None


def reasoning_states(opening: str, closing: str, control: Mapping[str, int]) -> dict[str, State]:
    """Text that may begin with marked reasoning; newlines around the markers belong to neither.

    A closing marker without an opening one is dropped where it is a token, and stays text where it is a string.
    """
    to_text = Edge(marker=closing, to="text")
    is_token = any(token and token in opening for token in control)
    to_reasoning = Edge(marker=opening, to="reasoning", first=not is_token)
    text_edges = (to_reasoning, to_text) if closing in control else (to_reasoning,)
    return {
        "text": State(channel="text", edges=text_edges, lstrip="\n"),
        "reasoning": State(channel="reasoning", edges=(to_text,), lstrip="\n", rstrip="\n"),
    }
