"""Calls as JSON objects between tags: `<tool_call>{"name": …, "arguments": {…}}</tool_call>`, on lines of their own.

Qwen 2.5 and 3, QwQ, Hermes, Granite 4, MiMo: a block for each call. MiniMax-M1: one block, each call on its line. It is
the syntax that most models have seen, so it stands in where a template ignores tools.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from deepinfra.core.conversation import ToolCall, ToolDefinition
from deepinfra.core.digits import json_text
from deepinfra.recipes.output.family import Allowed, ToolFamily
from deepinfra.recipes.output.grammar import Edge, State
from deepinfra.recipes.output.lark import Rules

__all__ = ("HERMES", "MINIMAX_M1", "call_object")


class _Tags:
    """Tools, calls and results as text between tags; nothing of it becomes a control token."""

    def show_tools(self, tools: Sequence[ToolDefinition]) -> str:
        """One JSON line for each tool, keys in the order received."""
        return (
            "# Tools\n\nThese functions can be called to help with the user's request, one JSON object each:\n<tools>\n"
            + "\n".join(json_text(_described(tool)) for tool in tools)
            + "\n</tools>\n\nTo call a function, write its name and its arguments as one JSON object between tool_call "
            "tags, and nothing after the last call:\n"
            '<tool_call>\n{"name": <function name>, "arguments": <object of arguments>}\n</tool_call>'
        )

    def show_calls(self, calls: Sequence[ToolCall]) -> str:
        """Arguments stay as they were written."""
        return "\n".join(
            f'<tool_call>\n{{"name": {json.dumps(call.name, ensure_ascii=False)}, '
            f'"arguments": {call.arguments.strip() or "{}"}}}\n</tool_call>'
            for call in calls
        )

    def show_result(self, name: str, text: str) -> str:
        """The name is not shown: the model sees results in the order of its calls."""
        return f"<tool_response>\n{text}\n</tool_response>"


def _described(tool: ToolDefinition) -> Mapping[str, object]:
    parts = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
    return {"type": "function", "function": {key: value for key, value in parts.items() if value is not None}}


def call_object(rules: Rules, tool: Allowed, name: str = "name", arguments: str = "arguments") -> str:
    """A call as one JSON object."""
    start = f'{{"{name}": {json.dumps(tool.name, ensure_ascii=False)}, "{arguments}": '
    return f'{rules.literal(start)} {rules.json(tool.schema)} "}}"'


def _hermes(rules: Rules, tools: Sequence[Allowed], many: bool) -> str:
    call = rules.either([call_object(rules, tool) for tool in tools])
    close, again = rules.literal("\n</tool_call>"), rules.literal("\n<tool_call>\n")
    return f'"\\n" {call} {close}' + (f" ({again} {call} {close})*" if many else "")


def _minimax(rules: Rules, tools: Sequence[Allowed], many: bool) -> str:
    call = rules.either([call_object(rules, tool) for tool in tools])
    return f'("\\n" {call}){"+" if many else ""} {rules.literal(chr(10) + "</tool_calls>")}'


def _states(closer: str) -> Mapping[str, State]:
    return {
        "tool": State(channel="gap", edges=(Edge(marker="{", to="call", keep=True), Edge(marker=closer, to="text"))),
        "call": State(channel="envelope", after="tool"),
    }


HERMES = ToolFamily(
    name="hermes",
    entries=(Edge(marker="<tool_call>", to="tool"),),
    states=_states("</tool_call>"),
    opener="<tool_call>",
    calls=_hermes,
    shown=_Tags(),
)

MINIMAX_M1 = ToolFamily(
    name="minimax-m1",
    entries=(Edge(marker="<tool_calls>", to="tool"),),
    states=_states("</tool_calls>"),
    opener="<tool_calls>",
    calls=_minimax,
)
