"""What is found out about a template before it serves, and the proof that it may.

Six benign conversations must render as plain Jinja renders them and tokenise as the model's own tokenizer does; their
hostile twins, with every control token typed into every field, must have the same control tokens.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from datetime import datetime

from deepinfra.core.conversation import Conversation, JsonValue, Message, TextPart, ToolCall, ToolDefinition
from deepinfra.errors import InjectionError, ModelError, TemplateError
from deepinfra.recipes.chat_template.environment import PlainTemplate
from deepinfra.recipes.chat_template.hygiene import settle
from deepinfra.recipes.chat_template.rendering import Rendered, Renderer
from deepinfra.recipes.chat_template.traits import SHAPES, Traits
from deepinfra.recipes.chat_template.variables import variables
from deepinfra.recipes.output.family import Shown

__all__ = ("FIELDS", "NOW", "check", "hostile", "plain_text")

NOW = "2025-01-15T12:00:00"
"""The date of the self-test."""
FIELDS = ("content", "reasoning", "tool results", "names", "arguments", "tools")
"""What a user, a model or a tool can fill."""
_KEYWORDS = ("type", "properties", "required", "description")
"""Keys of a schema without which a template would print something else."""


def hostile(conversation: Conversation, junk: str, fields: Collection[str] = FIELDS) -> Conversation:
    """The same conversation with `junk` typed into these fields; `arguments` and `tools` are keys and values."""

    def value(item: JsonValue) -> JsonValue:
        if isinstance(item, str):
            return item if item in ("object", "string") else item + junk
        if isinstance(item, Mapping):
            return {(k if k in _KEYWORDS else k + junk): value(v) for k, v in item.items()}
        if isinstance(item, Sequence):
            return [value(element) for element in item]
        return item

    def name(text: str) -> str:
        return text + junk if "names" in fields else text

    def call(item: ToolCall) -> ToolCall:
        arguments = item.arguments
        if "arguments" in fields:
            arguments = json.dumps(value(json.loads(arguments)), ensure_ascii=False)
        return replace(item, name=name(item.name), arguments=arguments)

    def message(item: Message) -> Message:
        content = item.content
        if ("tool results" if item.role == "tool" else "content") in fields:
            content = (*content, TextPart(junk)) if content else content
        reasoning = item.reasoning + junk if item.reasoning and "reasoning" in fields else item.reasoning
        return replace(item, content=content, reasoning=reasoning, tool_calls=tuple(map(call, item.tool_calls)))

    def tool(item: ToolDefinition) -> ToolDefinition:
        if "tools" in fields:
            parameters = value(item.parameters)
            item = replace(item, description=f"{item.description}{junk}", parameters=parameters)  # type: ignore[arg-type]
        return replace(item, name=name(item.name))

    return replace(
        conversation, messages=tuple(map(message, conversation.messages)), tools=tuple(map(tool, conversation.tools))
    )


def plain_text(
    plain: PlainTemplate, conversation: Conversation, traits: Traits, syntax: Shown, constants: Mapping[str, str]
) -> str:
    """What plain Jinja renders of the settled conversation.

    Raises:
        TemplateError: The template refuses it.
    """
    values = variables(settle(conversation, traits, syntax), traits)
    return plain.render({**values, **constants}, datetime.fromisoformat(NOW))


def check(
    renderer: Renderer, plain: Callable[[Conversation], str], encode: Callable[[str], Sequence[int]], junk: str
) -> list[int]:
    """Prove the renderer on the shapes that the template accepts.

    Args:
        renderer: What is to be proved.
        plain: What plain Jinja renders of a conversation.
        encode: The model's own tokenizer, control tokens parsed from text, none added.
        junk: Every control token, spelled.

    Returns:
        Ids of the simplest conversation.

    Raises:
        ModelError: It renders otherwise than plain Jinja, or tokenises otherwise than the model, or what a user types
            changes the control tokens: the model is not served.
    """
    first: list[int] = []
    refusal: TemplateError | None = None
    for name, shape in SHAPES.items():
        shape = replace(shape, now=NOW)
        try:
            text = plain(shape)
        except TemplateError as error:
            refusal = error
            continue
        rendered = renderer.render(shape)
        if rendered.text != text:
            raise ModelError(f"self-test {name!r}: the text is not what plain Jinja renders")
        if rendered.ids != list(encode(text)) and not renderer.spells(shape):
            raise ModelError(f"self-test {name!r}: the ids are not those of the model's own tokenizer")
        first = first or rendered.ids
        if _forged(renderer, rendered, hostile(shape, junk)):
            fields = [field for field in FIELDS if _forged(renderer, rendered, hostile(shape, junk, {field}))]
            where = ", ".join(fields) or "several fields together"
            raise ModelError(f"self-test {name!r}: control tokens typed by a user change those of the prompt: {where}")
    if not first:
        raise ModelError(f"the chat template refuses every conversation, last: {refusal}")
    return first


def _forged(renderer: Renderer, benign: Rendered, twin: Conversation) -> bool:
    try:
        return renderer.render(twin).control != benign.control
    except TemplateError:
        return False  # refused is safe
    except InjectionError:
        return True
