"""What a conversation makes of items: turns, in the order in which models know them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from deepinfra.api.media import image_part
from deepinfra.api.responses.content import InputText, Refusal
from deepinfra.api.responses.items import (
    FunctionCall,
    FunctionOutput,
    InputMessage,
    OutputMessage,
    Reasoning,
    StoredItem,
)
from deepinfra.core.conversation import ContentPart, Message, Role, TextPart, ToolCall
from deepinfra.errors import RequestError

__all__ = ("Placed", "turns_of")


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
