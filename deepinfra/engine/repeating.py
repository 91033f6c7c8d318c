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
from deepinfra.engine.roster import Roster
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


def times_of(choice: Choice, planned: Planned, roster: Roster, block_size: int) -> int:
    """How often a planned step may be computed in a row, so that none of these times would be planned otherwise."""
    plan, most = planned.plan, choice.repeat
    if most <= 1 or not plan.items or len(plan.items) != len(roster.lives) or roster.loading or planned.slots:
        return 1
    if plan.opened or plan.fills or plan.masked or plan.snapshots or planned.preempted:
        return 1
    for item in plan.items:
        live = planned.lives[item.seq]
        spec = live.spec
        if item.length != 1 or item.drafts or live.over or live.prefill_only or spec.stop_ids or spec.stops:
            return 1
        if len(live.tokens) <= spec.prompt_len:  # its first token is waited for
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
