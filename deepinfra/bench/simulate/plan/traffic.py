"""What users send: how much, how long, and how much of it is cached."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from deepinfra.bench.simulate.plan.given import SHARE, ZERO
from deepinfra.errors import ConfigError

__all__ = ("Traffic", "summarised")


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Requests of one day.

    Attributes:
        source: Where the shape comes from.
        tokens_day: Prompt tokens, cached ones among them, and output tokens.
        prompt: Mean tokens of a prompt.
        output: Mean tokens of an answer.
        hit_rate: Share of prompt tokens that are cached.
        position: Mean position of a prompt token in its prompt: half the mean of all prompts if they are equally long.
        context: Mean context of a generated token.
        sources: Of figures that have one of their own.
    """

    source: str
    tokens_day: float
    prompt: float
    output: float
    hit_rate: float = field(metadata=SHARE | ZERO)
    position: float
    context: float
    sources: Mapping[str, str] = field(default_factory=dict, repr=False)

    @property
    def requests_day(self) -> float:
        """Requests of a day."""
        return self.tokens_day / (self.prompt + self.output)

    @property
    def uncached(self) -> float:
        """Mean prompt tokens to compute per request."""
        return self.prompt * (1.0 - self.hit_rate)

    @property
    def uncached_position(self) -> float:
        """Mean position of those: what is cached comes first."""
        return self.position * (1.0 + self.hit_rate)


def summarised(requests: Iterable[tuple[int, int]], *, source: str, tokens_day: float, hit_rate: float) -> Traffic:
    """The shape of requests of which prompt and output tokens are known.

    Raises:
        ConfigError: There are none, or all are empty.
    """
    count = prompts = outputs = squares = contexts = 0
    for prompt, output in requests:
        count += 1
        prompts += prompt
        outputs += output
        squares += prompt * prompt
        contexts += output * (2 * prompt + output)
    if not prompts or not outputs:
        raise ConfigError(f"trace: {source} has no prompt or no output tokens")
    return Traffic(
        source=source,
        tokens_day=tokens_day,
        prompt=prompts / count,
        output=outputs / count,
        hit_rate=hit_rate,
        position=squares / 2 / prompts,
        context=contexts / 2 / outputs,
    )
