"""How long an executor's steps take: a mix of steps is run, and the scheduler's own predictor learns from it."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from deepinfra.bench.machine import CpuUse, CpuWatch
from deepinfra.core.cost import StepWork
from deepinfra.core.step import DoneRow, StepReport, WorkItem
from deepinfra.errors import ConfigError
from deepinfra.interfaces.executor import Executor
from deepinfra.interfaces.given import Clock, SystemClock
from deepinfra.schedulers.predictor import StepPredictor, percentile
from deepinfra.testing.host import Host, Line

__all__ = ("ErrorRow", "ProfileReport", "ProfileRun", "run_profile")

_DRAFTS = (1, 3)
_TELL = 25
_KINDS = ("prompts", "decoding", "both", "drafts")

Work = list[tuple[Line, WorkItem]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileRun:
    """What to run.

    Attributes:
        steps: Steps in all; errors are told of the second half, each predicted before it was learned from.
        context: Longest context, cut to what the executor holds.
        seed: Of the mix, and of the prompts, which are random token ids.
    """

    steps: int = 300
    context: int = 4096
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorRow:
    """Relative errors of one kind of step: `prompts`, `decoding`, `both` in one step, `drafts` in it, or `all`."""

    name: str
    steps: int
    median: float
    p95: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileReport:
    """Everything a run found; its fields are those of the JSON output.

    Attributes:
        kind: `profile`.
        model: The model's name.
        speed: What decides how long steps take; the same text at a server's start finds what was saved.
        run: What was run.
        cost: Seconds by name: `step`, `chunk_token`, `chunk_read`, `decode_row`, `decode_read`, `draft`.
        errors: Of the second half of the steps; a kind without steps is left out.
        cpu: What else the machine did meanwhile; with `noisy` the figures are not to be trusted.
    """

    kind: str
    model: str
    speed: str
    run: ProfileRun
    cost: dict[str, float]
    errors: tuple[ErrorRow, ...]
    cpu: CpuUse


async def run_profile(
    executor: Executor,
    run: ProfileRun,
    predictor: StepPredictor,
    *,
    clock: Clock | None = None,
    progress: Callable[[str], None] = lambda what: None,
) -> ProfileReport:
    """Run the mix on an entered executor and let `predictor` learn from it.

    The mix is random but for the same seed the same: chunks of 16 tokens to a full step at every depth of prompts from
    32 tokens to `run.context`, beside 0 to all of the sequences that have been computed, which decode at whatever
    context they have, some with drafts.

    Args:
        executor: Entered.
        run: What to run.
        predictor: Learns; what it knew before it keeps.
        clock: Time.
        progress: Told how far it is.

    Raises:
        ConfigError: The executor measures no time, or is too small for any mix.
    """
    clock = clock or SystemClock()
    watch, began = CpuWatch(), clock.now()
    mix = _Mix(executor, run)
    errors: list[tuple[str, float]] = []
    for index in range(run.steps):
        if index % _TELL == 0:
            progress(f"step {index + 1} of {run.steps}")
        report = await mix.step(index)
        if report.seconds <= 0.0:
            raise ConfigError(f"{type(executor).__name__} does not measure how long its steps take")
        if 2 * index >= run.steps and predictor.cost is not None:
            work = StepWork.of(report.rows)
            errors.append((_kind(work), abs(predictor.cost.seconds(work) - report.seconds) / report.seconds))
        predictor.observe(report)
    if predictor.cost is None:
        raise ConfigError(f"{run.steps} steps are too few to learn from")
    named = ((name, [error for kind, error in errors if name in ("all", kind)]) for name in (*_KINDS, "all"))
    return ProfileReport(
        kind="profile",
        model=executor.identity.model,
        speed=executor.speed,
        run=run,
        cost=predictor.cost._asdict(),
        errors=tuple(
            ErrorRow(name=name, steps=len(found), median=percentile(found, 0.5), p95=percentile(found, 0.95))
            for name, found in named
            if found
        ),
        cpu=watch.stop(clock.now() - began),
    )


def _kind(work: StepWork) -> str:
    if work.drafts:
        return "drafts"
    if work.chunk_tokens:
        return "both" if work.decode_rows else "prompts"
    return "decoding"


class _Mix:
    """Sequences at many contexts, and steps drawn from them."""

    def __init__(self, executor: Executor, run: ProfileRun) -> None:
        self._executor, self._host = executor, Host(executor)
        self._limits = limits = executor.limits
        self._draw = random.Random(run.seed)
        # Half of the memory is left to prompts under way and to what sequences grow by.
        self._room = limits.num_blocks * self._host.block_size // 2
        self._longest = min(run.context, limits.max_context - 1, self._room)
        if self._longest < 1 or limits.max_seqs < 2:
            raise ConfigError("the executor has no room for two sequences")
        self._ready: list[Line] = []
        self._begun: Line | None = None

    async def step(self, index: int) -> StepReport:
        """Run one step."""
        work = self._decoding()
        left = self._limits.max_step_tokens - sum(item.length for _, item in work)
        chunk = self._chunk(left) if not work or self._draw.random() < 0.5 else None
        if chunk is not None:
            work.append(chunk)
        elif not work:  # what is left of the step is smaller than the grid: nothing decodes, so it is all of it
            raise ConfigError("the executor's grid is larger than its steps")
        known = {line.seq: len(line.tokens) for line, _ in work}
        opened = {line.seq for line, _ in work if not line.open}
        result = await self._host.step(*work)
        rows = tuple(
            DoneRow(
                item.seq,
                item.start,
                item.length,
                len(item.drafts),
                len(line.tokens) - known[item.seq],
                item.seq in opened,
            )
            for line, item in work
        )
        self._settle()
        return StepReport(index, result.seconds, rows)

    def _decoding(self) -> Work:
        """Some of the sequences that can decode, at times with drafts."""
        most = min(len(self._ready), self._limits.max_seqs - 1, self._limits.max_step_tokens // 2)
        sizes = [0, *(size for size in (1, 2, 4, 8, 16, 32, 64, 128) if size < most), most]
        lines = self._draw.sample(self._ready, self._draw.choice(sizes))
        with_drafts = "drafts" in self._executor.provides and self._draw.random() < 0.3
        left = self._limits.max_step_tokens - len(lines)
        work: Work = []
        for line in lines:
            room = min(left, self._limits.max_context - len(line.tokens) - 1)
            count = min(self._draw.choice(_DRAFTS), max(0, room)) if with_drafts else 0
            left -= count
            work.append((line, self._host.work(line, 1, self._tokens(count))))
        return work

    def _chunk(self, left: int) -> tuple[Line, WorkItem] | None:
        """The next chunk of the prompt under way, or of a new one."""
        line = self._begun = self._begun or self._host.line(self._tokens(self._length()))
        sizes = [size for size in (16, 32, 64, 128, 256, 512, 1024, 2048, 4096) if size < left]
        size, start = min(self._draw.choice([*sizes, left]), len(line.tokens) - line.done), line.done
        if start + size < len(line.tokens):
            size -= (start + size) % self._limits.grid
        if size <= 0:
            size = min(self._limits.grid - start % self._limits.grid, len(line.tokens) - start)
        return (line, self._host.work(line, size)) if 0 < size <= left else None

    def _settle(self) -> None:
        """Let a computed prompt decode from now on; end sequences when they are too many or too long."""
        if self._begun is not None and self._begun.done >= self._begun.prompt_len:
            self._ready.append(self._begun)
            self._begun = None
        for line in [line for line in self._ready if len(line.tokens) >= self._limits.max_context - 1]:
            self._end(line)
        while self._ready and (self._held() > self._room or len(self._ready) > self._limits.max_seqs - 1):
            self._end(self._draw.choice(self._ready))

    def _held(self) -> int:
        coming = 0 if self._begun is None else len(self._begun.tokens)
        return coming + sum(len(line.tokens) + self._host.block_size for line in self._ready)

    def _end(self, line: Line) -> None:
        self._ready.remove(line)
        self._host.close(line)

    def _length(self) -> int:
        """Of a new prompt: each octave as often as the other, but many short ones first, for batches to decode."""
        lengths = [32]
        while lengths[-1] * 2 <= self._longest and len(self._ready) >= min(4, self._limits.max_seqs - 1):
            lengths.append(lengths[-1] * 2)
        return max(1, min(self._draw.choice(lengths), self._longest))

    def _tokens(self, count: int) -> list[int]:
        return [self._draw.randrange(self._limits.vocab_size) for _ in range(count)]
