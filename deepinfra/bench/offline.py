"""Speed of an engine in this process: prefill, decode, and what happens between its steps."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import anyio

from deepinfra.bench.machine import CpuUse, CpuWatch
from deepinfra.bench.recorder import Recorder, Steady, steady
from deepinfra.core.events import Failed
from deepinfra.core.request import GenerateRequest
from deepinfra.core.sampling import SamplingParams
from deepinfra.engine import Engine
from deepinfra.errors import ConfigError, EngineError
from deepinfra.interfaces.given import Clock, SystemClock

__all__ = ("Figure", "Measured", "OfflineReport", "OfflineRun", "Prompt", "random_prompt", "run_offline")

Prompt = tuple[int, ...]

_GREEDY = SamplingParams(temperature=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class OfflineRun:
    """What to run.

    Attributes:
        batches: Numbers of sequences that decode together.
        prompt: Tokens per prompt.
        new: Tokens to generate per sequence.
        repeat: Rounds; each measures everything once.
        seed: Of the prompts, which are random token ids.
    """

    batches: tuple[int, ...] = (1, 8, 32)
    prompt: int = 512
    new: int = 64
    repeat: int = 5
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One thing that was measured; its fields are those of the JSON output.

    Attributes:
        name: `prefill` or `decode`, in tokens per second, or `overhead`, the share of wall time between the steps of
            the same decode (waiting for the executor is not overhead, everything else is).
        batch: Sequences at once.
        median: Median over the rounds.
        values: One per round, in order.
    """

    name: str
    batch: int
    median: float
    values: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class OfflineReport:
    """Everything a run found; its fields are those of the JSON output.

    Attributes:
        kind: `offline`.
        model: The model's name.
        weights: Fingerprint of its weights.
        kv_dtype: Element type of KV.
        run: What was run.
        figures: What was measured.
        cpu: What else the machine did meanwhile; with `noisy` the figures are not to be trusted.
    """

    kind: str
    model: str
    weights: str
    kv_dtype: str
    run: OfflineRun
    figures: tuple[Figure, ...]
    cpu: CpuUse


class Measured:
    """An engine to be measured.

    Args:
        engine: Entered; its only pool runs on `recorder`.
        recorder: Its executor.
        clock: Time.
    """

    def __init__(self, engine: Engine, recorder: Recorder, clock: Clock) -> None:
        self._engine, self._recorder, self._clock = engine, recorder, clock

    async def prefill(self, prompt: Prompt) -> float:
        """Seconds from a request's arrival to its first token, on a prompt never seen before."""
        began = self._clock.now()
        await self._generate(prompt, 1)
        return self._clock.now() - began

    async def decode(self, prompts: Sequence[Prompt], new: int) -> tuple[Steady, list[int]]:
        """Steps in which all prompts decoded together, and the first token of each.

        Prompts are computed before and come back from the prefix cache.

        Raises:
            ConfigError: The executor cannot hold them, or they did not decode together.
        """
        check_room(self._recorder, len(prompts), max(map(len, prompts)) + new)
        firsts = []
        for prompt in prompts:
            await self._generate(prompt, 1)
            firsts.append(self._recorder.records[-1].ids[-1])
        self._recorder.records.clear()
        async with anyio.create_task_group() as tasks:
            for prompt in prompts:
                tasks.start_soon(self._generate, prompt, new)
        found = steady(self._recorder.records, len(prompts))
        if found.steps < new // 2:
            raise ConfigError(f"of {new} steps only {found.steps} decoded {len(prompts)} sequences together")
        return found, firsts

    async def _generate(self, prompt: Prompt, new: int) -> None:
        request = GenerateRequest(input=prompt, sampling=_GREEDY, max_tokens=new, ignore_eos=True)
        async with self._engine.generate(request) as stream:
            async for event in stream:
                if isinstance(event, Failed):
                    raise EngineError(event.message)


def check_room(recorder: Recorder, batch: int, tokens: int) -> None:
    """Refuse what an executor cannot hold.

    Raises:
        ConfigError: So many sequences of so many tokens do not fit.
    """
    limits = recorder.limits
    need = batch * -(-tokens // recorder.layout.block_size)
    if batch > limits.max_seqs or need > limits.num_blocks:
        raise ConfigError(
            f"a batch of {batch} needs as many sequences and {need} blocks; the executor has "
            f"{limits.max_seqs} and {limits.num_blocks}: raise max_seqs and num_blocks, or measure less"
        )


def random_prompt(draw: random.Random, vocab_size: int, tokens: int) -> Prompt:
    """Random token ids."""
    return tuple(draw.randrange(vocab_size) for _ in range(tokens))


async def run_offline(
    engine: Engine,
    recorder: Recorder,
    run: OfflineRun,
    *,
    clock: Clock | None = None,
    progress: Callable[[str], None] = lambda what: None,
) -> OfflineReport:
    """Measure an entered engine; see `Measured` for what is timed.

    Args:
        engine: Entered; its only pool runs on `recorder`.
        recorder: Its executor.
        run: What to run.
        clock: Time.
        progress: Told what is measured next.

    Raises:
        ConfigError: The executor cannot hold the batch.
    """
    clock = clock or SystemClock()
    check_room(recorder, max(run.batches), run.prompt + run.new)
    draw = random.Random(run.seed)

    def prompt() -> Prompt:
        return random_prompt(draw, recorder.limits.vocab_size, run.prompt)

    measured, watch, began = Measured(engine, recorder, clock), CpuWatch(), clock.now()
    prompts = [prompt() for _ in range(max(run.batches))]
    found: dict[tuple[str, int], list[float]] = {}
    progress("warming up")
    await measured.prefill(prompt())  # whatever is allocated and compiled once
    for index in range(run.repeat):
        progress(f"round {index + 1} of {run.repeat}: prefill")
        found.setdefault(("prefill", 1), []).append(run.prompt / await measured.prefill(prompt()))
        for batch in run.batches:
            progress(f"round {index + 1} of {run.repeat}: decode at batch {batch}")
            steps, _ = await measured.decode(prompts[:batch], run.new)
            found.setdefault(("decode", batch), []).append(steps.tokens_per_s)
            found.setdefault(("overhead", batch), []).append(steps.overhead)
    identity = recorder.identity
    return OfflineReport(
        kind="offline",
        model=engine.name,
        weights=identity.weights,
        kv_dtype=identity.kv_dtype,
        run=run,
        figures=tuple(
            Figure(name=name, batch=batch, median=statistics.median(values), values=tuple(values))
            for (name, batch), values in found.items()
        ),
        cpu=watch.stop(clock.now() - began),
    )
