"""What OpenAI's completion protocols share: request fields that say how tokens are drawn, and pieces of answers."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping
from typing import Annotated, ClassVar, Literal, TypeAlias, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from deepinfra.api.errors import WireError, request_error
from deepinfra.api.protocol import Json
from deepinfra.core.conversation import JsonValue
from deepinfra.core.events import TokenLogprobs, TopLogprob
from deepinfra.core.request import CachedTokens, FinishReason, Usage
from deepinfra.core.sampling import SamplingParams
from deepinfra.errors import RequestError, UnsupportedFieldError

__all__ = (
    "KEEPALIVE",
    "MAX_STOPS",
    "MAX_TOP_LOGPROBS",
    "Dialect",
    "DrawFields",
    "Options",
    "RequestFields",
    "Salt",
    "SamplingFields",
    "Stop",
    "add_usage",
    "finish_of",
    "logprob_json",
    "openai_error",
    "parse_fields",
    "token_json",
    "usage_json",
)

_logger = logging.getLogger("deepinfra.api")

KEEPALIVE = b": keep-alive\n\n"
"""A comment: readers skip it, proxies see that the connection lives."""

Dialect: TypeAlias = Literal["openai", "deepseek"]
"""Where the two differ: DeepSeek refuses a wrong parameter with 422, and ends a call asked for by name as any call."""

MAX_STOPS = 16
"""Stop strings per request: OpenAI takes 4, deepseek-recipe 16."""

MAX_TOP_LOGPROBS = 20

MAX_BIASES = 1024
"""Entries of `logit_bias`; OpenAI takes 300."""


class Options(BaseModel):
    """Base of every object in a request: unknown fields are refused, nothing is converted."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class StreamOptions(Options):
    """`stream_options`."""

    include_usage: bool | None = None
    include_obfuscation: Literal[False] | None = None


def _as_list(value: object) -> object:
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        raise ValueError("must be a string or an array of strings")
    return value


Stop = Annotated[str, Field(min_length=1, max_length=1000)]
Stops = Annotated[list[Stop], Field(max_length=MAX_STOPS)]


Salt = Annotated[str, Field(min_length=1, max_length=512)]
"""`cache_salt`, as in vLLM."""


class Extensions(Options):
    """`deepinfra` of a request: what only this server can be asked for."""

    receipt: bool | None = None


class RequestFields(Options):
    """Base of a request's body.

    Attributes:
        deepinfra: See `Extensions`.
        IGNORED: Fields accepted without effect on the answer, because none is theirs: bookkeeping and billing of
            the caller, hints for speed.
        NEUTRAL: Fields refused unless they say what happens anyway (`null` always does).
    """

    IGNORED: ClassVar[frozenset[str]] = frozenset()
    NEUTRAL: ClassVar[Mapping[str, tuple[JsonValue, ...]]] = {}

    deepinfra: Extensions | None = None

    @property
    def wants_receipt(self) -> bool:
        """Whether a receipt is asked for."""
        return bool(self.deepinfra and self.deepinfra.receipt)

    def check(self) -> None:
        """Rules between fields.

        Raises:
            RequestError: Two fields contradict each other.
        """


class DrawFields(RequestFields):
    """Fields with one meaning in all of OpenAI's protocols: whom to ask, and how tokens are drawn.

    Beyond OpenAI's, as vLLM spells them: `top_k` (-1 or 0 keeps all), `min_p`, `repetition_penalty`, `ignore_eos`.
    """

    model: Annotated[str, Field(min_length=1, max_length=512)]
    seed: int | None = None
    stop: Annotated[Stops, BeforeValidator(_as_list, json_schema_input_type=str | Stops)] | None = None
    stream: bool | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    logit_bias: (
        Annotated[
            dict[Annotated[str, Field(pattern=r"^[0-9]{1,9}$")], Annotated[float, Field(ge=-100, le=100)]],
            Field(max_length=MAX_BIASES),
        ]
        | None
    ) = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=10)] | None = None
    ignore_eos: bool | None = None

    def sampling(self, logprobs: int | None) -> SamplingParams:
        """The parameters, with defaults where the client said nothing."""
        plain = SamplingParams()
        return SamplingParams(
            temperature=_or(self.temperature, plain.temperature),
            top_k=max(0, self.top_k or 0),
            top_p=_or(self.top_p, plain.top_p),
            min_p=_or(self.min_p, plain.min_p),
            repetition_penalty=_or(self.repetition_penalty, plain.repetition_penalty),
            presence_penalty=_or(self.presence_penalty, plain.presence_penalty),
            frequency_penalty=_or(self.frequency_penalty, plain.frequency_penalty),
            logit_bias=tuple((int(token), bias) for token, bias in (self.logit_bias or {}).items()),
            logprobs=logprobs,
        )


