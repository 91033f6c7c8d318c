"""`POST /v1/responses`: the request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field

from deepinfra.api.encoding import json_bytes
from deepinfra.api.errors import WireError
from deepinfra.api.protocol import Call, Json, Received
from deepinfra.api.responses.content import Unsupported
from deepinfra.api.responses.items import Item, ItemReference, StoredItem, output_items
from deepinfra.api.responses.store import ResponseStore, Turn
from deepinfra.api.responses.tools import (
    MAX_TOOLS,
    Choice,
    Text,
    Tool,
    choice_json,
    constraint_of,
    tool_choice_of,
    tool_definitions,
)
from deepinfra.api.responses.turns import turns_of
from deepinfra.api.responses.writer import ResponseWriter
from deepinfra.api.retention import CacheOptions, Kept, body_retention
from deepinfra.api.wire import MAX_TOP_LOGPROBS, DrawFields, Options, Salt, openai_error, parse_fields
from deepinfra.core.conversation import Conversation, JsonValue, Message
from deepinfra.core.request import GenerateRequest
from deepinfra.core.sampling import SamplingParams
from deepinfra.errors import RequestError
from deepinfra.interfaces.given import Clock

__all__ = ("Responses", "ResponsesRequest")

MAX_ITEMS = 8192
"""Items of one request."""

_ITEM_NBYTES = 1024
"""What an item takes in memory besides its JSON, for the store's limit."""

Include = Literal[
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "web_search_call.action.sources",
    "web_search_call.results",
]


_PARAMS = {
    "constraint": "text.format",
    "effort": "reasoning.effort",
    "max_tokens": "max_output_tokens",
    "messages": "input",
    "prompt": "input",
    "reasoning_effort": "reasoning.effort",
    "response_format": "text.format",
}


class ReasoningIn(Options):
    """`reasoning`. No summaries are made: the items carry the reasoning whole, which is all that `auto` asks for.

    Which reasoning of earlier turns the model sees again is its template's matter, hence `context` is `auto`.
    """

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max", "ultra"] | None = None
    summary: Literal["auto"] | None = None
    generate_summary: Literal["auto"] | None = None
    context: Literal["auto"] | None = None
    mode: Literal["standard"] | None = None


class StreamIn(Options):
    """`stream_options`: no characters are added to hide how long pieces are."""

    include_obfuscation: Literal[False] | None = None


class ResponsesCacheOptions(CacheOptions):
    """`prompt_cache_options` of this protocol."""

    prewarm: Literal[False] | None = None
    comparison_response_id: None = None


def _as_items(value: object) -> object:
    if isinstance(value, str):
        return [{"type": "message", "role": "user", "content": value}]
    if not isinstance(value, list):
        raise ValueError("must be a string or an array of items")
    return value


class ResponsesRequest(DrawFields):
    """Fields of the body; see `RequestFields` for IGNORED and NEUTRAL, and `DrawFields` for those beyond OpenAI's.

    `client_metadata` is Codex's: who runs it where.
    """

    IGNORED: ClassVar[frozenset[str]] = frozenset({"client_metadata"})
    NEUTRAL: ClassVar[Mapping[str, tuple[JsonValue, ...]]] = {
        "access_programs": (),
        "background": (False,),
        "background_options": (),
        "context_management": ([],),
        "conversation": (),
        "image": ({"context_compression": "auto"}, {"context_compression": "disabled"}),
        "moderation": (),
        "prompt": (),
        "service_tier": ("auto", "default"),
        "truncation": ("disabled",),
    }

    input: Annotated[
        list[Item],
        Field(max_length=MAX_ITEMS),
        BeforeValidator(
            _as_items, json_schema_input_type=str | Annotated[list[dict[str, Any]], Field(max_length=MAX_ITEMS)]
        ),
    ]
    instructions: str | None = None
    previous_response_id: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    max_tool_calls: Annotated[int, Field(ge=1)] | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Choice | None = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningIn | None = None
    text: Text | None = None
    include: Annotated[list[Include], Field(max_length=16)] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    store: bool | None = None
    stream_options: StreamIn | None = None
    metadata: (
        Annotated[
            dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]], Field(max_length=16)
        ]
        | None
    ) = None
    prompt_cache_key: Annotated[str, Field(max_length=512)] | None = None
    prompt_cache_options: ResponsesCacheOptions | None = None
    prompt_cache_retention: Kept | None = None
    safety_identifier: Annotated[str, Field(max_length=512)] | None = None
    user: Annotated[str, Field(max_length=512)] | None = None
    cache_salt: Salt | None = None

    def check(self) -> None:
        """See `RequestFields.check`."""
        if self.stream_options is not None and not self.stream:
            raise RequestError("'stream_options' is only allowed with 'stream': true", "stream_options")
        if self.top_logprobs and not self.wants("message.output_text.logprobs"):
            raise RequestError(
                "'top_logprobs' is only allowed with 'include': ['message.output_text.logprobs']", "top_logprobs"
            )

    def wants(self, what: Include) -> bool:
        """Whether `include` names it."""
        return what in (self.include or ())

    @property
    def drawn(self) -> SamplingParams:
        """How tokens are drawn."""
        return self.sampling((self.top_logprobs or 0) if self.wants("message.output_text.logprobs") else None)

    def echo(self) -> dict[str, Any]:
        """What the response's object repeats of it."""
        drawn = self.drawn
        return {
            "background": False,
            "instructions": self.instructions,
            "max_output_tokens": self.max_output_tokens,
            "max_tool_calls": self.max_tool_calls,
            "metadata": self.metadata or {},
            "parallel_tool_calls": self.parallel_tool_calls is not False,
            "previous_response_id": self.previous_response_id,
            "prompt_cache_key": self.prompt_cache_key,
            "prompt_cache_retention": self.prompt_cache_retention,
            "reasoning": {"effort": self.reasoning.effort if self.reasoning else None, "summary": None},
            "safety_identifier": self.safety_identifier,
            "service_tier": "default",
            "store": self.store is not False,
            "temperature": drawn.temperature,
            "text": (self.text or Text()).told(),
            "tool_choice": choice_json(self.tool_choice),
            "tools": [tool.told() for tool in self.tools or ()],
            "top_logprobs": self.top_logprobs or 0,
            "top_p": drawn.top_p,
            "truncation": "disabled",
            "user": self.user,
        }


