"""How long a step may take, and what prompts may have of it: the same for every order in which sequences are served."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf, isinf
from typing import NamedTuple, TypeAlias

from deepinfra.core.cost import StepCost, StepWork
from deepinfra.core.ids import SeqId
from deepinfra.core.step import Choice, RunRow, StepReport, StepView
from deepinfra.schedulers.entry import Entry
from deepinfra.schedulers.grants import Grants, give_decode
from deepinfra.schedulers.queue import Queue

__all__ = ("ALONE", "FOREVER", "MIN_CHUNK", "WINDOW", "Allowance", "GiveChunks", "Pacing", "Step", "repeats")

WINDOW = 8
"""Steps with decoding sequences over which these keep their share."""

ALONE = 2
"""How many budgets long a step may be if it ends the prompt of the only sequence here.

Shorter steps serve those who wait or decode; for a lone prompt they only cost: 512 tokens of SmolLM2 in bfloat16 took
590 ms in steps of 0.25 s and 400 ms in one. Whoever comes meanwhile finds nothing before it but one row that decodes,
so that even then its first token takes at most two budgets more than it would have alone.
"""

MIN_CHUNK = 16
"""Prompt tokens of a chunk at least, but for the only one of a step whose aim or whose window leaves less."""

FOREVER = 1 << 20
"""Steps that are the same until something happens: more than a sequence has tokens to come."""

_PREFILL_FLOOR = 0.1
"""Share of what a step takes without prompts that these get at least, when that alone exceeds the step's aims."""

_BY_TOKENS = StepCost(chunk_token=1.0)
"""Stands in for a cost that says nothing of chunks: a second is a token."""


