"""The simulated executor's time, in virtual time, and its repeated steps."""

from __future__ import annotations

import math
import statistics
from collections.abc import Awaitable, Callable
from itertools import pairwise
from typing import TypeVar

import anyio
import pytest

from deepinfra.bench.simulate.clock import ModelledOffload, VirtualClock, run_virtually
from deepinfra.core.cost import StepCost, StepWork
from deepinfra.core.sampling import SamplingParams
from deepinfra.core.step import Fill, StepPlan, StepResult
from deepinfra.errors import ExecutorError, StepFailed
from deepinfra.executors.simulated import SimulatedExecutor
from deepinfra.testing.host import Host, Line

T = TypeVar("T")

COST = StepCost(step=0.25, chunk_token=1e-3, chunk_read=1e-6, decode_row=2e-3, decode_read=1e-5, draft=5e-4)
ROOM = {"num_blocks": 64, "block_size": 16, "num_slots": 4, "max_step_tokens": 256, "max_seqs": 8}
DRAWN = SamplingParams()


def virtually(executor: SimulatedExecutor, main: Callable[[SimulatedExecutor, Host, VirtualClock], Awaitable[T]]) -> T:
    """Run something around an entered executor in virtual time."""
    clock = VirtualClock()
    executor.give(clock, ModelledOffload())

    async def run() -> T:
        async with executor:
            return await main(executor, Host(executor), clock)

    return run_virtually(run, clock)


async def decoding(host: Host, lengths: tuple[int, ...]) -> list[Line]:
    """Sequences of these lengths that decode."""
    lines = [host.line(range(length), sampling=DRAWN, seed=i) for i, length in enumerate(lengths)]
    await host.step(*((line, host.work(line, length)) for line, length in zip(lines, lengths, strict=True)))
    return lines


def repeated(host: Host, lines: list[Line], times: int) -> StepPlan:
    return host.plan([(line, host.work(line, 1)) for line in lines])._replace(repeat=times)


def test_a_step_takes_what_its_work_costs_and_says_so() -> None:
    async def main(executor: SimulatedExecutor, host: Host, clock: VirtualClock) -> None:
        (line,) = await decoding(host, (100,))
        newcomer, began = host.line(range(30)), clock.now()
        result = await host.step((line, host.work(line, 1, (1, 2, 3))), (newcomer, host.work(newcomer, 20)))
        assert result.seconds == COST.seconds(StepWork().decode(100, 4).chunk(0, 20))
        assert clock.now() == began + result.seconds

    virtually(SimulatedExecutor(cost=COST, **ROOM), main)


def test_steps_follow_each_other_though_nobody_waits() -> None:
    async def main(executor: SimulatedExecutor, host: Host, clock: VirtualClock) -> None:
        (line,) = await decoding(host, (10,))
        work = [(line, host.work(line, 1))]
        first = executor.submit(host.plan(work))
        with anyio.CancelScope() as scope:
            scope.cancel()
            await first.result()
        second = executor.submit(StepPlan(99, ()))
        assert second.begin == first.end > clock.now()
        await second.result()
        assert clock.now() == first.end

    virtually(SimulatedExecutor(cost=COST, **ROOM), main)


@pytest.mark.parametrize("noise", [0.0, 0.4])
def test_a_repeated_step_is_so_many_single_ones(noise: float) -> None:
    async def single(
        executor: SimulatedExecutor, host: Host, clock: VirtualClock
    ) -> tuple[list[float], list[list[int]]]:
        lines = await decoding(host, (40, 20, 33))
        seconds = [(await host.step(*((line, host.work(line, 1)) for line in lines))).seconds for _ in range(7)]
        return [*seconds, clock.now()], [line.output[1:] for line in lines]

    async def at_once(
        executor: SimulatedExecutor, host: Host, clock: VirtualClock
    ) -> tuple[list[float], list[list[int]]]:
        lines = await decoding(host, (40, 20, 33))
        result = await executor.submit(repeated(host, lines, 7)).result()
        assert result.seconds == sum(result.each_s)
        return [*result.each_s, clock.now()], [list(output.tokens) for output in result.outputs]

    executor = SimulatedExecutor(cost=COST, noise=noise, **ROOM)
    assert virtually(executor, single) == virtually(executor, at_once)


def cut_after(delay_s: float) -> tuple[StepResult, float]:
    """Cut a step of 7 times `delay_s` after it began; returns its result and how long it took."""

    async def main(executor: SimulatedExecutor, host: Host, clock: VirtualClock) -> tuple[StepResult, float]:
        lines = await decoding(host, (40, 20))
        began = clock.now()
        handle = executor.submit(repeated(host, lines, 7))

        async def cut() -> None:
            await anyio.sleep(delay_s)
            handle.cut()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(cut)
            result = await handle.result()
            took_s = clock.now() - began
        for line, output in zip(lines, result.outputs, strict=True):
            line.tokens += output.tokens
            line.done += len(output.tokens)
        await host.step(*((line, host.work(line, 1)) for line in lines))  # goes on behind what was computed
        return result, took_s

    return virtually(SimulatedExecutor(cost=StepCost(step=1.0), **ROOM), main)


