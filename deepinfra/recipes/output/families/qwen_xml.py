"""`<function=name>` with `<parameter=key>` tags: Qwen3-Coder, Qwen 3.5, Step 3.5, Seed-OSS.

Values do not say what they are: the tool's schema does. Qwen3-Coder at times leaves the outer tag out.
"""

from __future__ import annotations

from collections.abc import Sequence

from deepinfra.recipes.output.families.tagged import Tags
from deepinfra.recipes.output.family import Allowed, ToolFamily
from deepinfra.recipes.output.grammar import Edge, State
from deepinfra.recipes.output.lark import Rules

__all__ = ("QWEN_XML", "SEED_OSS")

_NAME = r"(?P<name>[^\s<>]+)"
_FUNCTION = Edge(marker="<function=", to="name")


def _family(name: str, tag: str, line: str) -> ToolFamily:
    """`line` is what stands between a value and its tags."""

    def opening(key: str) -> str:
        return f"<parameter={key}>{line}"

    tags = Tags(string=opening, other=opening, end=f"{line}</parameter>")
    opener, closer = f"<{tag}>", f"</{tag}>"

    def calls(rules: Rules, tools: Sequence[Allowed], many: bool) -> str:
        one = rules.either(
            [
                f"{rules.literal(f'<function={tool.name}>' + chr(10))} {tags.parameters(rules, tool.schema)}"
                for tool in tools
            ]
        )
        one = rules.rule(f'"\\n" {one} {rules.literal(f"</function>{chr(10)}{closer}")}')
        return one + (f" ({rules.literal(chr(10) + opener)} {one})*" if many else "")

    close = Edge(marker=closer, to="text", ends=True)
    parameter = Edge(marker="<parameter=", to="key")
    end = [Edge(marker=f"{line}</parameter>", to="body")]
    if line:
        end.append(Edge(marker="</parameter>", to="body"))
    return ToolFamily(
        name=name,
        entries=(Edge(marker=opener, to="tool"), _FUNCTION),
        states={
            "tool": State(channel="gap", edges=(_FUNCTION, close)),
            "name": State(channel="header", edges=(Edge(marker=">", to="body", when=_NAME),)),
            "body": State(channel="gap", edges=(parameter, Edge(marker="</function>", to="done", ends=True), close)),
            "done": State(channel="gap", edges=(_FUNCTION, close)),
            "key": State(channel="header", edges=(Edge(marker=">", to="value", when=r"\s*(?P<key>.+?)\s*"),)),
            "value": State(channel="value", edges=tuple(end), typed="schema", lead=line),
        },
        opener=opener,
        calls=calls,
    )


QWEN_XML = _family("qwen-xml", "tool_call", "\n")
SEED_OSS = _family("seed-oss", "seed:tool_call", "")
