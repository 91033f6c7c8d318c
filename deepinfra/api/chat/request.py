"""`POST /v1/chat/completions`: the request."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from deepinfra.api.chat.messages import ChatMessage, conversation_messages
from deepinfra.api.chat.response import ChatWriter
from deepinfra.api.chat.tools import FormatIn, Tool, ToolChoiceIn, constraint_of, tool_choice_of, tool_definitions
from deepinfra.api.errors import WireError
from deepinfra.api.extras import ExtraFields
from deepinfra.api.protocol import Call, Json, Received
from deepinfra.api.retention import CacheOptions, Kept, body_retention
from deepinfra.api.wire import MAX_TOP_LOGPROBS, Dialect, Options, openai_error, parse_fields
from deepinfra.core.conversation import Conversation, JsonValue
from deepinfra.errors import RequestError

__all__ = ("CHAT", "ChatProtocol", "ChatRequest")


class Thinking(Options):
    """DeepSeek's switch."""

    type: Literal["enabled", "disabled"]


class ChatRequest(ExtraFields):
    """Fields of the body; see `SamplingFields` for what IGNORED and NEUTRAL mean.

    `thinking` says whether, `reasoning_effort` how much; where they contradict each other, `thinking` wins, as in
    DeepSeek's library. `chat_template_kwargs` are further names for the model's template, as in vLLM and transformers.
    `prediction` and `prompt_cache_key` are hints for speed: every prefix is cached here, and found without a key.
    """

    IGNORED: ClassVar[frozenset[str]] = frozenset(
        {"user", "safety_identifier", "metadata", "prediction", "prompt_cache_key"}
    )
    NEUTRAL: ClassVar[Mapping[str, tuple[JsonValue, ...]]] = {
        "audio": (),
        "function_call": (),
        "functions": (),
        "modalities": (["text"],),
        "moderation": (),
        "service_tier": ("auto", "default"),
        "store": (False,),
        "verbosity": ("medium",),
        "web_search_options": (),
    }

    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=4096)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    tools: Annotated[list[Tool], Field(max_length=128)] | None = None
    tool_choice: ToolChoiceIn | None = None
    parallel_tool_calls: bool | None = None
    response_format: FormatIn | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max", "ultra"] | None = None
    prompt_cache_options: CacheOptions | None = None
    prompt_cache_retention: Kept | None = None
    thinking: Thinking | None = None
    chat_template_kwargs: Annotated[dict[str, Any], Field(max_length=64)] | None = None

    def check(self) -> None:
        """See `SamplingFields.check`."""
        super().check()
        if self.top_logprobs is not None and not self.logprobs:
            raise RequestError("'top_logprobs' is only allowed with 'logprobs': true", "top_logprobs")
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise RequestError("'max_tokens' and 'max_completion_tokens' are both given and differ", "max_tokens")

    @property
    def effort(self) -> str | None:
        """Reasoning effort; `thinking` without one means DeepSeek's default, `high`, or none."""
        if self.thinking is None:
            return self.reasoning_effort
        if self.thinking.type == "disabled":
            return "none"
        return "high" if self.reasoning_effort in (None, "none") else self.reasoning_effort


@dataclass(frozen=True, slots=True)
class ChatProtocol:
    """See `WireProtocol`."""

    dialect: Dialect = "openai"

    def parse(self, raw: Mapping[str, JsonValue], received: Received) -> Call:
        """See `WireProtocol.parse`."""
        fields = parse_fields(ChatRequest, raw)
        if (fields.n or 1) > received.max_choices:
            raise RequestError(f"'n' must be at most {received.max_choices} on this server", "n")
        named = fields.tool_choice is not None and fields.tool_choice.type == "function"
        request = fields.request(
            _conversation(fields, received.now),
            logprobs=(fields.top_logprobs or 0) if fields.logprobs else None,
            max_tokens=fields.max_completion_tokens or fields.max_tokens,
            constraint=None,
        )
        retention = body_retention(fields.prompt_cache_retention, fields.prompt_cache_options)
        request = replace(request, retention=retention)
        effort = "thinking" if fields.thinking and fields.reasoning_effort in (None, "none") else "reasoning_effort"
        return Call(
            model=fields.model,
            stream=bool(fields.stream),
            requests=(request,),
            writer=ChatWriter(
                request.n,
                include_usage=fields.tells_usage,
                # After a call that was asked for by name OpenAI ends with `stop`, DeepSeek as after any other.
                calls_end="stop" if named and self.dialect == "openai" else "tool_calls",
            ),
            id_prefix="chatcmpl-",
            param_names={
                "constraint": _demanding(fields),
                "effort": effort,
                "reasoning_effort": effort,
                "input": "messages",
                "prompt": "messages",
                "template_options": "chat_template_kwargs",
            },
        )

    def error(self, error: WireError, request_id: str) -> tuple[int, Json]:
        """See `WireProtocol.error`."""
        return openai_error(error, request_id, self.dialect)


CHAT = ChatProtocol()


def _demanding(fields: ChatRequest) -> str:
    """The field that demands something of the answer; strict tools do where no format does."""
    if fields.structured_outputs is not None:
        return "structured_outputs"
    return "response_format" if constraint_of(fields.response_format) or not fields.tools else "tools"


def _conversation(fields: ChatRequest, now: str) -> Conversation:
    messages = conversation_messages(fields.messages)
    tools = tool_definitions(fields.tools or ())
    constraint = constraint_of(fields.response_format)
    if fields.structured_outputs is not None:
        if constraint is not None:
            raise RequestError("'structured_outputs' and 'response_format' both say something", "structured_outputs")
        constraint = fields.structured_outputs.constraint
    loose = fields.response_format is not None and fields.response_format.type == "json_object"
    if loose and not any("json" in m.text.lower() for m in messages):
        raise RequestError(
            "'messages' must contain the word 'json' in some form to use 'response_format' of type 'json_object'",
            "messages",
        )
    return Conversation(
        messages=messages,
        tools=tools,
        tool_choice=tool_choice_of(fields.tool_choice, fields.parallel_tool_calls, tools),
        constraint=constraint,
        effort=fields.effort,
        template_options=fields.chat_template_kwargs,
        now=now,
    )
