"""What is found out about a template before it serves, and the proof that it may.

Six benign conversations must render as plain Jinja renders them and tokenise as the model's own tokenizer does; their
hostile twins, with every control token typed into every field, must have the same control tokens.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any

from deepinfra.core.conversation import Conversation, JsonValue, Message, TextPart, ToolCall, ToolDefinition
from deepinfra.errors import InjectionError, ModelError, RequestError, TemplateError
from deepinfra.recipes.chat_template.environment import PlainTemplate
from deepinfra.recipes.chat_template.rendering import Renderer
from deepinfra.recipes.chat_template.variables import Traits, variables

__all__ = ("SHAPES", "check", "hostile", "probe")

_NOW = "2025-01-15T12:00:00"


def _say(role: Any, text: str, **more: Any) -> Message:
    return Message(role=role, content=(TextPart(text),), **more)


_SYSTEM, _USER = _say("system", "Be brief."), _say("user", "What is 12 + 30?")
_TOOL = ToolDefinition(
    name="get_weather",
    description="Weather of a city.",
    parameters={"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
)
_CALL = ToolCall(id="call00001", name="get_weather", arguments='{"city": "Paris"}')
_LOOP = (
    _say("user", "Weather in Paris?"),
    Message(role="assistant", tool_calls=(_CALL,)),
    _say("tool", '{"temp": 20}', tool_call_id="call00001"),
)

SHAPES: Mapping[str, Conversation] = {
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


def probe(template: PlainTemplate, traits: Traits, constants: dict[str, str]) -> Traits:
    """Find out how the template wants content and arguments."""

    def text(conversation: Conversation, traits: Traits) -> str | None:
        try:
            values = variables(conversation, traits) | constants
            return template.render(values, datetime.fromisoformat(_NOW))
        except RequestError:
            return None

    needle = _USER.text
    if needle not in (text(SHAPES["user"], traits) or ""):
        parts = replace(traits, content_parts=True)
        if needle in (text(SHAPES["user"], parts) or ""):
            traits = parts
    as_object = text(SHAPES["loop"], traits)
    as_string = text(SHAPES["loop"], replace(traits, object_arguments=False))
    if as_string is not None and (as_object is None or "{'city'" in as_object):
        traits = replace(traits, object_arguments=False)
    return traits


def hostile(conversation: Conversation, junk: str) -> Conversation:
    """The same conversation with `junk` typed into every field that a user, a model or a tool can fill."""

    def value(item: JsonValue) -> JsonValue:
        if isinstance(item, str):
            return item if item in ("object", "string") else item + junk
        if isinstance(item, Mapping):
            return {(k if k in ("type", "properties", "required") else k + junk): value(v) for k, v in item.items()}
        if isinstance(item, Sequence):
            return [value(element) for element in item]
        return item

    def message(item: Message) -> Message:
        return replace(
            item,
            content=tuple(TextPart(part.text + junk) if isinstance(part, TextPart) else part for part in item.content),
            reasoning=None if item.reasoning is None else item.reasoning + junk,
            tool_calls=tuple(
                replace(call, name=call.name + junk, arguments=_arguments(call.arguments, value))
                for call in item.tool_calls
            ),
        )

    def tool(item: ToolDefinition) -> ToolDefinition:
        return replace(
            item,
            name=item.name + junk,
            description=None if item.description is None else item.description + junk,
            parameters=value(item.parameters),  # type: ignore[arg-type]
        )

    return replace(
        conversation, messages=tuple(map(message, conversation.messages)), tools=tuple(map(tool, conversation.tools))
    )


def _arguments(text: str, value: Callable[[JsonValue], JsonValue]) -> str:
    return json.dumps(value(json.loads(text)), ensure_ascii=False)


def check(
    renderer: Renderer,
    plain: PlainTemplate,
    traits: Traits,
    constants: dict[str, str],
    encode: Callable[[str], Sequence[int]],
    control: Mapping[str, int],
) -> list[int]:
    """Prove the renderer on the shapes that the template accepts.

    Args:
        renderer: What is to be proved.
        plain: The same template without provenance.
        traits: How the template wants its variables.
        constants: `bos_token` and so on.
        encode: The model's own tokenizer, control tokens parsed from text, none added.
        control: Spelling and id of the control tokens.

    Returns:
        Ids of the simplest conversation.

    Raises:
        ModelError: It renders otherwise than plain Jinja, or tokenises otherwise than the model, or user text changes
            the control tokens: the model is not served.
    """
    junk = "".join(control)
    first: list[int] = []
    refusal: TemplateError | None = None
    for name, shape in SHAPES.items():
        if (shape.tools and not traits.reads_tools) or (name == "loop" and not traits.reads("tool_calls")):
            continue  # refused by name
        shape = replace(shape, now=_NOW)
        try:
            text = plain.render(variables(shape, traits) | constants, datetime.fromisoformat(_NOW))
        except TemplateError as error:
            refusal = error
            continue
        rendered = renderer.render(shape)
        if rendered.text != text:
            raise ModelError(f"self-test {name!r}: the text is not what plain Jinja renders")
        if rendered.ids != list(encode(text)):
            raise ModelError(f"self-test {name!r}: the ids are not those of the model's own tokenizer")
        first = first or rendered.ids
        wanted = [rendered.ids[position] for position in rendered.positions]
        try:
            twin = renderer.render(hostile(shape, junk))
        except TemplateError:
            continue  # refused is safe
        except InjectionError as error:
            raise ModelError(f"self-test {name!r}: {error}") from error
        if [twin.ids[position] for position in twin.positions] != wanted:
            raise ModelError(f"self-test {name!r}: control tokens typed by a user change those of the prompt")
    if not first:
        raise ModelError(f"the chat template refuses every conversation, last: {refusal}")
    return first
