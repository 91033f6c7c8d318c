"""Items: what a request's input and a response's output are lists of, and what a conversation makes of them."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple, TypeAlias

from pydantic import AliasChoices, BaseModel, BeforeValidator, Discriminator, Field, Tag, TypeAdapter
from pydantic_core import PydanticCustomError

from deepinfra.api.errors import UNSUPPORTED
from deepinfra.api.media import image_part
from deepinfra.api.protocol import Json
from deepinfra.api.wire import Options
from deepinfra.core.conversation import ContentPart, Message, Role, TextPart, ToolCall
from deepinfra.errors import RequestError

__all__ = (
    "FunctionCall",
    "FunctionOutput",
    "InputMessage",
    "Item",
    "ItemReference",
    "OutputMessage",
    "Placed",
    "Reasoning",
    "StoredItem",
    "Unsupported",
    "item_json",
    "output_items",
    "sealed",
    "turns_of",
)

MAX_PARTS = 4096
"""Content parts of one item."""

Id = Annotated[str, Field(min_length=1, max_length=256)]
Status = Literal["in_progress", "completed", "incomplete"] | None


class Direct(Options):
    """Who made a call: the model itself. Calls made by programs are not served."""

    type: Literal["direct"]


# -- content --------------------------------------------------------------------------------------


class InputText(Options):
    """A piece of text. `prompt_cache_breakpoint` is accepted: every prefix is cached here."""

    type: Literal["input_text"]
    text: str
    prompt_cache_breakpoint: dict[str, Any] | None = None


class InputImage(Options):
    """An image, inside the request; `detail` is a hint that no model here reads."""

    type: Literal["input_image"]
    image_url: str
    detail: Literal["auto", "low", "high", "original"] | None = None
    file_id: None = None
    prompt_cache_breakpoint: dict[str, Any] | None = None


class OutputText(Options):
    """What the model said; annotations and logprobs are about it, and no part of it."""

    type: Literal["output_text"]
    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


class Refusal(Options):
    """What the model said when it refused."""

    type: Literal["refusal"]
    refusal: str


class ReasoningText(Options):
    """A piece of the model's reasoning."""

    type: Literal["reasoning_text"]
    text: str


class SummaryText(Options):
    """A summary of the model's reasoning: made for people, not given to the model."""

    type: Literal["summary_text"]
    text: str


def _refuse(kind: str) -> str:
    raise PydanticCustomError(UNSUPPORTED, "of '{kind}' is not supported by this server", {"kind": kind[:64]})


class Unsupported(BaseModel):
    """A type that OpenAI serves and this server does not."""

    type: Annotated[str, BeforeValidator(_refuse)]


def _tag(kind: object, known: Sequence[str], refused: Sequence[str]) -> str | None:
    if kind in refused:
        return "<refused>"
    return f"<{kind}>" if kind in known else None


def _type_of(value: object) -> object:
    return value.get("type") if isinstance(value, Mapping) else getattr(value, "type", None)


def _unknown(known: str) -> dict[str, Any]:
    return {
        "custom_error_type": "unknown_tag",
        "custom_error_message": f"must be one of {known}",
        "custom_error_context": {"field": "type"},
    }


InputContent: TypeAlias = Annotated[
    Annotated[InputText, Tag("<input_text>")]
    | Annotated[InputImage, Tag("<input_image>")]
    | Annotated[Unsupported, Tag("<refused>")],
    Discriminator(
        lambda value: _tag(_type_of(value), ("input_text", "input_image"), ("input_file", "input_audio")),
        **_unknown("input_text, input_image"),
    ),
]

OutputContent: TypeAlias = Annotated[
    Annotated[OutputText, Tag("<output_text>")]
    | Annotated[Refusal, Tag("<refusal>")]
    | Annotated[InputText, Tag("<input_text>")],
    Discriminator(
        lambda value: _tag(_type_of(value), ("output_text", "refusal", "input_text"), ()),
        **_unknown("output_text, refusal"),
    ),
]


def _as_input(value: object) -> object:
    if isinstance(value, str):
        return [{"type": "input_text", "text": value}]
    if not isinstance(value, list):
        raise ValueError("must be a string or an array of content parts")
    return value


def _as_output(value: object) -> object:
    if isinstance(value, str):
        return [{"type": "output_text", "text": value, "annotations": []}]
    return _as_input(value)


InputParts = Annotated[list[InputContent], Field(max_length=MAX_PARTS), BeforeValidator(_as_input)]
OutputParts = Annotated[list[OutputContent], Field(max_length=MAX_PARTS), BeforeValidator(_as_output)]

