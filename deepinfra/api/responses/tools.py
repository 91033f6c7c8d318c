"""Tools, the choice among them, and the format of the text, as `/v1/responses` writes them: flat."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BeforeValidator, Discriminator, Field, Tag
from pydantic_core import PydanticCustomError

from deepinfra.api.errors import UNSUPPORTED
from deepinfra.api.protocol import Json
from deepinfra.api.wire import Options
from deepinfra.core.conversation import Constraint, ToolChoice, ToolDefinition
from deepinfra.core.digits import json_text
from deepinfra.errors import RequestError

__all__ = ("MAX_TOOLS", "Choice", "Text", "Tool", "choice_json", "constraint_of", "tool_choice_of", "tool_definitions")

MAX_TOOLS = 128

Name = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,128}$")]

# -- tools ----------------------------------------------------------------------------------------


def _refuse(kind: object) -> object:
    if kind == "function":
        return kind
    raise PydanticCustomError(
        UNSUPPORTED, "of {kind} is not supported by this server; it serves 'function'", _kind(kind)
    )


def _kind(kind: object) -> dict[str, Any]:
    return {"kind": repr(kind[:64]) if isinstance(kind, str) else "another type than a string"}


FunctionType = Annotated[Literal["function"], BeforeValidator(_refuse)]


class Tool(Options):
    """A function that the model may call. Tools that run at OpenAI, custom tools and namespaces are refused by name."""

    type: FunctionType
    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    async_: Literal[False] | None = Field(None, alias="async")
    allowed_callers: Annotated[list[Literal["direct"]], Field(min_length=1, max_length=1)] | None = None
    defer_loading: Literal[False] | None = None
    output_schema: None = None

    def told(self) -> Json:
        """The tool as a response repeats it."""
        return {
            "type": "function",
            "name": self.name,
            "description": self.description,
            "parameters": self.parameters,
            "strict": bool(self.strict),
        }


def tool_definitions(tools: Sequence[Tool]) -> tuple[ToolDefinition, ...]:
    """The protocol-free form.

    Raises:
        RequestError: Two tools of one name.
    """
    seen: set[str] = set()
    for index, tool in enumerate(tools):
        if tool.name in seen:
            raise RequestError(f"two tools are named {tool.name!r}", f"tools.{index}.name")
        seen.add(tool.name)
    return tuple(
        ToolDefinition(
            name=tool.name, description=tool.description, parameters=tool.parameters, strict=bool(tool.strict)
        )
        for tool in tools
    )


# -- the choice among them ------------------------------------------------------------------------


class NamedTool(Options):
    """A function by name; as `tool_choice` it must be called."""

    type: FunctionType
    name: Name


class AllowedTools(Options):
    """A subset of the tools."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(min_length=1, max_length=MAX_TOOLS)]


def _choice(value: object) -> str | None:
    if isinstance(value, str):
        return "<word>"
    if not isinstance(value, Mapping):
        return None
    return "<allowed>" if value.get("type") == "allowed_tools" else "<named>"


Choice: TypeAlias = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("<word>")]
    | Annotated[AllowedTools, Tag("<allowed>")]
    | Annotated[NamedTool, Tag("<named>")],
    Discriminator(
        _choice,
        custom_error_type="unknown_choice",
        custom_error_message="must be none, auto, required or an object",
    ),
]


def choice_json(choice: Choice | None) -> str | Json:
    """The choice as a response repeats it."""
    if choice is None or isinstance(choice, str):
        return choice or "auto"
    return choice.model_dump()


def tool_choice_of(choice: Choice | None, parallel: bool | None, tools: Sequence[ToolDefinition]) -> ToolChoice:
    """The protocol-free form; without tools the choice is `none`, with tools it is `auto` unless said otherwise.

    A function by name means one call of it, as OpenAI has it.

    Raises:
        RequestError: A name that is no tool's, or a call demanded without tools.
    """
    several = parallel is not False
    if choice is None or (not tools and choice == "auto"):
        return ToolChoice(mode="auto" if tools else "none", parallel=several)
    if choice == "none":
        return ToolChoice(mode="none", parallel=several)
    if not tools:
        raise RequestError("'tool_choice' names tools, but there are no 'tools'", "tool_choice")
    if isinstance(choice, str):
        return ToolChoice(mode=choice, parallel=several)
    names = [choice.name] if isinstance(choice, NamedTool) else [tool.name for tool in choice.tools]
    known = {tool.name for tool in tools}
    for name in names:
        if name not in known:
            raise RequestError(f"'tool_choice' names {name!r}, which is no tool of this request", "tool_choice")
    if isinstance(choice, NamedTool):
        return ToolChoice(mode="required", names=tuple(names), parallel=False)
    return ToolChoice(mode=choice.mode, names=tuple(names), parallel=several)


# -- the format of the text -----------------------------------------------------------------------


class PlainFormat(Options):
    """No format, or any JSON object."""

    type: Literal["text", "json_object"]


class SchemaFormat(Options):
    """A JSON Schema; always enforced to the letter, so that `strict` changes nothing."""

    type: Literal["json_schema"]
    name: Name
    schema_: dict[str, Any] = Field(alias="schema")
    description: str | None = None
    strict: bool | None = None


def _format(value: object) -> str | None:
    kind = value.get("type") if isinstance(value, Mapping) else None
    if kind in ("text", "json_object"):
        return "<plain>"
    return "<schema>" if kind == "json_schema" else None


def _or_text(value: object) -> object:
    return {"type": "text"} if value is None else value


Format: TypeAlias = Annotated[
    Annotated[PlainFormat, Tag("<plain>")] | Annotated[SchemaFormat, Tag("<schema>")],
    Discriminator(
        _format,
        custom_error_type="unknown_tag",
        custom_error_message="must be text, json_object or json_schema",
        custom_error_context={"field": "type"},
    ),
    BeforeValidator(_or_text),
]


class Text(Options):
    """`text`: what the answer's text must be. Nothing here reads a `verbosity`, so that only the default is true."""

    format: Format = PlainFormat(type="text")
    verbosity: Literal["medium"] | None = None

    def told(self) -> Json:
        """The field as a response repeats it."""
        return {"format": self.format.model_dump(by_alias=True, exclude_none=True), "verbosity": "medium"}


def constraint_of(text: Text) -> Constraint | None:
    """What the answer must match."""
    if isinstance(text.format, SchemaFormat):
        return Constraint(kind="json_schema", source=json_text(text.format.schema_))
    return Constraint(kind="json") if text.format.type == "json_object" else None
