"""Speed of an engine in this process, alone or beside a peer on the same weights in the same run."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import anyio

from deepinfra.bench.machine import CpuUse, CpuWatch
from deepinfra.bench.recorder import Recorder, steady
from deepinfra.core.events import Failed
from deepinfra.core.request import GenerateRequest
from deepinfra.core.sampling import SamplingParams
from deepinfra.engine import Engine
from deepinfra.errors import ConfigError, EngineError
from deepinfra.interfaces.given import Clock, SystemClock

__all__ = ("Figure", "OfflineReport", "OfflineRun", "Peer", "Side", "run_offline")

Prompt = tuple[int, ...]

_GREEDY = SamplingParams(temperature=0.0)


class Peer(Protocol):
    """Another implementation, measured on the same prompts. Both calls block."""

    name: str

    def prefill(self, prompt: Prompt) -> float:
        """Seconds from a prompt to its first token."""

    def decode(self, prompts: Sequence[Prompt], new: int) -> float:
        """Tokens per second over `new` greedy tokens for each prompt, prompts not counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OfflineRun:
    """What to run.

    Attributes:
        batches: Numbers of sequences that decode together.
        prompt: Tokens per prompt.
        new: Tokens to generate per sequence.
        repeat: Rounds; each measures everything once, ours first in even rounds and the peer first in odd ones.
        seed: Of the prompts, which are random token ids.
    """

    batches: tuple[int, ...] = (1, 8, 32)
    prompt: int = 512
    new: int = 64
    repeat: int = 5
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One side's values of a figure, one per round, and their median."""

    median: float
    values: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One thing that was measured; its fields are those of the JSON output.

    Attributes:
        name: `prefill` or `decode`, in tokens per second, or `overhead`, the share of wall time between the steps of
            the same decode (waiting for the executor is not overhead, everything else is).
        batch: Sequences at once.
        ours: deepinfra.
        peer: The peer; absent without one.
        ratio: Median of ours over median of the peer's; above 1 is faster.
    """

    name: str
    batch: int
    ours: Side
    peer: Side | None = None
    ratio: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class OfflineReport:
    """Everything a run found; its fields are those of the JSON output.

    Attributes:
        kind: `offline`.
        model: The model's name.
        weights: Fingerprint of its weights.
        kv_dtype: Element type of KV, and of computation.
        peer: Name of the peer.
        run: What was run.
        figures: What was measured.
        cpu: What else the machine did meanwhile; with `noisy` the figures are not to be trusted.
    """

    kind: str
    model: str
    weights: str
    kv_dtype: str
    peer: str | None
    run: OfflineRun
    figures: tuple[Figure, ...]
    cpu: CpuUse


async def run_offline(
    engine: Engine,
    recorder: Recorder,
    run: OfflineRun,
    *,
    peer: Peer | None = None,
    clock: Clock | None = None,
    progress: Callable[[str], None] = lambda what: None,
) -> OfflineReport:
    """Measure an entered engine.

    Prefill is timed from a request's arrival to its first token, on a prompt never seen before. For decoding, prompts
    are computed before the clock starts and come back from the prefix cache; steps in which all sequences decode are
    counted.

    Args:
        engine: Entered; its only pool runs on `recorder`.
        recorder: Its executor.
        run: What to run.
        peer: Whom to compare with.
        clock: Time.
        progress: Told what is measured next.

    Raises:
        ConfigError: The executor cannot hold the batch.
    """
    clock = clock or SystemClock()
    limits = recorder.limits
    need = max(run.batches) * -(-(run.prompt + run.new) // recorder.layout.block_size)
    if max(run.batches) > limits.max_seqs or need > limits.num_blocks:
        raise ConfigError(
            f"a batch of {max(run.batches)} needs as many sequences and {need} blocks; the executor has "
            f"{limits.max_seqs} and {limits.num_blocks}: raise max_seqs and num_blocks, or measure less"
        )
    watch, began = CpuWatch(), clock.now()
    bench = _Bench(engine, recorder, run, clock, progress)
    await bench.warm_up(peer)
    for index in range(run.repeat):
        order = ["ours", "peer"] if index % 2 == 0 else ["peer", "ours"]
        for side in order:
            if side == "ours":
                await bench.ours(index)
            elif peer is not None:
                bench.theirs(peer, index)
    identity = recorder.identity
    return OfflineReport(
        kind="offline",
        model=engine.name,
        weights=identity.weights,
        kv_dtype=identity.kv_dtype,
        peer=peer.name if peer else None,
        run=run,
        figures=bench.figures(),
        cpu=watch.stop(clock.now() - began),
    )


class _Bench:
    """Values of all rounds, by (name, batch), for both sides."""

    def __init__(
        self, engine: Engine, recorder: Recorder, run: OfflineRun, clock: Clock, progress: Callable[[str], None]
    ) -> None:
        self._engine, self._recorder, self._run, self._clock, self._progress = engine, recorder, run, clock, progress
        self._draw = random.Random(run.seed)
        self._fresh = [self._prompt() for _ in range(run.repeat)]
        self._prompts = [self._prompt() for _ in range(max(run.batches))]
        self._ours: dict[tuple[str, int], list[float]] = {}
        self._theirs: dict[tuple[str, int], list[float]] = {}

    def figures(self) -> tuple[Figure, ...]:
        return tuple(self._figure(*key) for key in self._ours)

    async def warm_up(self, peer: Peer | None) -> None:
        """Let both sides allocate and compile what they do once."""
        self._progress("warming up")
        prompt = self._prompt()
        await self._generate(prompt, 1)
        if peer is not None:
            peer.prefill(prompt)

    async def ours(self, index: int) -> None:
        self._tell(index, "deepinfra, prefill")
        await self._generate(self._prompt(), 1)  # the other side had the caches
        began = self._clock.now()
        await self._generate(self._fresh[index], 1)
        self._add(self._ours, "prefill", 1, self._run.prompt / (self._clock.now() - began))
        for batch in self._run.batches:
            self._tell(index, f"deepinfra, decode at batch {batch}")
            prompts = self._prompts[:batch]
            for prompt in prompts:
                await self._generate(prompt, 1)
            self._recorder.records.clear()
            async with anyio.create_task_group() as tasks:
                for prompt in prompts:
                    tasks.start_soon(self._generate, prompt, self._run.new)
            found = steady(self._recorder.records, batch)
            if found.steps < self._run.new // 2:
                raise ConfigError(f"of {self._run.new} steps only {found.steps} decoded {batch} sequences together")
            self._add(self._ours, "decode", batch, found.tokens_per_s)
            self._add(self._ours, "overhead", batch, found.overhead)

    def theirs(self, peer: Peer, index: int) -> None:
        self._tell(index, f"{peer.name}, prefill")
        peer.prefill(self._prompt())
        self._add(self._theirs, "prefill", 1, self._run.prompt / peer.prefill(self._fresh[index]))
        for batch in self._run.batches:
            self._tell(index, f"{peer.name}, decode at batch {batch}")
            self._add(self._theirs, "decode", batch, peer.decode(self._prompts[:batch], self._run.new))

    async def _generate(self, prompt: Prompt, new: int) -> None:
        request = GenerateRequest(input=prompt, sampling=_GREEDY, max_tokens=new, ignore_eos=True)
        async with self._engine.generate(request) as stream:
            async for event in stream:
                if isinstance(event, Failed):
                    raise EngineError(event.message)

    def _prompt(self) -> Prompt:
        return tuple(self._draw.randrange(self._recorder.limits.vocab_size) for _ in range(self._run.prompt))

    def _tell(self, index: int, what: str) -> None:
        self._progress(f"round {index + 1} of {self._run.repeat}: {what}")

    def _add(self, side: dict[tuple[str, int], list[float]], name: str, batch: int, value: float) -> None:
        side.setdefault((name, batch), []).append(value)

    def _figure(self, name: str, batch: int) -> Figure:
        ours, theirs = self._ours[name, batch], self._theirs.get((name, batch))
        side = Side(median=statistics.median(ours), values=tuple(ours))
        if theirs is None:
            return Figure(name=name, batch=batch, ours=side)
        other = Side(median=statistics.median(theirs), values=tuple(theirs))
        return Figure(name=name, batch=batch, ours=side, peer=other, ratio=side.median / other.median)
