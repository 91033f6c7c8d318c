"""Repeated steps: an unchanged decoding batch is one event of the executor, and looks to all others as single steps do.

How often a step may be repeated, and what is left of one that somebody cut short. Nothing is allocated, published or
preempted within a repeated step, and nobody ends within it, so that what single steps would have done before its last
boundary is only this: tokens, and what policy learned. These are caught up when somebody comes or leaves.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

from deepinfra.core.step import Choice, SeqOutput, StepResult
from deepinfra.engine.planner import Planned
from deepinfra.interfaces.executor import StepHandle

__all__ = ("Repeated", "behind", "times_of")


@dataclass(slots=True)
class Repeated:
    """A repeated step under way: what, by whom it is computed, since when, and how often for all that others know."""

    planned: Planned
    handle: StepHandle
    begin: float
    told: int = 0

    def ends(self, result: StepResult) -> tuple[float, ...]:
        """When each of the times was over that a result tells of, which are all since it began."""
        return tuple(accumulate(result.each_s, initial=self.begin))[1:]


def times_of(choice: Choice, planned: Planned, block_size: int) -> int:
    """How often a step that nothing but its own tokens changes may be computed in a row as if each time were planned.

    Nobody may end within it or need a block, and nobody may wait for its first token.
    """
    most = choice.repeat
    for item in planned.plan.items:
        live = planned.lives[item.seq]
        spec = live.spec
        if spec.stop_ids or spec.stops or len(live.tokens) <= spec.prompt_len:
            return 1
        most = min(most, live.room, len(live.table) * block_size - item.start)
    return most


def behind(result: StepResult, times: int) -> StepResult:
    """The part of a repeated step's result behind its first `times`."""
    if not times:
        return result

    def rest(output: SeqOutput) -> SeqOutput:
        return output._replace(tokens=output.tokens[times:], probs=output.probs[times:])

    each_s = result.each_s[times:]
    return result._replace(outputs=tuple(map(rest, result.outputs)), each_s=each_s, seconds=sum(each_s))
