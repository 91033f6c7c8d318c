"""Load on an OpenAI-compatible server: so many requests, so many at a time, each streamed to its end."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import anyio

from deepinfra.bench.http import Endpoint
from deepinfra.bench.machine import CpuUse, CpuWatch
from deepinfra.errors import EngineError
from deepinfra.interfaces.given import Clock, SystemClock

__all__ = ("LoadReport", "LoadRun", "Reply", "Spread", "ask", "first_model", "made_prompt", "run_load", "spread")

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
        chat: Send chats of one message instead of plain prompts.
        new: Tokens to generate per request; the model's own end is ignored.
        model: Name to ask for; default: the first that the server lists.
        seed: Of the prompts.
    """

    requests: int = 32
    concurrency: int = 8
    prompt: int = 256
    new: int = 64
    chat: bool = False
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """A stream that came to its end.

    Attributes:
        began: When it was asked for, by the clock that was given.
        pieces: When each piece of text was there.
        ended: When it ended.
        prompt_tokens: Of the prompt, as the server counted them.
        cached_tokens: Of those, how many it had cached.
        completion_tokens: Of the answer.
        text: The answer.
    """

    began: float
    pieces: tuple[float, ...]
    ended: float
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    text: str = ""

    @property
    def ttft_s(self) -> float:
        """Seconds until the first piece."""
        return self.pieces[0] - self.began


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
    model = run.model or await first_model(endpoint)
    draw = random.Random(run.seed)
    waiting = [made_prompt(draw, index, run.prompt) for index in range(run.requests)][::-1]
    found: list[Reply] = []
    errors: list[str] = []

    async def client() -> None:
        while waiting:
            text = waiting.pop()
            body = {"messages": [{"role": "user", "content": text}]} if run.chat else {"prompt": text}
            path = "/chat/completions" if run.chat else "/completions"
            try:
                found.append(await ask(endpoint, path, {"model": model, **body}, run.new, clock))
            except (EngineError, OSError) as error:
                errors.append(str(error))
            progress(len(found) + len(errors))

    watch, began = CpuWatch(), clock.now()
    async with anyio.create_task_group() as tasks:
        for _ in range(run.concurrency):
            tasks.start_soon(client)
    wall_s = clock.now() - began
    completion_tokens = sum(reply.completion_tokens for reply in found)
    return LoadReport(
        kind="serve",
        model=model,
        run=run,
        succeeded=len(found),
        failed=len(errors),
        errors=tuple(dict.fromkeys(errors)),
        prompt_tokens=sum(reply.prompt_tokens for reply in found),
        cached_tokens=sum(reply.cached_tokens for reply in found),
        completion_tokens=completion_tokens,
        wall_s=wall_s,
        output_tokens_per_s=completion_tokens / wall_s,
        ttft_s=spread([reply.ttft_s for reply in found]),
        itl_s=spread([b - a for reply in found for a, b in pairwise(reply.pieces)]),
        request_s=spread([reply.ended - reply.began for reply in found]),
        cpu=watch.stop(wall_s),
    )


async def first_model(endpoint: Endpoint) -> str:
    """The first that the server lists.

    Raises:
        EngineError: It lists none.
    """
    async with endpoint.request("/models") as response:
        listed = await response.json()
    try:
        return str(listed["data"][0]["id"])  # type: ignore[index]
    except (KeyError, IndexError, TypeError):
        raise EngineError("the server lists no models: name one with --model") from None


def made_prompt(draw: random.Random, index: int, words: int) -> str:
    """Text of so many words, each about a token; no two begin alike."""
    return " ".join((f"{index}:", *(draw.choice(_WORDS) for _ in range(max(0, words - 2)))))


async def ask(endpoint: Endpoint, path: str, body: Mapping[str, object], new: int, clock: Clock) -> Reply:
    """Ask for a stream of `new` greedy tokens and read it to its end.

    Args:
        endpoint: The server.
        path: `/completions` or `/chat/completions`.
        body: Model and prompt or messages.
        new: Tokens; the model's own end is ignored.
        clock: Time.

    Raises:
        OSError: Nobody listens there.
        EngineError: The server refuses, or fails.
    """
    asked = {
        **body,
        "max_tokens": new,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    began = clock.now()
    at: list[float] = []
    text: list[str] = []
    usage: dict[str, object] = {}
    async with endpoint.request(path, asked) as response:
        while (data := await response.event()) and data != b"[DONE]":
            chunk = json.loads(data)
            if "error" in chunk:
                raise EngineError(str(chunk["error"]["message"]))
            usage = chunk.get("usage") or usage
            pieces = [choice.get("text") or choice.get("delta", {}).get("content") for choice in chunk["choices"]]
            if any(pieces):
                at.append(clock.now())
                text += filter(None, pieces)
    if not at or not usage:
        raise EngineError("an answer ended without text or usage")
    details = usage.get("prompt_tokens_details")
    return Reply(
        began=began,
        pieces=tuple(at),
        ended=clock.now(),
        prompt_tokens=int(str(usage["prompt_tokens"])),
        cached_tokens=int(details.get("cached_tokens") or 0) if isinstance(details, dict) else 0,
        completion_tokens=int(str(usage["completion_tokens"])),
        text="".join(text),
    )
