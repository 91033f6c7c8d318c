"""What OpenAI's completion protocols share: request fields that say how tokens are drawn, and pieces of answers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal, Protocol, TypeAlias, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from deepinfra.api.errors import request_error
from deepinfra.core.conversation import JsonValue
from deepinfra.core.events import Event
from deepinfra.core.request import CachedTokens, FinishReason, GenerateRequest, Usage
from deepinfra.core.sampling import SamplingParams
from deepinfra.errors import RequestError, UnsupportedFieldError

__all__ = (
    "MAX_TOP_LOGPROBS",
    "Call",
    "Extension",
    "Fold",
    "Head",
    "Json",
    "Options",
    "Parse",
    "SamplingFields",
    "Writer",
    "add_usage",
    "finish_of",
    "logprob_json",
    "parse_fields",
    "usage_json",
)

Json: TypeAlias = dict[str, JsonValue]
"""A JSON object on its way out."""

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


class SamplingFields(Options):
    """Fields with one meaning in `/v1/chat/completions` and `/v1/completions`.

    Beyond OpenAI's, as vLLM spells them: `top_k` (-1 or 0 keeps all), `min_p`, `repetition_penalty`, `ignore_eos`.

    Attributes:
        IGNORED: Fields accepted without effect on the answer, because none is theirs: bookkeeping and billing of
            the caller, hints for speed.
        NEUTRAL: Fields refused unless they say what happens anyway (`null` always does).
    """

    IGNORED: ClassVar[frozenset[str]] = frozenset({"user"})
    NEUTRAL: ClassVar[Mapping[str, tuple[JsonValue, ...]]] = {}

    model: Annotated[str, Field(min_length=1, max_length=512)]
    n: Annotated[int, Field(ge=1)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None
    stop: Annotated[list[Stop], Field(max_length=MAX_STOPS), BeforeValidator(_as_list)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
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

    def check(self) -> None:
        """Rules between fields.

        Raises:
            RequestError: Two fields contradict each other.
        """
        if self.stream_options is not None and not self.stream:
            raise RequestError("'stream_options' is only allowed with 'stream': true", "stream_options")

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a chunk of usage."""
        return bool(self.stream_options and self.stream_options.include_usage)

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


Fields = TypeVar("Fields", bound=SamplingFields)


def parse_fields(model: type[Fields], raw: Mapping[str, JsonValue]) -> Fields:
    """Validate a request body.

    Raises:
        UnsupportedFieldError: A field has an effect that is not honoured, or is unknown.
        RequestError: A field has a wrong type or value.
    """
    for name, neutral in model.NEUTRAL.items():
        value = raw.get(name)
        if value is not None and not any(value == plain and type(value) is type(plain) for plain in neutral):
            alone = f"; it may be {' or '.join(repr(plain) for plain in neutral)}" if neutral else ""
            raise UnsupportedFieldError(name, f"is not supported by this server{alone}")
    known = {name: value for name, value in raw.items() if name not in model.IGNORED and name not in model.NEUTRAL}
    try:
        fields = model.model_validate(known)
    except ValidationError as error:
        raise request_error(error) from None
    fields.check()
    return fields


# -- answers --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """What every object of one answer repeats."""

    id: str
    created: int
    model: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Extension:
    """What only this server tells: goes into the object `deepinfra`."""

    seed: int
    cached: CachedTokens

    def json(self) -> Json:
        """`seed` reproduces the answer; `cached_tokens` are prompt tokens not computed, by tier."""
        return {"seed": self.seed, "cached_tokens": {"device": self.cached.device, **self.cached.store}}


class Fold(Protocol):
    """The whole answer, made of the choices of all chunks of the stream it would have been."""

    def add(self, choice: Json) -> None:
        """Take one chunk's choice; choices of one index come in order."""

    def answer(self, head: Head, usage: Usage, extension: Extension) -> Json:
        """The object a client gets that did not ask for a stream."""


class Writer(Protocol):
    """Turns events of one call into a protocol's objects; keeps the little state that needs."""

    def choices(self, prompt: int, event: Event) -> Sequence[Json]:
        """Choices that say what `event` of prompt number `prompt` says, one per chunk."""

    def chunk(self, head: Head, choices: Sequence[Json]) -> Json:
        """One chunk of a stream, without usage."""

    def fold(self) -> Fold:
        """Begin a whole answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A parsed request: what to ask the engine, and how to say its answer.

    Attributes:
        requests: One per prompt; answers are numbered through: `prompt * n + choice`.
        id_prefix: Of the answer's `id`.
        param_names: The engine's field names in this protocol's words, for errors.
    """

    model: str
    stream: bool
    include_usage: bool
    requests: tuple[GenerateRequest, ...]
    writer: Writer
    id_prefix: str
    param_names: Mapping[str, str]


Parse: TypeAlias = Callable[[Mapping[str, JsonValue], int], Call]
"""A protocol's parser: the JSON object and the most answers allowed to the call; raises `RequestError`."""


def finish_of(reason: FinishReason, *, called: bool) -> str:
    """OpenAI's `finish_reason`: a normal end after tool calls is `tool_calls`; being cut short wins over that."""
    return "tool_calls" if called and reason == "stop" else reason


def add_usage(parts: Iterable[Usage]) -> Usage:
    """Sum over prompts."""
    prompt = completion = reasoning = device = 0
    store: dict[str, int] = {}
    for usage in parts:
        prompt += usage.prompt_tokens
        completion += usage.completion_tokens
        reasoning += usage.reasoning_tokens
        device += usage.cached.device
        for tier, tokens in usage.cached.store.items():
            store[tier] = store.get(tier, 0) + tokens
    return Usage(
        prompt_tokens=prompt,
        completion_tokens=completion,
        reasoning_tokens=reasoning,
        cached=CachedTokens(device=device, store=store),
    )


def usage_json(usage: Usage) -> Json:
    """OpenAI's usage object; `prompt_cache_hit_tokens` and `prompt_cache_miss_tokens` are DeepSeek's."""
    cached = usage.cached.total
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached},
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "prompt_cache_hit_tokens": cached,
        "prompt_cache_miss_tokens": usage.prompt_tokens - cached,
    }


def logprob_json(logprob: float) -> float:
    """A logarithm that JSON can carry: nothing is below -9999, OpenAI's own floor for impossible tokens."""
    return max(logprob, -9999.0)
