"""How long a record lives, and why one that is gone went."""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

from deepinfra.core.kv import Retention

__all__ = ("DAY_S", "Departed", "Lifetimes")

DAY_S = 86_400.0

MOST_S = 36_525 * DAY_S
"""A life that is longer, or infinite, is a hundred years."""


class Lifetimes(NamedTuple):
    """Seconds that records of each traffic class live.

    Source: 3 days for agents and 7 for chat are what DeepSeek keeps on SSD; a day for the rest is our choice.
    """

    default_s: float = DAY_S
    agent_s: float = 3 * DAY_S
    chat_s: float = 7 * DAY_S

    def of(self, retention: Retention) -> float:
        """Seconds to live; 0 for what must not be kept at all."""
        if retention.traffic == "none":
            return 0.0
        if retention.ttl_s is not None:
            return min(MOST_S, max(0.0, retention.ttl_s, retention.least_s))
        life_s = {"default": self.default_s, "agent": self.agent_s, "chat": self.chat_s}[retention.traffic]
        return min(MOST_S, max(life_s, retention.least_s))


class Departed:
    """Remembers, for a bounded number of keys, why they left, so that a miss can be explained.

    Keeps the first 8 bytes of a key: a wrong word about one key in 2**64 harms nobody.
    """

    def __init__(self, limit: int = 16_384) -> None:
        self._limit = limit
        self._why: OrderedDict[bytes, str] = OrderedDict()

    def add(self, key: bytes, why: str) -> None:
        """Note that `key` left because of `why` (a word of `Match.missed`)."""
        self._why.pop(key[:8], None)
        self._why[key[:8]] = why
        if len(self._why) > self._limit:
            self._why.popitem(last=False)

    def why(self, key: bytes) -> str:
        """Why a key that is not held is not held."""
        return self._why.get(key[:8], "absent")
