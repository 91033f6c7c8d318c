"""Conversation to text, control ranges and start state: a pure function that needs no tokenizer."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby

from deepinfra.core.conversation import Conversation, MediaPart, Message, ToolCall, ToolDefinition
from deepinfra.errors import RequestError, UnsupportedFieldError
from deepinfra.recipes.deepseek.arguments import parameters, read_json, spaced
from deepinfra.recipes.deepseek.dialect import (
    ASSISTANT,
    BOS,
    DIALECTS,
    DSML,
    EOS,
    FORMAT,
    OWN,
    REMINDER,
    THINK,
    THINK_END,
    USER,
    Dialect,
    Version,
)
from deepinfra.recipes.deepseek.strict import with_strict_tools
from deepinfra.recipes.output.constraint import offered

__all__ = ("Rendered", "render")

_NAME = re.compile(r"[a-zA-Z0-9_-]+")
_EFFORTS = {
    "minimal": "low",
    "low": "low",
    "medium": "high",
    "high": "high",
    "xhigh": "high",
    "max": "max",
    "ultra": "max",
}
_BLANK = "\n\n"
_END_OF_TOOLS = "\nYou MUST strictly follow the above defined tool name and parameter schemas to invoke tool calls.\n"


@dataclass(frozen=True, slots=True)
class Rendered:
    """A prompt before it is tokens.

    Attributes:
        text: The whole prompt.
        ranges: Where its control tokens stand, as (start, end) in characters, ascending.
        start: State in which the answer begins: `text`, `reasoning` or `tool`.
        turns: Indexes in `ranges` of the tokens that begin a turn.
        media: Index in `ranges` and digest of each image.
        tools: The tools that may be called, as the prompt shows them.
    """

    text: str
    ranges: tuple[tuple[int, int], ...]
    start: str
    turns: tuple[int, ...]
    media: tuple[tuple[int, bytes], ...]
    tools: tuple[ToolDefinition, ...]


@dataclass(slots=True)
class _Writer:
    """Collects the prompt; `text` is others' words, `own` and `control` are the format's."""

    dialect: Dialect
    parts: list[str] = field(default_factory=list)
    length: int = 0
    ranges: list[tuple[int, int]] = field(default_factory=list)
    turns: list[int] = field(default_factory=list)
    media: list[tuple[int, bytes]] = field(default_factory=list)

    def text(self, text: str) -> None:
        self.parts.append(text)
        self.length += len(text)

    def control(self, token: str) -> None:
        self.ranges.append((self.length, self.length + len(token)))
        self.text(token)

    def own(self, text: str) -> None:
        """The format's own sentences: control tokens in them are real."""
        for index, piece in enumerate(OWN.split(text)):
            (self.control if index % 2 else self.text)(piece)

    def turn(self, token: str) -> None:
        self.turns.append(len(self.ranges))
        self.control(token)

    def content(self, message: Message) -> None:
        for index, part in enumerate(message.content):
            if index:
                self.text(_BLANK)
            if not isinstance(part, MediaPart):
                self.text(part.text)
            elif self.dialect.image is None:
                self.text("[Unsupported Image]")
            else:
                self.media.append((len(self.ranges), part.digest))
                self.control(self.dialect.image)

    def joined(self, messages: Iterable[Message]) -> None:
        """Messages of one turn, a blank line between two."""
        for index, message in enumerate(messages):
            if index:
                self.text(_BLANK)
            if message.role == "tool":
                self.text("<tool_result>Error: " if message.is_error else "<tool_result>")
                self.content(message)
                self.text("</tool_result>")
            else:
                self.content(message)


