"""Functionary: `<function=name>{…}</function>` in 3.1; `>>>name` and a line's end before each part of a 3.2 answer."""

from __future__ import annotations

from collections.abc import Sequence

from deepinfra.recipes.output.family import Allowed, ToolFamily
from deepinfra.recipes.output.grammar import Edge, State
from deepinfra.recipes.output.lark import Rules

__all__ = ("FUNCTIONARY", "FUNCTIONARY_32")

_FUNCTION = Edge(marker="<function=", to="name")


def _functionary(rules: Rules, tools: Sequence[Allowed], many: bool) -> str:
    one = rules.either(
        [f"{rules.literal(f'{tool.name}>')} {rules.json(tool.schema)} {rules.literal('</function>')}" for tool in tools]
    )
    return one + (f" ({rules.literal('<function=')} {one})*" if many else "")


FUNCTIONARY = ToolFamily(
    name="functionary",
    entries=(_FUNCTION,),
    states={
        "name": State(channel="header", edges=(Edge(marker=">", to="arguments", when=r"(?P<name>[^\s<>]+)"),)),
        "arguments": State(channel="arguments", after="tool"),
        "tool": State(channel="gap", edges=(_FUNCTION, Edge(marker="</function>", to="tool"))),
    },
    opener="<function=",
    calls=_functionary,
)


def _calls(rules: Rules, tools: Sequence[Allowed], many: bool) -> str:
    one = rules.either([f"{rules.literal(tool.name + chr(10))} {rules.json(tool.schema)}" for tool in tools])
    return one + (f" ({rules.literal('>>>')} {one})*" if many else "")


_HEADER = State(
    channel="header",
    edges=(
        Edge(marker="\n", to="text", when="all", quiet=True),
        Edge(marker="\n", to="arguments", when=r"(?P<name>[A-Za-z0-9_.-]+)"),
    ),
)

FUNCTIONARY_32 = ToolFamily(
    name="functionary-3.2",
    states={
        "header": _HEADER,
        "text": State(channel="text", edges=(Edge(marker=">>>", to="header"),), rstrip=" \t\r\n"),
        "arguments": State(channel="arguments", after="between"),
        "between": State(channel="gap", edges=(Edge(marker=">>>", to="header"),)),
    },
    calls=_calls,
    prefix="all\n",
)
"""A prompt ends with `>>>`, so an answer begins with a name: `all` before text, else a tool's."""
