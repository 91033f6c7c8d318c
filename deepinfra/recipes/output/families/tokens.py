"""Calls whose parts are set off by tokens: Kimi K2, Mistral since 2503, DeepSeek R1 and V3.1, Solar Open."""

from __future__ import annotations

from collections.abc import Sequence

from deepinfra.recipes.output.family import Allowed, ToolFamily
from deepinfra.recipes.output.grammar import Edge, State
from deepinfra.recipes.output.lark import Rules

__all__ = ("DEEPSEEK_R1", "DEEPSEEK_V31", "KIMI", "MISTRAL", "MISTRAL_IDS", "SOLAR_OPEN")

_NAME = r"\s*(?P<name>[^\s<>{}\"\[\]]+)\s*"
_ID = r"\s*(?P<id>[^\s<>{}\"\[\]]+)\s*"


def _repeated(rules: Rules, one: Sequence[str], between: str, many: bool, end: str = "") -> str:
    call = rules.either(one)
    more = f" ({rules.literal(between)} {call})*" if many else ""
    return f"{call}{more} {rules.literal(end)}"


def _kimi(rules: Rules, tools: Sequence[Allowed], many: bool) -> str:
    number = rules.pattern("[0-9]{1,3}")
    one = [
        f"{rules.literal(f'<|tool_call_begin|>functions.{tool.name}:')} {number} "
        f"{rules.literal('<|tool_call_argument_begin|>')} {rules.json(tool.schema)} "
        f"{rules.literal('<|tool_call_end|>')}"
        for tool in tools
    ]
    return f"{rules.either(one)}{'+' if many else ''} {rules.literal('<|tool_calls_section_end|>')}"


KIMI = ToolFamily(
    name="kimi",
    entries=(Edge(marker="<|tool_calls_section_begin|>", to="tool"),),
    states={
        "tool": State(
            channel="gap",
            edges=(
                Edge(marker="<|tool_call_begin|>", to="id"),
                Edge(marker="<|tool_call_end|>", to="tool"),
                Edge(marker="<|tool_calls_section_end|>", to="text"),
            ),
        ),
        "id": State(
            channel="header",
            edges=(
                Edge(
                    marker="<|tool_call_argument_begin|>",
                    to="arguments",
                    when=r"\s*(?P<id>(?:functions\.)?(?P<name>[^\s<>:]+)(?::\d+)?)\s*",
                ),
            ),
        ),
        "arguments": State(channel="arguments", after="tool"),
    },
    opener="<|tool_calls_section_begin|>",
    calls=_kimi,
)
"""Its ids (`functions.get_weather:0`) are kept: the model stops calling when its history shows others."""


def _mistral(ids: bool) -> ToolFamily:
    def calls(rules: Rules, tools: Sequence[Allowed], many: bool) -> str:
        number = f" {rules.literal('[CALL_ID]')} {rules.pattern('[A-Za-z0-9]{9}')}" if ids else ""
        one = [
            f"{rules.literal(tool.name)}{number} {rules.literal('[ARGS]')} {rules.json(tool.schema)}" for tool in tools
        ]
        return _repeated(rules, one, "[TOOL_CALLS]", many)

    return ToolFamily(
        name="mistral-ids" if ids else "mistral",
        entries=(Edge(marker="[TOOL_CALLS]", to="tool"),),
        states={
            "tool": State(
                channel="header",
                edges=(
                    Edge(marker="[CALL_ID]", to="id", when=_NAME),
                    Edge(marker="[ARGS]", to="arguments", when=_NAME),
                ),
            ),
            "id": State(channel="header", edges=(Edge(marker="[ARGS]", to="arguments", when=_ID),)),
            "arguments": State(channel="arguments", after="next"),
            "next": State(channel="gap", edges=(Edge(marker="[TOOL_CALLS]", to="tool"),)),
        },
        opener="[TOOL_CALLS]",
        calls=calls,
    )


MISTRAL, MISTRAL_IDS = _mistral(ids=False), _mistral(ids=True)


def _deepseek(name: str, before: str, after: str) -> ToolFamily:
    """`before` stands before the name, `after` behind it; the fence that `after` opens is closed again."""
    begin, end = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
    fence = "\n```" if "```" in after else ""

    def calls(rules: Rules, tools: Sequence[Allowed], many: bool) -> str:
        one = [
            f"{rules.literal(begin + before + tool.name + after)} {rules.json(tool.schema)} "
            f"{rules.literal(fence + end)}"
            for tool in tools
        ]
        return _repeated(rules, one, "\n" if fence else "", many, "<｜tool▁calls▁end｜>")

    return ToolFamily(
        name=name,
        entries=(Edge(marker="<｜tool▁calls▁begin｜>", to="tool"),),
        states={
            "tool": State(
                channel="gap",
                edges=(
                    Edge(marker=begin + before, to="name"),
                    Edge(marker="```", to="tool"),
                    Edge(marker=end, to="tool"),
                    Edge(marker="<｜tool▁calls▁end｜>", to="text"),
                ),
            ),
            "name": State(channel="header", edges=(Edge(marker=after, to="arguments", when=_NAME),)),
            "arguments": State(channel="arguments", after="tool"),
        },
        opener="<｜tool▁calls▁begin｜>",
        calls=calls,
    )


DEEPSEEK_R1 = _deepseek("deepseek-r1", "function<｜tool▁sep｜>", "\n```json\n")
DEEPSEEK_V31 = _deepseek("deepseek-v3.1", "", "<｜tool▁sep｜>")


def _solar(rules: Rules, tools: Sequence[Allowed], many: bool) -> str:
    number = rules.pattern("[a-z0-9]{10}")
    one = [
        f"{rules.literal('<|tool_call:begin|>')} {number} {rules.literal(f'<|tool_call:name|>{tool.name}')} "
        f"{rules.literal('<|tool_call:args|>')} {rules.json(tool.schema)} {rules.literal('<|tool_call:end|>')}"
        for tool in tools
    ]
    return f"{rules.literal('<|tool_calls|>')} {rules.either(one)}{'+' if many else ''}"


_NEXT = (Edge(marker="<|end|>", to="between", quiet=True),)

SOLAR_OPEN = ToolFamily(
    name="solar-open",
    states={
        "header": State(
            channel="gap",
            edges=(
                Edge(marker="<|think|>", to="reasoning", quiet=True),
                Edge(marker="<|content|>", to="text", quiet=True),
                Edge(marker="<|tool_calls|>", to="tool"),
            ),
        ),
        "reasoning": State(channel="reasoning", edges=_NEXT),
        "text": State(channel="text", edges=(*_NEXT, Edge(marker="<|tool_calls|>", to="tool"))),
        "between": State(
            channel="gap", edges=(*_NEXT, Edge(marker="<|begin|>assistant", to="header", quiet=True)), quiet=True
        ),
        "tool": State(
            channel="gap",
            edges=(
                Edge(marker="<|tool_call:begin|>", to="id"),
                Edge(marker="<|tool_call:end|>", to="tool"),
            ),
        ),
        "id": State(channel="header", edges=(Edge(marker="<|tool_call:name|>", to="name", when=_ID),)),
        "name": State(channel="header", edges=(Edge(marker="<|tool_call:args|>", to="arguments", when=_NAME),)),
        "arguments": State(channel="arguments", after="tool"),
    },
    calls=_solar,
    prefix="<|content|>",
    reasoning=("<|think|>", "<|end|><|begin|>assistant"),
)
"""A prompt ends with `<|begin|>assistant`; reasoning, text and calls are messages of their own."""