class Responses:
    """See `WireProtocol`: `POST /v1/responses` over a store of its answers."""

    def __init__(self, store: ResponseStore, clock: Clock) -> None:
        self._store, self._clock = store, clock

    def parse(self, raw: Mapping[str, JsonValue], received: Received) -> Call:
        """See `WireProtocol.parse`."""
        fields = parse_fields(ResponsesRequest, raw)
        before: Turn | None = None
        if fields.previous_response_id is not None:
            before = self._store.turn(received.tenant, fields.previous_response_id, "previous_response_id")
        items = [self._resolved(item, received.tenant, f"input.{at}.id") for at, item in enumerate(fields.input)]
        asked = _Asked(self._store, received.tenant, before, items, len(json_bytes(raw["input"])))
        writer = ResponseWriter(
            fields.echo(),
            self._clock,
            seal=fields.wants("reasoning.encrypted_content"),
            keep=None if fields.store is False else asked.keep,
        )
        turns = turns_of(fields.instructions, [item for _, item in before.context()] if before else [], items)
        conversation = _conversation(fields, [turn.message for turn in turns], received.now)
        request = GenerateRequest(
            input=conversation,
            sampling=fields.drawn,
            seed=fields.seed,
            max_tokens=fields.max_output_tokens,
            stop=tuple(fields.stop or ()),
            ignore_eos=bool(fields.ignore_eos),
            retention=body_retention(fields.prompt_cache_retention, fields.prompt_cache_options),
            salt=fields.cache_salt or "",
            receipt=fields.wants_receipt,
        )
        return Call(
            model=fields.model,
            stream=bool(fields.stream),
            requests=(request,),
            writer=writer,
            id_prefix="resp_",
            param_names={
                **_PARAMS,
                # strict tools demand something of the answer where no format does
                **({"constraint": "tools"} if conversation.tools and not conversation.constraint else {}),
                **{f"messages[{at}]": turn.path for at, turn in enumerate(turns)},
            },
        )

    def error(self, error: WireError, request_id: str) -> tuple[int, Json]:
        """See `WireProtocol.error`."""
        if error.status == 404 and error.param == "previous_response_id":
            error = error._replace(code="previous_response_not_found")
        return openai_error(error, request_id)

    def _resolved(self, item: Item, tenant: str, param: str) -> StoredItem:
        if isinstance(item, ItemReference):
            return self._store.item(tenant, item.id, param)
        assert not isinstance(item, Unsupported)  # refused when it was read
        return item


class _Asked:
    """What a response will be stored with."""

    def __init__(
        self, store: ResponseStore, tenant: str, before: Turn | None, items: Sequence[StoredItem], nbytes: int
    ) -> None:
        self._store, self._tenant, self._nbytes = store, tenant, nbytes
        self.before, self.items = before, items

    def keep(self, response: Json) -> None:
        """Store a finished response."""
        body = json_bytes(response)
        response_id, output = str(response["id"]), response["output"]
        assert isinstance(output, list)
        told = [*self.items, *output_items(output)]
        made = response_id.rpartition("_")[2]
        turn = Turn(
            self.before,
            [(item.id or f"item_{made}{index:04x}", item) for index, item in enumerate(told)],
            asked=len(self.items),
            nbytes=self._nbytes + len(json_bytes(output)) + _ITEM_NBYTES * len(told),
        )
        self._store.put(self._tenant, response_id, body, turn)


def _conversation(fields: ResponsesRequest, messages: Sequence[Message], now: str) -> Conversation:
    if not messages:
        raise RequestError("'input' has no items", "input")
    constraint = constraint_of(fields.text or Text())
    if constraint is not None and constraint.kind == "json" and not any("json" in m.text.lower() for m in messages):
        raise RequestError(
            "'input' must contain the word 'json' in some form to use 'text.format' of type 'json_object'", "input"
        )
    tools = tool_definitions(fields.tools or ())
    return Conversation(
        messages=tuple(messages),
        tools=tools,
        tool_choice=tool_choice_of(fields.tool_choice, fields.parallel_tool_calls, tools),
        constraint=constraint,
        effort=fields.reasoning.effort if fields.reasoning else None,
        now=now,
    )
