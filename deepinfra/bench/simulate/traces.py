"""What comes in: requests of public traces and of our own generators, by time, and prompts made of them."""

from __future__ import annotations

import csv
import lzma
import random
from collections.abc import Iterable, Sequence
from datetime import datetime
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple, TextIO

from deepinfra.core.kv import Traffic
from deepinfra.core.request import PUBLIC
from deepinfra.errors import ConfigError
from deepinfra.testing.traces import TRACE_BLOCK_TOKENS, TraceRequest, agent_trace, read_trace

__all__ = (
    "LEAST_VOCABULARY",
    "Arrival",
    "LengthClass",
    "agents",
    "bursts",
    "first",
    "generated",
    "giant_then_short",
    "prompt_ids",
    "read_workload",
    "stretched",
)

_DIGIT_BITS, _DIGITS = 14, 3

LEAST_VOCABULARY = 1 << _DIGIT_BITS
"""Tokens that a model needs for the prompts made here."""

_FILL = (0,) * TRACE_BLOCK_TOKENS


class Arrival(NamedTuple):
    """One request of a workload.

    Attributes:
        at_s: Seconds from the start.
        prompt: Tokens of its prompt.
        output: Tokens it wants; it gets as many unless it fails.
        blocks: Ids of its prompt's blocks of `TRACE_BLOCK_TOKENS`; an equal id is an equal prefix up to the end of that
            block. None: the prompt is like no other.
        tenant: Whose it is.
        priority: Its own.
        deadline_s: Seconds after which nobody wants it any more.
        traffic: How long its KV is worth keeping.
    """

    at_s: float
    prompt: int
    output: int
    blocks: tuple[int, ...] = ()
    tenant: str = PUBLIC
    priority: int = 0
    deadline_s: float | None = None
    traffic: Traffic = "default"


def prompt_ids(arrival: Arrival, serial: int) -> tuple[int, ...]:
    """Token ids of a prompt; two share a prefix exactly as far as their blocks' ids are equal.

    Args:
        arrival: Whose.
        serial: Its place in the workload, for a prompt that is like no other.
    """
    if not arrival.blocks:
        head = (*_named(serial), 1)
        return (head + (0,) * (arrival.prompt - len(head)))[: arrival.prompt]
    ids: list[int] = []
    for block in arrival.blocks:
        ids += _named(block)
        ids += _FILL[_DIGITS:]
    return tuple(ids[: arrival.prompt])


def _named(number: int) -> tuple[int, ...]:
    """A number in tokens."""
    return tuple(number >> _DIGIT_BITS * i & LEAST_VOCABULARY - 1 for i in range(_DIGITS))


# -- files ----------------------------------------------------------------------------------------


def read_workload(path: Path) -> list[Arrival]:
    """Requests of a file, by time: Mooncake's `.jsonl` or Azure's `.csv`, as they are or with `.xz` behind.

    Source: the formats are those of github.com/kvcache-ai/Mooncake (FAST'25) and github.com/Azure/AzurePublicDataset
    (2023 traces, Splitwise, ISCA'24).

    Raises:
        ConfigError: The file is of neither kind, or something in it is not what it should be.
    """
    kind = Path(path.stem).suffix if path.suffix == ".xz" else path.suffix
    try:
        if kind == ".jsonl":
            return _arrivals(read_trace(path))
        if kind == ".csv":
            with lzma.open(path, "rt") if path.suffix == ".xz" else path.open() as file:
                return _azure(file)
    except (KeyError, ValueError, TypeError, EOFError, lzma.LZMAError) as error:
        raise ConfigError(f"{path}: {error!r} is not what such a trace holds") from error
    raise ConfigError(f"{path}: a trace is a file .jsonl or .csv, or one of these with .xz")


def _arrivals(trace: Iterable[TraceRequest]) -> list[Arrival]:
    """Requests of a trace; the first one comes at 0."""
    requests = list(trace)
    start = requests[0].at_ms if requests else 0
    return [
        Arrival((request.at_ms - start) / 1000, request.tokens, request.output, request.blocks, traffic=request.traffic)
        for request in requests
    ]