# -- items ----------------------------------------------------------------------------------------


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
    kind = _type_of(value)
    if not isinstance(value, Mapping):
        return None
    if kind == "message" or (kind is None and "role" in value):
        return "<output>" if value.get("role") == "assistant" else "<message>"
    if kind is None:
        return "<reference>" if "id" in value else None
    if kind == "item_reference":
        return "<reference>"
    return _tag(kind, ("reasoning", "function_call", "function_call_output"), _REFUSED)


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
    Discriminator(_item, **_unknown("message, reasoning, function_call, function_call_output, item_reference")),
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


# -- the conversation -----------------------------------------------------------------------------


class Placed(NamedTuple):
    """A message, and the path of the item it begins with."""

    path: str
    message: Message


def turns_of(instructions: str | None, before: Sequence[StoredItem], items: Sequence[StoredItem]) -> list[Placed]:
    """The protocol-free form of a whole context: instructions, then items of earlier responses, then new ones.

    Reasoning, text and calls that follow each other are one turn of the model, and outputs stand behind the turn that
    called: that is how models know them, wherever the items stand.

    Raises:
        RequestError: An output without its call, a call without its output, or something unreadable.
    """
    gathered = _Gathered()
    if instructions is not None:
        gathered.say("system", (TextPart(instructions),), "instructions")
    for item in before:
        gathered.add(item, "input")
    for index, item in enumerate(items):
        gathered.add(item, f"input.{index}")
    return gathered.turns()


class _Gathered:
    """Groups of turns so far, the model's open turn, and the calls that wait for their outputs, with their groups.

    A group is a turn and, if it called, its outputs.
    """

    def __init__(self) -> None:
        self._groups: list[list[Placed]] = []
        self._waiting: dict[str, tuple[str, list[Placed]]] = {}
        self._clear()

    def _clear(self) -> None:
        self._path = ""
        self._reasoning: str | None = None
        self._content: tuple[ContentPart, ...] | None = None
        self._calls: dict[str, tuple[str, ToolCall]] = {}

    def say(self, role: Role, content: tuple[ContentPart, ...], path: str) -> None:
        """A turn that is not the model's."""
        self._end_turn()
        self._groups.append([Placed(path, Message(role=role, content=content))])

    def add(self, item: StoredItem, path: str) -> None:
        """The next item."""
        match item:
            case InputMessage():
                self.say(item.role, _parts(item.content, f"{path}.content"), path)
            case FunctionOutput():
                self._answer(item, path)
            case _:
                self._speak(item, path)
                self._path = self._path or path

    def _speak(self, item: Reasoning | OutputMessage | FunctionCall, path: str) -> None:
        match item:
            case Reasoning():
                if self._reasoning is not None or self._content is not None or self._calls:
                    self._end_turn()
                try:
                    self._reasoning = item.text
                except ValueError as error:
                    raise RequestError(f"'{path}.encrypted_content' {error}", f"{path}.encrypted_content") from None
            case OutputMessage():
                if self._content is not None and not self._calls:
                    self._end_turn()
                self._content = (*(self._content or ()), *_said(item))
            case FunctionCall():
                if item.call_id in self._calls or item.call_id in self._waiting:
                    raise RequestError(f"'{path}.call_id' is that of another call without an output", f"{path}.call_id")
                call = ToolCall(id=item.call_id, name=item.name, arguments=item.arguments)
                self._calls[item.call_id] = path, call

    def _answer(self, item: FunctionOutput, path: str) -> None:
        self._end_turn()
        if item.call_id not in self._waiting:
            message = f"No tool call found for function call output with call_id {item.call_id}."
            raise RequestError(message, f"{path}.call_id")
        _, group = self._waiting.pop(item.call_id)
        content = _parts(item.output, f"{path}.output")
        group.append(Placed(path, Message(role="tool", content=content, tool_call_id=item.call_id)))

    def turns(self) -> list[Placed]:
        """All of them."""
        self._end_turn()
        for call_id, (path, _) in self._waiting.items():
            raise RequestError(f"No tool output found for function call {call_id}.", path)
        return [turn for group in self._groups for turn in group]

    def _end_turn(self) -> None:
        if self._reasoning or self._content is not None or self._calls:
            message = Message(
                role="assistant",
                content=self._content or (),
                reasoning=self._reasoning or None,
                tool_calls=tuple(call for _, call in self._calls.values()),
            )
            group = [Placed(self._path, message)]
            self._groups.append(group)
            self._waiting |= {call_id: (path, group) for call_id, (path, _) in self._calls.items()}
        self._clear()


def _parts(parts: Sequence[Any], path: str) -> tuple[ContentPart, ...]:
    return tuple(
        TextPart(part.text) if isinstance(part, InputText) else image_part(part.image_url, f"{path}.{index}.image_url")
        for index, part in enumerate(parts)
    )


def _said(message: OutputMessage) -> tuple[ContentPart, ...]:
    texts = [part.refusal if isinstance(part, Refusal) else part.text for part in message.content]
    return tuple(TextPart(text) for text in texts if text)
