"""What comes in: requests of public traces and of our own generators, by time, and prompts made of them."""

from __future__ import annotations

import csv
import json
import lzma
import random
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from functools import partial
from itertools import accumulate
from math import isfinite
from pathlib import Path
from typing import NamedTuple

from deepinfra.core.kv import Traffic
from deepinfra.core.request import PUBLIC
from deepinfra.errors import ConfigError
from deepinfra.testing.traces import TRACE_BLOCK_TOKENS, TraceRequest, agent_trace

__all__ = (
    "CHATS_AND_DOCUMENTS",
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
    """Requests of a file, by time, the first at 0: JSON lines as Mooncake's, or CSV as Azure's, also compressed by xz.

    Source: the formats are those of github.com/kvcache-ai/Mooncake (FAST'25) and github.com/Azure/AzurePublicDataset
    (2023 traces, Splitwise, ISCA'24).

    Raises:
        ConfigError: The file is neither, or a line is not what it should be.
        OSError: The file cannot be read.
    """
    data = path.read_bytes()
    try:
        lines = (lzma.decompress(data) if data.startswith(_XZ) else data).decode().splitlines()
    except (UnicodeDecodeError, lzma.LZMAError) as error:
        raise ConfigError(f"{path}: neither JSON lines nor CSV, nor one of these in xz: {error}") from error
    if not lines:
        raise ConfigError(f"{path}: the file is empty")
    read = _mooncake
    if not lines[0].startswith("{"):
        fields = next(csv.reader(lines[:1]))
        if missing := [name for name in _AZURE if name not in fields]:
            raise ConfigError(f"{path}, line 1: neither a JSON object nor a head with {', '.join(missing)}")
        read = partial(_azure, fields)
        lines[0] = ""
    found: list[Arrival] = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                found.append(_checked(read(line)))
            except KeyError as error:
                raise ConfigError(f"{path}, line {number}: no field {error}") from error
            except (ValueError, TypeError, AttributeError) as error:
                raise ConfigError(f"{path}, line {number}: {error}") from error
    found.sort(key=lambda arrival: arrival.at_s)
    start = found[0].at_s if found else 0.0
    return [arrival._replace(at_s=round(arrival.at_s - start, 6)) for arrival in found]


_XZ = b"\xfd7zXZ\x00"
_AZURE = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


def _mooncake(line: str) -> Arrival:
    row = json.loads(line)
    at_ms, prompt, output = float(row["timestamp"]), int(row["input_length"]), int(row["output_length"])
    blocks = tuple(int(block) for block in row["hash_ids"])
    if len(blocks) * TRACE_BLOCK_TOKENS < prompt:
        raise ValueError(f"hash_ids: {len(blocks)} blocks of {TRACE_BLOCK_TOKENS} do not hold {prompt} tokens")
    return Arrival(at_ms / 1000, prompt, output, blocks)


def _azure(fields: Sequence[str], line: str) -> Arrival:
    row = dict(zip(fields, next(csv.reader([line])), strict=True))
    # Seven digits behind the point are one more than Python reads.
    at = datetime.fromisoformat(row["TIMESTAMP"][:26]).replace(tzinfo=UTC).timestamp()
    return Arrival(at, int(row["ContextTokens"]), int(row["GeneratedTokens"]))


def _checked(arrival: Arrival) -> Arrival:
    if not isfinite(arrival.at_s) or arrival.prompt < 1 or arrival.output < 0:
        raise ValueError(
            f"a request at {arrival.at_s} s of {arrival.prompt} tokens for {arrival.output} makes no sense"
        )
    return arrival._replace(output=max(1, arrival.output))


def _arrivals(trace: Iterable[TraceRequest]) -> list[Arrival]:
    """Requests of a trace; the first one comes at 0."""
    requests = list(trace)
    start = requests[0].at_ms if requests else 0
    return [
        Arrival((request.at_ms - start) / 1000, request.tokens, request.output, request.blocks, traffic=request.traffic)
        for request in requests
    ]


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
