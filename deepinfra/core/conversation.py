"""A conversation, free of any wire protocol: what a Recipe renders."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

__all__ = (
    "Constraint",
    "ContentPart",
    "Conversation",
    "JsonValue",
    "MediaPart",
    "Message",
    "Role",
    "TextPart",
    "ToolCall",
    "ToolChoice",
    "ToolDefinition",
)

JsonValue: TypeAlias = "bool | int | float | str | Sequence[JsonValue] | Mapping[str, JsonValue] | None"

Role = Literal["system", "developer", "user", "assistant", "tool", "reminder"]
"""`reminder` is DeepSeek's `latest_reminder`: a note to the model beside the latest user turn."""


@dataclass(frozen=True, slots=True)
class TextPart:
    """A piece of text exactly as the client sent it."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaPart:
    """An image, a sound or a file: its bytes, their SHA-256 (part of block keys) and media type."""

    data: bytes
    digest: bytes
    media_type: str


ContentPart: TypeAlias = TextPart | MediaPart


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A call in the history; `arguments` is JSON text as it was written (numbers keep their digits)."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolDefinition:
    """A tool that the model may call; `parameters` is a JSON Schema with its keys in the order received."""

    name: str
    description: str | None = None
    parameters: Mapping[str, JsonValue] | None = None
    strict: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolChoice:
    """Whether tools may, must or must not be called; `names` limits which."""

    mode: Literal["none", "auto", "required"] = "auto"
    names: tuple[str, ...] = ()
    parallel: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One turn. `tool_call_id` belongs to role `tool`; `prefix` marks a last assistant turn to be continued."""

    role: Role
    content: tuple[ContentPart, ...] = ()
    name: str | None = None
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    is_error: bool = False
    prefix: bool = False

    @property
    def text(self) -> str:
        """The text parts joined without a separator."""
        return "".join(part.text for part in self.content if isinstance(part, TextPart))


@dataclass(frozen=True, slots=True, kw_only=True)
class Constraint:
    """What an answer must match, as text; compiled by the engine, stated by the request or the recipe.

    Attributes:
        kind: `json` is any JSON object, `json_schema` a JSON Schema, `regex` a regular expression over the whole
            answer (Rust's syntax, no look-around), `grammar` Lark as llguidance reads it. Only there can control
            tokens be named, as `<[id]>`; text in any kind never becomes one.
        source: The schema, expression or grammar.
    """

    kind: Literal["json", "json_schema", "regex", "grammar"]
    source: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """Everything a recipe needs to render a prompt.

    Attributes:
        messages: The turns in order.
        tools: Tools that the model may call.
        tool_choice: Whether it may, must or must not.
        constraint: What the answer's text must match; reasoning and tool calls are outside it.
        effort: The reasoning effort asked for (`None` = the model's default, `"none"` = off).
        template_options: Extra names a chat template may read.
        now: ISO 8601 date or time for templates that print it; a recipe has no clock.
        effort_optional: `effort` is leave to reason rather than a demand: a model that cannot reason answers without,
            instead of refusing it. A model that can reason treats both alike.
    """

    messages: tuple[Message, ...]
    tools: tuple[ToolDefinition, ...] = ()
    tool_choice: ToolChoice = ToolChoice()
    constraint: Constraint | None = None
    effort: str | None = None
    template_options: Mapping[str, JsonValue] | None = None
    now: str | None = None
    effort_optional: bool = False
