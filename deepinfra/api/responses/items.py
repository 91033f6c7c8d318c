"""Items: what a request's input and a response's output are lists of."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import AliasChoices, BeforeValidator, Discriminator, Field, Tag, TypeAdapter

from deepinfra.api.protocol import Json
from deepinfra.api.responses.content import (
    MAX_PARTS,
    InputParts,
    OutputParts,
    ReasoningText,
    SummaryText,
    Unsupported,
    tag,
    type_of,
    unknown,
)
from deepinfra.api.wire import Options

__all__ = (
    "FunctionCall",
    "FunctionOutput",
    "InputMessage",
    "Item",
    "ItemReference",
    "OutputMessage",
    "Reasoning",
    "StoredItem",
    "item_json",
    "output_items",
    "sealed",
)

Id = Annotated[str, Field(min_length=1, max_length=256)]
Status = Literal["in_progress", "completed", "incomplete"] | None


class Direct(Options):
    """Who made a call: the model itself. Calls made by programs are not served."""

    type: Literal["direct"]


class InputMessage(Options):
    """A turn of system, developer or user; `phase` belongs to the model's turns."""

    type: Literal["message"] = "message"
    id: Id | None = None
    role: Literal["system", "developer", "user"]
    status: Status = None
    content: InputParts
    phase: None = None


class OutputMessage(Options):
    """A turn of the model. `phase` says whether calls followed, which the model sees anyway."""

    type: Literal["message"] = "message"
    id: Id | None = None
    role: Literal["assistant"]
    status: Status = None
    content: OutputParts
    phase: Literal["commentary", "final_answer"] | None = None


class Reasoning(Options):
    """The model's reasoning before a turn: `content`, or what `sealed` made of it."""

    type: Literal["reasoning"]
    id: Id | None = None
    status: Status = None
    summary: Annotated[list[SummaryText], Field(max_length=MAX_PARTS)] = Field([])
    content: Annotated[list[ReasoningText], Field(max_length=MAX_PARTS)] | None = None
    encrypted_content: str | None = None

    @property
    def text(self) -> str:
        """The reasoning; empty if a client kept nothing but its id.

        Raises:
            ValueError: There is only `encrypted_content`, and another server made it.
        """
        if self.content or self.encrypted_content is None:
            return "".join(part.text for part in self.content or ())
        return _unsealed(self.encrypted_content)


class FunctionCall(Options):
    """A call that the model made; `arguments` is JSON text as it was written.

    The official client writes `async_` when an item of an answer is dumped.
    """

    type: Literal["function_call"]
    id: Id | None = None
    call_id: Id
    name: Annotated[str, Field(min_length=1, max_length=128)]
    arguments: str
    status: Status = None
    async_: Literal[False] | None = Field(
        None, validation_alias=AliasChoices("async", "async_"), serialization_alias="async"
    )
    caller: Direct | None = None
    namespace: None = None
    created_by: str | None = None


class FunctionOutput(Options):
    """What a function answered."""

    type: Literal["function_call_output"]
    id: Id | None = None
    call_id: Id
    output: InputParts
    status: Status = None
    caller: Direct | None = None
    name: str | None = None
    namespace: None = None
    created_by: str | None = None


class ItemReference(Options):
    """An item of a stored response, by its id."""

    type: Literal["item_reference"] = "item_reference"
    id: Id


StoredItem: TypeAlias = InputMessage | OutputMessage | Reasoning | FunctionCall | FunctionOutput
"""An item with its content."""

_REFUSED = (
    "additional_tools",
    "apply_patch_call",
    "apply_patch_call_output",
    "code_interpreter_call",
    "compaction",
    "compaction_trigger",
    "computer_call",
    "computer_call_output",
    "configuration_update",
    "custom_tool_call",
    "custom_tool_call_output",
    "file_search_call",
    "image_generation_call",
    "local_shell_call",
    "local_shell_call_output",
    "mcp_approval_request",
    "mcp_approval_response",
    "mcp_call",
    "mcp_list_tools",
    "program",
    "program_output",
    "shell_call",
    "shell_call_output",
    "tool_search_call",
    "tool_search_output",
    "web_search_call",
)
"""Types of items that belong to tools which run at OpenAI, and to custom tools."""


def _item(value: object) -> str | None:
    kind = type_of(value)
    if not isinstance(value, Mapping):
        return None
    if kind == "message" or (kind is None and "role" in value):
        return "<output>" if value.get("role") == "assistant" else "<message>"
    if kind is None:
        return "<reference>" if "id" in value else None
    if kind == "item_reference":
        return "<reference>"
    return tag(kind, ("reasoning", "function_call", "function_call_output"), _REFUSED)


def _without_null_type(value: object) -> object:
    """`"type": null` is how the official client leaves it out of a reference."""
    if isinstance(value, Mapping) and value.get("type", "") is None:
        return {name: each for name, each in value.items() if name != "type"}
    return value


Item: TypeAlias = Annotated[
    Annotated[InputMessage, Tag("<message>")]
    | Annotated[OutputMessage, Tag("<output>")]
    | Annotated[Reasoning, Tag("<reasoning>")]
    | Annotated[FunctionCall, Tag("<function_call>")]
    | Annotated[FunctionOutput, Tag("<function_call_output>")]
    | Annotated[ItemReference, Tag("<reference>")]
    | Annotated[Unsupported, Tag("<refused>")],
    Discriminator(_item, **unknown("message, reasoning, function_call, function_call_output, item_reference")),
    BeforeValidator(_without_null_type),
]

_OUTPUT: TypeAdapter[list[OutputMessage | Reasoning | FunctionCall]] = TypeAdapter(
    list[
        Annotated[
            Annotated[OutputMessage, Tag("<output>")]
            | Annotated[Reasoning, Tag("<reasoning>")]
            | Annotated[FunctionCall, Tag("<function_call>")],
            Discriminator(_item),
        ]
    ]
)


def output_items(output: Sequence[Json]) -> list[StoredItem]:
    """Items of a response as the next request would send them back."""
    return [*_OUTPUT.validate_python(list(output))]


def item_json(item: StoredItem, made_id: str) -> Json:
    """An item as the API lists it; one that came without an id gets `made_id`."""
    told: dict[str, Any] = item.model_dump(by_alias=True, exclude_none=True)
    told.setdefault("id", made_id)
    told.setdefault("status", "completed")
    for part in told.get("content") or told.get("output") or ():
        if isinstance(item, OutputMessage) and part["type"] == "input_text":
            part["type"] = "output_text"
        if part["type"] == "output_text":
            part.setdefault("annotations", [])
        if part["type"] == "input_image":
            part.setdefault("detail", "auto")
    return told


# -- reasoning that travels as an opaque string ---------------------------------------------------

_SEAL = "deepinfra1."


def sealed(reasoning: str) -> str:
    """`encrypted_content`: the text in an opaque form for clients that send nothing else back.

    It is not encrypted: `content` beside it holds the same text. OpenAI encrypts because it hides the text.
    """
    return _SEAL + base64.urlsafe_b64encode(reasoning.encode()).decode()


def _unsealed(text: str) -> str:
    try:
        if not text.startswith(_SEAL):
            raise ValueError
        return base64.b64decode(text.removeprefix(_SEAL), altchars=b"-_", validate=True).decode()
    except (ValueError, binascii.Error):
        raise ValueError("was not made by this server, so that only its maker can read it") from None
