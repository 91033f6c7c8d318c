"""A tool syntax: what a family of models writes when it calls tools."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from deepinfra.core.conversation import JsonValue, ToolCall, ToolDefinition
from deepinfra.recipes.output.grammar import Edge, Grammar, State, reasoning_states
from deepinfra.recipes.output.lark import ANY, Rules

__all__ = ("Allowed", "Shown", "ToolFamily", "output_grammar")

_SPACE = " \t\r\n"


@dataclass(frozen=True, slots=True)
class Allowed:
    """A tool as a constraint sees it.

    Attributes:
        name: Its name.
        schema: JSON Schema of its arguments, an object.
        strict: All of it is to be enforced; else what can be.
    """

    name: str
    schema: Mapping[str, JsonValue]
    strict: bool = False


class Shown(Protocol):
    """How tools are described in a prompt whose template ignores them."""

    def show_tools(self, tools: Sequence[ToolDefinition]) -> str:
        """What the model is told about its tools."""
        ...

    def show_calls(self, calls: Sequence[ToolCall]) -> str:
        """Calls as the model writes them."""
        ...

    def show_result(self, name: str, text: str) -> str:
        """What a tool answered."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFamily:
    """How a family of models calls tools.

    Attributes:
        name: Its name, as `recipe doctor` prints it.
        entries: The markers that open a block of calls. Without any the family's states are how the model writes all
            answers, and they begin in the one named `header`.
        states: The states inside. `tool` is the one behind an opened block; a prompt may end there. States named
            `text` or `reasoning` replace those of the composition.
        opener: How a block is opened where one is demanded.
        calls: Adds to a grammar what follows the opener: calls of these tools, one or (third argument) more, and the
            end of the block. `None`: the family cannot be constrained.
        prefix: What the model writes before answer text.
        reasoning: What stands before and after reasoning, of a family without entries.
        text: Regular expression of answer text where a call may stand in its place.
        shown: How a prompt describes tools for the template, if the family can stand in for one.
    """

    name: str
    entries: tuple[Edge, ...] = ()
    states: Mapping[str, State] = field(default_factory=dict)
    opener: str = ""
    calls: Callable[[Rules, Sequence[Allowed], bool], str] | None = None
    prefix: str = ""
    reasoning: tuple[str, str] | None = None
    text: str = ANY
    shown: Shown | None = None


def output_grammar(
    control: Mapping[str, int], reasoning: tuple[str, str] | None = None, family: ToolFamily | None = None
) -> Grammar:
    """The grammar of an answer: text, reasoning if the model marks it, tool calls if a family is given.

    White space between text and a block of calls, and between blocks, belongs to neither. A block drafted inside the
    reasoning is part of it: a call counts when the model has thought.

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
        states |= family.states
    return Grammar(states, control)
