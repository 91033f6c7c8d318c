"""Predicts how a queue empties if nobody else comes: the server in a few hundred events instead of step by step.

Prompts are a fluid: of what a step may add for them the line whose next one is the first of all in the order gets
most, and the shortest a part. Whatever decodes gets one token per step, and leaves its seat and its blocks after the
tokens that are expected of it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from heapq import heapify, heappop, heappush
from itertools import islice
from math import inf
from typing import NamedTuple

from deepinfra.core.cost import StepCost, StepWork
from deepinfra.core.step import StepView

__all__ = ("Drain", "Load", "Point", "drain")

_EVENTS = 150
"""Events after which the rest is extrapolated; one takes about 6 us, and a loop callback should end within 1 ms."""


_ASIDE = 64
"""How many of tenants at their limits are put aside at once, so that a forecast ends in time."""

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


class Drain:
    """The points of a forecast, each with less waiting than the one before, and the seconds per sequence after them."""

    def __init__(self, points: Sequence[Point], openings: Sequence[Opening], ended_s: float, each_s: float) -> None:
        self._points, self._openings, self._ended_s, self._each_s = points, openings, ended_s, each_s

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
        for opening in self._openings:
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
    caps: Mapping[str, int],
    part: float,
) -> Drain:
    """Forecast.

    Args:
        view: The pool's limits.
        cost: Of steps.
        allowance: Seconds that prompts may add to a step whose decoding takes so long, and whether any decodes.
        lines: Waiting sequences of each line, in the order in which they will be opened.
        running: The line of each sequence that runs, and what is left of it.
        now: What waits now, at 0 seconds.
        caps: How many more may run of each tenant that has a limit.
        part: Of the work that the shortest line has before others.
    """
    flow = _Flow(view, cost, allowance, lines, running, now, caps, part)
    for _ in range(_EVENTS):
        if not flow.event():
            break
    return Drain(flow.points, flow.openings, flow.seconds, flow.each_s())


class _Prompt:
    """A prompt under way: seconds left of it, and tokens per second of them."""

    __slots__ = ("left_s", "load", "rate")

    def __init__(self, load: Load, cost: StepCost) -> None:
        self.load = load
        self.left_s = max(1e-9, cost.seconds(load.work) - cost.step)
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
        caps: Mapping[str, int],
        part: float,
    ) -> None:
        self._part = part
        self.points = [now]
        self.openings: list[Opening] = []
        self._caps = dict(caps)
        self._aside: list[list[Load]] = [[] for _ in lines]
        self._passes, self._hurry = 0, False
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
        for load in opened:  # known when the step is over in which they begin: half a step later, on average
            last = self.points[-1]
            seconds, tokens = max(last.seconds, self.seconds + 0.5 * step_s), load.tokens - load.start
            self.openings.append(Opening(seconds, load.tenant, tokens))
            self.points.append(
                Point(
                    seconds,
                    last.requests - 1,
                    last.tokens - tokens,
                    max(0.0, last.work_s - (self._cost.seconds(load.work) - self._cost.step)),
                )
            )
        if not (any(self._heads) or any(self._aside)) or not (shares or decoding):
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

    def _open(self) -> list[Load]:
        """Let a line begin its next sequence if it is the line's turn, or if nobody may pass that any more."""
        due = [load.place for load in self._heads if load and load.patience <= self._passes and self._fits(load)]
        first = min(due, default=_LAST)
        opened: list[Load] = []
        for index in sorted(range(len(self._heads)), key=self._place):
            place = self._place(index)
            if place == first or (place < first and not self._begun[index] and index in self._turns()):
                opened += self._begin(index)
        self._hurry = bool(due and opened)
        return opened

    def _turns(self) -> set[int]:
        """Whose turn it is: the line's with the first of all in the order, and the shortest's."""
        able: dict[int, tuple[float, float, int]] = {}
        for index, (begun, head) in enumerate(zip(self._begun, self._heads, strict=True)):
            if begun:
                able[index] = begun[0].load.place
            elif head is not None and self._fits(head):
                able[index] = head.place
        return {min(able, key=able.__getitem__), min(able)} if able else set()

    def _shares(self) -> dict[int, float]:
        """What part of the prompts' time each line with one under way gets."""
        able = [index for index, begun in enumerate(self._begun) if begun]
        if not able:
            return {}
        oldest, shortest = min(able, key=lambda index: self._begun[index][0].load.place), able[0]
        if oldest == shortest:
            return {oldest: 1.0}
        return {shortest: self._part, oldest: 1.0 - self._part} if self._part else {oldest: 1.0}

    def _place(self, index: int) -> tuple[float, float, int]:
        load = self._heads[index]
        return _LAST if load is None else load.place

    def _next(self, index: int) -> Load | None:
        """The next of a line whose tenant may run one more; the others wait aside."""
        aside = self._aside[index]
        for place, load in enumerate(aside):
            if self._may(load):
                return aside.pop(place)
        for load in islice(self._waiting[index], _ASIDE):
            if self._may(load):
                return load
            aside.append(load)
        return None

    def _may(self, load: Load) -> bool:
        return self._caps.get(load.tenant, 1) > 0

    def _give_back(self, tenant: str) -> None:
        """A tenant with a limit may run one more."""
        self._caps[tenant] += 1
        for index, aside in enumerate(self._aside):
            mine = next((load for load in aside if load.tenant == tenant), None)
            head = self._heads[index]
            if mine is not None and (head is None or mine.place < head.place):
                aside.remove(mine)
                if head is not None:
                    aside.insert(0, head)
                self._heads[index] = mine
            elif head is None:
                self._heads[index] = self._next(index)

    def _fits(self, load: Load) -> bool:
        return self._seats > 0 and (load.blocks <= self._free or self._seats == self._view.max_seqs)

    def _begin(self, index: int) -> list[Load]:
        load = self._heads[index]
        if load is None or not self._fits(load):
            return []
        if not self._may(load):  # another line had its tenant's last one
            self._aside[index].append(load)
            self._heads[index] = self._next(index)
            return []
        if load.tenant in self._caps:
            self._caps[load.tenant] -= 1
        self._outs.append(load.out)
        self._seats -= 1
        self._free -= load.blocks
        self._begun[index].append(_Prompt(load, self._cost))
        self._heads[index] = next(self._waiting[index], None)
        self._passes += any(other is not None and other.place < load.place for other in self._heads)
        return [load]

    def _end(self, served_s: Mapping[int, float]) -> None:
        """Serve prompts, and end what is at its end."""
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
            if tenant in self._caps:
                self._give_back(tenant)
            self._seats += 1
            self._free += blocks
            self._context = max(0.0, self._context - context)
