"""What the ssd store is worth to a model: the first token of a restored prefix, and tokens while KV is saved."""

from __future__ import annotations

import random
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import anyio

from deepinfra.bench.kvdisk import drop_folder
from deepinfra.bench.machine import CpuUse, CpuWatch
from deepinfra.bench.recorder import Recorder
from deepinfra.core.events import Failed, Finished, TextDelta
from deepinfra.core.kv import Retention
from deepinfra.core.request import GenerateRequest
from deepinfra.core.sampling import SamplingParams
from deepinfra.engine import Engine, Pool
from deepinfra.errors import EngineError
from deepinfra.interfaces.given import Clock, SystemClock
from deepinfra.interfaces.recipe import Recipe
from deepinfra.interfaces.scheduler import Scheduler
from deepinfra.kvstores import SsdStore

__all__ = ("RestoreReport", "RestoreRun", "Restored", "TokenGaps", "run_restore")

Prompt = tuple[int, ...]

_GREEDY = SamplingParams(temperature=0.0, logprobs=0)
_SAVED, _UNSAVED = Retention(), Retention(traffic="none")


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreRun:
    """What to run.

    Attributes:
        prefix: Tokens that are computed once and restored later; one more token follows in every prompt.
        batch: Sequences that decode together while KV is saved, each behind an eighth of `prefix`.
        new: Tokens that each of them generates.
        repeat: Rounds, each with prompts of its own.
        seed: Of the prompts, which are random token ids.
    """

    prefix: int = 2000
    batch: int = 4
    new: int = 48
    repeat: int = 5
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """Seconds from a request to its first token, one value per round.

    Attributes:
        name: `cold`: restored after a restart, with the page cache emptied of the store's files; `warm`: after another
            restart, from the page cache.
        computed_s: By computing the prompt.
        restored_s: With the prefix from the store.
        ratio: Median of the rounds' ratios: how many times sooner.
    """

    name: str
    computed_s: tuple[float, ...]
    restored_s: tuple[float, ...]
    ratio: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenGaps:
    """Seconds between the steps of a batch that decodes, over all rounds.

    Attributes:
        name: `p50`, `p95` or `worst`.
        saving_s: While the KV of its prompts, and then its own, is saved.
        idle_s: The same with a retention that saves nothing, in turns with the former.
        ratio: The first by the second.
    """

    name: str
    saving_s: float
    idle_s: float
    ratio: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreReport:
    """Everything a run found; its fields are those of the JSON output.

    Attributes:
        kind: `restore`.
        model: The model's name.
        kv_dtype: Element type of KV.
        record_nbytes: Bytes of a block's record.
        run: What was run.
        figures: First tokens.
        gaps: Tokens beside saving.
        saved: Blocks that were saved while the second of them was measured.
        cpu: What else the machine did meanwhile; with `noisy` the figures are not to be trusted.
    """

    kind: str
    model: str
    kv_dtype: str
    record_nbytes: int
    run: RestoreRun
    figures: tuple[Restored, ...]
    gaps: tuple[TokenGaps, ...]
    saved: int
    cpu: CpuUse


async def run_restore(
    recipe: Recipe,
    scheduler: Scheduler,
    recorder: Recorder,
    run: RestoreRun,
    *,
    model: str,
    path: Path,
    clock: Clock | None = None,
    progress: Callable[[str], None] = lambda what: None,
) -> RestoreReport:
    """Measure in a folder made under `path` and removed again.

    Args:
        recipe: For an engine, which is entered three times: to compute, and after two restarts to restore.
        scheduler: For the same.
        recorder: Around its executor.
        run: What to run.
        model: Its name.
        path: On the disk that is measured.
        clock: Time.
        progress: Told what is measured next.

    Raises:
        EngineError: A request failed, or a prefix was not restored, or another token followed.
    """
    clock = clock or SystemClock()
    watch, began = CpuWatch(), clock.now()
    with tempfile.TemporaryDirectory(prefix="deepinfra-bench-restore-", dir=path) as made:
        folder = Path(made)
        engine = Engine(recipe, Pool(scheduler, recorder, store=SsdStore(folder, min_free_nbytes=0)), name=model)
        bench = _Bench(engine, recorder, run, clock, progress)
        async with engine:
            await bench.compute()
            saved = await bench.decode()
        for name in ("cold", "warm"):
            async with engine:
                await bench.restore(name, folder)
    return RestoreReport(
        kind="restore",
        model=model,
        kv_dtype=recorder.identity.kv_dtype,
        record_nbytes=recorder.layout.slot_nbytes,
        run=run,
        figures=tuple(bench.figures),
        gaps=bench.gaps(),
        saved=saved,
        cpu=watch.stop(clock.now() - began),
    )


