"""What a template does and how it wants things: found by reading it, then by rendering short conversations with it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from deepinfra.core.conversation import Conversation, Message, TextPart, ToolCall, ToolDefinition

__all__ = ("SHAPES", "Traits", "probe")


@dataclass(frozen=True, slots=True, kw_only=True)
class Traits:
    """How a template is to be given a conversation; the default is what most of them take.

    Attributes:
        names: Variables it reads.
        literals: Its own text, constants and attribute names.
        content_parts: Wants content as a list of parts.
        object_arguments: Wants a call's arguments as an object, not as JSON text.
        short_ids: Wants ids of calls that are nine letters and digits.
        system: `anywhere`: takes system messages where they stand; `first`: shows only one of them;
            `none`: raises.
        tools: Who shows the declared tools to the model: the template, or the fallback.
        calls: Who shows the calls of earlier turns: the template, or their text in the answer.
        described: Wants a description of every tool, be it empty.
        every_call: Shows all calls of a turn; else only the first, and they are given one by one.
        known: The syntax of calls that it teaches is one that can be read.
    """

    names: frozenset[str]
    literals: frozenset[str]
    content_parts: bool = False
    object_arguments: bool = True
    short_ids: bool = False
    system: Literal["anywhere", "first", "none"] = "anywhere"
    tools: Literal["template", "fallback"] = "template"
    calls: Literal["template", "text"] = "template"
    described: bool = False
    every_call: bool = True
    known: bool = True

    def reads(self, word: str) -> bool:
        """Whether a word is one of its constants or attributes."""
        return word in self.literals


def _say(role: Literal["system", "user", "assistant", "tool"], text: str, **more: str | None) -> Message:
    return Message(role=role, content=(TextPart(text),), **more)  # type: ignore[arg-type]


_SYSTEM, _USER = _say("system", "Be brief."), _say("user", "What is 12 + 30?")
_TOOL = ToolDefinition(
    name="get_weather",
    description="Weather of a city.",
    parameters={
        "type": "object",
        "properties": {"city": {"type": "string", "description": "Its name."}},
        "required": ["city"],
    },
)
_CALL = ToolCall(id="call00001", name="get_weather", arguments='{"city": "Oslo"}')
_LOOP = (
    _say("user", "Weather in the capital of Norway?"),
    Message(role="assistant", tool_calls=(_CALL,)),
    _say("tool", '{"temp": 20}', tool_call_id="call00001"),
)

SHAPES: dict[str, Conversation] = {
    "user": Conversation(messages=(_USER,)),
    "system": Conversation(messages=(_SYSTEM, _USER)),
    "turns": Conversation(messages=(_SYSTEM, _USER, _say("assistant", "It is 42."), _say("user", "And 1 more?"))),
    "reasoning": Conversation(
        messages=(_USER, _say("assistant", "42", reasoning="12 + 30 = 42"), _say("user", "And 1 more?"))
    ),
    "tools": Conversation(messages=_LOOP[:1], tools=(_TOOL,)),
    "loop": Conversation(messages=(*_LOOP, _say("assistant", "20 degrees."), _say("user", "Thanks!")), tools=(_TOOL,)),
}
"""The conversations that a template is tried with."""


def probe(render: Callable[[Conversation, Traits], str | None], traits: Traits) -> Traits:
    """Find out how a template wants things.

    Args:
        render: Its text for a conversation given as some traits say; `None` if it refuses.
        traits: What is known of it.
    """
    question = _USER.text
    always = () if render(SHAPES["user"], traits) is not None else (_TOOL,)  # some render nothing without tools

    def shows(conversation: Conversation, text: str, traits: Traits) -> bool:
        tools = conversation.tools or always
        return text in (render(replace(conversation, tools=tools), traits) or "")

    parts = replace(traits, content_parts=True)
    if not shows(SHAPES["user"], question, traits) and shows(SHAPES["user"], question, parts):
        traits = parts
    bare = replace(SHAPES["tools"], tools=(replace(_TOOL, description=None),))
    if render(bare, traits) is None:
        traits = replace(traits, described=True)
    traits = _probe_calls(render, traits)
    if not shows(SHAPES["tools"], _TOOL.name, traits) and not shows(SHAPES["tools"], "city", traits):
        calls = traits.calls if render(SHAPES["loop"], traits) is not None else "text"
        traits = replace(traits, tools="fallback", calls=calls)
    if not shows(SHAPES["system"], _SYSTEM.text, traits):
        return replace(traits, system="none")
    later = (*SHAPES["turns"].messages[:-1], _say("system", "Now be long."), _say("user", "Why?"))
    if not all(shows(Conversation(messages=later), text, traits) for text in (_SYSTEM.text, "Now be long.")):
        traits = replace(traits, system="first")
    return traits


def _probe_calls(render: Callable[[Conversation, Traits], str | None], traits: Traits) -> Traits:
    """How calls of earlier turns are to be given, if the template takes any."""
    loop = SHAPES["loop"]
    as_object = render(loop, traits)
    strings = replace(traits, object_arguments=False)
    as_string = render(loop, strings)
    if as_string is not None and (as_object is None or "{'city'" in as_object):
        traits, as_object = strings, as_string
    if as_object is None:
        return traits  # it raises, with its own words
    if "Oslo" not in as_object:
        return replace(traits, calls="text")
    if render(_with_calls(loop, (replace(_CALL, id="call_0123456789"),)), traits) is None:
        traits = replace(traits, short_ids=True)
    other = replace(_CALL, id="call00002", arguments='{"city": "Bergen"}')
    two = render(_with_calls(loop, (_CALL, other)), traits)
    return replace(traits, every_call=two is None or "Bergen" in two)  # if it raises, it says so itself


def _with_calls(loop: Conversation, calls: tuple[ToolCall, ...]) -> Conversation:
    results = (_say("tool", "20", tool_call_id=call.id) for call in calls)
    first, _, _, *rest = loop.messages
    return replace(loop, messages=(first, Message(role="assistant", tool_calls=calls), *results, *rest))
