"""Calls as bare JSON where the answer begins: `{"name": …, "parameters": {…}}`, `<|python_tag|>` before it or not.

Nothing but its name tells such a call from an answer that is JSON, so the name must be that of a declared tool.
"""

from __future__ import annotations

from collections.abc import Sequence

from deepinfra.recipes.output.families.hermes import call_object
from deepinfra.recipes.output.family import Allowed, ToolFamily
from deepinfra.recipes.output.grammar import Edge, State
from deepinfra.recipes.output.lark import Rules

__all__ = ("LLAMA3_JSON",)


def _calls(rules: Rules, tools: Sequence[Allowed], many: bool) -> str:
    one = rules.either([call_object(rules, tool, arguments="parameters") for tool in tools])
    return one + (f' ("; " {one})*' if many else "")


_CALL = Edge(marker="{", to="call", keep=True)

LLAMA3_JSON = ToolFamily(
    name="llama3-json",
    entries=(
        Edge(marker="{", to="call", keep=True, first=True),
        Edge(marker="<|python_tag|>", to="tool"),
    ),
    states={
        "tool": State(channel="gap", edges=(_CALL,)),
        "call": State(channel="envelope", after="next", declared=True),
        "next": State(channel="gap", edges=(_CALL, Edge(marker=";", to="next"))),
    },
    calls=_calls,
    text=r"([^\s{](?s:.*))?",
)
