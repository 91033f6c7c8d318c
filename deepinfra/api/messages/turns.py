"""From blocks to a conversation: turns merged, calls paired with their results, a last assistant turn continued."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from deepinfra.api.media import image_part_of_base64
from deepinfra.api.messages.blocks import (
    Content,
    Document,
    Image,
    MessageIn,
    Text,
    Thinking,
    ToolResult,
    ToolUse,
)
from deepinfra.api.messages.signature import unsealed
from deepinfra.core.conversation import ContentPart, MediaPart, Message, TextPart, ToolCall
from deepinfra.core.digits import json_text
from deepinfra.errors import RequestError

__all__ = ("Turns", "turns_of")

_BILLING = "x-anthropic-billing-header:"
"""How Claude Code begins a line of its system prompt that differs in every request."""


@dataclass(slots=True)
class _Turn:
    """Messages of one role in a row, as one; each block with its path in the request."""

    role: Literal["user", "assistant", "system"]
    number: int
    blocks: list[tuple[str, Any]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Turns:
    """The protocol-free messages, and for each the path of what it was made of."""

    messages: tuple[Message, ...]
    paths: tuple[str, ...]


def turns_of(system: Sequence[Text], messages: Sequence[MessageIn]) -> Turns:
    """The protocol-free form.

    Raises:
        RequestError: Calls and results do not match, or the last assistant turn cannot be continued.
    """
    turns = _merged(messages)
    _check_pairs(turns)
    made: list[tuple[str, Message]] = []
    told = [text for block in system if (text := _unbilled(block.text))]
    if told:
        made.append(("system", Message(role="system", content=(TextPart("\n\n".join(told)),))))
    for turn in turns:
        if turn.role == "assistant":
            made.append((f"messages.{turn.number}", _assistant(turn, last=turn is turns[-1])))
        else:
            made += _results(turn)
    return Turns(tuple(message for _, message in made), tuple(path for path, _ in made))


def _merged(messages: Sequence[MessageIn]) -> list[_Turn]:
    turns: list[_Turn] = []
    for number, message in enumerate(messages):
        if not turns or turns[-1].role != message.role:
            turns.append(_Turn(message.role, number))
        turns[-1].blocks += (
            (f"messages.{number}.content.{index}", block) for index, block in enumerate(message.content)
        )
    return turns


def _unbilled(text: str) -> str:
    """A system block without Claude Code's billing line: it would keep every prefix from being found in the cache."""
    return text.partition("\n")[2] if text.startswith(_BILLING) else text


# -- content --------------------------------------------------------------------------------------


def _content(blocks: Iterable[tuple[str, Any]]) -> tuple[ContentPart, ...]:
    """Texts in a row become one with blank lines between them, as deepseek-recipe writes them."""
    parts: list[ContentPart] = []
    for part in _parts(blocks):
        if isinstance(part, TextPart) and parts and isinstance(before := parts[-1], TextPart):
            parts[-1] = TextPart(f"{before.text}\n\n{part.text}")
        else:
            parts.append(part)
    return tuple(parts)


def _parts(blocks: Iterable[tuple[str, Any]]) -> Iterator[ContentPart]:
    for path, block in blocks:
        if isinstance(block, Text):
            if block.text:
                yield TextPart(block.text)
        elif isinstance(block, Image):
            yield _image(block, path)
        elif isinstance(block, Document):
            yield from (TextPart(text) for text in (block.title, block.context) if text)
            if isinstance(block.source, Content):
                yield from _parts(
                    (f"{path}.source.content.{index}", each) for index, each in enumerate(block.source.content)
                )
            elif block.source.data:
                yield TextPart(block.source.data)


def _image(block: Image, path: str) -> MediaPart:
    return image_part_of_base64(block.source.media_type, block.source.data, f"{path}.source")


# -- turns ----------------------------------------------------------------------------------------


def _assistant(turn: _Turn, last: bool) -> Message:
    """What the model said. Where text stood among calls is lost: models write their calls last."""
    calls = [block for _, block in turn.blocks if isinstance(block, ToolUse)]
    reasoning = [text for path, block in turn.blocks if isinstance(block, Thinking) and (text := _thought(block, path))]
    message = Message(
        role="assistant",
        content=_content(turn.blocks),
        reasoning="\n\n".join(reasoning) if reasoning else None,
        tool_calls=tuple(ToolCall(id=call.id, name=call.name, arguments=json_text(call.input)) for call in calls),
        prefix=last,
    )
    if last and message.text != message.text.rstrip():
        raise RequestError("messages: final assistant content cannot end with trailing whitespace", "messages")
    return message


def _thought(block: Thinking, path: str) -> str:
    try:
        return unsealed(block.thinking, block.signature)
    except ValueError as error:
        raise RequestError(f"'{path}.signature' {error}", f"{path}.signature") from None


def _results(turn: _Turn) -> Iterator[tuple[str, Message]]:
    """Results of calls, one message each, then whatever else the user or the system said."""
    rest: list[tuple[str, Any]] = []
    for path, block in turn.blocks:
        if not isinstance(block, ToolResult):
            rest.append((path, block))
            continue
        content = _content((f"{path}.content.{index}", each) for index, each in enumerate(block.content or ()))
        yield (
            path,
            Message(role="tool", content=content, tool_call_id=block.tool_use_id, is_error=bool(block.is_error)),
        )
    if rest:
        yield f"messages.{turn.number}", Message(role=turn.role, content=_content(rest))


def _check_pairs(turns: Sequence[_Turn]) -> None:
    """Every call has its one result at the beginning of the next turn, and every result its call; in Anthropic's words.

    Raises:
        RequestError: It is not so.
    """
    open_calls: dict[str, int] = {}
    for turn in turns:
        others = False
        for path, block in turn.blocks:
            if not isinstance(block, ToolResult):
                others = True
                continue
            if others:
                raise RequestError(f"{path}: `tool_result` blocks must come before all others of their turn", path)
            if open_calls.pop(block.tool_use_id, None) is None:
                raise RequestError(
                    f"{path}: unexpected `tool_use_id` found in `tool_result` blocks: {block.tool_use_id}. Each "
                    "`tool_result` block must have a corresponding `tool_use` block in the previous message.",
                    path,
                )
        _check_answered(open_calls)
        for path, block in turn.blocks:
            if isinstance(block, ToolUse):
                if block.id in open_calls:
                    raise RequestError(f"{path}: `tool_use` ids must be unique", path)
                open_calls[block.id] = turn.number
    _check_answered(open_calls)


def _check_answered(open_calls: Mapping[str, int]) -> None:
    if open_calls:
        path = f"messages.{next(iter(open_calls.values()))}"
        raise RequestError(
            f"{path}: `tool_use` ids were found without `tool_result` blocks immediately after: "
            f"{', '.join(open_calls)}. Each `tool_use` block must have a corresponding `tool_result` block in the next "
            "message.",
            path,
        )
