"""Tools of a Messages request, and the choice among them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BeforeValidator, Discriminator, Field, Tag

from deepinfra.api.messages.blocks import Block, tagged
from deepinfra.api.wire import Options
from deepinfra.core.conversation import ToolChoice, ToolDefinition
from deepinfra.errors import RequestError

__all__ = ("Choice", "Tool", "tool_choice_of", "tool_definitions")

Name = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,128}$")]


class CustomTool(Block):
    """A tool that the client runs. `eager_input_streaming` changes nothing: inputs stream as they are written."""

    type: Literal["custom"] | None = None
    name: Name
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None
    eager_input_streaming: bool | None = None
    defer_loading: Literal[False] | None = None
    allowed_callers: list[Literal["direct"]] | None = None
    input_examples: Annotated[list[Any], Field(max_length=0)] | None = None


def _custom(value: object) -> object:
    if isinstance(value, dict) and value.get("type") is not None:
        return tagged("type", "custom")(value)
    return value


Tool: TypeAlias = Annotated[CustomTool, BeforeValidator(_custom)]
"""Tools that Anthropic's servers run, or that its models were trained on, are refused by their type."""


class Free(Options):
    """The model decides, or has to call some tool."""

    type: Literal["auto", "any"]
    disable_parallel_tool_use: bool | None = None


class One(Options):
    """The model has to call this tool."""

    type: Literal["tool"]
    name: Name
    disable_parallel_tool_use: bool | None = None


class Never(Options):
    """The model must not call any."""

    type: Literal["none"]


def _kind(value: Any) -> str:
    kind = value["type"]
    return f"<{kind}>" if kind in ("tool", "none") else "<free>"


Choice: TypeAlias = Annotated[
    Annotated[
        Annotated[Free, Tag("<free>")] | Annotated[One, Tag("<tool>")] | Annotated[Never, Tag("<none>")],
        Discriminator(_kind),
    ],
    BeforeValidator(tagged("type", "auto", "any", "tool", "none")),
]


def tool_definitions(tools: Sequence[CustomTool]) -> tuple[ToolDefinition, ...]:
    """The protocol-free form.

    Raises:
        RequestError: Two tools of one name.
    """
    seen: set[str] = set()
    for index, tool in enumerate(tools):
        if tool.name in seen:
            param = f"tools.{index}.name"
            raise RequestError(f"'{param}': tool names must be unique, and {tool.name!r} is not", param)
        seen.add(tool.name)
    return tuple(
        ToolDefinition(
            name=tool.name, description=tool.description, parameters=tool.input_schema, strict=bool(tool.strict)
        )
        for tool in tools
    )


def tool_choice_of(choice: Free | One | Never | None, tools: Sequence[ToolDefinition]) -> ToolChoice:
    """The protocol-free form; without tools the choice is `none`, with tools it is `auto` unless said otherwise.

    Raises:
        RequestError: A call is demanded and there is no such tool.
    """
    if choice is None:
        return ToolChoice(mode="auto" if tools else "none")
    if isinstance(choice, Never):
        return ToolChoice(mode="none")
    parallel = not choice.disable_parallel_tool_use
    if isinstance(choice, One):
        if choice.name not in {tool.name for tool in tools}:
            raise RequestError(
                f"'tool_choice.name' is {choice.name!r}, which is no tool of this request", "tool_choice.name"
            )
        return ToolChoice(mode="required", names=(choice.name,), parallel=parallel)
    if choice.type == "any":
        if not tools:
            raise RequestError("'tool_choice' demands a call, but there are no 'tools'", "tool_choice")
        return ToolChoice(mode="required", parallel=parallel)
    return ToolChoice(mode="auto" if tools else "none", parallel=parallel)
