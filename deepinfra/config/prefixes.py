"""Public prefixes from files: what an operator declares to be the beginning of everybody's prompts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from deepinfra.core.conversation import Conversation, Message, TextPart, ToolChoice, ToolDefinition
from deepinfra.core.digits import read_float
from deepinfra.errors import ConfigError

__all__ = ("read_prefix",)


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class _Function(_Part):
    name: Annotated[str, Field(min_length=1)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class _Tool(_Part):
    type: Literal["function"]
    function: _Function


class _File(_Part):
    system: str | None = None
    tools: list[_Tool] = []


def read_prefix(path: str | Path) -> Conversation:
    """A prefix from a file: a system prompt in plain text, or JSON if the file's name ends in `.json`.

    JSON is an object with `system` and `tools`, of which one may be left out. Tools are written as in a chat request,
    and numbers in them keep their digits. A last line break of a text is not
    part of it: editors put it there, clients do not send it.

    Raises:
        ConfigError: The file cannot be read, or says nothing.
    """
    path = Path(path).expanduser()
    try:
        text = path.read_bytes().decode("utf-8")
    except FileNotFoundError:
        raise ConfigError(f"there is no file {path.absolute()} for a public prefix") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {type(error).__name__}") from None
    said = _said(path, text) if path.suffix == ".json" else _File(system=text.removesuffix("\n").removesuffix("\r"))
    if not said.system and not said.tools:
        raise ConfigError(f"{path} is no public prefix: it has neither a system prompt nor tools")
    return Conversation(
        messages=(Message(role="system", content=(TextPart(said.system),)),) if said.system else (),
        tools=tuple(
            ToolDefinition(
                name=tool.function.name,
                description=tool.function.description,
                parameters=tool.function.parameters,
                strict=bool(tool.function.strict),
            )
            for tool in said.tools
        ),
        tool_choice=ToolChoice(mode="auto" if said.tools else "none"),
    )


def _said(path: Path, text: str) -> _File:
    try:
        return _File.model_validate(json.loads(text, parse_float=read_float))
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path} is no JSON file: {error.msg} at line {error.lineno}") from None
    except ValidationError as error:
        problem = error.errors(include_url=False, include_input=False, include_context=False)[0]
        at = ".".join(map(str, problem["loc"])) or "all of it"
        raise ConfigError(f"{path}: {at}: {problem['msg']}") from None
