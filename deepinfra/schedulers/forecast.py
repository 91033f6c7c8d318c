"""Predicts how a queue empties if nobody else comes: the server in a few dozen events instead of step by step.

Prompts are a fluid: of what a step may add for them the line whose next one is the first of all in the order gets
most, and the shortest line its part, on account as in the real thing (see `Credit`). Whatever decodes gets one token
per step, and leaves its seat and its blocks after the tokens that are expected of it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from heapq import heapify, heappop, heappush, heappushpop
from math import inf
from typing import NamedTuple

from deepinfra.core.cost import StepCost, StepWork
from deepinfra.core.step import StepView

__all__ = ("Credit", "Drain", "Load", "Point", "drain")

_EVENTS = 40
"""Events after which the rest is extrapolated; one takes 9 to 18 us, and a loop callback should end within 1 ms."""

_LAST = (inf, 0.0, 0)


class Load(NamedTuple):
    """A sequence as a forecast sees it.

    Attributes:
        start: Position from which it has to be computed.
        tokens: Known tokens; equal to `start + 1` if it decodes.
        out: Tokens expected still to come.
        blocks: Blocks it holds or will hold.
        place: Its rank.
        patience: How many may pass it; then nobody behind it is opened before it.
        tenant: Whose it is.
    """

    start: int
    tokens: int
    out: float
    blocks: float
    place: tuple[float, float, int] = (inf, 0.0, 0)
    patience: float = inf
    tenant: str = ""

    @property
    def work(self) -> StepWork:
        """Of its prompt."""
        return StepWork().chunk(self.start, self.tokens - self.start)


class Point(NamedTuple):
    """What waits, from some moment on, `seconds` after the forecast's beginning."""

    seconds: float
    requests: int
    tokens: int
    work_s: float


class Opening(NamedTuple):
    """A sequence that begins, `seconds` after the forecast's beginning, with so many tokens to compute."""

    seconds: float
    tenant: str
    tokens: int


class Credit(NamedTuple):
    """What a line may have done out of order: a part of all work, and seconds that are left of it, below 0 if owed."""

    part: float
    saved_s: float


class Drain:
    """The points of a forecast, each with less waiting than the one before, and the seconds per sequence after them.

    Attributes:
        openings: Who begins, in this order.
    """

    def __init__(self, points: Sequence[Point], openings: Sequence[Opening], ended_s: float, each_s: float) -> None:
        self._points, self.openings, self._ended_s, self._each_s = points, openings, ended_s, each_s

    def until(self, requests: float, tokens: float, work_s: float) -> float:
        """Seconds until no more than this waits."""
        points = self._points
        index = bisect_left(points, True, key=lambda p: p.requests <= requests and _below(p, tokens, work_s))
        if index < len(points):
            return points[index].seconds
        last = points[-1]
        rest = ((last.requests, requests), (last.tokens, tokens), (last.work_s, work_s))
        shares = [(waits - target) / waits for waits, target in rest if waits > target]
        return self._ended_s + max(shares, default=0.0) * last.requests * self._each_s

    def until_of(self, tenant: str, waits: tuple[int, int], most: tuple[float, float]) -> float:
        """Seconds until no more than so many of the sequences and tokens that wait of one tenant do."""
        requests, tokens = waits
        mine = 0
        for opening in self.openings:
            if requests <= most[0] and tokens <= most[1]:
                break
            if opening.tenant == tenant:
                mine, requests, tokens, seconds = mine + 1, requests - 1, tokens - opening.tokens, opening.seconds
        shares = [(n - target) / n for n, target in ((requests, most[0]), (tokens, most[1])) if n > target]
        if not shares:
            return seconds if mine else 0.0
        # As often as it came so far; if it did not, it comes among the last.
        each_s = self._ended_s / mine if mine else self._each_s * self._points[-1].requests / max(1, requests)
        return self._ended_s + max(shares) * requests * each_s


def _below(point: Point, tokens: float, work_s: float) -> bool:
    return point.tokens <= tokens and point.work_s <= work_s * (1 + 1e-9)


def drain(
    view: StepView,
    cost: StepCost,
    allowance: Callable[[float, bool], float],
    lines: Sequence[Iterator[Load]],
    running: Sequence[tuple[int, Load]],
    now: Point,
    parked: Mapping[str, Iterator[tuple[int, Load]]],
    credit: Sequence[Credit] = (),
) -> Drain:
    """Forecast.

    Args:
        view: The pool's limits.
        cost: Of steps.
        allowance: Seconds that prompts may add to a step whose decoding takes so long, and whether any decodes.
        lines: Waiting sequences of each line, in the order in which they will be opened.
        running: The line of each sequence that runs, and what is left of it.
        now: What waits now, at 0 seconds.
        parked: Those with their lines that wait in none yet, of each tenant that may not run more, in order.
        credit: What each line may have done out of order; none if all is done in order.
    """
    flow = _Flow(view, cost, allowance, lines, running, now, parked, credit)
    for _ in range(_EVENTS):
        if not flow.event():
            break
    return Drain(flow.points, flow.openings, flow.seconds, flow.each_s())


