"""`POST /v1/messages`: the request."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from pydantic import BeforeValidator, Discriminator, Field, Tag

from deepinfra.api.errors import WireError
from deepinfra.api.messages.blocks import (
    MAX_MESSAGES,
    CacheControl,
    Content,
    Document,
    MessageIn,
    SystemBlocks,
    tagged,
)
from deepinfra.api.messages.errors import anthropic_error
from deepinfra.api.messages.response import MessagesWriter
from deepinfra.api.messages.tools import Choice, Tool, tool_choice_of, tool_definitions
from deepinfra.api.messages.turns import Turns, turns_of
from deepinfra.api.protocol import Call, Json, Received
from deepinfra.api.wire import MAX_STOPS, Options, RequestFields, Stop, parse_fields
from deepinfra.core.conversation import Constraint, Conversation, JsonValue
from deepinfra.core.digits import json_text
from deepinfra.core.kv import Retention
from deepinfra.core.request import GenerateRequest
from deepinfra.core.sampling import SamplingParams
from deepinfra.errors import RequestError

__all__ = ("MESSAGES", "MessagesProtocol", "MessagesRequest", "ParamNames")

MAX_MARKS = 4
"""Anthropic's limit of `cache_control`, the one of the body itself included."""

MIN_BUDGET = 1024
"""Anthropic's lower bound of `budget_tokens`."""

Display: TypeAlias = Literal["summarized", "omitted"]


class Adaptive(Options):
    """The model decides whether and how long to think: what it does anyway, unless an effort is given."""

    type: Literal["adaptive"]
    display: Display | None = None


class Enabled(Options):
    """Think first, if the model can. `budget_tokens` is what Anthropic calls a target; `max_tokens` is enforced."""

    type: Literal["enabled"]
    budget_tokens: Annotated[int, Field(ge=MIN_BUDGET)] | None = None
    display: Display | None = None


class Disabled(Options):
    """Answer at once."""

    type: Literal["disabled"]


ThinkingIn: TypeAlias = Annotated[
    Annotated[
        Annotated[Adaptive, Tag("<adaptive>")]
        | Annotated[Enabled, Tag("<enabled>")]
        | Annotated[Disabled, Tag("<disabled>")],
        Discriminator(lambda value: f"<{value['type']}>"),
    ],
    BeforeValidator(tagged("type", "enabled", "disabled", "adaptive")),
]


class JsonFormat(Options):
    """A schema that the answer's text must match."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Options):
    """How much effort, and what form."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: JsonFormat | None = None


class ClearThinking(Options):
    """A rule of context editing that clears nothing."""

    type: Literal["clear_thinking_20251015"]
    keep: Literal["all"]


class ContextManagement(Options):
    """What Claude Code sends with every request."""

    edits: list[ClearThinking] | None = None


