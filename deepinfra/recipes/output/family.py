"""A tool syntax: what a family of models writes when it calls tools."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from deepinfra.recipes.output.grammar import Edge, Grammar, State, reasoning_states

__all__ = ("ToolFamily", "output_grammar")

_SPACE = " \t\r\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFamily:
    """How a family of models calls tools.

    Attributes:
        name: Its name, as `recipe doctor` prints it.
        entries: The markers that open a block of calls.
        states: The states inside. `tool` is the one behind an opened block; a prompt may end there. States named
            `text` or `reasoning` replace those of the composition.
        in_reasoning: A block inside the reasoning ends it, and its calls count.
    """

    name: str
    entries: tuple[Edge, ...] = ()
    states: Mapping[str, State] = field(default_factory=dict)
    in_reasoning: bool = False


def output_grammar(
    control: Mapping[str, int], reasoning: tuple[str, str] | None = None, family: ToolFamily | None = None
) -> Grammar:
    """The grammar of an answer: text, reasoning if the model marks it, tool calls if a family is given.

    White space between text and a block of calls, and between blocks, belongs to neither.

    Args:
        control: Spelling and id of the model's control tokens; a marker that is none is found by its characters.
        reasoning: Opening and closing marker.
        family: The tool syntax; leave it out for an answer to a conversation that declares no tools, so that text
            about the syntax stays text.
    """
    states = reasoning_states(*reasoning, control) if reasoning is not None else {"text": State(channel="text")}
    if family is not None:
        text = states["text"]
        states["text"] = replace(text, edges=(*text.edges, *family.entries), lstrip="\n", rstrip=_SPACE)
        if family.in_reasoning and "reasoning" in states:
            thought = states["reasoning"]
            states["reasoning"] = replace(thought, edges=(*thought.edges, *family.entries), rstrip=_SPACE)
        states |= family.states
    return Grammar(states, control)
