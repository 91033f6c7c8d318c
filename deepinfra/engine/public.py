"""Public prefixes: beginnings of prompts that an operator declares to be everybody's."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace

from deepinfra.core.conversation import Conversation, Message, TextPart
from deepinfra.errors import ConfigError, DeepinfraError
from deepinfra.interfaces.given import Offload
from deepinfra.interfaces.recipe import Recipe

__all__ = ("PublicPrefixes",)

_log = logging.getLogger("deepinfra.engine")

_VARIANTS = ("Is this so?", "0 of 7")
"""What may follow a prefix: texts that begin differently, so that no id which both have says anything of them."""

_PIECE = 256
"""Ids compared at once, by the interpreter: 10,000 of them take 0.15 ms."""

_DATES = 4
"""Renderings that are kept: templates print the date, so there is another one each day."""


class PublicPrefixes:
    """The ids with which prompts begin that all tenants share.

    A conversation is rendered with two different user turns behind it; what both have in common is its prefix.

    Args:
        declared: Conversations without their user's turns: a system message, tools, or both.
        recipe: Renders them; entered by whoever calls `ids`.
        offload: Threads.
    """

    def __init__(self, declared: Sequence[Conversation], recipe: Recipe, offload: Offload) -> None:
        self._declared, self._recipe, self._offload = tuple(declared), recipe, offload
        self._ids: OrderedDict[str | None, tuple[tuple[int, ...], ...]] = OrderedDict()

    async def ids(self, now: str | None) -> tuple[tuple[int, ...], ...]:
        """Every prefix as it is rendered at a date.

        Raises:
            ConfigError: The recipe cannot render one.
        """
        if not self._declared:
            return ()
        if now not in self._ids:
            self._ids[now] = await self._offload(self._rendered, now)
            if len(self._ids) > _DATES:
                self._ids.popitem(last=False)
        return self._ids[now]

    def _rendered(self, now: str | None) -> tuple[tuple[int, ...], ...]:
        found: list[tuple[int, ...]] = []
        for index, declared in enumerate(self._declared):
            try:
                one, other = (self._recipe.render(_asked(declared, text, now)).ids for text in _VARIANTS)
            except DeepinfraError as error:
                raise ConfigError(
                    f"public_prefixes.{index} cannot be rendered by this model's recipe: {error}"
                ) from error
            found.append(one[: common(one, other)])
            _log.info("public prefix %d has %d tokens", index, len(found[-1]))
        return tuple(found)

    async def shared(self, ids: Sequence[int], now: str | None) -> int:
        """How many leading tokens of a prompt lie in the prefix that shares most with it."""
        try:
            prefixes = await self.ids(now)
        except ConfigError:  # it was rendered when the engine began, and only costs what is not found
            _log.exception("the public prefixes cannot be rendered for %s", now)
            return 0
        return max((common(prefix, ids) for prefix in prefixes), default=0)


def _asked(declared: Conversation, text: str, now: str | None) -> Conversation:
    asked = Message(role="user", content=(TextPart(text),))
    return replace(declared, messages=(*declared.messages, asked), now=now)


def common(one: Sequence[int], other: Sequence[int]) -> int:
    """How many leading ids two sequences share."""
    most = min(len(one), len(other))
    for start in range(0, most, _PIECE):
        end = min(start + _PIECE, most)
        if one[start:end] != other[start:end]:
            return next(at for at in range(start, end) if one[at] != other[at])
    return most