class MessagesRequest(RequestFields):
    """Fields of the body; see `RequestFields` for what IGNORED and NEUTRAL mean. `seed` is ours.

    `diagnostics` asks for a report on the cache, which may be absent; `cache_control` marks what is cached anyway, and
    its `ttl` is the least time for which it is kept.
    """

    IGNORED: ClassVar[frozenset[str]] = frozenset({"metadata", "service_tier", "diagnostics", "user_profile_id"})
    NEUTRAL: ClassVar[Mapping[str, tuple[JsonValue, ...]]] = {
        "container": (),
        "inference_geo": (),
        "speed": ("standard",),
        "workspace_id": (),
    }

    model: Annotated[str, Field(min_length=1, max_length=512)]
    messages: Annotated[list[MessageIn], Field(min_length=1, max_length=MAX_MESSAGES)]
    max_tokens: Annotated[int, Field(ge=1)]
    system: SystemBlocks | None = None
    stream: bool | None = None
    stop_sequences: Annotated[list[Stop], Field(max_length=MAX_STOPS)] | None = None
    temperature: Annotated[float, Field(ge=0, le=1)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None
    thinking: ThinkingIn | None = None
    output_config: OutputConfig | None = None
    tools: Annotated[list[Tool], Field(max_length=1024)] | None = None
    tool_choice: Choice | None = None
    cache_control: CacheControl | None = None
    context_management: ContextManagement | None = None

    @property
    def effort(self) -> str | None:
        """How hard to think; `enabled` alone means Anthropic's default, `high`."""
        if isinstance(self.thinking, Disabled):
            return "none"
        wanted = self.output_config.effort if self.output_config else None
        return wanted or ("high" if isinstance(self.thinking, Enabled) else None)

    @property
    def constraint(self) -> Constraint | None:
        """What the answer's text must match."""
        if self.output_config is None or self.output_config.format is None:
            return None
        return Constraint(kind="json_schema", source=json_text(self.output_config.format.schema_))

    def check(self) -> None:
        """See `RequestFields.check`."""
        marks = self._marks()
        if len(marks) > MAX_MARKS:
            path = marks[MAX_MARKS][0]
            raise RequestError(
                f"'{path}': at most {MAX_MARKS} blocks may have 'cache_control', and {len(marks)} have", path
            )

    def _marks(self) -> list[tuple[str, CacheControl]]:
        """Every `cache_control` with its path, in the order of the prompt, the body's own last."""
        marks = [*_marks_of("tools", self.tools or ()), *_marks_of("system", self.system or ())]
        for index, message in enumerate(self.messages):
            marks += _marks_of(f"messages.{index}.content", message.content)
        if self.cache_control is not None:
            marks.append(("cache_control", self.cache_control))
        return marks

    @property
    def least_s(self) -> float:
        """Seconds for which what was marked is kept at least."""
        return max((3600.0 if mark.ttl == "1h" else 300.0 for _, mark in self._marks()), default=0.0)

    @property
    def sampling(self) -> SamplingParams:
        """The parameters, with defaults where the client said nothing."""
        plain = SamplingParams()
        return SamplingParams(
            temperature=plain.temperature if self.temperature is None else self.temperature,
            top_p=plain.top_p if self.top_p is None else self.top_p,
            top_k=self.top_k or 0,
        )


def _marks_of(path: str, blocks: Sequence[object]) -> Iterator[tuple[str, CacheControl]]:
    """Marks of blocks, those inside a tool's result or a document before its own."""
    for index, block in enumerate(blocks):
        within, inner = "content", getattr(block, "content", None)
        if isinstance(block, Document) and isinstance(block.source, Content):
            within, inner = "source.content", block.source.content
        if inner:
            yield from _marks_of(f"{path}.{index}.{within}", inner)
        mark = getattr(block, "cache_control", None)
        if mark is not None:
            yield f"{path}.{index}.cache_control", mark


class ParamNames(Mapping[str, str]):
    """The engine's field names in this protocol's words; messages are not numbered here as the client numbered them."""

    _WORDS: ClassVar[Mapping[str, str]] = {
        "constraint": "output_config.format",
        "response_format": "output_config.format",
        "input": "messages",
        "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
        "prompt": "messages",
        "stop": "stop_sequences",
    }
    _MESSAGE = re.compile(r"messages\[(\d+)\]")

    def __init__(self, paths: tuple[str, ...] = (), effort: str = "thinking") -> None:
        self._paths, self._words = paths, {**self._WORDS, "effort": effort, "reasoning_effort": effort}

    def __getitem__(self, name: str) -> str:
        match = self._MESSAGE.match(name)
        if match and int(match[1]) < len(self._paths):
            path = self._paths[int(match[1])]
            return path if path == "system" else path + name[match.end() :]
        return self._words[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._words)

    def __len__(self) -> int:
        return len(self._words)


class MessagesProtocol:
    """See `WireProtocol`."""

    def parse(self, raw: Mapping[str, JsonValue], received: Received) -> Call:
        """See `WireProtocol.parse`."""
        fields = parse_fields(MessagesRequest, raw)
        turns = turns_of(fields.system or (), fields.messages)
        _check_thinking(fields, turns, interleaved="interleaved-thinking" in received.headers.get("anthropic-beta", ""))
        tools = tool_definitions(fields.tools or ())
        said = fields.output_config is not None and fields.output_config.effort is not None
        request = GenerateRequest(
            input=Conversation(
                messages=turns.messages,
                tools=tools,
                tool_choice=tool_choice_of(fields.tool_choice, tools),
                constraint=fields.constraint,
                effort=fields.effort,
                effort_optional=not said,
                now=received.now,
            ),
            sampling=fields.sampling,
            seed=fields.seed,
            max_tokens=fields.max_tokens,
            fit=True,
            stop=tuple(fields.stop_sequences or ()),
            retention=Retention(least_s=fields.least_s),
            receipt=fields.wants_receipt,
        )
        return Call(
            model=fields.model,
            stream=bool(fields.stream),
            requests=(request,),
            writer=MessagesWriter(
                shows_thinking=getattr(fields.thinking, "display", None) != "omitted", hour=fields.least_s >= 3600
            ),
            id_prefix="msg_",
            param_names=ParamNames(turns.paths, "output_config.effort" if said else "thinking"),
        )

    def error(self, error: WireError, request_id: str) -> tuple[int, Json]:
        """See `WireProtocol.error`."""
        return anthropic_error(error, request_id)


MESSAGES = MessagesProtocol()


def _check_thinking(fields: MessagesRequest, turns: Turns, *, interleaved: bool) -> None:
    """`interleaved`: thinking between calls may exceed one answer's tokens.

    Raises:
        RequestError: Thinking contradicts another field.
    """
    thinking = fields.thinking
    if thinking is None or isinstance(thinking, Disabled):
        return
    if turns.messages[-1].prefix:
        raise RequestError(
            "messages: the last message must be of role 'user' when 'thinking' is enabled; an answer can only be "
            "prefilled without",
            "messages",
        )
    budget = thinking.budget_tokens if isinstance(thinking, Enabled) else None
    if budget is not None and budget >= fields.max_tokens and not interleaved:
        raise RequestError("'max_tokens' must be greater than 'thinking.budget_tokens'", "max_tokens")
