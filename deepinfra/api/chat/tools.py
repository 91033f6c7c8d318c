"""Tools, the choice among them, and response formats of a chat request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from deepinfra.api.extras import schema_constraint
from deepinfra.api.wire import Options
from deepinfra.core.conversation import Constraint, ToolChoice, ToolDefinition
from deepinfra.errors import RequestError

__all__ = ("FormatIn", "Tool", "ToolChoiceIn", "constraint_of", "tool_choice_of", "tool_definitions")

Name = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]


class FunctionIn(Options):
    """A function that the model may call."""

    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Options):
    """One tool; custom tools are not served."""

    type: Literal["function"]
    function: FunctionIn


class Named(Options):
    """A function by name."""

    name: Name


class NamedTool(Options):
    """A tool by name."""

    type: Literal["function"]
    function: Named


class Allowed(Options):
    """A subset of the tools."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(min_length=1, max_length=128)]


class ChoiceObject(Options):
    """`tool_choice`; its three words are read as objects of that type."""

    type: Literal["none", "auto", "required", "function", "allowed_tools"]
    function: Named | None = None
    allowed_tools: Allowed | None = None


def _as_choice(value: object) -> object:
    if isinstance(value, str):
        if value not in ("none", "auto", "required"):
            raise ValueError("must be none, auto, required or an object")
        return {"type": value}
    if not isinstance(value, dict):
        raise ValueError("must be none, auto, required or an object")
    return value


ToolChoiceIn = Annotated[
    ChoiceObject,
    BeforeValidator(_as_choice, json_schema_input_type=Literal["none", "auto", "required"] | ChoiceObject),
]


class JsonSchema(Options):
    """`response_format.json_schema`; a schema is always enforced to the letter, so `strict` changes nothing."""

    name: Name
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class FormatIn(Options):
    """`response_format`."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


def tool_definitions(tools: Sequence[Tool]) -> tuple[ToolDefinition, ...]:
    """The protocol-free form.

    Raises:
        RequestError: Two tools of one name.
    """
    seen: set[str] = set()
    for index, tool in enumerate(tools):
        if tool.function.name in seen:
            raise RequestError(f"two tools are named {tool.function.name!r}", f"tools.{index}.function.name")
        seen.add(tool.function.name)
    return tuple(
        ToolDefinition(
            name=tool.function.name,
            description=tool.function.description,
            parameters=tool.function.parameters,
            strict=bool(tool.function.strict),
        )
        for tool in tools
    )


def tool_choice_of(choice: ChoiceObject | None, parallel: bool | None, tools: Sequence[ToolDefinition]) -> ToolChoice:
    """The protocol-free form; without tools the choice is `none`, with tools it is `auto` unless said otherwise.

    A function by name means one call of it, as OpenAI has it.

    Raises:
        RequestError: A name that is no tool's, a call demanded without tools, or a half-given object.
    """
    several = parallel is not False
    if choice is None or (not tools and choice.type == "auto"):
        return ToolChoice(mode="auto" if tools else "none", parallel=several)
    if choice.type != "none" and not tools:
        raise RequestError("'tool_choice' demands a call, but there are no 'tools'", "tool_choice")
    names: tuple[str, ...] = ()
    mode: Literal["none", "auto", "required"]
    if choice.type == "function":
        if choice.function is None:
            raise RequestError("missing required field 'tool_choice.function'", "tool_choice.function")
        names, mode, several = (choice.function.name,), "required", False
    elif choice.type == "allowed_tools":
        if choice.allowed_tools is None:
            raise RequestError("missing required field 'tool_choice.allowed_tools'", "tool_choice.allowed_tools")
        names, mode = tuple(tool.function.name for tool in choice.allowed_tools.tools), choice.allowed_tools.mode
    else:
        mode = choice.type
    known = {tool.name for tool in tools}
    for name in names:
        if name not in known:
            raise RequestError(f"'tool_choice' names {name!r}, which is no tool of this request", "tool_choice")
    return ToolChoice(mode=mode, names=names, parallel=several)


def constraint_of(wanted: FormatIn | None) -> Constraint | None:
    """What the answer must match.

    Raises:
        RequestError: `json_schema` is missing, or given for another type.
    """
    if wanted is None:
        return None
    if (wanted.type == "json_schema") != (wanted.json_schema is not None):
        raise RequestError(
            "'response_format.json_schema' belongs to type 'json_schema', and to no other",
            "response_format.json_schema",
        )
    if wanted.json_schema is not None and wanted.json_schema.schema_ is not None:
        return schema_constraint(wanted.json_schema.schema_, "response_format.json_schema.schema")
    return None if wanted.type == "text" else Constraint(kind="json")
