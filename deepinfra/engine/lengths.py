"""How long a conversation is, before it is rendered."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from deepinfra.core.conversation import Conversation, JsonValue, TextPart

__all__ = ("SHORT", "characters", "is_short")

SHORT = 4096
"""Characters that are rendered and encoded in about 1 ms; what is longer is rendered off the loop."""

_MESSAGE, _VALUE = 32, 8
"""What a message and a value of JSON take besides their text, in characters."""


def characters(conversation: Conversation) -> int:
    """Characters of all messages' content."""
    return sum(
        len(part.text) for message in conversation.messages for part in message.content if isinstance(part, TextPart)
    )


def is_short(conversation: Conversation) -> bool:
    """Whether it can be rendered on the event loop; looks at no more of it than it must."""
    left = SHORT
    for size in _sizes(conversation):
        left -= size
        if left < 0:
            return False
    return True


def _sizes(conversation: Conversation) -> Iterator[int]:
    for message in conversation.messages:
        yield _MESSAGE + len(message.reasoning or "")
        for part in message.content:
            yield len(part.text) if isinstance(part, TextPart) else 0
        for call in message.tool_calls:
            yield _MESSAGE + len(call.arguments)
    for tool in conversation.tools:
        yield _MESSAGE + len(tool.description or "")
        yield from _json_sizes(tool.parameters)
    yield len(conversation.constraint.source) if conversation.constraint is not None else 0
    yield from _json_sizes(conversation.template_options)


def _json_sizes(value: JsonValue) -> Iterator[int]:
    """Of a large object or array its length first, so that nobody need go through it."""
    waiting = [value]
    while waiting:
        each = waiting.pop()
        if isinstance(each, str):
            yield _VALUE + len(each)
        elif isinstance(each, Mapping):
            yield _VALUE * len(each)
            yield sum(map(len, each))
            waiting += each.values()
        elif isinstance(each, Sequence):
            yield _VALUE * len(each)
            waiting += each
        else:
            yield _VALUE