class _Prompt:
    """A prompt under way: its seconds, those left of it, and tokens per second of them."""

    __slots__ = ("left_s", "load", "rate", "work_s")

    def __init__(self, load: Load, cost: StepCost) -> None:
        self.load = load
        self.left_s = self.work_s = max(1e-9, cost.seconds(load.work) - cost.step)
        self.rate = (load.tokens - load.start) / self.left_s


class _Flow:
    """The state of one forecast."""

    def __init__(
        self,
        view: StepView,
        cost: StepCost,
        allowance: Callable[[float, bool], float],
        lines: Sequence[Iterator[Load]],
        running: Sequence[tuple[int, Load]],
        now: Point,
        parked: Mapping[str, Iterator[tuple[int, Load]]],
        credit: Sequence[Credit],
    ) -> None:
        self._parts = [each.part for each in credit] or [0.0] * len(lines)
        self._saved_s = [each.saved_s for each in credit] or [-1.0] * len(lines)
        self.points = [now]
        self.openings: list[Opening] = []
        self._parked = parked
        self._late: list[list[tuple[tuple[float, float, int], Load]]] = [[] for _ in lines]
        self._passes, self._hurry = 0, False
        self._most_s = cost.chunk_token * view.max_step_tokens
        self._view, self._cost, self._allowance = view, cost, allowance
        self._seats = view.max_seqs - len(running)
        self._free = view.num_blocks - sum(load.blocks for _, load in running)
        self._waiting = lines
        self._heads = [self._next(line) for line in range(len(lines))]
        self._begun: list[list[_Prompt]] = [[] for _ in lines]
        self.seconds, self._turn, self._context = 0.0, 0.0, 0.0
        self._step_s, self._prompts_s = 1e-9, 1e-9
        self._outs = [load.out for load in self._heads if load]
        # Those that decode: in which turn they are done, and their blocks and context then, and whose they are.
        self._decoding: list[tuple[float, float, float, str]] = []
        for line, load in running:
            if load.tokens - load.start > 1:
                self._begun[line].append(_Prompt(load, cost))
            else:
                self._context += load.tokens
                self._decoding.append((load.out, load.blocks, load.tokens + load.out, load.tenant))
        heapify(self._decoding)

    def event(self) -> bool:
        """Go on to the next end of a prompt or of an answer; `False` when nothing waits any more."""
        opened = self._open()
        shares = self._shares()
        decoding = len(self._decoding)
        base_s = self._cost.step + self._cost.decode_row * decoding + self._cost.decode_read * self._context
        prompts_s = 0.0
        if shares:
            rate = sum(share * self._begun[line][0].rate for line, share in shares.items())
            most_s = max(1, self._view.max_step_tokens - decoding) / rate
            prompts_s = self._prompts_s = max(1e-9, min(most_s, self._allowance(base_s, decoding > 0)))
        step_s = self._step_s = base_s + prompts_s
        for prompt in opened:  # known when the step is over in which they begin: half a step later, on average
            last, load = self.points[-1], prompt.load
            seconds, tokens = max(last.seconds, self.seconds + 0.5 * step_s), load.tokens - load.start
            self.openings.append(Opening(seconds, load.tenant, tokens))
            self.points.append(
                Point(
                    seconds,
                    last.requests - 1,
                    last.tokens - tokens,
                    max(0.0, last.work_s - prompt.work_s),
                )
            )
        if not (any(self._heads) or self.points[-1].requests > 0) or not (shares or decoding):
            return False
        left = (self._begun[line][0].left_s / (share * prompts_s) for line, share in shares.items())
        steps = min(left, default=inf)
        if self._hurry:
            steps = min(steps, 1.0)  # the next that nobody may pass follows in the next step
        if decoding:
            steps = min(steps, max(0.0, self._decoding[0][0] - self._turn))
        self.seconds += steps * step_s
        self._turn += steps
        self._context += steps * decoding
        self._end({line: steps * share * prompts_s for line, share in shares.items()})
        return True

    def each_s(self) -> float:
        """Seconds per sequence in the long run: what its prompt takes, or what its answer takes of one of all seats."""
        last = self.points[-1]
        prompt_s = last.work_s / max(1, last.requests) * self._step_s / self._prompts_s
        out = sum(self._outs) / max(1, len(self._outs))
        return max(prompt_s, (prompt_s + out * self._step_s) / max(1, self._view.max_seqs))

    def _open(self) -> list[_Prompt]:
        """Let lines begin their next sequences while it is their turn, or if nobody may pass those any more."""
        self._hurry = False
        if self._seats <= 0:
            return []
        due = [load for load in self._heads if load and load.patience <= self._passes and self._fits(load)]
        first = _LAST
        opened: list[_Prompt] = []
        if due:
            first = min(load.place for load in due)
            opened.append(self._begin(next(i for i, load in enumerate(self._heads) if load and load.place == first)))
        while (line := self._turn_of(first)) is not None:
            opened.append(self._begin(line))
        self._hurry = bool(due and opened)
        return opened

    def _turn_of(self, first: tuple[float, float, int]) -> int | None:
        """Which line may begin its next: the shortest with credit, or that with the first of all in the order."""
        if self._seats <= 0:
            return None
        able: dict[int, tuple[float, float, int]] = {}
        for line, begun in enumerate(self._begun):
            head = self._heads[line]
            if begun:
                able[line] = begun[0].load.place
            elif head is not None and head.place < first and self._fits(head):
                able[line] = head.place
        if not able:
            return None
        oldest = min(able, key=able.__getitem__)
        line = next((line for line in able if self._saved_s[line] >= 0.0), oldest)
        line = oldest if self._begun[line] else line
        if self._begun[line]:
            return None
        head = self._heads[line]
        if head is not None and line != oldest and self._seats == 1 and not self._begun[oldest]:
            # Once the last seat is taken nobody can be passed any more.
            passing_s = min(self._prompts_s, self._cost.seconds(head.work) - self._cost.step)
            self._save(0.0, line, passing_s)
        return line

    def _save(self, total_s: float, line: int, passing_s: float) -> None:
        """Save each line's part of what is done, less what is done out of order, paid by its line and longer ones."""
        most_s = self._most_s
        for index, part in enumerate(self._parts):
            saved_s = self._saved_s[index] + part * total_s
            if index >= line:
                saved_s -= passing_s
            self._saved_s[index] = most_s if saved_s > most_s else -most_s if saved_s < -most_s else saved_s

    def _shares(self) -> dict[int, float]:
        """What part of the prompts' time each line with one under way gets."""
        able = [index for index, begun in enumerate(self._begun) if begun]
        if not able:
            return {}
        shortest = able[0]
        oldest = shortest if len(able) == 1 else min(able, key=lambda line: self._begun[line][0].load.place)
        part = self._parts[shortest]
        if oldest == shortest or not part:
            return {oldest: 1.0}
        return {shortest: part, oldest: 1.0 - part}

    def _next(self, index: int) -> Load | None:
        """The next of a line, or one that came into it later and is before that."""
        late, load = self._late[index], next(self._waiting[index], None)
        if not late:
            return load
        return heappop(late)[1] if load is None else heappushpop(late, (load.place, load))[1]

    def _into_line(self, tenant: str) -> None:
        """A tenant with a limit may run one more."""
        index, load = next(self._parked[tenant], (0, None))
        if load is None:
            return
        head = self._heads[index]
        if head is None or load.place < head.place:
            self._heads[index], load = load, head
        if load is not None:
            heappush(self._late[index], (load.place, load))

    def _fits(self, load: Load) -> bool:
        return self._seats > 0 and (load.blocks <= self._free or self._seats == self._view.max_seqs)

    def _begin(self, index: int) -> _Prompt:
        load = self._heads[index]
        assert load is not None
        self._outs.append(load.out)
        self._seats -= 1
        self._free -= load.blocks
        prompt = _Prompt(load, self._cost)
        self._begun[index].append(prompt)
        self._heads[index] = self._next(index)
        self._passes += any(other is not None and other.place < load.place for other in self._heads)
        return prompt

    def _end(self, served_s: Mapping[int, float]) -> None:
        """Serve prompts, and end what is at its end."""
        if served_s:
            passing = min(served_s)
            self._save(sum(served_s.values()), passing, served_s[passing] if len(served_s) > 1 else 0.0)
        for index, seconds in served_s.items():
            line = self._begun[index]
            line[0].left_s -= seconds
            if line[0].left_s <= 1e-9:
                load = line.pop(0).load
                self._context += load.tokens
                done = (self._turn + load.out, load.blocks, load.tokens + load.out, load.tenant)
                heappush(self._decoding, done)
        while self._decoding and self._decoding[0][0] <= self._turn + 1e-9:
            _, blocks, context, tenant = heappop(self._decoding)
            if tenant in self._parked:
                self._into_line(tenant)
            self._seats += 1
            self._free += blocks
            self._context = max(0.0, self._context - context)
