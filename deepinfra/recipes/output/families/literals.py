"""Calls whose arguments are no JSON: Python's in LFM2, between tokens for quotes in Gemma 4."""

from __future__ import annotations

from collections.abc import Sequence

from deepinfra.recipes.output.family import Allowed, ToolFamily
from deepinfra.recipes.output.grammar import Edge, Notation, State
from deepinfra.recipes.output.lark import Rules
from deepinfra.recipes.output.shapes import Shapes

__all__ = ("GEMMA_4", "LFM2")

_PYTHON = Notation(assign="=", close=")", comma=", ", colon=": ", words=("True", "False", "None"))
_GEMMA = Notation(assign=":", close="}", comma=",", colon=":", bare=True, quote='<|"|>')
_NAME = r"(?P<name>[^\s<>{}()\[\],:=\"']+)\s*"


def _lfm2(rules: Rules, tools: Sequence[Allowed], many: bool) -> str:
    one = rules.either(
        [
            f"{rules.literal(tool.name + '(')} {Shapes(rules, _PYTHON, tool).arguments()} {rules.literal(')')}"
            for tool in tools
        ]
    )
    more = f" ({rules.literal(', ')} {one})*" if many else ""
    return f"{rules.literal('[')} {one}{more} {rules.literal(']<|tool_call_end|>')}"


_CLOSE = Edge(marker="<|tool_call_end|>", to="text", when=r"\s*")

LFM2 = ToolFamily(
    name="lfm2",
    entries=(Edge(marker="<|tool_call_start|>", to="tool"),),
    states={
        "tool": State(
            channel="header",
            edges=(
                Edge(marker="(", to="arguments", when=rf"[\s,\[]*{_NAME}"),
                Edge(marker="{", to="call", when=r"[\s,\[]*", keep=True),
                Edge(marker="]", to="end", when=r"[\s,\[]*"),
                _CLOSE,
            ),
        ),
        "arguments": State(channel="arguments", after="next", notation=_PYTHON),
        "call": State(channel="envelope", after="next"),
        "next": State(channel="gap", edges=(Edge(marker=",", to="tool"), Edge(marker="]", to="end"), _CLOSE)),
        "end": State(channel="gap", edges=(_CLOSE,)),
    },
    opener="<|tool_call_start|>",
    calls=_lfm2,
)
"""`<|tool_call_start|>[f(a="x", n=1), g()]<|tool_call_end|>`; the objects it writes when asked to are read too."""


def _gemma(rules: Rules, tools: Sequence[Allowed], many: bool) -> str:
    one = rules.either(
        [
            f"{rules.literal(f'call:{tool.name}{{')} {Shapes(rules, _GEMMA, tool).arguments()} "
            f"{rules.literal('}<tool_call|>')}"
            for tool in tools
        ]
    )
    return one + (f" ({rules.literal('<|tool_call>')} {one})*" if many else "")


GEMMA_4 = ToolFamily(
    name="gemma-4",
    entries=(Edge(marker="<|tool_call>", to="tool"),),
    states={
        "tool": State(
            channel="header",
            edges=(
                Edge(marker="{", to="arguments", when=rf"\s*call:\s*{_NAME}"),
                Edge(marker="<tool_call|>", to="text", when=r"\s*"),
            ),
        ),
        "arguments": State(channel="arguments", after="end", notation=_GEMMA),
        "end": State(channel="gap", edges=(Edge(marker="<tool_call|>", to="text"),)),
    },
    opener="<|tool_call>",
    calls=_gemma,
)
"""`<|tool_call>call:f{a:<|"|>x<|"|>,n:1}<tool_call|>`, a block for each call."""
