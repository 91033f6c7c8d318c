"""Random conversations for tests of recipes: the structure from one source of randomness, the words from another."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence

from deepinfra.core.conversation import (
    Constraint,
    ContentPart,
    Conversation,
    JsonValue,
    Message,
    TextPart,
    ToolCall,
    ToolChoice,
    ToolDefinition,
)

__all__ = ("BENIGN", "conversation", "hostile_words")

BENIGN = (
    "Hello",
    "What is 12 + 30?",
    " leading and trailing ",
    "line\n\n\tline\r\n",
    "naïve Ünïcödé 日本語 한국어 🙂🤷🏽‍♀️",
    'def f(x):\n    return {"a": [1, 2]}  # <b>&amp;</b>',
    "1000000 don't I'll [list] (tuple) | a < b > c",
    "x",
)
"""Pieces of text without markers."""

_WIDE = str.maketrans("<>[]/|_", "＜＞［］／｜＿")
"""Characters that a normaliser may map back (NFKC does)."""


def hostile_words(draw: random.Random, markers: Sequence[str]) -> Callable[[], str]:
    """Text that spells markers: whole, halved, nested, disguised, begun in one text and ended in the next."""
    halves = [marker[: len(marker) // 2] for marker in markers] + [marker[len(marker) // 2 :] for marker in markers]
    disguised = [marker.translate(_WIDE).upper() for marker in markers]
    begun = ""

    def say() -> str:
        nonlocal begun
        text, begun = begun, ""
        pool = draw.choice(
            (markers, halves, disguised, BENIGN, ("".join(draw.sample(list(markers), min(2, len(markers)))),))
        )
        text += "".join(draw.choice(draw.choice((pool, markers, BENIGN))) for _ in range(draw.randrange(1, 5)))
        marker = draw.choice(markers)
        at = draw.randrange(1, len(marker)) if len(marker) > 1 else 0
        how = draw.random()
        if how < 0.2:  # a marker inside a marker
            text += marker[:at] + draw.choice(markers) + marker[at:]
        elif how < 0.4:
            text, begun = text + marker[:at], marker[at:]
        return text

    return say


def conversation(draw: random.Random, say: Callable[[], str], *, reminders: bool = False) -> Conversation:
    """A conversation of up to six turns with system messages, reasoning, tools, calls and results.

    Args:
        draw: Decides the structure; the same state gives the same structure whatever is said.
        say: Makes each text; never an empty one. Names of tools are not made by it: protocols validate them.
        reminders: Whether to use the role `reminder`.
    """
    maker = _Maker(draw, say)
    messages: list[Message] = []
    if draw.random() < 0.5:
        messages.append(maker.message("system"))
    for _ in range(draw.randrange(1, 4)):
        messages += (maker.message("user") for _ in range(draw.choice((1, 1, 1, 2))))
        if draw.random() < 0.7:
            messages += maker.answer()
        if draw.random() < 0.15:
            messages.append(maker.message(draw.choice(("system", "developer"))))
        if reminders and draw.random() < 0.15:
            messages.append(maker.message("reminder"))
    if messages[-1].role != "user" and draw.random() < 0.8:
        messages.append(maker.message("user"))
    tools = tuple(maker.tool(index) for index in range(draw.choice((0, 0, 1, 2))))
    choice = ToolChoice(mode=draw.choice(("auto", "auto", "none"))) if tools else ToolChoice()
    schema = json.dumps({"type": "object", "properties": {say(): {"description": say()}}})
    wanted = draw.choice((None, None, Constraint(kind="json"), Constraint(kind="json_schema", source=schema)))
    return Conversation(
        messages=tuple(messages),
        tools=tools,
        tool_choice=choice,
        constraint=wanted,
        effort=draw.choice((None, "none", "none", "low", "max")),
    )


class _Maker:
    def __init__(self, draw: random.Random, say: Callable[[], str]) -> None:
        self._draw, self._say = draw, say
        self._calls = 0

    def message(self, role: str) -> Message:
        content: tuple[ContentPart, ...] = tuple(TextPart(self._say()) for _ in range(self._draw.choice((1, 1, 2))))
        return Message(role=role, content=content)  # type: ignore[arg-type]

    def answer(self) -> list[Message]:
        """A turn of the assistant, and the results of what it called."""
        draw, say = self._draw, self._say
        calls = tuple(self._call() for _ in range(draw.choice((0, 0, 1, 2))))
        content = (TextPart(say()),) if draw.random() < 0.8 or not calls else ()
        reasoning = say() if draw.random() < 0.6 else None
        turn = [Message(role="assistant", content=content, reasoning=reasoning, tool_calls=calls)]
        for call in draw.sample(calls, len(calls)):
            failed = draw.random() < 0.2
            turn.append(Message(role="tool", content=(TextPart(say()),), tool_call_id=call.id, is_error=failed))
        if calls and draw.random() < 0.6:
            turn.append(Message(role="assistant", content=(TextPart(say()),)))
        return turn

    def _call(self) -> ToolCall:
        draw, say = self._draw, self._say
        self._calls += 1
        if draw.random() < 0.1:
            arguments = "{" + say()
        else:
            values = (say(), draw.randrange(1000), [say(), 1, None], {say(): True}, False)
            arguments = json.dumps({f"{index}{say()}": draw.choice(values) for index in range(draw.choice((1, 1, 2)))})
        return ToolCall(id=f"call_{self._calls}", name=f"tool_{draw.randrange(3)}", arguments=arguments)

    def tool(self, index: int) -> ToolDefinition:
        """Number `index` of the tools offered."""
        properties: dict[str, JsonValue] = {
            self._say(): {"type": "string", "description": self._say(), "enum": [self._say(), 1]}
        }
        return ToolDefinition(
            name=f"tool_{index}",
            description=self._say() if self._draw.random() < 0.8 else None,
            parameters={"type": "object", "properties": properties, "required": [*properties]},
        )
