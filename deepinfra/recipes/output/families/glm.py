"""`<tool_call>name`, then `<arg_key>` and `<arg_value>` in turns: GLM 4.5 on, Ling 3, Laguna, Spark; Hy3.

Values do not say what they are: the tool's schema does. Hy3 has a block around its calls, a marker behind the name, and
`:opensource` in every marker.
"""

from __future__ import annotations

from collections.abc import Sequence

from deepinfra.recipes.output.families.tagged import Tags
from deepinfra.recipes.output.family import Allowed, ToolFamily
from deepinfra.recipes.output.grammar import Edge, State
from deepinfra.recipes.output.lark import Rules

__all__ = ("GLM", "HY3")


def _opening(key: str) -> str:
    return f"<arg_key>{key}</arg_key>\n<arg_value>"


_TAGS = Tags(string=_opening, other=_opening, end="</arg_value>")
_NAME = r"\s*(?P<name>[^\s<>{}\"]+)\s*"
_CLOSE = Edge(marker="</tool_call>", to="text", ends=True)


def _calls(rules: Rules, tools: Sequence[Allowed], many: bool) -> str:
    one = rules.either(
        [f"{rules.literal(tool.name + chr(10))} {_TAGS.parameters(rules, tool.schema)}" for tool in tools]
    )
    one = rules.rule(f"{one} {rules.literal('</tool_call>')}")
    return one + (f" ({rules.literal(chr(10) + '<tool_call>')} {one})*" if many else "")


GLM = ToolFamily(
    name="glm",
    entries=(Edge(marker="<tool_call>", to="tool"),),
    states={
        "tool": State(
            channel="header",
            edges=(
                Edge(marker="<arg_key>", to="key", when=_NAME),
                Edge(marker="</tool_call>", to="text", when=_NAME, ends=True),
            ),
        ),
        "key": State(channel="header", edges=(Edge(marker="</arg_key>", to="between", when=r"(?P<key>[^\n]+)"),)),
        "between": State(channel="gap", edges=(Edge(marker="<arg_value>", to="value"), _CLOSE)),
        "value": State(channel="value", edges=(Edge(marker="</arg_value>", to="body"),), typed="schema"),
        "body": State(channel="gap", edges=(Edge(marker="<arg_key>", to="key"), _CLOSE)),
    },
    opener="\n<tool_call>",
    calls=_calls,
)


def _hy3() -> ToolFamily:
    def mark(name: str) -> str:
        return f"<{name}:opensource>"

    def opening(key: str) -> str:
        return f"{mark('arg_key')}{key}{mark('/arg_key')}\n{mark('arg_value')}"

    tags = Tags(string=opening, other=opening, end=mark("/arg_value"))

    def calls(rules: Rules, tools: Sequence[Allowed], many: bool) -> str:
        one = rules.either(
            [
                rules.literal(f"{mark('tool_call')}{tool.name}{mark('tool_sep')}\n")
                + f" {tags.parameters(rules, tool.schema)} "
                + rules.literal(f"{mark('/tool_call')}\n")
                for tool in tools
            ]
        )
        return f'"\\n" {one}{"+" if many else ""} {rules.literal(mark("/tool_calls"))}'

    end = Edge(marker=mark("/tool_call"), to="tool", ends=True)
    return ToolFamily(
        name="hy3",
        entries=(Edge(marker=mark("tool_calls"), to="tool"),),
        states={
            "tool": State(
                channel="gap",
                edges=(Edge(marker=mark("tool_call"), to="name"), Edge(marker=mark("/tool_calls"), to="text")),
            ),
            "name": State(channel="header", edges=(Edge(marker=mark("tool_sep"), to="body", when=_NAME),)),
            "body": State(channel="gap", edges=(Edge(marker=mark("arg_key"), to="key"), end)),
            "key": State(
                channel="header", edges=(Edge(marker=mark("/arg_key"), to="between", when=r"(?P<key>[^\n]+)"),)
            ),
            "between": State(channel="gap", edges=(Edge(marker=mark("arg_value"), to="value"), end)),
            "value": State(channel="value", edges=(Edge(marker=mark("/arg_value"), to="body"),), typed="schema"),
        },
        opener=mark("tool_calls"),
        calls=calls,
    )


HY3 = _hy3()