def _or(value: float | None, default: float) -> float:
    return default if value is None else value


class SamplingFields(DrawFields):
    """Fields with one meaning in `/v1/chat/completions` and `/v1/completions`."""

    IGNORED: ClassVar[frozenset[str]] = frozenset({"user"})

    n: Annotated[int, Field(ge=1)] | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None

    def check(self) -> None:
        """See `RequestFields.check`."""
        if self.stream_options is not None and not self.stream:
            raise RequestError("'stream_options' is only allowed with 'stream': true", "stream_options")

    @property
    def tells_usage(self) -> bool:
        """Whether usage is among the frames: a stream says it when asked, a whole answer always."""
        return not self.stream or bool(self.stream_options and self.stream_options.include_usage)


Fields = TypeVar("Fields", bound=RequestFields)


def parse_fields(model: type[Fields], raw: Mapping[str, JsonValue]) -> Fields:
    """Validate a request body.

    Raises:
        UnsupportedFieldError: A field has an effect that is not honoured, or is unknown.
        RequestError: A field has a wrong type or value.
    """
    for name, neutral in model.NEUTRAL.items():
        value = raw.get(name)
        if value is not None and not any(value == plain and type(value) is type(plain) for plain in neutral):
            alone = f"; it may be {' or '.join(map(json.dumps, neutral))}" if neutral else ""
            raise UnsupportedFieldError(name, f"is not supported by this server{alone}")
    known = {name: value for name, value in raw.items() if name not in model.IGNORED and name not in model.NEUTRAL}
    if ignored := model.IGNORED.intersection(raw):
        _logger.debug("accepted without effect: %s", ", ".join(sorted(ignored)))
    try:
        fields = model.model_validate(known)
    except ValidationError as error:
        raise request_error(error, model.model_fields) from None
    fields.check()
    return fields


# -- answers --------------------------------------------------------------------------------------


def openai_error(error: WireError, request_id: str, dialect: Dialect = "openai") -> tuple[int, Json]:
    """See `WireProtocol.error`; this shape has no place for the request's id, a header carries it."""
    told: Json = {"message": error.message, "type": error.type, "param": error.param, "code": error.code}
    unprocessable = dialect == "deepseek" and error.code in ("invalid_value", "unsupported_parameter")
    return 422 if unprocessable else error.status, {"error": told}


def finish_of(reason: FinishReason, normally: str = "stop") -> str:
    """OpenAI's `finish_reason`; `normally` is what an answer that was not cut short says."""
    if reason == "context":
        return "length"
    return normally if reason in ("stop", "tool_calls") else reason


def add_usage(parts: Iterable[Usage]) -> Usage:
    """Sum over prompts; a tier's age is that of the oldest record of any."""
    prompt = completion = reasoning = written = device = 0
    approximate = False
    store: dict[str, int] = {}
    age_s: dict[str, float] = {}
    for usage in parts:
        prompt += usage.prompt_tokens
        completion += usage.completion_tokens
        reasoning += usage.reasoning_tokens
        written += usage.cache_write_tokens
        device += usage.cached.device
        approximate = approximate or usage.cached.approximate
        for tier, tokens in usage.cached.store.items():
            store[tier] = store.get(tier, 0) + tokens
        for tier, age in usage.cached.age_s.items():
            age_s[tier] = max(age, age_s.get(tier, 0.0))
    return Usage(
        prompt_tokens=prompt,
        completion_tokens=completion,
        reasoning_tokens=reasoning,
        cached=CachedTokens(device=device, store=store, age_s=age_s, approximate=approximate),
        cache_write_tokens=written,
    )


def usage_json(usage: Usage) -> Json:
    """OpenAI's usage object; `prompt_cache_hit_tokens` and `prompt_cache_miss_tokens` are DeepSeek's."""
    cached = usage.cached.total
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached, "cache_write_tokens": usage.cache_write_tokens},
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "prompt_cache_hit_tokens": cached,
        "prompt_cache_miss_tokens": usage.prompt_tokens - cached,
    }


def logprob_json(logprob: float) -> float:
    """A logarithm that JSON can carry: nothing is below -9999, OpenAI's own floor for impossible tokens."""
    return max(logprob, -9999.0)


def token_json(token: TokenLogprobs) -> Json:
    """OpenAI's entry for a token, with its alternatives."""
    return {**_spelled(token), "top_logprobs": [_spelled(top) for top in token.top]}


def _spelled(token: TokenLogprobs | TopLogprob) -> Json:
    return {
        "token": token.data.decode("utf-8", "replace"),
        "bytes": list(token.data),
        "logprob": logprob_json(token.logprob),
    }