@pytest.mark.parametrize(("delay_s", "times"), [(0.0, 1), (0.5, 1), (1.0, 1), (2.25, 3), (6.5, 7), (20.0, 7)])
def test_a_cut_ends_a_repeated_step_behind_the_time_that_is_computed(delay_s: float, times: int) -> None:
    result, took_s = cut_after(delay_s)
    assert result.each_s == (1.0,) * times
    assert {len(output.tokens) for output in result.outputs} == {times}
    assert took_s == times


def test_only_rows_that_decode_can_be_repeated() -> None:
    async def main(executor: SimulatedExecutor, host: Host, clock: VirtualClock) -> None:
        line = host.line(range(30))
        handle = executor.submit(host.plan([(line, host.work(line, 30))])._replace(repeat=2))
        with pytest.raises(StepFailed, match="single rows"):
            await handle.result()

    virtually(SimulatedExecutor(cost=COST, **ROOM), main)


def test_a_repeated_step_has_to_have_its_blocks() -> None:
    async def main(executor: SimulatedExecutor, host: Host, clock: VirtualClock) -> None:
        lines = await decoding(host, (10,))
        assert (await executor.submit(repeated(host, lines, 6)).result()).outputs
        lines[0].tokens += range(6)
        lines[0].done += 6
        with pytest.raises(StepFailed, match="has no block"):
            await executor.submit(repeated(host, lines, 17)).result()

    virtually(SimulatedExecutor(cost=COST, **ROOM), main)


def test_blocks_are_copied_after_the_step_under_way_at_the_speed_given() -> None:
    executor = SimulatedExecutor(cost=StepCost(step=1.0), block_nbytes=1000, copy_nbytes_per_s=4000, **ROOM)

    async def main(executor: SimulatedExecutor, host: Host, clock: VirtualClock) -> None:
        (line,) = await decoding(host, (40,))
        began = clock.now()
        handle = executor.submit(host.plan([(line, host.work(line, 1))]))
        await executor.memory.drain(line.blocks[:2], [0, 1])
        assert clock.now() - began == 1.0 + 2 * 0.25
        await handle.result()
        result = await executor.submit(StepPlan(99, (), fills=(Fill(0, host.free[0]),))).result()
        assert result.seconds == 0.25

    virtually(executor, main)


def test_noise_scatters_steps_around_what_they_cost() -> None:
    async def main(executor: SimulatedExecutor, host: Host, clock: VirtualClock) -> list[float]:
        seconds = []
        for seed in range(40):
            line = host.line(range(10), sampling=DRAWN, seed=seed)
            seconds += [(await host.step((line, host.work(line, 10)))).seconds for _ in range(20)]
            host.close(line)
        return seconds

    seconds = virtually(SimulatedExecutor(cost=StepCost(step=1.0), noise=0.3, **ROOM), main)
    assert statistics.mean(seconds) == pytest.approx(1.0, rel=0.05)
    assert statistics.stdev(map(math.log, seconds)) == pytest.approx(0.3, rel=0.1)


@pytest.mark.parametrize("acceptance", [0.0, 0.5, 1.0])
def test_a_text_repeats_itself_as_often_as_drafts_are_to_be_accepted(acceptance: float) -> None:
    async def main(executor: SimulatedExecutor, host: Host, clock: VirtualClock) -> list[int]:
        line = host.line(range(10), sampling=DRAWN, seed=3)
        return await host.generate(line, 600)

    text = virtually(SimulatedExecutor(cost=COST, acceptance=acceptance, max_context=900, **ROOM), main)
    cycle = [a - b for a, b in zip(text[16:], text, strict=False)]
    # Both of two tokens that stand a cycle apart have to be of the cycle.
    assert cycle.count(0) / len(cycle) == pytest.approx(acceptance**2, abs=0.08)
    assert len(set(pairwise(text))) > 500 * (1 - acceptance)


def test_it_takes_no_masks() -> None:
    async def main(executor: SimulatedExecutor, host: Host, clock: VirtualClock) -> None:
        handle = executor.submit(StepPlan(1, ()))
        with pytest.raises(ExecutorError, match="masks"):
            handle.masks(None)  # type: ignore[arg-type]
        await handle.result()

    virtually(SimulatedExecutor(cost=COST, **ROOM), main)


def test_step_times_learned_at_one_cost_are_not_used_at_another() -> None:
    assert SimulatedExecutor(cost=COST).speed != SimulatedExecutor(cost=COST._replace(step=0.5)).speed
    assert SimulatedExecutor(cost=COST).speed == SimulatedExecutor(cost=COST, num_blocks=1).speed
