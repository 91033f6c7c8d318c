"""DeepSeek V4's markup: `<｜DSML｜invoke name="f">`, parameters that say whether they are strings.

`｜DSML｜` is one token, which is what tells a tag from text. V4.1 has a space before each tag's name, and `calls` for
`tool_calls`. A quote in a parameter's name is written `&quot;`, as the recipe writes it in the history.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from deepinfra.recipes.output.families.tagged import Tags
from deepinfra.recipes.output.family import Allowed, ToolFamily
from deepinfra.recipes.output.grammar import Edge, State
from deepinfra.recipes.output.lark import Rules

__all__ = ("ATEM", "DSML", "DSML_41")

_TEXT = r"(?P<{}>[^\n]+)"


def _family(name: str, block: str, invoke: str, parameter: str, typed: bool = True, home: str = "text") -> ToolFamily:
    def opening(kind: str) -> Callable[[str], str]:
        return lambda key: f'<{parameter} name="{key.replace(chr(34), "&quot;") if typed else key}"{kind}>'

    tags = Tags(
        string=opening(' string="true"' if typed else ""),
        other=opening(' string="false"' if typed else ""),
        end=f"</{parameter}>",
    )

    def arguments(rules: Rules, tool: Allowed) -> str:
        """Parameters; a call without any has an empty line, which some models leave out."""
        given = tags.parameters(rules, tool.schema)
        return given if tool.schema.get("required") else f"({rules.literal(chr(10))})? {given}"

    def calls(rules: Rules, tools: Sequence[Allowed], many: bool) -> str:
        one = rules.either(
            [
                rules.literal(f'<{invoke} name="{tool.name}">\n')
                + f" {arguments(rules, tool)} "
                + rules.literal(f"</{invoke}>\n")
                for tool in tools
            ]
        )
        return f"{one}{'+' if many else ''} {rules.literal(f'</{block}>')}"

    key = _TEXT.format("key")
    kinds = {'" string="true">': "string", '" string="false">': "json"} if typed else {'">': "value"}
    close = Edge(marker=f"</{block}>", to=home, ends=True)
    end = (Edge(marker=f"</{parameter}>", to="invoke"),)
    return ToolFamily(
        name=name,
        entries=(Edge(marker=f"<{block}>", to="tool"),),
        states={
            "tool": State(channel="gap", edges=(Edge(marker=f'<{invoke} name="', to="name"), close)),
            "name": State(channel="header", edges=(Edge(marker='">', to="invoke", when=_TEXT.format("name")),)),
            "invoke": State(
                channel="gap",
                edges=(
                    Edge(marker=f'<{parameter} name="', to="key"),
                    Edge(marker=f"</{invoke}>", to="tool", ends=True),
                    close,
                ),
            ),
            "key": State(
                channel="header",
                edges=tuple(Edge(marker=text, to=to, when=key, quoted=typed) for text, to in kinds.items()),
            ),
            "string": State(channel="value", edges=end),
            "json": State(channel="value", edges=end, typed="json"),
            "value": State(channel="value", edges=end, typed="schema"),
        },
        opener=f"\n\n<{block}>\n",
        calls=calls,
    )


_D = "｜DSML｜"
DSML = _family("dsml", f"{_D}tool_calls", f"{_D}invoke", f"{_D}parameter")
DSML_41 = _family("dsml-4.1", f"{_D} calls", f"{_D} invoke", f"{_D} parameter")
_ATEM = _family("atem", "atem:function_calls", "atem:invoke", "atem:parameter", typed=False, home="between")
_OPEN, _NEXT = "<atem:function_calls>\n", "<|eom|><|start|>assistant"


def _atem(rules: Rules, tools: Sequence[Allowed], many: bool) -> str:
    """A message to the tool for each call."""
    assert _ATEM.calls is not None
    one = rules.either(
        [
            f"{rules.literal(f' to={tool.name}<|message|>{_OPEN}')} {_ATEM.calls(rules, (tool,), False)}"
            for tool in tools
        ]
    )
    return one + (f" ({rules.literal(_NEXT)} {one})*" if many else "")


_TO = r".*\bto={}(?:\s.*)?"
_OUT = tuple(Edge(marker=marker, to="between", quiet=True) for marker in ("<|eom|>", "<|eot|>"))

ATEM = replace(
    _ATEM,
    entries=(),
    states={
        **_ATEM.states,
        "header": State(
            channel="header",
            edges=(
                Edge(marker="<|message|>", to="reasoning", when=_TO.format("self"), quiet=True),
                Edge(marker="<|message|>", to="block", when=_TO.format(r"(?!user\b)\S+")),
                Edge(marker="<|message|>", to="text", quiet=True),
            ),
        ),
        "reasoning": State(channel="reasoning", edges=_OUT),
        "text": State(channel="text", edges=_OUT),
        "block": State(channel="gap", edges=_ATEM.entries),
        "between": State(channel="gap", edges=(*_OUT, Edge(marker="<|start|>", to="header", quiet=True)), quiet=True),
    },
    opener="",
    calls=_atem,
    prefix=" to=user<|message|>",
    reasoning=(" to=self<|message|>", _NEXT),
)
"""Muse Glimmer: a prompt ends with `<|start|>assistant`. A message to `self` is reasoning, one to a tool a call."""
