"""Conformance of executors that repeat steps, or take them ahead: they are single steps, one after the other."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import anyio
import pytest

from deepinfra.core.step import StepPlan, StepResult, WorkItem
from deepinfra.interfaces.executor import Executor, StepHandle
from deepinfra.testing.host import Host, Line

__all__ = ("RepeatLaws",)

TIMES = 5


@pytest.mark.anyio
class RepeatLaws:
    """The part of `ExecutorConformance` for executors that provide `repeat`, or have a depth over 1."""

    @abstractmethod
    def make(self) -> Executor:
        """See `ExecutorConformance.make`."""

    @abstractmethod
    def prompts(self, executor: Executor, count: int) -> list[list[int]]:
        """See `ExecutorConformance.prompts`."""

    async def test_a_repeated_step_gives_what_single_steps_give(self) -> None:
        """Each time every sequence gets its next token; afterwards single steps go on from there."""
        executor = self.make()
        if "repeat" not in executor.provides:
            return
        async with executor:
            host, prompts = Host(executor), self.prompts(executor, 2)
            texts = await self._alone(host, prompts)
            lines = await self._begun(host, prompts)
            work, plan = self._repeated(host, lines)
            result = await executor.submit(plan).result()
            assert (result.step, len(result.each_s)) == (plan.step, TIMES)
            self._commit(work, result)
            for line, text in zip(lines, texts, strict=True):
                assert line.output == text[: TIMES + 1]
                assert await host.generate(line, len(text)) == text

    async def test_a_repeated_step_that_is_cut_loses_nothing(self) -> None:
        """What `cut` tells is the beginning of the result, which has as many tokens of each as times.

        More cuts change nothing, and the rest of the text is to come.
        """
        executor = self.make()
        if "repeat" not in executor.provides:
            return
        async with executor:
            host, prompts = Host(executor), self.prompts(executor, 2)
            texts = await self._alone(host, prompts)
            for delay_s in (None, 0.0, 0.002):
                lines = await self._begun(host, prompts)
                work, plan = self._repeated(host, lines)
                handle = executor.submit(plan)
                results: list[StepResult] = []
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(self._wait, handle, results)
                    if delay_s is not None:
                        await anyio.sleep(delay_s)
                    told = handle.cut()
                    handle.cut()
                [result] = results
                handle.cut()
                times = len(result.each_s)
                assert 1 <= times <= TIMES
                if told is not None:
                    assert told.each_s == result.each_s[: len(told.each_s)]
                    for before, output in zip(told.outputs, result.outputs, strict=True):
                        assert before.tokens == output.tokens[: len(told.each_s)]
                self._commit(work, result)
                for line, text in zip(lines, texts, strict=True):
                    assert line.output == text[: times + 1]
                    assert await host.generate(line, len(text)) == text
                    host.close(line)

    async def test_cut_has_no_effect_on_a_single_step(self) -> None:
        """It tells nothing and the step is computed."""
        executor = self.make()
        if "repeat" not in executor.provides:
            return
        async with executor:
            host = Host(executor)
            line = host.line(self.prompts(executor, 1)[0])
            item = host.work(line, executor.limits.max_step_tokens)
            handle = executor.submit(host.plan([(line, item)]))
            assert handle.cut() is None
            host.commit([(line, item)], await handle.result())
            assert len(line.output) == 1

    async def test_steps_go_on_from_the_tokens_of_those_in_flight(self) -> None:
        """With a depth over 1, steps are submitted before the ones whose tokens they go on from are over."""
        async with self.make() as executor:
            host, depth = Host(executor), executor.depth
            prompts = self.prompts(executor, 1)
            (text,) = await self._alone(host, prompts)
            (line,) = await self._begun(host, prompts)
            assert depth < len(text)
            handles, items = [], list[WorkItem]()
            for at in range(line.done, line.done + depth):
                fresh = (host.free.pop(0),) if at >= len(line.blocks) * host.block_size else ()
                line.blocks += fresh
                items.append(WorkItem(line.seq, line.epoch, at, 1, at, True, fresh))
                handles.append(executor.submit(host.plan([(line, items[-1])])))
            for item, handle in zip(items, handles, strict=True):
                (output,) = (await handle.result()).outputs
                line.tokens += output.tokens
                line.done = item.start + 1
            assert await host.generate(line, len(text)) == text

    async def _alone(self, host: Host, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
        texts = []
        for prompt in prompts:
            line = host.line(prompt)
            texts.append(await host.generate(line, TIMES + 3))
            host.close(line)
        return texts

    async def _begun(self, host: Host, prompts: Sequence[Sequence[int]]) -> list[Line]:
        """Sequences that have their first token."""
        lines = [host.line(prompt) for prompt in prompts]
        for line in lines:
            await host.generate(line, 1)
        return lines

    def _repeated(self, host: Host, lines: Sequence[Line]) -> tuple[list[tuple[Line, WorkItem]], StepPlan]:
        """A plan that repeats a step of all, with the blocks that this takes."""
        work = []
        for line in lines:
            item = host.work(line, 1)
            held = len(line.blocks) + len(item.blocks)
            more = -(-(item.start + TIMES) // host.block_size) - held
            work.append((line, item._replace(blocks=(*item.blocks, *(host.free.pop(0) for _ in range(more))))))
        return work, host.plan(work)._replace(repeat=TIMES)

    def _commit(self, work: Sequence[tuple[Line, WorkItem]], result: StepResult) -> None:
        assert not result.failed
        assert result.seconds == pytest.approx(sum(result.each_s))
        outputs = {output.seq: output for output in result.outputs}
        for line, item in work:
            tokens = outputs[line.seq].tokens
            assert len(tokens) == len(result.each_s)
            line.blocks += item.blocks
            line.tokens += tokens
            line.done = len(line.tokens) - 1

    @staticmethod
    async def _wait(handle: StepHandle, results: list[StepResult]) -> None:
        results.append(await handle.result())