def _azure(file: TextIO) -> list[Arrival]:
    rows = [
        # Seven digits behind the point are one more than Python reads.
        (datetime.fromisoformat(row["TIMESTAMP"][:26]), int(row["ContextTokens"]), int(row["GeneratedTokens"]))
        for row in csv.DictReader(file)
    ]
    rows.sort(key=lambda row: row[0])
    start = rows[0][0] if rows else datetime.min
    return [Arrival((at - start).total_seconds(), prompt, max(1, output)) for at, prompt, output in rows]


# -- what is done with them -----------------------------------------------------------------------


def stretched(workload: Sequence[Arrival], by: float) -> list[Arrival]:
    """The same requests `by` times as far apart: 0.5 doubles the load, 0 brings all at once."""
    return [arrival._replace(at_s=by * arrival.at_s) for arrival in workload]


def first(
    workload: Sequence[Arrival], requests: int | None = None, seconds: float | None = None, context: int | None = None
) -> list[Arrival]:
    """The first so many requests, or those of the first so many seconds, that fit into a context of so many tokens."""
    kept = [
        arrival
        for arrival in workload
        if (seconds is None or arrival.at_s < seconds)
        and (context is None or arrival.prompt + arrival.output <= context)
    ]
    return kept[:requests]


# -- generators -----------------------------------------------------------------------------------


class LengthClass(NamedTuple):
    """Requests of one kind: their share, medians of prompt and output, and how far these scatter (log-normal)."""

    share: float
    prompt: float
    output: float
    scatter: float = 0.5
    traffic: Traffic = "default"
    tenant: str = PUBLIC
    priority: int = 0


CHATS_AND_DOCUMENTS = (LengthClass(0.8, 400, 200), LengthClass(0.15, 4000, 300), LengthClass(0.05, 24_000, 200))


def generated(
    requests: int,
    per_s: float,
    classes: Sequence[LengthClass] = CHATS_AND_DOCUMENTS,
    *,
    burstiness: float = 1.0,
    seed: int = 0,
    longest: int = 131_072,
) -> list[Arrival]:
    """Requests with independent gaps, each of a class drawn at random.

    Args:
        requests: How many.
        per_s: How many a second on average.
        classes: What they ask for.
        burstiness: Coefficient of variation of the gaps (gamma): 1 is Poisson, 0 a metronome.
        seed: Of everything drawn.
        longest: Most tokens of prompt and output together.
    """
    draw = random.Random(seed)
    shape = 1.0 / burstiness**2 if burstiness else 0.0
    gaps = (draw.gammavariate(shape, 1.0 / (shape * per_s)) if burstiness else 1.0 / per_s for _ in range(requests))
    return [_drawn(draw, at_s, classes, longest) for at_s in accumulate(gaps)]


def bursts(
    count: int,
    size: int,
    every_s: float,
    classes: Sequence[LengthClass] = CHATS_AND_DOCUMENTS,
    *,
    seed: int = 0,
    longest: int = 131_072,
) -> list[Arrival]:
    """`count` bursts of `size` requests at once, `every_s` apart."""
    draw = random.Random(seed)
    return [_drawn(draw, every_s * i, classes, longest) for i in range(count) for _ in range(size)]


def _drawn(draw: random.Random, at_s: float, classes: Sequence[LengthClass], longest: int) -> Arrival:
    kind = draw.choices(classes, [each.share for each in classes])[0]
    output = min(longest // 2, max(1, int(kind.output * draw.lognormvariate(0.0, kind.scatter))))
    prompt = min(longest - output, max(1, int(kind.prompt * draw.lognormvariate(0.0, kind.scatter))))
    return Arrival(at_s, prompt, output, tenant=kind.tenant, priority=kind.priority, traffic=kind.traffic)


def giant_then_short(
    giant: int = 600_000,
    short: int = 101,
    *,
    after_s: float = 1.0,
    shorts: int = 1,
    every_s: float = 1.0,
    output: int = 16,
) -> list[Arrival]:
    """A prompt of `giant` tokens, and `shorts` of `short` tokens that come while it is computed."""
    later = [Arrival(after_s + every_s * i, short, output) for i in range(shorts)]
    return [Arrival(0.0, giant, output), *later]


def agents(seed: int = 0, *, sessions: int = 400, days: float = 8.0, share: float = 0.7) -> list[Arrival]:
    """Days of agents and chats whose contexts grow turn by turn; see `testing.traces.agent_trace`."""
    return _arrivals(agent_trace(seed, sessions=sessions, days=days, agents=share))
