"""A conversation as mistral-common takes it."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from mistral_common.exceptions import (
    InvalidFunctionCallException,
    InvalidToolException,
    InvalidToolSchemaException,
    MistralCommonException,
)
from mistral_common.protocol.instruct.chunk import TextChunk, ThinkChunk
from mistral_common.protocol.instruct.messages import AssistantMessage, SystemMessage, ToolMessage, UserMessage
from mistral_common.protocol.instruct.request import (
    ChatCompletionRequest,
    JsonSchema,
    ReasoningEffort,
    ResponseFormat,
    ResponseFormats,
)
from mistral_common.protocol.instruct.tool_calls import Function, FunctionCall, Tool, ToolCall

from deepinfra.core.conversation import Conversation, MediaPart, Message, ToolDefinition
from deepinfra.errors import RequestError, TemplateError, UnsupportedFieldError

__all__ = ("call_id", "refused", "request_of")

_CALL_ID = re.compile(r"[a-zA-Z0-9]{9}")
_DIGITS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"


def call_id(given: str) -> str:
    """The nine letters and digits by which the model knows a call: its own as they are, any other by its hash."""
    if _CALL_ID.fullmatch(given):
        return given
    number = int.from_bytes(hashlib.sha256(given.encode()).digest()[:8], "big")
    return "".join(_DIGITS[number // 62**place % 62] for place in range(9))


def request_of(
    conversation: Conversation, tools: Sequence[ToolDefinition], *, number: int, thinks: bool
) -> ChatCompletionRequest[Any]:
    """The request, not validated yet.

    Args:
        conversation: What was asked.
        tools: Those that may be called, and so are shown.
        number: The tokenizer's version; from 15 on the prompt says the reasoning effort and the answer's schema.
        thinks: It has tokens for reasoning.

    Raises:
        RequestError: A role or order that does not exist here.
        UnsupportedFieldError: Media, or a field that would have no effect.
    """
    settings = number >= 15
    if tools and number == 1:
        raise UnsupportedFieldError("tools", "cannot be used: this model does not know tools")
    choice, known = conversation.tool_choice, {tool.name for tool in conversation.tools}
    for name in choice.names:
        if name not in known:
            raise RequestError(f"there is no tool {name!r}", "tool_choice")
    if choice.mode == "required" and not known:
        raise RequestError("a tool call is required, but there are no tools", "tool_choice")
    for name in conversation.template_options or {}:
        raise UnsupportedFieldError(f"template_options.{name}", "is not read by Mistral's prompts")
    effort = conversation.effort
    if conversation.effort_optional and effort != "none" and not settings:
        effort = None
    if effort is not None and not settings and (effort != "none" or thinks):
        raise UnsupportedFieldError("reasoning_effort", "is not read by this model")
    if effort is not None and effort not in ReasoningEffort.__members__:
        words = ", ".join(ReasoningEffort.__members__)
        raise RequestError(f"there is no reasoning effort {effort!r}; known: {words}", "reasoning_effort")
    last = len(conversation.messages) - 1
    messages = [
        _message(message, index, index == last, thinks=thinks) for index, message in enumerate(conversation.messages)
    ]
    return ChatCompletionRequest(
        model="served",
        messages=messages,
        tools=[_tool(tool) for tool in tools] or None,
        reasoning_effort=ReasoningEffort(effort) if effort is not None and settings else None,
        response_format=_format(conversation) if settings else ResponseFormat(),
    )


def refused(error: Exception) -> RequestError:
    """Mistral-common's refusal in this package's words: its message, and the field as near as it tells."""
    said = _said(error)
    if isinstance(error, (InvalidToolException, InvalidToolSchemaException)):
        return TemplateError(said, "tools")
    if isinstance(error, InvalidFunctionCallException):
        return TemplateError(said, "messages")
    if isinstance(error, MistralCommonException) and "reasoning_effort" in said:
        return TemplateError(said, "reasoning_effort")
    return TemplateError(said or "mistral-common refuses this conversation", "messages")


def _said(error: Exception) -> str:
    """Its message, without pydantic's advice."""
    return str(error).split("\n    For further information")[0]


def _message(
    message: Message, index: int, last: bool, *, thinks: bool
) -> SystemMessage | UserMessage | AssistantMessage | ToolMessage:
    where = f"messages[{index}]"
    if any(isinstance(part, MediaPart) for part in message.content):
        raise UnsupportedFieldError(f"{where}.content", "has media, which this recipe does not take")
    if message.prefix and (message.role != "assistant" or not last):
        raise RequestError("only the last assistant message can be a prefix", f"{where}.prefix")
    if message.role in ("system", "developer", "reminder"):
        return SystemMessage(content=_content(message))
    if message.role == "user":
        return UserMessage(content=_content(message))
    if message.role == "tool":
        text = f"Error: {message.text}" if message.is_error else message.text
        return ToolMessage(content=text, tool_call_id=call_id(message.tool_call_id or ""), name=message.name)
    if message.role == "assistant":
        return _assistant(message, thinks=thinks)
    raise RequestError(f"there is no role {message.role!r}", f"{where}.role")


def _content(message: Message) -> str | list[Any]:
    """Several parts stay several: how they are joined is the model's own rule."""
    texts = [part.text for part in message.content if not isinstance(part, MediaPart)]
    return message.text if len(texts) < 2 else [TextChunk(text=text) for text in texts]


def _assistant(message: Message, *, thinks: bool) -> AssistantMessage:
    content: str | list[Any] | None = _content(message)
    calls = [
        ToolCall(id=call_id(call.id), function=FunctionCall(name=call.name, arguments=call.arguments))
        for call in message.tool_calls
    ]
    if message.reasoning is not None and thinks:
        closed = not message.prefix or bool(message.text)
        parts = [TextChunk(text=content)] if isinstance(content, str) and content else content or []
        content = [ThinkChunk(thinking=message.reasoning, closed=closed), *parts]
    elif not message.text:
        # An empty turn: mistral-common refuses it by that name, but drops spaces at the end of an answer.
        content = None if calls else " "
    return AssistantMessage(content=content, tool_calls=calls or None, prefix=message.prefix)


def _tool(tool: ToolDefinition) -> Tool:
    parameters = {"type": "object", "properties": {}} if tool.parameters is None else _plain(tool.parameters)
    return Tool(function=Function(name=tool.name, description=tool.description or "", parameters=parameters))


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_plain(item) for item in value]
    return value


def _format(conversation: Conversation) -> ResponseFormat:
    constraint = conversation.constraint
    if constraint is None or constraint.kind not in ("json", "json_schema"):
        return ResponseFormat()
    if constraint.kind == "json":
        return ResponseFormat(type=ResponseFormats.json_object)
    try:
        named = JsonSchema(name="response", schema=json.loads(constraint.source))
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the answer's schema is no JSON Schema: {_said(error)}", "response_format") from None
    return ResponseFormat(type=ResponseFormats.json_schema, json_schema=named)
