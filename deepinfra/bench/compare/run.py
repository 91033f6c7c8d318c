"""Ours and peers on the same prompts in one run, in turns: prefill and decode."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass

from deepinfra.bench.compare.sides import Side, SideSpec, running
from deepinfra.bench.machine import CpuUse, CpuWatch
from deepinfra.bench.offline import Prompt, random_prompt
from deepinfra.interfaces.given import Clock, SystemClock

__all__ = (
    "CompareReport",
    "CompareRow",
    "CompareRun",
    "SideReport",
    "SideValues",
    "Slowdown",
    "figure_row",
    "run_compare",
    "slowdowns",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CompareRun:
    """What to run.

    Attributes:
        prefills: Lengths of prompts, in tokens.
        batches: Numbers of sequences that decode together.
        prompt: Tokens of their prompts, which are computed before and not counted.
        new: Tokens that each of them generates.
        repeat: Rounds; sides go in order in even ones and backwards in odd ones.
        seed: Of the prompts, which are random token ids.
    """

    prefills: tuple[int, ...] = (512, 2048)
    batches: tuple[int, ...] = (1, 8, 32)
    prompt: int = 128
    new: int = 64
    repeat: int = 5
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SideValues:
    """One side's values of a row, one per round, and their median; `ratio` is ours to the best peer, above 1 is better.

    A peer has no ratio, nor has ours without peers.
    """

    side: str
    median: float
    values: tuple[float, ...]
    ratio: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CompareRow:
    """One thing that was measured.

    Attributes:
        name: Such as `prefill 512` or `decode 8`.
        unit: `tok/s`, `s` or `B`; of the last two less is better.
        best_peer: Label of the best peer; absent without one.
        sides: Every side that was measured.
    """

    name: str
    unit: str
    best_peer: str | None
    sides: tuple[SideValues, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SideReport:
    """Who took part.

    Attributes:
        label: As in the rows.
        name: Program and version.
        about: What it says about itself.
        same_firsts: Share of prompts behind which its first token is the one that most sides give: whether all compute
            the same model. Sides with coarser weights differ in some.
    """

    label: str
    name: str
    about: Mapping[str, str]
    same_firsts: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Slowdown:
    """What batch invariance costs in one row, beside the fastest ordinary mode of the same format.

    Attributes:
        row: Name of the row.
        format: `stored`, or the type to which weights are decoded.
        side: The side in batch-invariant mode.
        fastest: The fastest of ours that multiplies the same format in ordinary mode, by whichever operations.
        slowdown: How many times slower the former is, by medians: 1.05 is 5 % slower, below 1 is faster.
    """

    row: str
    format: str
    side: str
    fastest: str
    slowdown: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CompareReport:
    """Everything a run found; its fields are those of the JSON output.

    Attributes:
        kind: `compare`.
        model: The model's name.
        threads: Of each side.
        run: What was run.
        sides: Who took part.
        rows: What was measured.
        slowdowns: What batch invariance costs, for each side in that mode beside which an ordinary one was measured.
        cpu: What else the machine did meanwhile; with `noisy` the figures are not to be trusted.
        rounds: The same for each round.
    """

    kind: str
    model: str
    threads: int
    run: CompareRun
    sides: tuple[SideReport, ...]
    rows: tuple[CompareRow, ...]
    slowdowns: tuple[Slowdown, ...]
    cpu: CpuUse
    rounds: tuple[CpuUse, ...]


async def run_compare(
    specs: Sequence[SideSpec],
    run: CompareRun,
    *,
    model: str,
    vocab_size: int,
    threads: int,
    clock: Clock | None = None,
    progress: Callable[[str], None] = lambda what: None,
) -> CompareReport:
    """Start all sides, measure them in turns, and end them.

    Each row is measured on one side after the other, so that values that are compared are close in time. A side that
    waits does nothing.

    Args:
        specs: Whom; at least one.
        run: What to run.
        model: The model's name.
        vocab_size: Of the model.
        threads: Of each side, as they were told.
        clock: Time.
        progress: Told what is measured next.

    Raises:
        EngineError: A side ended.
    """
    clock = clock or SystemClock()
    draw = random.Random(run.seed)
    prompts = [random_prompt(draw, vocab_size, run.prompt) for _ in range(max(run.batches, default=0))]
    found: dict[tuple[str, str], dict[str, list[float]]] = {}
    rounds: list[CpuUse] = []
    watch, began = CpuWatch(), clock.now()
    async with AsyncExitStack() as stack:
        sides: list[Side] = []
        for spec in specs:
            progress(f"{spec.label}: starting")
            sides.append(await stack.enter_async_context(running(spec, clock)))
        turns = _Turns(run, prompts, found, progress)
        for side in sides:
            progress(f"{side.spec.label}: warming up")
            await turns.warm_up(side, random_prompt(draw, vocab_size, run.prompt))
        for index in range(run.repeat):
            each, start = CpuWatch(), clock.now()
            fresh = {length: random_prompt(draw, vocab_size, length) for length in run.prefills}
            await turns.round(index, sides if index % 2 == 0 else sides[::-1], fresh)
            rounds.append(each.stop(clock.now() - start))
        cpu = watch.stop(clock.now() - began)
        for side in sides:
            found.setdefault(("start to ready", "s"), {})[side.spec.label] = [side.ready_s]
            found.setdefault(("peak memory", "B"), {})[side.spec.label] = [float(side.peak_nbytes())]
    ours = {spec.label for spec in specs if spec.ours}
    reports = tuple(turns.report(side) for side in sides)
    rows = tuple(figure_row(name, unit, values, ours) for (name, unit), values in found.items())
    return CompareReport(
        kind="compare",
        model=model,
        threads=threads,
        run=run,
        sides=reports,
        rows=rows,
        slowdowns=slowdowns([report for report in reports if report.label in ours], rows),
        cpu=cpu,
        rounds=tuple(rounds),
    )


def figure_row(name: str, unit: str, values: Mapping[str, Sequence[float]], ours: set[str]) -> CompareRow:
    """A row of values by side: medians, the best peer and ratios to it."""
    medians = {side: statistics.median(each) for side, each in values.items()}
    peers = {side: median for side, median in medians.items() if side not in ours}
    more = unit == "tok/s"
    best = (max if more else min)(peers, key=lambda side: peers[side], default=None)

    def ratio(side: str) -> float | None:
        if best is None or side not in ours:
            return None
        return medians[side] / medians[best] if more else medians[best] / medians[side]

    sides = tuple(
        SideValues(side=side, median=medians[side], values=tuple(each), ratio=ratio(side))
        for side, each in values.items()
    )
    return CompareRow(name=name, unit=unit, best_peer=best, sides=sides)


def slowdowns(ours: Sequence[SideReport], rows: Sequence[CompareRow]) -> tuple[Slowdown, ...]:
    """What batch invariance costs in each row of speed, going by what sides of ours say about themselves."""
    formats: dict[str, str] = {}
    invariant: set[str] = set()
    for side in ours:
        about = {name: words.partition(":")[0] for name, words in side.about.items()}
        formats[side.label] = "stored" if about.get("weights") == "stored" else about.get("dtype", "")
        if about.get("numerics", "").startswith("batch-invariant"):
            invariant.add(side.label)
    found = []
    for row in rows:
        medians = {each.side: each.median for each in row.sides if each.side in formats}
        for label in [label for label in medians if label in invariant and row.unit == "tok/s"]:
            same = [each for each in medians if formats[each] == formats[label] and each not in invariant]
            if fastest := max(same, key=lambda side: medians[side], default=""):
                slower = medians[fastest] / medians[label]
                found.append(
                    Slowdown(row=row.name, format=formats[label], side=label, fastest=fastest, slowdown=slower)
                )
    return tuple(found)


class _Turns:
    """Asks sides and keeps what they say."""

    def __init__(
        self,
        run: CompareRun,
        prompts: Sequence[Prompt],
        found: dict[tuple[str, str], dict[str, list[float]]],
        progress: Callable[[str], None],
    ) -> None:
        self._run, self._prompts, self._found, self._progress = run, prompts, found, progress
        self._firsts: dict[str, list[int]] = {}

    async def warm_up(self, side: Side, prompt: Prompt) -> None:
        """Let it allocate and compile what it does once, and compute the prompts."""
        await side.ask("prefill", prompt=prompt)
        for batch in self._run.batches:
            await side.ask("decode", prompts=self._prompts[:batch], new=4)

    async def round(self, index: int, sides: Sequence[Side], fresh: Mapping[int, Prompt]) -> None:
        for length, prompt in fresh.items():
            for side in sides:
                self._tell(index, side, f"prefill of {length}")
                answer = await side.ask("prefill", prompt=prompt)
                self._add(f"prefill {length}", side, length / float(str(answer["seconds"])))
        for batch in self._run.batches:
            for side in sides:
                self._tell(index, side, f"decode of {batch}")
                answer = await side.ask("decode", prompts=self._prompts[:batch], new=self._run.new)
                self._firsts[side.spec.label] = list(answer["firsts"])  # type: ignore[call-overload]
                self._add(f"decode {batch}", side, float(str(answer["tokens"])) / float(str(answer["seconds"])))

    def report(self, side: Side) -> SideReport:
        columns = list(zip(*self._firsts.values(), strict=True))
        usual = [statistics.mode(column) for column in columns]
        own = self._firsts.get(side.spec.label, [])
        same = sum(a == b for a, b in zip(own, usual, strict=True)) / len(usual) if usual else 1.0
        return SideReport(label=side.spec.label, name=side.name, about=side.about, same_firsts=same)

    def _tell(self, index: int, side: Side, what: str) -> None:
        self._progress(f"round {index + 1} of {self._run.repeat}: {side.spec.label}, {what}")

    def _add(self, name: str, side: Side, value: float) -> None:
        self._found.setdefault((name, "tok/s"), {}).setdefault(side.spec.label, []).append(value)