def render(conversation: Conversation, version: Version) -> Rendered:
    """The exact prompt of a conversation.

    Reasoning of earlier turns is shown only if tools are offered; results of tools stand in the order of their calls.
    V4 moves system messages to the beginning, V4.1 leaves them where they are.

    Raises:
        RequestError: Something in the conversation is wrong.
        UnsupportedFieldError: It has something that this format cannot say.
    """
    dialect = DIALECTS[version]
    _check(conversation)
    thinking = conversation.effort != "none"
    tools = offered(with_strict_tools(conversation))
    messages = [_known_role(message, dialect) for message in conversation.messages]
    if dialect.system is None:
        system = [message for message in messages if message.role == "system" and _says(message)]
        messages = [message for message in messages if message.role != "system"]
    else:
        system = [message for message in messages[:1] if message.role == "system"]
        messages = messages[len(system) :]
    writer = _Writer(dialect)
    writer.control(BOS)
    _head(writer, conversation, system, tools, thinking=thinking)
    start = _turns(writer, messages, keep_reasoning=thinking and bool(tools), thinking=thinking)
    if tools and conversation.tool_choice.mode == "required" and start == "text":
        writer.own(f"\n\n<{DSML}{dialect.calls}>\n")
        start = "tool"
    ranges, turns, media = tuple(writer.ranges), tuple(writer.turns), tuple(writer.media)
    return Rendered("".join(writer.parts), ranges, start, turns, media, tools)


def _check(conversation: Conversation) -> None:
    if conversation.effort not in (None, "none", *_EFFORTS):
        known = ", ".join(("none", *_EFFORTS))
        raise RequestError(f"{conversation.effort!r} is no reasoning effort of this model: {known}", "effort")
    if conversation.template_options:
        name = next(iter(conversation.template_options))
        raise UnsupportedFieldError(f"template_options.{name}", "has no meaning for this model")
    for index, tool in enumerate(conversation.tools):
        if not _NAME.fullmatch(tool.name):
            raise RequestError(f"{tool.name!r} is no name of a tool: letters, digits, _ and -", f"tools[{index}].name")
    last = len(conversation.messages) - 1
    for index, message in enumerate(conversation.messages):
        path = f"messages[{index}]"
        if message.prefix and (index != last or message.role != "assistant"):
            raise RequestError("only the last message, and only an assistant's, can be continued", f"{path}.prefix")
        if message.prefix and message.tool_calls:
            raise UnsupportedFieldError(f"{path}.prefix", "cannot have tool calls")
        if message.prefix and conversation.constraint is not None and _says(message):
            raise UnsupportedFieldError(
                f"{path}.prefix", "cannot be combined with a response format: it is a part of the answer"
            )
        for part in message.content:
            if isinstance(part, MediaPart) and not part.media_type.startswith("image/"):
                raise UnsupportedFieldError(f"{path}.content", f"has {part.media_type}, which this model does not take")
            if isinstance(part, MediaPart) and message.role in ("assistant", "reminder"):
                raise UnsupportedFieldError(f"{path}.content", f"has an image in a turn of the {message.role}")


def _known_role(message: Message, dialect: Dialect) -> Message:
    """A developer is the system where there are system turns, and a user where there are none."""
    if message.role != "developer":
        return message
    return replace(message, role="user" if dialect.system is None else "system")


def _says(message: Message) -> bool:
    return len(message.content) > 1 or any(isinstance(part, MediaPart) or part.text for part in message.content)


def _head(
    writer: _Writer,
    conversation: Conversation,
    system: Sequence[Message],
    tools: Sequence[ToolDefinition],
    *,
    thinking: bool,
) -> None:
    """Everything before the first turn."""
    dialect = writer.dialect
    effort = dialect.efforts[_EFFORTS[conversation.effort or "high"]] if thinking else ""
    wanted = _format(conversation, dialect)
    if dialect.system is not None and (system or effort or tools or wanted):
        writer.turn(dialect.system)
    writer.text(effort)
    writer.joined(system)
    if tools:
        writer.own(dialect.tools)
        for tool in tools:
            writer.text(_schema(tool) + "\n")
        writer.text(_END_OF_TOOLS)
    writer.text(wanted)


def _schema(tool: ToolDefinition) -> str:
    schema = {"name": tool.name, "description": tool.description or "", "parameters": tool.parameters or {}}
    return spaced(schema)


