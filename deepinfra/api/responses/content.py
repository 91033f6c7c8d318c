"""Parts of which the content of items is made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BaseModel, BeforeValidator, Discriminator, Field, Tag
from pydantic_core import PydanticCustomError

from deepinfra.api.errors import UNSUPPORTED
from deepinfra.api.wire import Options

__all__ = (
    "MAX_PARTS",
    "InputImage",
    "InputParts",
    "InputText",
    "OutputParts",
    "OutputText",
    "ReasoningText",
    "Refusal",
    "SummaryText",
    "Unsupported",
    "tag",
    "type_of",
    "unknown",
)

MAX_PARTS = 4096
"""Content parts of one item."""


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


def tag(kind: object, known: Sequence[str], refused: Sequence[str]) -> str | None:
    """Tag of a type in a union that has `Unsupported`; `None` for one that is neither known nor refused."""
    if kind in refused:
        return "<refused>"
    return f"<{kind}>" if kind in known else None


def type_of(value: object) -> object:
    """The field `type`, of JSON or of a model."""
    return value.get("type") if isinstance(value, Mapping) else getattr(value, "type", None)


def unknown(known: str) -> dict[str, Any]:
    """What a discriminator says of other types."""
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
        lambda value: tag(type_of(value), ("input_text", "input_image"), ("input_file", "input_audio")),
        **unknown("input_text, input_image"),
    ),
]

OutputContent: TypeAlias = Annotated[
    Annotated[OutputText, Tag("<output_text>")]
    | Annotated[Refusal, Tag("<refusal>")]
    | Annotated[InputText, Tag("<input_text>")],
    Discriminator(
        lambda value: tag(type_of(value), ("output_text", "refusal", "input_text"), ()),
        **unknown("output_text, refusal"),
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
