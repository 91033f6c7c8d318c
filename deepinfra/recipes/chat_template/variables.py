"""From a settled conversation to the variables a chat template reads, and their marking."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from deepinfra.core.conversation import Conversation, Message, ToolDefinition
from deepinfra.core.digits import read_float
from deepinfra.errors import UnsupportedFieldError
from deepinfra.recipes.chat_template.provenance import Marked, trusted
from deepinfra.recipes.chat_template.traits import Traits

__all__ = ("mark", "strings", "unused_characters", "variables")

_PRIVATE = re.compile("[\ue000-\uf8ff]")
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
_SWITCHES = ("enable_thinking", "thinking")


def variables(conversation: Conversation, traits: Traits) -> dict[str, Any]:
    """What the template is called with, as plain values in the order received; `bos_token` and so on not included.

    Raises:
        UnsupportedFieldError: A reasoning effort that is demanded and that the template never reads.
    """
    values: dict[str, Any] = dict(_plain(conversation.template_options or {}))
    values |= _effort(conversation, traits)
    values |= {
        "messages": [_message(message, traits) for message in conversation.messages],
        "tools": [_tool(tool, traits) for tool in conversation.tools] or None,
        "documents": None,
        "add_generation_prompt": not (conversation.messages and conversation.messages[-1].prefix),
    }
    return values


def _effort(conversation: Conversation, traits: Traits) -> dict[str, Any]:
    """The reasoning effort in the words the template knows; a template without reasoning honours only `none`."""
    effort = conversation.effort
    if effort is None:
        return {}
    switches = {name: effort != "none" for name in _SWITCHES if name in traits.names}
    if "reasoning_effort" in traits.names and (effort != "none" or not switches):
        return {**switches, "reasoning_effort": effort}
    if not switches and effort != "none" and not conversation.effort_optional:
        raise UnsupportedFieldError("reasoning_effort", "is not read by this model's chat template")
    return switches


def _message(message: Message, traits: Traits) -> dict[str, Any]:
    text = message.text
    role = "latest_reminder" if message.role == "reminder" else message.role
    values: dict[str, Any] = {
        "role": role,
        "content": [{"type": "text", "text": text}] if traits.content_parts else text,
    }
    if message.name is not None:
        values["name"] = message.name
    if message.reasoning is not None:
        values |= dict.fromkeys(("reasoning_content", "reasoning", "thinking"), message.reasoning)
    if message.tool_calls:
        values["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": _arguments(call.arguments, traits)},
            }
            for call in message.tool_calls
        ]
    if message.tool_call_id is not None:
        values["tool_call_id"] = message.tool_call_id
    if message.is_error:
        values["is_error"] = True
    return values


def _arguments(text: str, traits: Traits) -> object:
    """Arguments as the template wants them; text that is no JSON object becomes one argument named `arguments`."""
    if not traits.object_arguments:
        return text
    try:
        value = json.loads(text or "{}", parse_float=read_float)
        if _SURROGATE.search(text):
            json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError):  # half a character, which no tokenizer takes, is a ValueError too
        return {"arguments": text}
    return value if isinstance(value, dict) else {"arguments": text}


def _tool(tool: ToolDefinition, traits: Traits) -> dict[str, Any]:
    function: dict[str, Any] = {"name": tool.name}
    if tool.description is not None or traits.described:
        function["description"] = tool.description or ""
    parameters = {"type": "object", "properties": {}} if tool.parameters is None else tool.parameters
    function["parameters"] = _plain(parameters)
    return {"type": "function", "function": function}


def _plain(value: Any) -> Any:
    """Mappings and sequences as the dicts and lists that Jinja and JSON know."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_plain(item) for item in value]
    return value


def mark(values: Mapping[str, Any], change: Callable[[str], str] | None) -> dict[str, Any]:
    """The same variables with every string, keys too, changed and untrusted; roles are trusted, being checked."""
    marked = {key: _mark(item, change) for key, item in values.items() if key != "messages"}
    marked["messages"] = [
        {key: item if key == "role" else _mark(item, change) for key, item in message.items()}
        for message in values["messages"]
    ]
    roles: dict[str, Marked] = {}
    for message in marked["messages"]:
        role = message["role"]
        message["role"] = roles.get(role) or roles.setdefault(role, trusted(role))
    return marked


def _mark(value: Any, change: Callable[[str], str] | None) -> Any:
    if isinstance(value, str):
        return Marked(value if change is None else change(value))
    if isinstance(value, dict):
        return {_mark(key, change): _mark(item, change) for key, item in value.items()}
    if isinstance(value, list):
        return [_mark(item, change) for item in value]
    return value


def strings(value: Any) -> list[str]:
    """Every string inside, keys too."""
    found: list[str] = []
    _collect(value, found)
    return found


def _collect(value: Any, found: list[str]) -> None:
    if isinstance(value, str):
        found.append(value)
    elif isinstance(value, dict):
        found += value
        for item in value.values():
            _collect(item, found)
    elif isinstance(value, list):
        for item in value:
            _collect(item, found)


def unused_characters(values: Any, literals: Iterable[str]) -> Iterator[str]:
    """Private-use characters that occur neither in the conversation nor in the template; looked for when asked."""
    used = {char for text in (*strings(values), *literals) for char in _PRIVATE.findall(text)}
    yield from (char for code in range(0xE000, 0xF900) if (char := chr(code)) not in used)
