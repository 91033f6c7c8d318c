"""Where the time of a step goes: each part's seconds beside the least that this machine could take for it."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from deepinfra.bench.machine import CpuUse, CpuWatch
from deepinfra.bench.probe import Reached, probe
from deepinfra.core.step import StepResult
from deepinfra.errors import ConfigError
from deepinfra.executors.torch import TorchExecutor
from deepinfra.executors.torch.choice import matrix_nbytes
from deepinfra.executors.torch.config import decoder_config
from deepinfra.interfaces.given import Clock, SystemClock
from deepinfra.models import Model
from deepinfra.testing.host import Host, Line

__all__ = ("PartTime", "RooflineReport", "RooflineRun", "Work", "demands", "run_roofline")

REST = "sampling and host"
"""What a step takes beside its parts: drawing tokens, and Python around the call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RooflineRun:
    """What to run.

    Attributes:
        prefills: Lengths of prompts, each computed in one step.
        batches: Numbers of sequences that decode together.
        context: Tokens that each of them has behind it.
        steps: Of each kind; medians are reported.
        seed: Of the prompts, which are random token ids.
    """

    prefills: tuple[int, ...] = (512,)
    batches: tuple[int, ...] = (1, 8, 32)
    context: int = 256
    steps: int = 16
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PartTime:
    """A part of a step, over all layers.

    Attributes:
        name: Such as `attention`.
        seconds: Median.
        nbytes: Weights and KV that have to come from memory; what lies between parts stays in caches.
        operations: Multiplications and additions.
        bound: `memory` or `compute`, whichever takes longer.
        limit_s: Seconds of that, at what this machine reaches.
        share: `limit_s` over `seconds`: 1 is as fast as can be.
    """

    name: str
    seconds: float
    nbytes: float
    operations: float
    bound: str
    limit_s: float
    share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """A kind of step.

    Attributes:
        name: Such as `decode 8`.
        seconds: Of a step, median.
        limit_s: Sum of its parts'.
        share: `limit_s` over `seconds`.
        parts: In the order of a layer; torch's operations are one part.
    """

    name: str
    seconds: float
    limit_s: float
    share: float
    parts: tuple[PartTime, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RooflineReport:
    """Everything a run found; its fields are those of the JSON output.

    Attributes:
        kind: `roofline`.
        model: The model's name.
        speed: What decides how long steps take.
        threads: That compute.
        run: What was run.
        reached: By this machine, in this run.
        works: What was measured.
        cpu: What else the machine did meanwhile; with `noisy` the figures are not to be trusted.
    """

    kind: str
    model: str
    speed: str
    threads: int
    run: RooflineRun
    reached: Reached
    works: tuple[Work, ...]
    cpu: CpuUse


async def run_roofline(
    model: Model,
    options: Mapping[str, object],
    run: RooflineRun,
    *,
    threads: int,
    clock: Clock | None = None,
    progress: Callable[[str], None] = lambda what: None,
) -> RooflineReport:
    """Measure the machine, then steps of the torch executor.

    Args:
        model: Opened.
        options: Of the executor.
        run: What to run.
        threads: That compute.
        clock: Time.
        progress: Told what is measured next.

    Raises:
        ConfigError: The executor has too little room, or refuses its options.
    """
    clock = clock or SystemClock()
    watch, began = CpuWatch(), clock.now()
    progress("what this machine reaches")
    reached = probe(threads, clock)
    seqs, longest = max((1, *run.batches)), max((1, *run.prefills))
    given = {"max_seqs": seqs, "max_step_tokens": max(longest, 512), **options, "threads": threads}
    async with TorchExecutor(model, **given) as executor:  # type: ignore[arg-type]
        _check_room(executor, run, seqs, longest)
        steps = _Steps(executor, run)
        works = []
        for length in run.prefills:
            progress(f"prefill of {length}")
            works.append(_work(f"prefill {length}", await steps.prefills(length), executor, model, reached))
        for batch in run.batches:
            progress(f"decode of {batch}")
            works.append(_work(f"decode {batch}", await steps.decodes(batch), executor, model, reached))
        return RooflineReport(
            kind="roofline",
            model=model.name,
            speed=executor.speed,
            threads=threads,
            run=run,
            reached=reached,
            works=tuple(works),
            cpu=watch.stop(clock.now() - began),
        )


def _check_room(executor: TorchExecutor, run: RooflineRun, seqs: int, longest: int) -> None:
    limits = executor.limits
    tokens = seqs * (run.context + run.steps + 64) + longest
    blocks = -(-tokens // executor.layout.block_size)
    for what, asked, most, name in (
        ("a prompt in one step", longest, limits.max_step_tokens, "max_step_tokens"),
        ("a prompt", longest, limits.max_context, "max_context"),
        ("the context of a decoding sequence", run.context + run.steps, limits.max_context - 1, "max_context"),
        ("a batch", seqs, limits.max_seqs, "max_seqs"),
        ("blocks of KV for all sequences", blocks, limits.num_blocks, "num_blocks"),
    ):
        if asked > most:
            raise ConfigError(f"{what}: {asked} are asked for, {most} are the most ({name}): measure less or raise it")


@dataclass(frozen=True, slots=True)
class _Measured:
    """Steps alike.

    Attributes:
        seconds: Of each.
        parts: Of each, by part.
        rows: Of one.
        sampled: Rows that sample.
        read: Positions of KV that attention reads.
        seen: Pairs of a row and a position that it sees.
    """

    seconds: list[float]
    parts: list[Mapping[str, float]]
    rows: int
    sampled: int
    read: float
    seen: float


class _Steps:
    """Runs steps of some kind."""

    def __init__(self, executor: TorchExecutor, run: RooflineRun) -> None:
        self._executor, self._run, self._host = executor, run, Host(executor)
        self._draw = random.Random(run.seed)
        self._lines: list[Line] = []

    async def prefills(self, length: int) -> _Measured:
        found = _Measured([], [], length, 1, length, length * (length + 1) / 2)
        for _ in range(max(2, self._run.steps // 4)):
            line = self._host.line(self._tokens(length))
            self._keep(
                found, await self._host.step((line, self._host.work(line, length))), await self._executor.parts()
            )
            self._host.close(line)
        return found

    async def decodes(self, batch: int) -> _Measured:
        while len(self._lines) < batch:
            line = self._host.line(self._tokens(self._run.context))
            await self._host.generate(line, 1)
            self._lines.append(line)
        lines = self._lines[:batch]
        read = sum(len(line.tokens) for line in lines) + batch * self._run.steps / 2
        found = _Measured([], [], batch, batch, read, read)
        for _ in range(self._run.steps):
            result = await self._host.step(*((line, self._host.work(line, 1)) for line in lines))
            self._keep(found, result, await self._executor.parts())
        return found

    def _keep(self, found: _Measured, result: StepResult, parts: Mapping[str, float]) -> None:
        found.seconds.append(result.seconds)
        found.parts.append({**parts, REST: result.seconds - sum(parts.values())} if parts else {"step": result.seconds})

    def _tokens(self, count: int) -> list[int]:
        return [self._draw.randrange(self._executor.limits.vocab_size) for _ in range(count)]


def _work(name: str, found: _Measured, executor: TorchExecutor, model: Model, reached: Reached) -> Work:
    wanted = demands(executor, model, found.rows, found.sampled, found.read, found.seen)
    if "step" in found.parts[0]:
        total, counted = sum(each[0] for each in wanted.values()), sum(each[1] for each in wanted.values())
        wanted = {"step": (total, counted, wanted["qkv"][2])}  # nearly all of it is products
    parts = []
    for part in found.parts[0]:
        seconds = statistics.median(each[part] for each in found.parts)
        nbytes, operations, kind = wanted.get(part, (0.0, 0.0, "float32"))
        memory, compute = nbytes / reached.bytes_per_s, operations / getattr(reached, kind)
        limit = max(memory, compute)
        parts.append(
            PartTime(
                name=part,
                seconds=seconds,
                nbytes=nbytes,
                operations=operations,
                bound="memory" if memory >= compute else "compute",
                limit_s=limit,
                share=limit / seconds if seconds > 0.0 else 0.0,
            )
        )
    seconds, limit = statistics.median(found.seconds), sum(part.limit_s for part in parts)
    return Work(name=name, seconds=seconds, limit_s=limit, share=limit / seconds, parts=tuple(parts))


def demands(
    executor: TorchExecutor, model: Model, rows: int, sampled: int, read: float, seen: float
) -> dict[str, tuple[float, float, str]]:
    """Bytes from memory, operations, and the type they are done in, of each part of a step.

    Args:
        executor: Whose choice of types and weights counts.
        model: Its model.
        rows: Of the step.
        sampled: Rows that sample, which are those of the head.
        read: Positions of KV that attention reads, each sequence's once.
        seen: Pairs of a row and a position that it sees.
    """
    config, how = decoder_config(model.config), executor.computing
    itemsize = {"float32": 4, "bfloat16": 2}[how.dtype]
    stored = how.weights == "stored"
    kind = "int8" if stored else how.dtype
    hidden, width = config.hidden_size, config.num_heads * config.head_dim
    keys = config.num_kv_heads * config.head_dim
    kv = config.kv_nbytes_per_token(itemsize)

    def product(times: int, *names: str) -> tuple[float, float, str]:
        nbytes = operations = 0.0
        for index in range(config.num_layers) if "{}" in names[0] else range(1):
            for name in names:
                info = model.tensors.info(name.format(index))
                out, inputs = info.shape
                nbytes += matrix_nbytes(info.dtype, out, inputs, stored=stored, itemsize=itemsize)
                operations += 2.0 * times * out * inputs
        return nbytes, operations, kind

    attention, gated = "model.layers.{}.self_attn.", "model.layers.{}.mlp."
    table = model.tensors.info("model.embed_tokens.weight")
    head = "model.embed_tokens.weight" if config.tied else "lm_head.weight"
    norms = rows * hidden * (2 * config.num_layers + 1)
    return {
        "embed": (rows * table.nbytes / config.vocab_size, float(rows * hidden), "float32"),
        "norm": (0.0, 4.0 * norms, "float32"),
        "qkv": product(rows, *(f"{attention}{name}_proj.weight" for name in ("q", "k", "v"))),
        "write": (float(rows * kv), 3.0 * rows * (width + keys) * config.num_layers, "float32"),
        "attention": (read * kv, 4.0 * seen * width * config.num_layers, how.dtype),
        "output": product(rows, f"{attention}o_proj.weight"),
        "gate_up": product(rows, f"{gated}gate_proj.weight", f"{gated}up_proj.weight"),
        "down": product(rows, f"{gated}down_proj.weight"),
        "head": product(sampled, head),
        REST: (4.0 * sampled * config.vocab_size, float(sampled * config.vocab_size), "float32"),
    }
