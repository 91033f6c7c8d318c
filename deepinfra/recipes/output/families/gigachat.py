"""GigaChat 3: one call a turn, an object behind a token (3.1) or in a message of its own (3)."""

from __future__ import annotations

from collections.abc import Sequence

from deepinfra.recipes.output.families.hermes import call_object
from deepinfra.recipes.output.family import Allowed, ToolFamily
from deepinfra.recipes.output.grammar import Edge, State
from deepinfra.recipes.output.lark import Rules

__all__ = ("GIGACHAT_3", "GIGACHAT_31")


def _calls(rules: Rules, tools: Sequence[Allowed], many: bool) -> str:
    """One call: the model stops behind it, whether it may call again or not."""
    return rules.either([call_object(rules, tool) for tool in tools])


def _family(name: str, *openers: str) -> ToolFamily:
    entries = tuple(Edge(marker=opener, to="tool") for opener in openers)
    return ToolFamily(
        name=name,
        entries=entries,
        states={
            "tool": State(channel="gap", edges=(Edge(marker="{", to="call", keep=True), *entries)),
            "call": State(channel="envelope", after="tool"),
        },
        opener=openers[0],
        calls=_calls,
    )


GIGACHAT_3 = _family("gigachat-3", "<|message_sep|>\n\nfunction call<|role_sep|>\n", "function call<|role_sep|>\n")
GIGACHAT_31 = _family("gigachat-3.1", "<|function_call|>")
