"""From a conversation to the variables a chat template reads: hygiene first, then marking.

Everything that public issues report as breaking templates is settled here, before rendering: content that is null,
arguments as a string, a role the template does not know, content in parts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

from deepinfra.core.conversation import Conversation, MediaPart, Message, Role, ToolDefinition
from deepinfra.errors import RequestError, UnsupportedFieldError
from deepinfra.recipes.chat_template.provenance import Marked, trusted

__all__ = ("Traits", "mark", "strings", "unused_characters", "variables")

_ROLES = frozenset(get_args(Role))
_RESERVED = frozenset({"messages", "tools", "documents", "add_generation_prompt", "bos_token", "eos_token"})
_PRIVATE = re.compile("[\ue000-\uf8ff]")
_SWITCHES = ("enable_thinking", "thinking")


@dataclass(frozen=True, slots=True, kw_only=True)
class Traits:
    """What a template reads and how it wants it; found by reading and probing it at load.

    Attributes:
        names: Its variables.
        literals: Its own text, constants and attribute names.
        object_arguments: Wants a call's arguments as an object, not as JSON text.
        content_parts: Wants content as a list of parts.
    """

    names: frozenset[str]
    literals: frozenset[str]
    object_arguments: bool = True
    content_parts: bool = False

    @property
    def reads_tools(self) -> bool:
        """Whether tools given to it have an effect."""
        return "tools" in self.names

    def reads(self, word: str) -> bool:
        """Whether a word is one of its constants or attributes."""
        return word in self.literals


def variables(conversation: Conversation, traits: Traits) -> dict[str, Any]:
    """What the template is called with, as plain values in the order received; `bos_token` and so on not included.

    Raises:
        RequestError: A role that does not exist, or a prefix that is not the last assistant message.
        UnsupportedFieldError: Media, tools for a template without, a forced call, an option the template never reads.
    """
    tools = conversation.tools if conversation.tool_choice.mode != "none" else ()
    _refuse(conversation, tools, traits)
    calls = {call.id: call.name for message in conversation.messages for call in message.tool_calls}
    values: dict[str, Any] = dict(_plain(conversation.template_options or {}))
    values |= _effort(conversation.effort, traits)
    values |= {
        "messages": [_message(message, index, calls, traits) for index, message in enumerate(conversation.messages)],
        "tools": [_tool(tool) for tool in tools] or None,
        "documents": None,
        "add_generation_prompt": not (conversation.messages and conversation.messages[-1].prefix),
    }
    return values


def _refuse(conversation: Conversation, tools: Sequence[ToolDefinition], traits: Traits) -> None:
    if tools and not traits.reads_tools:
        raise UnsupportedFieldError("tools", "cannot be used: this model's chat template does not know tools")
    for index, tool in enumerate(tools):
        if tool.strict:
            raise UnsupportedFieldError(f"tools[{index}].strict")
    if conversation.tool_choice.mode == "required" or (tools and conversation.tool_choice.names):
        raise UnsupportedFieldError("tool_choice", "can be 'auto' or 'none' here")
    if tools and not conversation.tool_choice.parallel:
        raise UnsupportedFieldError("parallel_tool_calls", "cannot be turned off here")
    for name in conversation.template_options or {}:
        if name in _RESERVED or name not in traits.names:
            raise UnsupportedFieldError(f"template_options.{name}", "is not read by this model's chat template")
    for index, message in enumerate(conversation.messages):
        if message.role not in _ROLES:
            raise RequestError(f"there is no role {message.role!r}", f"messages[{index}].role")
        if message.prefix and (message.role != "assistant" or index != len(conversation.messages) - 1):
            raise RequestError("only the last assistant message can be a prefix", f"messages[{index}].prefix")
        if message.tool_calls and not traits.reads("tool_calls"):
            raise UnsupportedFieldError(
                f"messages[{index}].tool_calls", "cannot be shown: this model's chat template does not know tool calls"
            )


def _effort(effort: str | None, traits: Traits) -> dict[str, Any]:
    """The reasoning effort in the words the template knows; a template without reasoning honours only `none`."""
    if effort is None:
        return {}
    switches = {name: effort != "none" for name in _SWITCHES if name in traits.names}
    if "reasoning_effort" in traits.names and (effort != "none" or not switches):
        return {**switches, "reasoning_effort": effort}
    if not switches and effort != "none":
        raise UnsupportedFieldError("reasoning_effort", "is not read by this model's chat template")
    return switches


def _message(message: Message, index: int, calls: Mapping[str, str], traits: Traits) -> dict[str, Any]:
    if any(isinstance(part, MediaPart) for part in message.content):
        raise UnsupportedFieldError(f"messages[{index}].content", "has media, which this model's recipe does not take")
    role = "system" if message.role == "developer" and not traits.reads("developer") else message.role
    text = message.text
    if message.is_error and not traits.reads("is_error"):
        text = f"Error: {text}"
    content: object = [{"type": "text", "text": text}] if traits.content_parts else text
    values: dict[str, Any] = {"role": role, "content": content}
    name = message.name or (calls.get(message.tool_call_id or "") if message.role == "tool" else None)
    if name is not None:
        values["name"] = name
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
        value = json.loads(text or "{}")
    except (ValueError, RecursionError):
        return {"arguments": text}
    return value if isinstance(value, dict) else {"arguments": text}


def _tool(tool: ToolDefinition) -> dict[str, Any]:
    function: dict[str, Any] = {"name": tool.name}
    if tool.description is not None:
        function["description"] = tool.description
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
    marked["messages"] = [{key: _mark(item, change) for key, item in message.items()} for message in values["messages"]]
    for message in marked["messages"]:
        message["role"] = trusted(message["role"])
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
