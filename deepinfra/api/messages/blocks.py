"""Content blocks of a Messages request: what each may hold, and which are refused by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BeforeValidator, Discriminator, Field, Tag
from pydantic_core import PydanticCustomError

from deepinfra.api.wire import Options

__all__ = (
    "MAX_MESSAGES",
    "Block",
    "CacheControl",
    "Content",
    "Document",
    "Image",
    "MessageIn",
    "SystemBlocks",
    "Text",
    "Thinking",
    "ToolResult",
    "ToolUse",
    "tagged",
)

MAX_MESSAGES = 100_000
"""Anthropic's own limit; the body's size is reached first."""

MAX_BLOCKS = 4096
"""Content blocks of one message."""

Id = Annotated[str, Field(min_length=1, max_length=256)]


def tagged(field: str, *known: str) -> Callable[[object], object]:
    """A check before a union: `field` says which member it is, and an unknown one is named in the error."""

    def check(value: object) -> object:
        kind = value.get(field) if isinstance(value, Mapping) else None
        if kind not in known:
            said = f"'{kind[:64]}' is not supported by this server" if isinstance(kind, str) else "missing or no string"
            raise PydanticCustomError(
                "unknown_tag", "{said}; it may be {known}", {"field": field, "said": said, "known": ", ".join(known)}
            )
        return value

    return check


def _tag(value: Any) -> str:
    return f"<{value['type']}>"


def _as_blocks(value: object) -> object:
    if isinstance(value, str):
        return [{"type": "text", "text": value}]
    if not isinstance(value, list):
        raise ValueError("must be a string or an array of content blocks")
    return value


class CacheControl(Options):
    """Anthropic's mark of a prefix that will come again; every prefix is cached here, marked or not.

    `scope` is Claude Code's: whom a cached prefix may serve. Here it is its tenant, never anybody else.
    """

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None
    scope: Annotated[str, Field(max_length=64)] | None = None


class Block(Options):
    """What every block may carry."""

    cache_control: CacheControl | None = None


class Text(Block):
    """A piece of text. `citations` say where an earlier answer found things and are no part of what it said."""

    type: Literal["text"]
    text: str
    citations: list[Any] | None = None


class Base64Image(Options):
    """An image in the request itself; nothing is fetched."""

    type: Literal["base64"]
    media_type: str
    data: str


class Image(Block):
    """An image. `transformations` would change how it is scaled."""

    type: Literal["image"]
    source: Annotated[Base64Image, BeforeValidator(tagged("type", "base64"))]
    transformations: Annotated[dict[str, Any], Field(max_length=0)] | None = None


class PlainText(Options):
    """A document's text."""

    type: Literal["text"]
    media_type: Literal["text/plain"]
    data: str


PlainBlock: TypeAlias = Annotated[
    Annotated[Annotated[Text, Tag("<text>")] | Annotated[Image, Tag("<image>")], Discriminator(_tag)],
    BeforeValidator(tagged("type", "text", "image")),
]


class Content(Options):
    """A document made of blocks."""

    type: Literal["content"]
    content: Annotated[list[PlainBlock], Field(max_length=MAX_BLOCKS), BeforeValidator(_as_blocks)]


class Citations(Options):
    """Citations are not written."""

    enabled: Literal[False] | None = None


class Document(Block):
    """A document in plain text; its title and context stand before it."""

    type: Literal["document"]
    source: Annotated[
        Annotated[Annotated[PlainText, Tag("<text>")] | Annotated[Content, Tag("<content>")], Discriminator(_tag)],
        BeforeValidator(tagged("type", "text", "content")),
    ]
    title: str | None = None
    context: str | None = None
    citations: Citations | None = None


class Thinking(Options):
    """Reasoning of an earlier answer; see `response.sealed` for signatures. Anthropic takes no `cache_control` here."""

    type: Literal["thinking"]
    thinking: str
    signature: str


class RedactedThinking(Options):
    """Reasoning that only Anthropic can read."""

    type: Literal["redacted_thinking"]
    data: str


class Direct(Options):
    """Who made a call: the model itself. Calls made by programs are not served."""

    type: Literal["direct"]


class ToolUse(Block):
    """A call of an earlier answer."""

    type: Literal["tool_use"]
    id: Id
    name: Annotated[str, Field(min_length=1, max_length=200)]
    input: dict[str, Any]
    caller: Direct | None = None
    toolset_name: None = None


ResultBlock: TypeAlias = Annotated[
    Annotated[
        Annotated[Text, Tag("<text>")] | Annotated[Image, Tag("<image>")] | Annotated[Document, Tag("<document>")],
        Discriminator(_tag),
    ],
    BeforeValidator(tagged("type", "text", "image", "document")),
]


class ToolResult(Block):
    """What a tool answered."""

    type: Literal["tool_result"]
    tool_use_id: Id
    content: Annotated[list[ResultBlock], Field(max_length=MAX_BLOCKS), BeforeValidator(_as_blocks)] | None = None
    is_error: bool | None = None
    toolset_name: None = None


UserBlock: TypeAlias = Annotated[
    Annotated[
        Annotated[Text, Tag("<text>")]
        | Annotated[Image, Tag("<image>")]
        | Annotated[Document, Tag("<document>")]
        | Annotated[ToolResult, Tag("<tool_result>")],
        Discriminator(_tag),
    ],
    BeforeValidator(tagged("type", "text", "image", "document", "tool_result")),
]

AssistantBlock: TypeAlias = Annotated[
    Annotated[
        Annotated[Text, Tag("<text>")]
        | Annotated[Thinking, Tag("<thinking>")]
        | Annotated[RedactedThinking, Tag("<redacted_thinking>")]
        | Annotated[ToolUse, Tag("<tool_use>")],
        Discriminator(_tag),
    ],
    BeforeValidator(tagged("type", "text", "thinking", "redacted_thinking", "tool_use")),
]

_TextBlocks: TypeAlias = Annotated[
    list[Annotated[Text, BeforeValidator(tagged("type", "text"))]], Field(max_length=MAX_BLOCKS)
]
SystemBlocks: TypeAlias = Annotated[_TextBlocks, BeforeValidator(_as_blocks, json_schema_input_type=str | _TextBlocks)]


class UserMessage(Options):
    """A turn of the user, tools' results first."""

    role: Literal["user"]
    content: Annotated[list[UserBlock], Field(min_length=1, max_length=MAX_BLOCKS), BeforeValidator(_as_blocks)]


class AssistantMessage(Options):
    """A turn of the model; an answer of ours may have been empty."""

    role: Literal["assistant"]
    content: Annotated[list[AssistantBlock], Field(max_length=MAX_BLOCKS), BeforeValidator(_as_blocks)]


class SystemMessage(Options):
    """Instructions in mid-conversation."""

    role: Literal["system"]
    content: SystemBlocks


MessageIn: TypeAlias = Annotated[
    Annotated[
        Annotated[UserMessage, Tag("<user>")]
        | Annotated[AssistantMessage, Tag("<assistant>")]
        | Annotated[SystemMessage, Tag("<system>")],
        Discriminator(lambda value: f"<{value['role']}>"),
    ],
    BeforeValidator(tagged("role", "user", "assistant", "system")),
]