class _Bench:
    def __init__(
        self, engine: Engine, recorder: Recorder, run: RestoreRun, clock: Clock, progress: Callable[[str], None]
    ) -> None:
        self._engine, self._recorder, self._run, self._clock, self._progress = engine, recorder, run, clock, progress
        self._draw = random.Random(run.seed)
        self._prompts: list[Prompt] = []
        self._answers: list[list[int]] = []
        self._computed_s: list[float] = []
        self._gaps: dict[bool, list[float]] = {False: [], True: []}
        self.figures: list[Restored] = []

    async def compute(self) -> None:
        """Time every prompt's first token, and let its KV be saved."""
        self._progress("warming up")
        await self._answer(self._prompt(self._run.prefix + 1), 1, _UNSAVED)
        for index in range(self._run.repeat):
            self._progress(f"computing prompt {index + 1} of {self._run.repeat}")
            prompt = self._prompt(self._run.prefix + 1)
            self._prompts.append(prompt)
            started = self._clock.now()
            tokens, _ = await self._answer(prompt, 1)
            self._computed_s.append(self._clock.now() - started)
            self._answers.append(tokens)
            await self._settle()

    async def restore(self, name: str, folder: Path) -> None:
        """Time every prompt's first token once more, in an engine that has never seen it."""
        await self._answer(self._prompt(self._recorder.layout.block_size), 1, _UNSAVED)
        seconds = []
        size = self._recorder.layout.block_size
        for index, prompt in enumerate(self._prompts):
            self._progress(f"restoring prompt {index + 1} of {self._run.repeat}, {name}")
            if name == "cold":
                drop_folder(folder)
            started = self._clock.now()
            tokens, restored = await self._answer(prompt, 1)
            seconds.append(self._clock.now() - started)
            if restored != self._run.prefix // size * size or tokens != self._answers[index]:
                raise EngineError(f"{restored} tokens of {self._run.prefix} were restored, and {tokens} followed")
            await self._settle()
        ratio = statistics.median(a / b for a, b in zip(self._computed_s, seconds, strict=True))
        self.figures.append(
            Restored(name=name, computed_s=tuple(self._computed_s), restored_s=tuple(seconds), ratio=ratio)
        )

    async def decode(self) -> int:
        """Note the gaps between tokens with and without saving; returns how many blocks were saved."""
        before = self._saved()
        for index in range(self._run.repeat):
            for saving in (False, True) if index % 2 == 0 else (True, False):
                self._progress(
                    f"round {index + 1} of {self._run.repeat}: tokens {'and' if saving else 'without'} saving"
                )
                retention = _SAVED if saving else _UNSAVED
                self._recorder.records.clear()
                async with anyio.create_task_group() as tasks:
                    for _ in range(self._run.batch):
                        prompt = self._prompt(self._run.prefix // 8)
                        tasks.start_soon(self._answer, prompt, self._run.new, retention)
                last = None
                for record in self._recorder.records:
                    decodes = record.rows == record.positions == self._run.batch
                    if decodes and last is not None:
                        self._gaps[saving].append(record.ended_at - last)
                    last = record.ended_at if decodes else None
                await self._settle()
        return self._saved() - before

    def gaps(self) -> tuple[TokenGaps, ...]:
        saving, idle = sorted(self._gaps[True]), sorted(self._gaps[False])
        found = []
        for name, part in (("p50", 0.5), ("p95", 0.95), ("worst", 1.0)):
            slow, fast = (gaps[min(len(gaps) - 1, int(part * len(gaps)))] for gaps in (saving, idle))
            found.append(TokenGaps(name=name, saving_s=slow, idle_s=fast, ratio=slow / fast))
        return tuple(found)

    async def _answer(self, prompt: Prompt, new: int, retention: Retention = _SAVED) -> tuple[list[int], int]:
        """Tokens of an answer, and how many of the prompt's came from the store."""
        request = GenerateRequest(input=prompt, sampling=_GREEDY, max_tokens=new, ignore_eos=True, retention=retention)
        tokens: list[int] = []
        restored = 0
        async with self._engine.generate(request) as stream:
            async for event in stream:
                if isinstance(event, Failed):
                    raise EngineError(event.message)
                if isinstance(event, TextDelta):
                    tokens += [token.token for token in event.tokens]
                if isinstance(event, Finished):
                    restored = sum(event.usage.cached.store.values())
        return tokens, restored

    async def _settle(self) -> None:
        for pool in self._engine.pools:
            await pool.settle()

    def _saved(self) -> int:
        held = [pool.stats().store for pool in self._engine.pools]
        return sum(stats.saved for stats in held if stats is not None)

    def _prompt(self, length: int) -> Prompt:
        return tuple(self._draw.randrange(self._recorder.limits.vocab_size) for _ in range(length))
