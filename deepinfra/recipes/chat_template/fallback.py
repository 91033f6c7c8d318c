"""How tools are shown to a model whose template does not know them: in the most common of the syntaxes."""

from __future__ import annotations

import json
from collections.abc import Sequence

from deepinfra.core.conversation import ToolCall, ToolDefinition

__all__ = ("Fallback",)


class Fallback:
    """JSON between `<tool_call>` tags; see `hygiene.Syntax`. All of it is text: nothing becomes a control token."""

    def show_tools(self, tools: Sequence[ToolDefinition]) -> str:
        """What the model is told about its tools: one JSON line for each, keys in the order received."""
        lines = (_line({"name": t.name, "description": t.description, "parameters": t.parameters}) for t in tools)
        return (
            "# Tools\n\nYou can call these functions, one JSON object for each:\n<tools>\n"
            + "\n".join(lines)
            + "\n</tools>\n\nTo call one, answer with its name and its arguments as a JSON object between tags:\n"
            '<tool_call>\n{"name": "NAME", "arguments": {"ARGUMENT": "VALUE"}}\n</tool_call>'
        )

    def show_calls(self, calls: Sequence[ToolCall]) -> str:
        """Calls as the model writes them; arguments stay as they were written."""
        return "\n".join(
            f'<tool_call>\n{{"name": {json.dumps(call.name)}, "arguments": {call.arguments or "{}"}}}\n</tool_call>'
            for call in calls
        )

    def show_result(self, name: str, text: str) -> str:
        """What a tool answered."""
        return f"<tool_response>\n{text}\n</tool_response>"


def _line(values: dict[str, object]) -> str:
    return json.dumps({key: value for key, value in values.items() if value is not None}, ensure_ascii=False)