class Allowance:
    """What prompts may have of one step; their chunks are cut here.

    Attributes:
        left_s: Seconds that chunks may still add.
        aim_s: Seconds that the step may take in all, if that can be told.
        chunks_s: Predicted seconds of chunks.
        chunks: How many there are.

    Args:
        cost: Of steps, as far as it is known; if chunks cost nothing only tokens count.
        base_s: What the step takes without prompts.
        seconds: What all chunks together should add.
        most_s: What they must not exceed, but for one chunk if `owed`.
        owed: Whether there must be a chunk, however short.
        strict: Whether rather a chunk shorter than `MIN_CHUNK` than more seconds.
        tokens: Left of the step's limit.
        grid: Where chunks end that are not a prompt's last.
    """

    def __init__(
        self,
        cost: StepCost,
        *,
        base_s: float = 0.0,
        seconds: float = inf,
        most_s: float = inf,
        owed: bool = True,
        strict: bool = False,
        tokens: int,
        grid: int,
    ) -> None:
        known = (cost.chunk_token > 0.0 or cost.chunk_read > 0.0) and not isinf(seconds)
        self.cost = cost if known else _BY_TOKENS
        self.left_s = min(seconds, most_s) if known else float(tokens)
        self.base_s, self.chunks_s, self.chunks = base_s, 0.0, 0
        self.aim_s = base_s + max(0.0, self.left_s) if known else None
        self._known, self._most_s, self._owed, self._grid = known, most_s if known else inf, owed, grid
        self._strict = strict

    def _length(self, start: int, todo: int, seconds: float) -> int:
        length = self._cut(start, min(todo, self.cost.tokens_within(min(seconds, self.left_s), start)), todo)
        shortest = min(todo, self._grid - start % self._grid)
        least = min(todo, shortest + -(-max(0, MIN_CHUNK - shortest) // self._grid) * self._grid)
        if length >= (shortest if not self._known or (self._strict and not self.chunks) else least):
            return length
        least_s = self._seconds(start, least)
        if least_s <= self.left_s or (not self.chunks and least_s <= self._most_s):
            return least
        if self.chunks or not self._owed:
            return 0
        return max(shortest, self._cut(start, min(least, self.cost.tokens_within(self._most_s, start)), todo))

    def give(self, grants: Grants, seq: SeqId, start: int, todo: int, seconds: float = inf) -> int:
        """Grant a chunk that adds about `seconds`; returns its tokens, 0 if nothing fits that is worth it."""
        length = self._length(start, todo, seconds)
        length = grants.give(seq, length) if length else 0
        if length:
            self._spend(start, length)
        return length

    def _spend(self, start: int, length: int) -> None:
        seconds = self._seconds(start, length)
        self.left_s = max(0.0, self.left_s - seconds)
        self.chunks_s += seconds if self._known else 0.0
        self.chunks += 1

    def _seconds(self, start: int, length: int) -> float:
        return self.cost.chunk_token * length + self.cost.chunk_read * length * (start + 0.5 * length)

    def _cut(self, start: int, length: int, todo: int) -> int:
        """The part of a chunk that ends on the grid, or with the prompt."""
        return length if length == todo else max(0, (start + length) // self._grid * self._grid - start)


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One step while it is chosen.

    Attributes:
        grants: What is granted, to begin with to what decodes.
        allowance: What prompts may have.
        prefill_waits: Whether any prompt could go on.
        decodes: Whether anything decodes.
    """

    grants: Grants
    allowance: Allowance
    prefill_waits: bool
    decodes: bool


GiveChunks: TypeAlias = Callable[[StepView, list[tuple[Entry, RunRow]], frozenset[SeqId], Grants, Allowance], None]
"""Grants prompt tokens, given who runs and who is held back from being opened."""


class _Paced(NamedTuple):
    """A step in which something decoded: what it would have taken without prompts, and what these added."""

    base_s: float
    chunks_s: float
    chunks: int


class Pacing:
    """Turns aims into seconds that prompts may add to a step, and keeps the books of what decoding got.

    A step with decoding sequences would take `base` seconds without prompts. In any `WINDOW` such steps in a row the
    sum of these is at least `decode_share` of the predicted sum, so that streams are at least as fast as this share of
    what they are without prompts; and in any such window in which a prompt could go on there is a chunk of one. Only
    where the two contradict each other, because the shortest chunk that the executor takes costs more than a whole
    window has left, is the share not kept: then there is one such chunk per window.

    Args:
        step_budget_s: Aim for a step's seconds; `None` is none.
        itl_target_s: Aim for the time between two tokens of a stream: a budget of steps in which something decodes.
        decode_share: See above; 0 protects nothing.
    """

    def __init__(self, step_budget_s: float | None, itl_target_s: float | None, decode_share: float) -> None:
        self._budget_s = inf if step_budget_s is None else step_budget_s
        self._target_s = min(self._budget_s, inf if itl_target_s is None else itl_target_s)
        self._rate = 1.0 / decode_share - 1.0 if decode_share > 0.0 else inf
        self._steps: deque[_Paced] = deque(maxlen=WINDOW - 1)
        self._ran: deque[tuple[StepCost, StepReport]] = deque(maxlen=WINDOW - 1)
        self._step = 0

    def prompts_s(self, base_s: float, decodes: bool) -> float:
        """Seconds that prompts may add to a usual step that takes `base_s` without them."""
        usual_s = min(self._target_s - base_s, self._rate * base_s) if decodes else self._budget_s - base_s
        return max(usual_s, _PREFILL_FLOOR * base_s)

    def choose(self, queue: Queue, view: StepView, give_chunks: GiveChunks) -> Choice:
        """Choose a step: everything but which prompts get its chunks, which only an order can say."""
        queue.planning(view)
        rows = queue.running(view)
        in_flight = frozenset(row.seq for row in view.running)
        shed = queue.expired(view, in_flight)
        held = in_flight.union(shed)
        step = self.begin(queue, view, rows, waits=queue.waiting > len(shed))
        if step.prefill_waits:
            give_chunks(view, rows, held, step.grants, step.allowance)
        self.end(step)
        return Choice(
            step.grants.take(),
            queue.victims(rows),
            queue.fetches(view, held),
            shed + queue.leaving(in_flight),
            repeats(queue, view, rows),
        )

    def begin(self, queue: Queue, view: StepView, rows: Sequence[tuple[Entry, RunRow]], *, waits: bool) -> Step:
        """Grant what decodes, and say what prompts may have; `end` is called when all is granted.

        Args:
            queue: Whose step it is.
            view: Of the step.
            rows: Running sequences, by rank.
            waits: Whether anything waits.
        """
        self._catch_up(view.step)
        grants, cost = Grants(view), queue.predictor.guess
        prefill_waits = waits or any(row.todo > 1 for _, row in rows)
        owed = not any(step.chunks for step in self._steps)
        keep = view.grid if owed and any(row.todo > 1 for _, row in rows) else 0
        decoding = give_decode(grants, rows, prefill_waits=prefill_waits, keep=keep)
        decodes = any(row.todo == 1 for _, row in rows)
        base_s = cost.seconds(decoding)
        seconds, most_s = self.prompts_s(base_s, decodes), inf
        if self._ends_alone(queue, cost):
            seconds = ALONE * self._budget_s - base_s
        if decodes and not isinf(self._rate):
            most_s = self._left_s(base_s, cost.seconds(StepWork(decode_rows=1)))
        allowance = Allowance(
            cost,
            base_s=base_s,
            seconds=seconds,
            most_s=most_s,
            owed=owed or not decodes,
            strict=decodes and seconds > _PREFILL_FLOOR * base_s,
            tokens=grants.tokens,
            grid=view.grid,
        )
        queue.aim = allowance.aim_s if prefill_waits else None
        return Step(grants=grants, allowance=allowance, prefill_waits=prefill_waits, decodes=decodes)

    def _left_s(self, base_s: float, least_s: float) -> float:
        """Seconds that prompts may add to a step so that no window with it exceeds what they may have of that.

        A window that began some steps ago goes on with steps of at least `least_s`.
        """
        bases_s, chunks_s = base_s + (WINDOW - 1) * least_s, 0.0
        left_s = self._rate * bases_s
        for step in reversed(self._steps):
            bases_s += step.base_s - least_s
            chunks_s += step.chunks_s
            left_s = min(left_s, self._rate * bases_s - chunks_s)
        return max(0.0, left_s)

    def _ends_alone(self, queue: Queue, cost: StepCost) -> bool:
        """Whether the prompt of the only sequence could end in this step."""
        if len(queue.entries) != 1 or isinf(self._budget_s):
            return False
        (only,) = queue.entries.values()
        start = only.computed if only.running else only.tokens - only.uncached
        return cost.seconds(StepWork().chunk(start, only.tokens - start)) <= ALONE * self._budget_s

    def ran(self, cost: StepCost, report: StepReport) -> None:
        """A step ran; `cost` is what was assumed before it did."""
        self._ran.append((cost, report))

    def _catch_up(self, step: int) -> None:
        """Note the times that a step was repeated without being chosen again, as if it had been."""
        missed = min(len(self._ran), max(0, step - self._step - 1))
        for cost, report in tuple(self._ran)[len(self._ran) - missed :]:
            self._steps.append(_Paced(cost.seconds(StepWork.of(report.rows)), 0.0, 0))
        self._step = step
        self._ran.clear()

    def end(self, step: Step) -> None:
        """Note what was chosen."""
        if step.decodes:
            allowance = step.allowance
            self._steps.append(_Paced(allowance.base_s, allowance.chunks_s, allowance.chunks))


def repeats(queue: Queue, view: StepView, rows: Sequence[tuple[Entry, RunRow]]) -> int:
    """How often the same is chosen if nothing happens but that every sequence decodes: for ever, or only now.

    For ever if all that is here runs and decodes without drafts in one step: nothing that the choice depends on
    changes then. No deadline comes either, for only sequences that wait have one.
    """
    idle = not queue.entries or queue.waiting or view.fetchable or view.loading or len(rows) != len(queue.entries)
    steady = not idle and len(rows) == len(view.running) <= min(view.max_step_tokens, view.max_seqs)
    return FOREVER if steady and all(row.todo == 1 and not row.drafts for _, row in rows) else 1
