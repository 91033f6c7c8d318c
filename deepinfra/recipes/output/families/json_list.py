"""Calls as a JSON list of objects behind a marker: Mistral up to Nemo, Nemotron, Apriel, Granite 3, Command-R, Apertus.

In Apertus' objects the name is the only key.
"""

from __future__ import annotations

from collections.abc import Sequence

from deepinfra.recipes.output.families.hermes import call_object
from deepinfra.recipes.output.family import Allowed, ToolFamily
from deepinfra.recipes.output.grammar import Edge, State
from deepinfra.recipes.output.lark import Rules

__all__ = ("APERTUS", "APRIEL", "COMMAND_R", "GRANITE_3", "MISTRAL_LIST", "NEMOTRON")


def _numbered(rules: Rules, tool: Allowed) -> str:
    """Command-R's objects begin with a number."""
    plain = call_object(rules, tool, "tool_name", "parameters").removeprefix('"{')
    return f'"{{\\"tool_call_id\\": \\"" {rules.pattern("[0-9]+")} "\\", {plain}'


def _family(name: str, opener: str, closer: str, numbered: bool = False, lead: str = "") -> ToolFamily:
    first, between, last = ("[\n    ", ",\n    ", "\n]") if numbered else ("[", ", ", "]")

    def calls(rules: Rules, tools: Sequence[Allowed], many: bool) -> str:
        one = rules.either([_numbered(rules, tool) if numbered else call_object(rules, tool) for tool in tools])
        more = f" ({rules.literal(between)} {one})*" if many else ""
        return f"{rules.literal(first)} {one}{more} {rules.literal(last + closer)}"

    call = Edge(marker="{", to="call", keep=True)
    close = (Edge(marker=closer, to="text"),) if closer else ()
    end = Edge(marker="]", to="end" if closer else "text")
    return ToolFamily(
        name=name,
        entries=(Edge(marker=opener, to="tool"),),
        states={
            "tool": State(channel="gap", edges=(Edge(marker="[", to="list"), call, *close)),
            "list": State(channel="gap", edges=(call, Edge(marker=",", to="list"), end, *close)),
            "call": State(channel="envelope", after="list"),
            "end": State(channel="gap", edges=close),
        },
        opener=lead + opener,
        calls=calls,
    )


MISTRAL_LIST = _family("mistral-list", "[TOOL_CALLS]", "")
NEMOTRON = _family("nemotron", "<TOOLCALL>", "</TOOLCALL>")
APRIEL = _family("apriel", "<tool_calls>", "</tool_calls>", lead="\n")
GRANITE_3 = _family("granite-3", "<|tool_call|>", "")
COMMAND_R = _family("command-r", "<|START_ACTION|>", "<|END_ACTION|>", numbered=True)


def _apertus(rules: Rules, tools: Sequence[Allowed], many: bool) -> str:
    one = rules.either([rules.literal('{"' + tool.name + '": ') + f' {rules.json(tool.schema)} "}}"' for tool in tools])
    more = f" ({rules.literal(', ')} {one})*" if many else ""
    return f"{rules.literal('[')} {one}{more} {rules.literal(']<|tools_suffix|>')}"


APERTUS = ToolFamily(
    name="apertus",
    entries=(Edge(marker="<|tools_prefix|>", to="tool"),),
    states={
        "tool": State(channel="gap", edges=(Edge(marker="[", to="list"), Edge(marker="<|tools_suffix|>", to="text"))),
        "list": State(
            channel="gap",
            edges=(
                Edge(marker="{", to="object"),
                Edge(marker="}", to="list"),
                Edge(marker=",", to="list"),
                Edge(marker="]", to="tool"),
                Edge(marker="<|tools_suffix|>", to="text"),
            ),
        ),
        "object": State(channel="gap", edges=(Edge(marker='"', to="name"),)),
        "name": State(channel="header", edges=(Edge(marker='"', to="colon", when=r"(?P<name>[^\s<>{}\[\]]+)"),)),
        "colon": State(channel="gap", edges=(Edge(marker=":", to="arguments"),)),
        "arguments": State(channel="arguments", after="list"),
    },
    opener="<|tools_prefix|>",
    calls=_apertus,
)
"""`<|tools_prefix|>[{"f": {…}}, …]<|tools_suffix|>`."""
