"""Conversation to text with trust, to control ranges, to ids."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from deepinfra.core.conversation import Conversation, Message, TextPart
from deepinfra.errors import RequestError, UnsupportedFieldError
from deepinfra.recipes.chat_template.environment import MarkedTemplate
from deepinfra.recipes.chat_template.hygiene import settle
from deepinfra.recipes.chat_template.provenance import trust_of, trusted
from deepinfra.recipes.chat_template.traits import Traits
from deepinfra.recipes.chat_template.variables import mark, strings, unused_characters, variables
from deepinfra.recipes.encoding.vocabulary import SafeEncoder
from deepinfra.recipes.output.family import Shown

__all__ = ("Rendered", "Renderer", "moment")


@dataclass(frozen=True, slots=True)
class Rendered:
    """Text and trust of a prompt, its control ranges, its ids and the positions of control tokens among them.

    `begun` is the text that the conversation gave the answer to begin with.
    """

    text: str
    trust: bytes
    ranges: list[tuple[int, int]]
    ids: list[int]
    positions: list[int]
    begun: str = ""

    @property
    def control(self) -> list[int]:
        """The control tokens."""
        return [self.ids[position] for position in self.positions]


def moment(conversation: Conversation, pinned: str | None) -> datetime | None:
    """What `strftime_now` says: the date the recipe is pinned to, else the conversation's `now`.

    Raises:
        RequestError: `now` is not an ISO 8601 time.
    """
    now = conversation.now if pinned is None else pinned
    if now is None:
        return None
    try:
        return datetime.fromisoformat(now)
    except ValueError:
        raise RequestError(f"{now!r} is not an ISO 8601 date or time", "now") from None


class Renderer:
    """Renders conversations with one template and one vocabulary; thread-safe.

    Args:
        syntax: How calls are written where the template does not.
        constants: `bos_token` and so on, as the template reads them.
        date: See `moment`.
    """

    def __init__(
        self,
        template: MarkedTemplate,
        encoder: SafeEncoder,
        traits: Traits,
        syntax: Shown,
        constants: Mapping[str, str],
        date: str | None,
    ) -> None:
        self._template, self._encoder, self._traits, self._syntax = template, encoder, traits, syntax
        self._date = date
        self._constants = {name: trusted(value) for name, value in constants.items()}

    def render(self, conversation: Conversation) -> Rendered:
        """See `Recipe.render`, whose errors these are; what `admit` refuses is not refused here."""
        conversation, reads_on = _without_prefix(conversation)
        values = variables(settle(conversation, self._traits, self._syntax), self._traits)
        spare = unused_characters(values, self._traits.literals)
        if reads_on:
            end = _next(spare)
            values["messages"][-1][reads_on] = self._ended(values["messages"][-1][reads_on], end)
            if reads_on != "content":
                values["messages"][-1] |= dict.fromkeys(("reasoning", "thinking"), values["messages"][-1][reads_on])
        text, trust = self._text(values, spare, moment(conversation, self._date))
        if reads_on:
            if text.count(end) != 1:
                raise UnsupportedFieldError(
                    f"messages[{len(conversation.messages) - 1}].prefix",
                    "cannot be used: this model's chat template does not write the message where it can be continued",
                )
            cut = text.index(end)
            text, trust = text[:cut], trust[:cut]
        ranges = self._encoder.ranges(text, trust)
        ids, positions = self._encoder.encode(text, ranges)
        last = conversation.messages[-1] if reads_on else None
        begun = "" if last is None else (last.text if reads_on == "content" else last.reasoning) or ""
        return Rendered(text, trust, ranges, ids, positions, begun)

    def spells(self, conversation: Conversation) -> bool:
        """Whether what the template is given spells a control token, be it in the recipe's own words."""
        values = variables(settle(conversation, self._traits, self._syntax), self._traits)
        return self._encoder.spells("\0".join(strings(values)))

    def _text(self, values: dict[str, Any], spare: Iterator[str], now: datetime | None) -> tuple[str, bytes]:
        encoder = self._encoder
        substitutes: dict[str, str] = {}
        if encoder.spells("\0".join(strings(values))):
            starts = {start for text in strings(values) for start in encoder.found(text)}
            substitutes = {start: _next(spare) for start in sorted(starts)}

        def change(text: str) -> str:
            return encoder.defang(text, substitutes)

        rendered = self._template.render(mark(values, change if substitutes else None) | self._constants, now)
        text = str.__str__(rendered)
        if substitutes:
            back = {substitute: start for start, substitute in substitutes.items()}
            text = re.sub(f"[{''.join(back)}]", lambda match: back[match[0]], text)
        return text, trust_of(rendered)

    def _ended(self, content: Any, end: str) -> Any:
        if isinstance(content, str):
            return content + end
        return [*content[:-1], {**content[-1], "text": content[-1]["text"] + end}]


def _without_prefix(conversation: Conversation) -> tuple[Conversation, str | None]:
    """The conversation, and which field of a last message that is to be continued is the open one."""
    last: Message | None = conversation.messages[-1] if conversation.messages else None
    if last is None or not last.prefix or last.role != "assistant":
        return conversation, None
    if last.tool_calls:
        raise UnsupportedFieldError(f"messages[{len(conversation.messages) - 1}].prefix", "cannot have tool calls")
    if last.reasoning is not None and not last.text:
        return conversation, "reasoning_content"
    if not last.content:
        last = replace(last, content=(TextPart(""),))
    return replace(conversation, messages=(*conversation.messages[:-1], last)), "content"


def _next(spare: Iterator[str]) -> str:
    try:
        return next(spare)
    except StopIteration:
        raise RequestError(
            "the conversation uses every private-use character, and spells control tokens", "messages"
        ) from None
