"""Conformance of executors that keep windows: chunks, snapshots and replay change no token."""

from __future__ import annotations

import random
from abc import abstractmethod
from collections.abc import Sequence

import pytest

from deepinfra.core.ids import Epoch, SeqId
from deepinfra.core.kv import FRAME_NBYTES
from deepinfra.core.step import WorkItem
from deepinfra.errors import StepFailed
from deepinfra.interfaces.executor import Executor
from deepinfra.testing.host import Host, Line

__all__ = ("WindowLaws",)


@pytest.mark.anyio
class WindowLaws:
    """The part of `ExecutorConformance` for layouts with `window` groups; of others it asks nothing.

    It needs room for two sequences of more than four windows and of what exact replay computes again.
    """

    new_tokens = 6
    """Tokens to generate where a law looks at text."""

    @abstractmethod
    def make(self) -> Executor:
        """See `ExecutorConformance.make`."""

    def long_prompts(self, executor: Executor, count: int) -> list[list[int]]:
        """Prompts of more than four windows and of more than is replayed, one token longer than whole blocks."""
        plan, size = Host(executor).windows, executor.layout.block_size
        length = -(-(max(4 * self._widest(executor), plan.rows) + 2 * plan.unit) // size) * size
        blocks = 2 * -(-(length + 2 * self.new_tokens + 4) // size)
        assert blocks <= executor.limits.num_blocks, f"the laws about windows need {blocks} blocks"
        draw, vocab = random.Random(13), executor.limits.vocab_size
        return [[first, *(draw.randrange(vocab) for _ in range(length))] for first in draw.sample(range(vocab), count)]

    async def test_chunks_do_not_change_long_texts(self) -> None:
        """Chunks shorter than, as long as and longer than a window give the text of the prompt in few."""
        executor = self.make()
        if not (widest := self._widest(executor)):
            return
        async with executor:
            host, prompt, grid = Host(executor), self.long_prompts(executor, 1)[0], executor.limits.grid
            text = await self._text(host, host.line(prompt))
            for size in {1, widest - 1, widest, widest + 1, 2 * widest + 1, executor.layout.block_size + 1}:
                line = host.line(prompt)
                assert await host.generate(line, self.new_tokens, chunk=-(-max(1, size) // grid) * grid) == text, size
                host.close(line)

    async def test_behind_a_snapshot_it_goes_on_as_before(self) -> None:
        """A sequence restored at any boundary in reach gets the same text, with blocks up to there or beyond."""
        executor = self.make()
        if not self._widest(executor):
            return
        async with executor:
            host, prompt = Host(executor), self.long_prompts(executor, 1)[0]
            first = host.line(prompt)
            await host.generate(first, 1)
            boundaries = self._boundaries(host, len(prompt), len(prompt))[: executor.memory.num_slots]
            for slot, boundary in enumerate(boundaries):
                host.snapshot(first, boundary, slot)
            await host.step()
            text = await host.generate(first, self.new_tokens)
            for slot, boundary in enumerate(boundaries):
                for positions in {boundary, boundaries[-1]}:
                    published = first.blocks[: positions // host.block_size]
                    line = host.line(prompt, published=published, restore=(slot, boundary))
                    assert await self._text(host, line) == text, (boundary, positions)

    async def test_snapshots_of_several_sequences_are_restored_in_one_step(self) -> None:
        """Sequences that begin behind snapshots in the same step get what each gets alone."""
        executor = self.make()
        if not self._widest(executor):
            return
        async with executor:
            host, prompts = Host(executor), self.long_prompts(executor, 2)
            texts, lines = [], []
            for slot, prompt in enumerate(prompts):
                first = host.line(prompt)
                await host.generate(first, 1)
                boundary = self._boundaries(host, len(prompt), len(prompt))[-1]
                host.snapshot(first, boundary, slot)
                await host.step()
                texts.append(await host.generate(first, self.new_tokens))
                published = first.blocks[: boundary // host.block_size]
                host.free += first.blocks[len(published) :]
                host.close(first, keep=True)
                lines.append(host.line(prompt, published=published, restore=(slot, boundary)))
            while lacking := [line for line in lines if len(line.output) < self.new_tokens]:
                await host.step(*((line, host.work(line, executor.limits.max_step_tokens // 2)) for line in lacking))
            assert [line.output[: self.new_tokens] for line in lines] == texts

    async def test_a_snapshot_is_of_the_time_before_its_step(self) -> None:
        """Neither the step's own rows nor its closing the sequence change what a snapshot holds."""
        executor = self.make()
        if not self._widest(executor):
            return
        async with executor:
            host, memory, prompt = Host(executor), executor.memory, self.long_prompts(executor, 1)[0]
            nbytes = executor.layout.snapshot_nbytes
            line = host.line(prompt)
            await host.generate(line, 1)
            boundary = self._boundaries(host, len(prompt), len(prompt))[-1]
            host.snapshot(line, boundary, 0)
            await host.step()
            host.snapshot(line, boundary, 1)
            await host.step((line, host.work(line, executor.limits.grid)))
            copies = [0, 1]
            if boundary in self._boundaries(host, line.done, line.done):
                host.snapshot(line, boundary, 2)
                copies.append(2)
            host.close(line)
            await host.step()
            payloads = {bytes(memory.slot(slot)[FRAME_NBYTES : FRAME_NBYTES + nbytes]) for slot in copies}
            assert len(payloads) == 1
            assert any(payloads.pop())
            assert not any(memory.slot(0)[:FRAME_NBYTES]), "a snapshot wrote into the engine's frame"

    async def test_rejected_drafts_leave_no_trace_in_windows(self) -> None:
        """A snapshot taken behind rejected drafts, and rows computed after them, are as if there had been none."""
        executor = self.make()
        if not self._widest(executor) or "drafts" not in executor.provides:
            return
        async with executor:
            vocab, prompt, layout = executor.limits.vocab_size, self.long_prompts(executor, 1)[0], executor.layout
            host = Host(executor)
            truth = await self._text(host, host.line(prompt), 2 * self.new_tokens)
            line, furthest = host.line(prompt), 0
            await host.generate(line, 1)
            drafts = min(3, layout.snapshot_reach)
            while len(line.output) < self.new_tokens:
                known = len(line.tokens) - len(prompt)
                wrong = [(token + 1) % vocab for token in truth[known : known + drafts]]
                item = host.work(line, executor.limits.max_step_tokens, wrong)
                furthest = item.start + item.length
                await host.step((line, item))
            assert line.output == truth[: len(line.output)]
            boundaries = self._boundaries(host, line.done, furthest)
            assert boundaries, "snapshot_reach does not cover a block and the drafts"
            host.snapshot(line, boundaries[-1], 0)
            await host.step()
            published = line.blocks[: boundaries[-1] // host.block_size]
            again = host.line(line.tokens, published=published, restore=(0, boundaries[-1]))
            rest = truth[len(line.output) :]
            assert await host.generate(again, len(rest)) == rest

    async def test_exact_replay_gives_the_whole_text(self) -> None:
        """Behind hits that end inside, at and past a window, and at the end of the tokens, nothing changes."""
        executor = self.make()
        if not (widest := self._widest(executor)):
            return
        async with executor:
            host, whole = Host(executor), self.long_prompts(executor, 1)[0]
            unit, rows = host.windows.unit, host.windows.rows
            first = host.line(whole)
            await host.generate(first, 1)
            last = host.windows.boundary(len(whole))
            hits = {unit, host.windows.boundary(widest), host.windows.boundary(widest) + unit, last - unit, last}
            hits |= {host.windows.boundary(rows), host.windows.boundary(rows) + unit}
            for hit in sorted(hit for hit in hits if 0 < hit <= last):
                for prompt in (whole[:hit], whole[: hit + 1], whole):
                    if prompt is whole or len(prompt) < len(whole):
                        line = host.line(prompt)
                        text = await self._text(host, line)
                        published = first.blocks[: hit // host.block_size]
                        again = host.line(prompt, published=published)
                        assert await self._text(host, again) == text, (hit, len(prompt))

    async def test_rows_below_the_first_are_not_seen(self) -> None:
        """Begun in the middle, a sequence sees nothing of what other sequences left in its windows' memory."""
        executor = self.make()
        if not self._widest(executor):
            return
        async with executor:
            host, prompts = Host(executor, "bounded"), self.long_prompts(executor, 3)
            first = host.line(prompts[0])
            await host.generate(first, 1)
            published = first.blocks[: host.windows.boundary(len(prompts[0])) // host.block_size]
            host.free += first.blocks[len(published) :]
            host.close(first, keep=True)
            texts = []
            start = host.windows.first_row(len(published) * host.block_size, len(prompts[0]))
            for other in prompts[1:]:
                # It ends where the next one begins, and leaves behind what that one must not see.
                await self._text(host, host.line(other[:start]), 1)
                texts.append(await self._text(host, host.line(prompts[0], published=published)))
            assert texts[0] == texts[1]

    async def test_a_failed_step_leaves_windows_as_they_were(self) -> None:
        """Rows of a step that failed are computed again behind the windows that were there before it."""
        executor = self.make()
        if not self._widest(executor):
            return
        async with executor:
            host, prompt = Host(executor), self.long_prompts(executor, 1)[0]
            text = await self._text(host, host.line(prompt))
            line = host.line(prompt)
            half = max(1, len(prompt) // 2 // executor.limits.grid) * executor.limits.grid
            while line.done < half:
                await host.step((line, host.work(line, min(executor.limits.max_step_tokens, half - line.done))))
            work = [(line, host.work(line, executor.limits.max_step_tokens))]
            plan = host.plan(work)
            stranger = WorkItem(SeqId(10**6), Epoch(0), 0, 1, 0, True)
            try:
                result = await executor.submit(plan._replace(items=(*plan.items, stranger))).result()
            except StepFailed:
                line.blocks += work[0][1].blocks
            else:
                assert {failure.seq for failure in result.failed} == {stranger.seq}
                host.commit(work, result._replace(failed=()))
            assert await host.generate(line, self.new_tokens) == text

    # -- helpers ----------------------------------------------------------------------------------

    def _widest(self, executor: Executor) -> int:
        return max((group.window for group in executor.layout.groups if group.kind == "window"), default=0)

    def _boundaries(self, host: Host, known: int, furthest: int) -> Sequence[int]:
        """Boundaries at which a snapshot can be taken, ascending."""
        plan = host.windows
        return [at for at in range(plan.unit, known + 1, plan.unit) if furthest - at <= plan.reach]

    async def _text(self, host: Host, line: Line, count: int = 0) -> list[int]:
        """Run a sequence alone to its end, and close it."""
        text = await host.generate(line, count or self.new_tokens)
        host.close(line)
        await host.step()
        return text
