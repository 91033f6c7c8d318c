"""`POST /v1/completions`: the request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

from pydantic import Field, PlainValidator

from deepinfra.api.completions.response import CompletionWriter
from deepinfra.api.errors import WireError
from deepinfra.api.extras import ExtraFields
from deepinfra.api.protocol import Call, Json, Received
from deepinfra.api.wire import MAX_TOP_LOGPROBS, Dialect, openai_error, parse_fields
from deepinfra.core.conversation import JsonValue
from deepinfra.core.request import TextInput
from deepinfra.errors import RequestError, UnsupportedFieldError

__all__ = ("COMPLETIONS", "CompletionProtocol", "CompletionRequest")

DEFAULT_MAX_TOKENS = 16
"""OpenAI's own default on this endpoint, and on no other."""


def _prompts(value: object) -> tuple[TextInput | tuple[int, ...], ...]:
    """A text, its token ids, or an array of several of one kind."""
    if isinstance(value, str):
        return (TextInput(value),)
    if not isinstance(value, list) or not value:
        raise ValueError("must be a string, an array of token ids, or a non-empty array of either")
    if all(type(item) is int for item in value):
        return (_ids(value),)
    if all(isinstance(item, str) for item in value):
        return tuple(TextInput(item) for item in value)
    if all(isinstance(item, list) and item and all(type(token) is int for token in item) for item in value):
        return tuple(_ids(item) for item in value)
    raise ValueError("must be a string, an array of token ids, or a non-empty array of either")


def _ids(ids: Sequence[int]) -> tuple[int, ...]:
    if min(ids) < 0 or max(ids) >= 2**31:
        raise ValueError("token ids run from 0 to the size of the vocabulary")
    return tuple(ids)


class CompletionRequest(ExtraFields):
    """Fields of the body; see `SamplingFields` for what IGNORED and NEUTRAL mean."""

    NEUTRAL: ClassVar[Mapping[str, tuple[JsonValue, ...]]] = {"echo": (False,), "suffix": ("",)}

    prompt: Annotated[tuple[TextInput | tuple[int, ...], ...], PlainValidator(_prompts)]
    best_of: Annotated[int, Field(ge=1)] | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None

    def check(self) -> None:
        """See `SamplingFields.check`."""
        super().check()
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise UnsupportedFieldError("best_of", "is not supported by this server; it may only equal 'n'")


@dataclass(frozen=True, slots=True)
class CompletionProtocol:
    """See `WireProtocol`."""

    dialect: Dialect = "openai"

    def parse(self, raw: Mapping[str, JsonValue], received: Received) -> Call:
        """See `WireProtocol.parse`."""
        fields = parse_fields(CompletionRequest, raw)
        n, most = fields.n or 1, received.max_choices
        if n > most:
            raise RequestError(f"'n' must be at most {most} on this server", "n")
        if n * len(fields.prompt) > most:
            raise RequestError(f"'prompt' times 'n' must be at most {most} on this server", "prompt")
        return Call(
            model=fields.model,
            stream=bool(fields.stream),
            requests=tuple(
                fields.request(
                    prompt,
                    logprobs=fields.logprobs,
                    max_tokens=fields.max_tokens or DEFAULT_MAX_TOKENS,
                    constraint=fields.structured_outputs.constraint if fields.structured_outputs else None,
                )
                for prompt in fields.prompt
            ),
            writer=CompletionWriter(len(fields.prompt), n, include_usage=fields.tells_usage),
            id_prefix="cmpl-",
            param_names={"constraint": "structured_outputs", "input": "prompt"},
        )

    def error(self, error: WireError, request_id: str) -> tuple[int, Json]:
        """See `WireProtocol.error`."""
        return openai_error(error, request_id, self.dialect)


COMPLETIONS = CompletionProtocol()
