"""Small questions to small engines: what tests of engines, and of parts inside engines, write most often."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from deepinfra.core.events import Event, Finished, TextDelta
from deepinfra.core.request import GenerateRequest
from deepinfra.core.sampling import SamplingParams
from deepinfra.engine import Engine, Pool
from deepinfra.executors.toy import ToyExecutor
from deepinfra.interfaces.kvstore import KVStore
from deepinfra.schedulers.fcfs import Fcfs

__all__ = ("ask", "end_of", "events_of", "tokens_of", "toy_pool")


def toy_pool(store: KVStore | None = None, *, max_queue: int = 4096, name: str = "pool", **options: Any) -> Pool:
    """A pool of `Fcfs` and a `ToyExecutor` with 64 blocks of 2 tokens; `options` are the executor's."""
    settings = {"num_blocks": 64, "block_size": 2, "max_step_tokens": 32, "max_seqs": 8, **options}
    return Pool(Fcfs(max_queue=max_queue), ToyExecutor(**settings), store=store, name=name)


def ask(prompt: Sequence[int], max_tokens: int = 8, **fields: Any) -> GenerateRequest:
    """A greedy request for exactly `max_tokens` tokens, with their ids in the events; `fields` are the request's."""
    fields.setdefault("sampling", SamplingParams(temperature=0.0, logprobs=0))
    return GenerateRequest(input=tuple(prompt), max_tokens=max_tokens, ignore_eos=True, **fields)


async def events_of(engine: Engine, request: GenerateRequest) -> list[Event]:
    """All events of a request's answer."""
    async with engine.generate(request) as stream:
        return [event async for event in stream]


def tokens_of(events: Sequence[Event], choice: int = 0) -> list[int]:
    """Ids of one choice's tokens."""
    return [
        token.token
        for event in events
        if isinstance(event, TextDelta) and event.choice == choice
        for token in event.tokens
    ]


def end_of(events: Sequence[Event]) -> Finished:
    """The last event, which must be a good end."""
    last = events[-1]
    assert isinstance(last, Finished), last
    return last
