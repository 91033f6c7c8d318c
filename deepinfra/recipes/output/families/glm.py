"""`<tool_call>name`, then `<arg_key>` and `<arg_value>` in turns: GLM 4.5 on, Ling 3, Laguna, Spark.

Values do not say what they are: the tool's schema does.
"""

from __future__ import annotations

from collections.abc import Sequence

from deepinfra.recipes.output.families.tagged import Tags
from deepinfra.recipes.output.family import Allowed, ToolFamily
from deepinfra.recipes.output.grammar import Edge, State
from deepinfra.recipes.output.lark import Rules

__all__ = ("GLM",)


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