def _format(conversation: Conversation, dialect: Dialect) -> str:
    """The sentences that ask for JSON; a regular expression or grammar is enforced without words."""
    wanted = conversation.constraint
    if wanted is None or wanted.kind not in ("json", "json_schema"):
        return ""
    if wanted.kind == "json":
        return dialect.json
    try:
        return FORMAT + spaced(read_json(wanted.source))
    except ValueError as error:
        raise RequestError(f"the schema is not JSON: {error}", "constraint") from error


def _turns(writer: _Writer, messages: Sequence[Message], *, keep_reasoning: bool, thinking: bool) -> str:
    """Every turn after the head, and the opening of the answer's; returns the state in which that begins."""
    ranks: dict[str, int] = {}
    for user, run in groupby(messages, key=lambda message: message.role in ("user", "tool")):
        turn = list(run)
        if user:
            writer.turn(USER)
            writer.joined(_ordered(turn, ranks) if writer.dialect.system else _ordered(_without_empty(turn), ranks))
            continue
        for message in turn:
            if message.role == "assistant" and message.prefix:
                return _continued(writer, message, thinking=thinking)
            if message.role == "assistant":
                _assistant(writer, message, keep_reasoning=keep_reasoning)
                if message.tool_calls:
                    ranks = {call.id: rank for rank, call in enumerate(message.tool_calls)}
            else:
                writer.turn(REMINDER if message.role == "reminder" else writer.dialect.system or "")
                writer.content(message)
    writer.turn(ASSISTANT)
    writer.control(THINK if thinking else THINK_END)
    return "reasoning" if thinking else "text"


def _without_empty(turn: list[Message]) -> list[Message]:
    """V4 joins user messages that say something."""
    kept: list[Message] = []
    for tool, run in groupby(turn, key=lambda message: message.role == "tool"):
        same = list(run)
        kept += same if tool else [message for message in same if _says(message)] or same[:1]
    return kept


def _ordered(turn: list[Message], ranks: dict[str, int]) -> list[Message]:
    """Results of tools in the order of their calls, in the places that results have."""
    places = [index for index, message in enumerate(turn) if message.role == "tool" and message.tool_call_id in ranks]
    results = sorted((turn[index] for index in places), key=lambda message: ranks[message.tool_call_id or ""])
    ordered = list(turn)
    for index, message in zip(places, results, strict=True):
        ordered[index] = message
    return ordered


def _assistant(writer: _Writer, message: Message, *, keep_reasoning: bool) -> None:
    writer.turn(ASSISTANT)
    if keep_reasoning:
        writer.control(THINK)
        writer.text(message.reasoning or "")
    writer.control(THINK_END)
    writer.content(message)
    if message.tool_calls:
        writer.text(_BLANK)
        _calls(writer, message.tool_calls)
    writer.control(EOS)


def _continued(writer: _Writer, message: Message, *, thinking: bool) -> str:
    """A last turn without its end; reasoning stays open until an answer was begun."""
    writer.turn(ASSISTANT)
    if thinking:
        writer.control(THINK)
        writer.text(message.reasoning or "")
        if not _says(message):
            return "reasoning"
    writer.control(THINK_END)
    writer.content(message)
    return "text"


def _calls(writer: _Writer, calls: Sequence[ToolCall]) -> None:
    dialect = writer.dialect
    writer.own(f"<{DSML}{dialect.calls}>\n")
    for call in calls:
        writer.own(f"<{DSML}{dialect.invoke} name=")
        writer.text(f'"{_attribute(call.name)}">\n')
        values = parameters(call.arguments)
        for name, value, is_text in values:
            writer.own(f"<{DSML}{dialect.parameter} name=")
            writer.text(f'"{_attribute(name)}" string="{"true" if is_text else "false"}">{value}')
            writer.own(f"</{DSML}{dialect.parameter}>\n")
        if not values:
            writer.text("\n")
        writer.own(f"</{DSML}{dialect.invoke}>\n")
    writer.own(f"</{DSML}{dialect.calls}>")


def _attribute(text: str) -> str:
    """An attribute's value: a quote in it cannot end it."""
    return text.replace('"', "&quot;")
