"""Load on an OpenAI-compatible server: so many requests, so many at a time, each streamed to its end."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

import anyio

from deepinfra.bench.http import Endpoint
from deepinfra.bench.machine import CpuUse, CpuWatch
from deepinfra.errors import EngineError
from deepinfra.interfaces.given import Clock, SystemClock

__all__ = ("LoadReport", "LoadRun", "Spread", "run_load")

# Short words that are one token each in nearly every vocabulary.
_WORDS: Final = (
    "time",
    "year",
    "people",
    "way",
    "day",
    "man",
    "thing",
    "woman",
    "life",
    "child",
    "world",
    "school",
    "state",
    "family",
    "student",
    "group",
    "country",
    "problem",
    "hand",
    "part",
    "place",
    "case",
    "week",
    "company",
    "system",
    "program",
    "question",
    "work",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadRun:
    """What to send.

    Attributes:
        requests: How many requests in all.
        concurrency: How many at a time; the next begins when one ends.
        prompt: Words per prompt, each about a token; no two prompts begin alike.
        new: Tokens to generate per request; the model's own end is ignored.
        model: Name to ask for; default: the first that the server lists.
        seed: Of the prompts.
    """

    requests: int = 32
    concurrency: int = 8
    prompt: int = 256
    new: int = 64
    model: str | None = None
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Median, 95th percentile and worst of some seconds; its fields are those of the JSON output."""

    p50: float
    p95: float
    worst: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport:
    """Everything a run found; its fields are those of the JSON output.

    Attributes:
        kind: `serve`.
        model: The model's name on the server.
        run: What was sent.
        succeeded: Requests answered to the end.
        failed: Requests that were not.
        errors: What failed ones said, each sentence once.
        prompt_tokens: Of succeeded requests, as the server counted them.
        cached_tokens: Of those, how many the server had cached.
        completion_tokens: Generated, as the server counted them.
        wall_s: Seconds from the first request to the end of the last.
        output_tokens_per_s: `completion_tokens / wall_s`.
        ttft_s: Seconds from sending a request to the first text of its answer.
        itl_s: Seconds between pieces of one answer; a piece is one token unless the server was ahead of the reader.
        request_s: Seconds from sending a request to the end of its answer.
        cpu: Processor use meanwhile. The server is another program here: `others_cores` includes it, and `noisy` is
            only meaningful if the server runs on another machine.
    """

    kind: str
    model: str
    run: LoadRun
    succeeded: int
    failed: int
    errors: tuple[str, ...]
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    wall_s: float
    output_tokens_per_s: float
    ttft_s: Spread | None
    itl_s: Spread | None
    request_s: Spread | None
    cpu: CpuUse


@dataclass(slots=True)
class _Found:
    """What all requests found."""

    ttft: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    whole: list[float] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    prompt: int = 0
    cached: int = 0
    completion: int = 0


def spread(values: Sequence[float]) -> Spread | None:
    """Nearest-rank percentiles; `None` of nothing."""
    if not values:
        return None
    ordered = sorted(values)
    return Spread(
        p50=ordered[(len(ordered) - 1) // 2], p95=ordered[-(-len(ordered) * 95 // 100) - 1], worst=ordered[-1]
    )


async def run_load(
    endpoint: Endpoint,
    run: LoadRun,
    *,
    clock: Clock | None = None,
    progress: Callable[[int], None] = lambda done: None,
) -> LoadReport:
    """Send the load and wait for all answers.

    Args:
        endpoint: The server.
        run: What to send.
        clock: Time.
        progress: Told how many requests are done.

    Raises:
        OSError: Nobody listens there.
        EngineError: The server does not list its models.
    """
    clock = clock or SystemClock()
    model = run.model or await _first_model(endpoint)
    draw = random.Random(run.seed)
    prompts = [_prompt(draw, index, run.prompt) for index in range(run.requests)]
    found, waiting = _Found(), list(reversed(prompts))

    async def client() -> None:
        while waiting:
            prompt = waiting.pop()
            try:
                await _one(endpoint, model, prompt, run.new, clock, found)
            except (EngineError, OSError) as error:
                found.errors.append(str(error))
            progress(len(found.whole) + len(found.errors))

    watch, began = CpuWatch(), clock.now()
    async with anyio.create_task_group() as tasks:
        for _ in range(run.concurrency):
            tasks.start_soon(client)
    wall_s = clock.now() - began
    return LoadReport(
        kind="serve",
        model=model,
        run=run,
        succeeded=len(found.whole),
        failed=len(found.errors),
        errors=tuple(dict.fromkeys(found.errors)),
        prompt_tokens=found.prompt,
        cached_tokens=found.cached,
        completion_tokens=found.completion,
        wall_s=wall_s,
        output_tokens_per_s=found.completion / wall_s,
        ttft_s=spread(found.ttft),
        itl_s=spread(found.gaps),
        request_s=spread(found.whole),
        cpu=watch.stop(wall_s),
    )


async def _first_model(endpoint: Endpoint) -> str:
    async with endpoint.request("/models") as response:
        listed = await response.json()
    try:
        return str(listed["data"][0]["id"])  # type: ignore[index]
    except (KeyError, IndexError, TypeError):
        raise EngineError("the server lists no models: name one with --model") from None


def _prompt(draw: random.Random, index: int, words: int) -> str:
    return " ".join((f"{index}:", *(draw.choice(_WORDS) for _ in range(max(0, words - 2)))))


async def _one(endpoint: Endpoint, model: str, prompt: str, new: int, clock: Clock, found: _Found) -> None:
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": new,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    began = clock.now()
    last: float | None = None
    usage: dict[str, object] = {}
    gaps: list[float] = []
    first = 0.0
    async with endpoint.request("/completions", body) as response:
        while (data := await response.event()) and data != b"[DONE]":
            chunk = json.loads(data)
            if "error" in chunk:
                raise EngineError(str(chunk["error"]["message"]))
            usage = chunk.get("usage") or usage
            if any(choice.get("text") for choice in chunk["choices"]):
                now = clock.now()
                if last is None:
                    first = now - began
                else:
                    gaps.append(now - last)
                last = now
    if last is None or not usage:
        raise EngineError("an answer ended without text or usage")
    found.ttft.append(first)
    found.gaps += gaps
    found.whole.append(clock.now() - began)
    found.prompt += int(str(usage["prompt_tokens"]))
    found.completion += int(str(usage["completion_tokens"]))
    details = usage.get("prompt_tokens_details")
    if isinstance(details, dict):
        found.cached += int(details.get("cached_tokens") or 0)
