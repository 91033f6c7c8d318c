"""Messages of a chat request, and what a conversation makes of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BeforeValidator, Discriminator, Field, Tag

from deepinfra.api.media import image_part
from deepinfra.api.wire import Options
from deepinfra.core.conversation import ContentPart, Message, Role, TextPart, ToolCall
from deepinfra.errors import RequestError

__all__ = ("ChatMessage", "conversation_messages")

MAX_PARTS = 4096
"""Content parts per message."""

MAX_CALLS = 128
"""Tool calls per assistant message."""

_ROLES = ("system", "developer", "user", "latest_reminder", "assistant", "tool")


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


class ImageUrl(Options):
    """Where an image is; only `data:` URLs are read. `detail` is a hint: the model's recipe decides the resolution."""

    url: str
    detail: Literal["auto", "low", "high", "original"] | None = None


class ImageContent(Options):
    """An image, inside the request."""

    type: Literal["image_url"]
    image_url: ImageUrl
    prompt_cache_breakpoint: dict[str, Any] | None = None


class AssistantContent(Options):
    """A piece of an assistant's turn: text, or a refusal, which is text too."""

    type: Literal["text", "refusal"]
    text: str | None = None
    refusal: str | None = None
    prompt_cache_breakpoint: dict[str, Any] | None = None


def _kind(value: object) -> str | None:
    kind = value.get("type") if isinstance(value, Mapping) else getattr(value, "type", None)
    return f"<{kind}>" if kind in ("text", "image_url") else None


UserContent: TypeAlias = Annotated[
    Annotated[TextContent, Tag("<text>")] | Annotated[ImageContent, Tag("<image_url>")],
    Discriminator(
        _kind,
        custom_error_type="unknown_tag",
        custom_error_message="a part of a user's message is an object whose type is text or image_url",
        custom_error_context={"field": "type"},
    ),
]

UserParts = Annotated[list[UserContent], Field(min_length=1, max_length=MAX_PARTS), BeforeValidator(_as_parts)]
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
    """A turn of system or developer, or DeepSeek's note beside the latest turn."""

    role: Literal["system", "developer", "latest_reminder"]
    content: Parts
    name: str | None = None


class UserMessage(Options):
    """A turn of the user: text and images."""

    role: Literal["user"]
    content: UserParts
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
    if role in ("system", "developer", "latest_reminder"):
        return "<plain>"
    return f"<{role}>" if role in ("user", "assistant", "tool") else None


ChatMessage: TypeAlias = Annotated[
    Annotated[PlainMessage, Tag("<plain>")]
    | Annotated[UserMessage, Tag("<user>")]
    | Annotated[AssistantMessage, Tag("<assistant>")]
    | Annotated[ToolMessage, Tag("<tool>")],
    Discriminator(
        _role,
        custom_error_type="unknown_tag",
        custom_error_message=f"a message is an object whose role is one of {', '.join(_ROLES)}",
        custom_error_context={"field": "role"},
    ),
]


def conversation_messages(messages: Sequence[ChatMessage]) -> tuple[Message, ...]:
    """The protocol-free form.

    Raises:
        RequestError: `prefix` on a message that is not the last, calls and their answers that do not belong together,
            or an image that is none.
        UnsupportedFieldError: An image that would have to be fetched.
    """
    _check_calls(messages)
    turns: list[Message] = []
    for index, message in enumerate(messages):
        match message:
            case AssistantMessage():
                if message.prefix and index != len(messages) - 1:
                    raise RequestError("only the last message may be a prefix", f"messages.{index}.prefix")
                turns.append(_assistant(message))
            case ToolMessage():
                turns.append(
                    Message(
                        role="tool",
                        content=_text(message.content),
                        name=message.name,
                        tool_call_id=message.tool_call_id,
                    )
                )
            case UserMessage():
                content = tuple(
                    _part(part, f"messages.{index}.content.{at}") for at, part in enumerate(message.content)
                )
                turns.append(Message(role="user", content=content, name=message.name))
            case PlainMessage():
                role: Role = "reminder" if message.role == "latest_reminder" else message.role
                turns.append(Message(role=role, content=_text(message.content), name=message.name))
    return tuple(turns)


def _check_calls(messages: Sequence[ChatMessage]) -> None:
    """Every call is answered by the tool messages right behind it, and these answer nothing else."""
    waiting: set[str] = set()
    for index, message in enumerate(messages):
        if isinstance(message, ToolMessage):
            if message.tool_call_id not in waiting:
                raise RequestError(
                    "a tool message must answer a call of the assistant message before it, once",
                    f"messages.{index}.tool_call_id",
                )
            waiting.remove(message.tool_call_id)
            continue
        if waiting:
            raise RequestError(
                f"call {min(waiting)[:64]!r} has no tool message that answers it before 'messages.{index}'",
                f"messages.{index}",
            )
        if isinstance(message, AssistantMessage):
            ids = [call.id for call in message.tool_calls or ()]
            waiting = set(ids)
            if len(waiting) != len(ids):
                raise RequestError("two calls have one id", f"messages.{index}.tool_calls")


def _text(parts: Sequence[TextContent]) -> tuple[TextPart, ...]:
    return tuple(TextPart(part.text) for part in parts)


def _part(part: TextContent | ImageContent, path: str) -> ContentPart:
    if isinstance(part, TextContent):
        return TextPart(part.text)
    return image_part(part.image_url.url, f"{path}.image_url.url")


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
