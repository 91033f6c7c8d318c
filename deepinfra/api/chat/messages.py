"""Messages of a chat request, and what a conversation makes of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BeforeValidator, Discriminator, Field, Tag

from deepinfra.api.wire import Options
from deepinfra.core.conversation import Message, TextPart, ToolCall
from deepinfra.errors import RequestError

__all__ = ("ChatMessage", "conversation_messages")

MAX_PARTS = 4096
"""Content parts per message."""

MAX_CALLS = 128
"""Tool calls per assistant message."""

_ROLES = ("system", "developer", "user", "assistant", "tool")


def _as_parts(value: object) -> object:
    if isinstance(value, str):
        return [{"type": "text", "text": value}]
    if not isinstance(value, list):
        raise ValueError("must be a string or an array of content parts")
    return value


class TextContent(Options):
    """A piece of text. `prompt_cache_breakpoint` is accepted: every prefix is cached here."""

    type: Literal["text"]
    text: str
    prompt_cache_breakpoint: dict[str, Any] | None = None


class AssistantContent(Options):
    """A piece of an assistant's turn: text, or a refusal, which is text too."""

    type: Literal["text", "refusal"]
    text: str | None = None
    refusal: str | None = None
    prompt_cache_breakpoint: dict[str, Any] | None = None


Parts = Annotated[list[TextContent], Field(min_length=1, max_length=MAX_PARTS), BeforeValidator(_as_parts)]
AssistantParts = Annotated[list[AssistantContent], Field(max_length=MAX_PARTS), BeforeValidator(_as_parts)]


class FunctionCall(Options):
    """Name and JSON text of a call in the history."""

    name: Annotated[str, Field(min_length=1, max_length=128)]
    arguments: str


class CallIn(Options):
    """A call in the history; `index` is what streams carry and is read past."""

    id: Annotated[str, Field(min_length=1, max_length=256)]
    type: Literal["function"] = "function"
    function: FunctionCall
    index: int | None = None


class PlainMessage(Options):
    """A turn of system, developer or user."""

    role: Literal["system", "developer", "user"]
    content: Parts
    name: str | None = None


class AssistantMessage(Options):
    """A turn of the model, as OpenAI's client gives it back; `reasoning_content` and `prefix` are DeepSeek's.

    `annotations` say where a web search found things and are no part of what the model said.
    """

    role: Literal["assistant"]
    content: AssistantParts | None = None
    refusal: str | None = None
    name: str | None = None
    tool_calls: Annotated[list[CallIn], Field(max_length=MAX_CALLS)] | None = None
    reasoning_content: str | None = None
    prefix: bool | None = None
    annotations: list[Any] | None = None
    audio: None = None
    function_call: None = None


class ToolMessage(Options):
    """What a tool answered."""

    role: Literal["tool"]
    content: Parts
    tool_call_id: Annotated[str, Field(min_length=1, max_length=256)]
    name: str | None = None


def _role(value: object) -> str | None:
    role = value.get("role") if isinstance(value, Mapping) else None
    if role in ("system", "developer", "user"):
        return "<plain>"
    return f"<{role}>" if role in ("assistant", "tool") else None


ChatMessage: TypeAlias = Annotated[
    Annotated[PlainMessage, Tag("<plain>")]
    | Annotated[AssistantMessage, Tag("<assistant>")]
    | Annotated[ToolMessage, Tag("<tool>")],
    Discriminator(
        _role,
        custom_error_type="unknown_tag",
        custom_error_message=f"a message is an object whose role is one of {', '.join(_ROLES)}",
        custom_error_context={"field": "role"},
    ),
]


def conversation_messages(messages: Sequence[PlainMessage | AssistantMessage | ToolMessage]) -> tuple[Message, ...]:
    """The protocol-free form.

    Raises:
        RequestError: `prefix` on a message that is not the last.
    """
    turns: list[Message] = []
    for index, message in enumerate(messages):
        if isinstance(message, AssistantMessage):
            if message.prefix and index != len(messages) - 1:
                raise RequestError("only the last message may be a prefix", f"messages.{index}.prefix")
            turns.append(_assistant(message))
        elif isinstance(message, ToolMessage):
            turns.append(
                Message(
                    role="tool", content=_text(message.content), name=message.name, tool_call_id=message.tool_call_id
                )
            )
        else:
            turns.append(Message(role=message.role, content=_text(message.content), name=message.name))
    return tuple(turns)


def _text(parts: Sequence[TextContent]) -> tuple[TextPart, ...]:
    return tuple(TextPart(part.text) for part in parts)


def _assistant(message: AssistantMessage) -> Message:
    said = [part.text if part.type == "text" else part.refusal for part in message.content or ()]
    if message.refusal:
        said.append(message.refusal)
    return Message(
        role="assistant",
        content=tuple(TextPart(text) for text in said if text),
        name=message.name,
        reasoning=message.reasoning_content,
        tool_calls=tuple(
            ToolCall(id=call.id, name=call.function.name, arguments=call.function.arguments)
            for call in message.tool_calls or ()
        ),
        prefix=bool(message.prefix),
    )
