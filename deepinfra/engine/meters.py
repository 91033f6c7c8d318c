"""An engine's own counters, written by answers and read by `Engine.stats`."""

from __future__ import annotations

from collections import Counter

from deepinfra.core.request import CachedTokens
from deepinfra.engine.stats import Histogram

__all__ = ("Meters",)


class Meters:
    """Counts of one engine since it was constructed."""

    def __init__(self) -> None:
        self.requests: Counter[str] = Counter()
        self.cached_tokens: Counter[str] = Counter()
        self.prompt_tokens = 0
        self.generated_tokens = 0
        self.ttft = Histogram()
        self.itl = Histogram()
        self.queue_wait = Histogram()
        self.loop_lag = Histogram()

    def cached(self, tokens: CachedTokens) -> None:
        """Count prompt tokens that were not computed."""
        if tokens.device:
            self.cached_tokens["device"] += tokens.device
        self.cached_tokens.update(tokens.store)

    def ended(self, reason: str) -> None:
        """Count an answer's end."""
        self.requests[reason] += 1
