"""What is settled about a conversation before a template sees it.

Everything that public issues report as breaking templates: a role it does not know, a system message where it takes
none, an id it refuses, calls it would drop, tools it ignores. What has an effect and cannot be honoured is refused by
name; what the template itself refuses is left to it, so that its own message reaches the client.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import get_args

from deepinfra.core.conversation import Conversation, MediaPart, Message, Role, TextPart
from deepinfra.errors import RequestError, UnsupportedFieldError
from deepinfra.recipes.chat_template.traits import Traits
from deepinfra.recipes.output.constraint import offered
from deepinfra.recipes.output.family import Shown

__all__ = ("admit", "settle")

_ROLES = frozenset(get_args(Role))
_INSTRUCTS = ("system", "developer")
_RESERVED = frozenset({"messages", "tools", "documents", "add_generation_prompt", "bos_token", "eos_token"})
_NAME = re.compile(r"[^\s<|\\/>]{1,128}")
_TOOL_NAME = re.compile(r"[\w.:/-]{1,128}", re.ASCII)
_ID = re.compile(r"[\w.:/|+=@-]{1,512}", re.ASCII)
_FORMATS = {
    "json": "Answer with one JSON object and nothing else.",
    "json_schema": "Answer with one JSON value that matches this JSON Schema, and nothing else:\n",
}
"""How a response format is told to the model: it is enforced anyway, but a model that knows it answers better."""
_ALPHABET = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"


def admit(conversation: Conversation, traits: Traits, tool_fallback: bool) -> None:
    """Refuse what would be dropped, and names that would forge the text around them.

    Raises:
        RequestError: A role or name that cannot be, or a prefix that is not the last assistant message.
        UnsupportedFieldError: Something that has an effect and cannot be honoured.
    """
    _admit_tools(conversation, traits, tool_fallback)
    for name in conversation.template_options or {}:
        if name in _RESERVED or name not in traits.names:
            raise UnsupportedFieldError(f"template_options.{name}", "is not read by this model's chat template")
    for index, message in enumerate(conversation.messages):
        _admit_message(message, f"messages[{index}]", traits)
        if message.prefix and (message.role != "assistant" or index != len(conversation.messages) - 1):
            raise RequestError("only the last assistant message can be a prefix", f"messages[{index}].prefix")
        if message.tool_calls and traits.calls == "text" and not tool_fallback:
            why = "cannot be shown: this model's chat template does not know tool calls"
            raise UnsupportedFieldError(f"messages[{index}].tool_calls", why)


def _admit_tools(conversation: Conversation, traits: Traits, tool_fallback: bool) -> None:
    choice = conversation.tool_choice
    declared = {tool.name for tool in conversation.tools}
    for index, tool in enumerate(conversation.tools):
        if not _TOOL_NAME.fullmatch(tool.name):
            raise RequestError("is not letters, digits and any of _ . : / -", f"tools[{index}].name")
    if choice.mode == "required" and not declared:
        raise RequestError("demands a call, but there are no tools", "tool_choice")
    for name in choice.names:
        if name not in declared:
            raise RequestError(f"names {name!r}, which is no tool of this request", "tool_choice")
    if offered(conversation) and traits.tools == "fallback" and not tool_fallback:
        raise UnsupportedFieldError("tools", "cannot be used: this model's chat template does not show tools")


def _admit_message(message: Message, path: str, traits: Traits) -> None:
    if message.role not in _ROLES:
        raise RequestError(f"there is no role {message.role!r}", f"{path}.role")
    if message.role == "reminder" and not traits.reads("latest_reminder"):
        raise UnsupportedFieldError(f"{path}.role", "cannot be a reminder: this model's chat template has none")
    if any(isinstance(part, MediaPart) for part in message.content):
        raise UnsupportedFieldError(f"{path}.content", "has media, which this model's recipe does not take")
    if message.name is not None and not _NAME.fullmatch(message.name):
        raise RequestError("has white space or one of < > | / \\", f"{path}.name")
    if message.tool_call_id is not None and not _ID.fullmatch(message.tool_call_id):
        raise RequestError("is no id", f"{path}.tool_call_id")
    for index, call in enumerate(message.tool_calls):
        if not _TOOL_NAME.fullmatch(call.name):
            raise RequestError("is not letters, digits and any of _ . : / -", f"{path}.tool_calls[{index}].name")
        if not _ID.fullmatch(call.id):
            raise RequestError("is no id", f"{path}.tool_calls[{index}].id")


def settle(conversation: Conversation, traits: Traits, syntax: Shown) -> Conversation:
    """The conversation as the template takes it; its tools are those that the template is to show.

    `syntax` is the one in which calls are written where the template does not write them. All tools are shown, also
    those that this answer may not call: a prompt that stays the same is found in the cache.
    """
    tools = conversation.tools if conversation.tool_choice.mode != "none" else ()
    fallback = bool(tools) and traits.tools == "fallback"
    messages = [_named(message, traits) for message in _with_names(conversation.messages)]
    if fallback or traits.calls == "text":
        messages = list(_written(messages, syntax, results=traits.tools == "fallback"))
    elif not traits.every_call:
        messages = list(_one_by_one(messages))
    if traits.system == "first":
        messages = _one_system(messages)
    notes = [syntax.show_tools(tools)] if fallback else []
    if conversation.constraint is not None and conversation.constraint.kind in _FORMATS:
        notes.append(_FORMATS[conversation.constraint.kind] + conversation.constraint.source)
    if notes:
        messages = _with_note(messages, "\n\n".join(notes), traits)
    return replace(conversation, messages=tuple(messages), tools=() if fallback else tools)


def _with_names(messages: Sequence[Message]) -> Iterator[Message]:
    """Every result with the name of the tool it came from."""
    names: dict[str, str] = {}
    for message in messages:
        names |= {call.id: call.name for call in message.tool_calls}
        if message.role == "tool" and message.name is None and message.tool_call_id in names:
            message = replace(message, name=names[message.tool_call_id])
        yield message


def _named(message: Message, traits: Traits) -> Message:
    """Role, ids and error as the template knows them."""
    if message.role == "developer" and not traits.reads("developer"):
        message = replace(message, role="system")
    if message.is_error and not traits.reads("is_error"):
        message = replace(message, content=(TextPart(f"Error: {message.text}"),))
    if traits.short_ids and message.tool_call_id is not None:
        message = replace(message, tool_call_id=_short(message.tool_call_id))
    if traits.short_ids and message.tool_calls:
        message = replace(message, tool_calls=tuple(replace(call, id=_short(call.id)) for call in message.tool_calls))
    return message


def _short(name: str) -> str:
    """Nine letters and digits; the same for the same id."""
    if len(name) == 9 and name.isascii() and name.isalnum():
        return name
    number = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big")
    return "".join(_ALPHABET[number // len(_ALPHABET) ** place % len(_ALPHABET)] for place in range(9))


def _one_by_one(messages: Sequence[Message]) -> Iterator[Message]:
    """A turn with several calls as turns with one call each, every one before its result."""
    waiting = list(messages)
    while waiting:
        message = waiting.pop(0)
        if len(message.tool_calls) < 2:
            yield message
            continue
        results: list[Message] = []
        while waiting and waiting[0].role == "tool":
            results.append(waiting.pop(0))
        for call in message.tool_calls:
            yield replace(message, tool_calls=(call,))
            message = replace(message, content=(), reasoning=None)
            yield from (result for result in results if result.tool_call_id == call.id)
        ids = {call.id for call in message.tool_calls}
        yield from (result for result in results if result.tool_call_id not in ids)


def _written(messages: Sequence[Message], syntax: Shown, *, results: bool) -> Iterator[Message]:
    """Calls as text of the answer; with `results`, results as text of the next user's message."""
    held: list[str] = []
    for message in messages:
        if message.role == "tool" and results:
            held.append(syntax.show_result(message.name or "", message.text))
            continue
        if held:
            turn = Message(role="user", content=(TextPart("\n".join(held)),))
            held = []
            if message.role == "user":
                message = replace(message, content=(TextPart(f"{turn.text}\n\n{message.text}"),))
            else:
                yield turn
        if message.tool_calls:
            calls = syntax.show_calls(message.tool_calls)
            text = f"{message.text}\n{calls}" if message.text else calls
            message = replace(message, content=(TextPart(text),), tool_calls=())
        yield message
    if held:
        yield Message(role="user", content=(TextPart("\n".join(held)),))


def _one_system(messages: Sequence[Message]) -> list[Message]:
    """All instructions as one message at the beginning, in the role of the first."""
    told = [message for message in messages if message.role in _INSTRUCTS]
    rest = [message for message in messages if message.role not in _INSTRUCTS]
    text = "\n\n".join(message.text for message in told)
    return [Message(role=told[0].role, content=(TextPart(text),)), *rest] if told else rest


def _with_note(messages: Sequence[Message], note: str, traits: Traits) -> list[Message]:
    """Add to the system message, or before the first user's text where the template takes none."""
    made = list(messages)
    if traits.system != "none":
        if made and made[0].role in _INSTRUCTS:
            made[0] = replace(made[0], content=(TextPart(f"{made[0].text}\n\n{note}"),))
        else:
            made.insert(0, Message(role="system", content=(TextPart(note),)))
        return made
    at = next((index for index, message in enumerate(made) if message.role == "user"), None)
    if at is None:
        return [Message(role="user", content=(TextPart(note),)), *made]
    made[at] = replace(made[at], content=(TextPart(f"{note}\n\n{made[at].text}"),))
    return made
