"""Conformance of executors: the laws that let an engine rely on one without knowing it."""

from __future__ import annotations

import itertools
import random
from abc import abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence

import anyio
import anyio.lowlevel
import pytest

from deepinfra.core.ids import Epoch, SeqId
from deepinfra.core.kv import FRAME_NBYTES
from deepinfra.core.sampling import SamplingParams
from deepinfra.core.step import MaskRows, SeqOpen, StepPlan, WorkItem
from deepinfra.errors import ExecutorError, StepFailed
from deepinfra.interfaces.executor import Executor
from deepinfra.testing.host import GREEDY, Host, Line
from deepinfra.testing.repeat_laws import RepeatLaws
from deepinfra.testing.window_laws import WindowLaws

__all__ = ("ExecutorConformance",)

_DRAWN = SamplingParams(temperature=1.0)


@pytest.mark.anyio
class ExecutorConformance(WindowLaws, RepeatLaws):
    """Every law of `Executor` as a test: `class TestMine(ExecutorConformance): def make(self): return Mine(...)`.

    Give it a small model in a type whose sums do not depend on the batch's shape (float32): text is compared
    token by token, and bit by bit where `provides` says `batch-invariant`. Room for two or three sequences of two
    blocks and ten tokens, with 4 slots, is enough; with little room the tests find more.
    """

    rounds = 60
    """Steps of the random schedule; fewer for a slow model."""

    @abstractmethod
    def make(self) -> Executor:
        """A new executor, not entered; each call builds the same model."""

    def prompts(self, executor: Executor, count: int) -> list[list[int]]:
        """Prompts of a little over two blocks, no two alike in their first token."""
        draw = random.Random(7)
        vocab, length = executor.limits.vocab_size, 2 * executor.layout.block_size + 1
        firsts = draw.sample(range(vocab), count)
        return [[first, *(draw.randrange(vocab) for _ in range(length + i - 1))] for i, first in enumerate(firsts)]

    def at_once(self, executor: Executor, wanted: int) -> int:
        """How many sequences to run together: as many as wanted and as have room."""
        longest = 2 * executor.layout.block_size + wanted + self.new_tokens + 3
        room = executor.limits.num_blocks // -(-longest // executor.layout.block_size)
        assert room >= 2, "two sequences of a little over two blocks must fit: give it more blocks"
        return min(wanted, room, executor.limits.max_seqs)

    async def alone(self, executor: Executor, prompts: Sequence[Sequence[int]], sampling: SamplingParams) -> list[Line]:
        """The reference: each prompt by itself, in as few steps as possible, seed and choice by its index."""
        host = Host(executor)
        lines = [host.line(prompt, sampling=sampling, seed=i, choice=i % 2) for i, prompt in enumerate(prompts)]
        for line in lines:
            await host.generate(line, self.new_tokens)
            host.close(line)
        await host.step()
        return lines

    # -- what is known when -----------------------------------------------------------------------

    async def test_what_it_is_does_not_change_by_entering(self) -> None:
        """`provides`, `layout` and `identity` are valid before, `limits` and `memory` inside; all fit each other."""
        executor = self.make()
        before = (executor.provides, executor.layout, executor.identity)
        async with executor:
            assert (executor.provides, executor.layout, executor.identity) == before
            limits, layout, memory = executor.limits, executor.layout, executor.memory
            assert min(limits[:6]) >= 1
            assert limits.grid >= 1
            assert memory.num_slots == limits.num_slots
            for group in layout.groups:
                assert layout.block_size % group.compress_rate == 0
            for index in range(memory.num_slots):
                assert len(memory.slot(index)) == layout.slot_nbytes
        other = self.make()
        assert (other.provides, other.layout, other.identity) == before

    async def test_slots_are_separate_lasting_memory(self) -> None:
        """What is written to a slot stays there, frame included, and in no other."""
        async with self.make() as executor:
            memory = executor.memory
            for index in range(memory.num_slots):
                memory.slot(index)[:] = bytes((index % 251 + 1,)) * len(memory.slot(index))
            for index in range(memory.num_slots):
                assert set(memory.slot(index)) == {index % 251 + 1}

    async def test_it_can_be_entered_again(self) -> None:
        """After leaving, the same object computes in the same way, serves the same text, and remembers no sequence."""
        executor = self.make()
        texts, computing = [], set()
        for _ in range(2):
            async with executor:
                computing.add(executor.computing)
                host = Host(executor)
                texts.append(await host.generate(host.line(self.prompts(executor, 1)[0]), self.new_tokens))
        assert texts[0] == texts[1]
        assert len(computing) == 1

    async def test_foreign_staging_is_used_or_refused(self) -> None:
        """`use_staging` places the slots in the buffer, and as many as fit; or raises `ExecutorError`."""
        executor = self.make()
        stride = executor.layout.slot_nbytes
        buffer = memoryview(bytearray(3 * stride))
        try:
            executor.use_staging(buffer)
        except ExecutorError:
            return
        async with executor:
            assert executor.limits.num_slots == executor.memory.num_slots == 3
            host = Host(executor)
            line = host.line(self.prompts(executor, 1)[0])
            await host.generate(line, 1)
            await executor.memory.drain(line.blocks[:2], [2, 0])
            for index in range(3):
                assert buffer[index * stride : (index + 1) * stride] == executor.memory.slot(index)
            assert any(buffer[FRAME_NBYTES:stride])
            assert not any(buffer[stride : 2 * stride])

    # -- text -------------------------------------------------------------------------------------

    async def test_chunks_do_not_change_the_text(self) -> None:
        """Any chunking of a prompt gives the text of the prompt in one piece."""
        async with self.make() as executor:
            prompts = self.prompts(executor, 2)
            reference = await self.alone(executor, prompts, GREEDY)
            host = Host(executor)
            for size in {1, 3, executor.layout.block_size, executor.layout.block_size + 1}:
                chunk = -(-size // executor.limits.grid) * executor.limits.grid
                for prompt, whole in zip(prompts, reference, strict=True):
                    line = host.line(prompt)
                    assert await host.generate(line, self.new_tokens, chunk=chunk) == whole.output[: self.new_tokens]
                    host.close(line)

    async def test_the_batch_does_not_change_the_text(self) -> None:
        """Sequences that start at different steps, prefills mixed with decodes, get what each gets alone."""
        async with self.make() as executor:
            invariant = "batch-invariant" in executor.provides
            probed = SamplingParams(temperature=0.0, logprobs=3 if "logprobs" in executor.provides else None)
            prompts = self.prompts(executor, self.at_once(executor, 3))
            reference = await self.alone(executor, prompts, probed)
            host = Host(executor)
            lines = [host.line(prompt, sampling=probed) for prompt in prompts]
            turn = 0
            while lacking := [line for line in lines if len(line.output) < self.new_tokens]:
                turn += 1
                await host.step(*((line, host.work(line, executor.limits.grid)) for line in lacking[: turn // 2 + 1]))
            for line, alone in zip(lines, reference, strict=True):
                assert line.output[: self.new_tokens] == alone.output[: self.new_tokens]
                if invariant:
                    assert line.probs[: self.new_tokens] == alone.probs[: self.new_tokens]

    async def test_draws_depend_on_seed_and_choice_alone(self) -> None:
        """At a temperature, (seed, choice) decide the text, not the batch; other seeds and choices give other texts."""
        async with self.make() as executor:
            prompt = self.prompts(executor, 1)[0]
            draws = [(0, 0), (0, 1), (1, 0), (2**64 - 1, 0)]
            host, texts = Host(executor), []
            for seed, choice in draws:
                line = host.line(prompt, sampling=_DRAWN, seed=seed, choice=choice)
                texts.append(tuple(await host.generate(line, self.new_tokens)))
                host.close(line)
            assert len(set(texts)) == len(texts)
            lines = [host.line(prompt, sampling=_DRAWN, seed=seed, choice=choice) for seed, choice in draws]
            lines = lines[: self.at_once(executor, len(lines))]
            while lacking := [line for line in lines if len(line.output) < self.new_tokens]:
                await host.step(*((line, host.work(line, executor.limits.grid)) for line in lacking))
            assert [tuple(line.output) for line in lines] == texts[: len(lines)]

    async def test_logprobs_are_of_the_tokens_that_were_chosen(self) -> None:
        """One entry per token, natural logarithms, as many alternatives as asked for, best first."""
        async with self.make() as executor:
            if "logprobs" not in executor.provides:
                return
            host = Host(executor)
            line = host.line(self.prompts(executor, 1)[0], sampling=SamplingParams(temperature=0.0, logprobs=4))
            await host.generate(line, self.new_tokens)
            assert len(line.probs) == len(line.output)
            for token, probs in zip(line.output, line.probs, strict=True):
                values = [logprob for _, logprob in probs.top]
                assert len(values) == 4
                assert values == sorted(values, reverse=True)
                assert probs.logprob <= 0.0
                # Greedy: the likeliest was chosen.
                assert probs.top[0] == (token, probs.logprob)

    async def test_drafts_change_speed_and_nothing_else(self) -> None:
        """Right, half-right and wrong drafts give the same text, greedy and drawn; right ones are all accepted."""
        async with self.make() as executor:
            if "drafts" not in executor.provides:
                return
            vocab, prompt = executor.limits.vocab_size, self.prompts(executor, 1)[0]
            for sampling, wrong_from in itertools.product((GREEDY, _DRAWN), (3, 1, 0)):
                truth = (await self.alone(executor, [prompt], sampling))[0]
                host = Host(executor)
                line = host.line(prompt, sampling=sampling)
                while len(line.output) < self.new_tokens:
                    known = len(line.tokens)
                    drafts = truth.tokens[known : known + min(3, self.new_tokens - len(line.output) - 1)]
                    drafts[wrong_from:] = [(token + 1) % vocab for token in drafts[wrong_from:]]
                    await host.step((line, host.work(line, executor.limits.max_step_tokens, drafts)))
                    if line.output:
                        assert len(line.tokens) - known == min(wrong_from, len(drafts)) + 1
                assert line.output[: self.new_tokens] == truth.output[: self.new_tokens]
                host.close(line)
                await host.step()

    async def test_masks_decide_what_may_be_sampled(self) -> None:
        """Greedy and drawn, a row takes none but allowed tokens; rows of the same step without a mask are as ever."""
        async with self.make() as executor:
            if "masks" not in executor.provides:
                return
            prompts, everything = self.prompts(executor, 2), frozenset(range(executor.limits.vocab_size))
            for sampling in (GREEDY, _DRAWN):
                truth = [line.output[0] for line in await self.alone(executor, prompts, sampling)]
                forced = min(everything - set(truth))
                for allowed in ({forced}, everything - {truth[1]}):
                    host = Host(executor)
                    free, bound = (
                        host.line(prompt, sampling=sampling, seed=i, choice=i % 2) for i, prompt in enumerate(prompts)
                    )
                    for line in (free, bound):
                        while len(line.tokens) - line.done > executor.limits.grid:
                            await host.step((line, host.work(line, executor.limits.grid)))
                    await self._masked(host, [(free, ()), (bound, ())], {bound.seq: [allowed]})
                    assert free.output == truth[:1]
                    assert bound.output[0] in allowed
                    host.close(free)
                    host.close(bound)
                    await host.step()

    async def test_every_draft_has_a_mask_of_its_own(self) -> None:
        """The mask behind a draft decides what follows it; a draft that its row's mask forbids is not accepted."""
        async with self.make() as executor:
            if not {"masks", "drafts"} <= executor.provides:
                return
            prompt = self.prompts(executor, 1)[0]
            host = Host(executor)
            line = host.line(prompt)
            first, second = await host.generate(line, 2)
            a, b, c = sorted(set(range(8)) - {first, second})[:3]
            await self._masked(host, [(line, (a, b))], {line.seq: [{a}, {b}, {c}]})
            assert line.output[2:] == [a, b, c]
            await self._masked(host, [(line, (a, b))], {line.seq: [{a}, {c}, {a}]})
            assert line.output[5:] == [a, c]

    async def _masked(
        self,
        host: Host,
        rows: Sequence[tuple[Line, Sequence[int]]],
        allowed: Mapping[SeqId, Sequence[Collection[int]]],
    ) -> None:
        """Run a masked step of decoding lines with their drafts; masks come while it waits for them."""
        work = [(line, host.work(line, host.executor.limits.grid, drafts)) for line, drafts in rows]
        handle = host.executor.submit(host.plan(work)._replace(masked=True))
        for _ in range(3):
            await anyio.lowlevel.checkpoint()
        nbytes = -(-host.executor.limits.vocab_size // 8)
        masks = [sum(1 << token for token in tokens) for each in allowed.values() for tokens in each]
        bits = b"".join(mask.to_bytes(nbytes, "little") for mask in masks)
        handle.masks(MaskRows(tuple(allowed), tuple(map(len, allowed.values())), bits))
        host.commit(work, await handle.result())

    async def test_any_schedule_gives_each_its_own_text(self) -> None:
        """Random chunks, drafts, preemption, closing, reopening, copies out and back: the text of each alone."""
        draw = random.Random(11)
        async with self.make() as executor:
            limits = executor.limits
            prompts = self.prompts(executor, 4)
            truth = await self.alone(executor, prompts, _DRAWN)
            host, at_once = Host(executor), self.at_once(executor, 4)
            live: dict[int, Line] = {}
            finished = 0
            for _ in range(self.rounds):
                for i in draw.sample(range(len(prompts)), len(prompts)):
                    if i not in live and len(live) < at_once and draw.random() < 0.5:
                        live[i] = host.line(prompts[i], sampling=_DRAWN, seed=i, choice=i % 2)
                work, budget = [], limits.max_step_tokens
                for i, line in live.items():
                    if draw.random() < 0.1 and line.open:
                        await self._preempt(host, line, draw, live.values())
                    if draw.random() < 0.8 and budget >= limits.grid + 4:
                        limit = draw.randint(1, max(1, (budget - 3) // limits.grid)) * limits.grid
                        item = host.work(line, min(limit, budget - 3), self._guess(executor, truth[i], line, draw))
                        budget -= item.length
                        work.append((line, item))
                if work:
                    await host.step(*work)
                for i, line in list(live.items()):
                    count = min(len(line.output), self.new_tokens)
                    assert line.output[:count] == truth[i].output[:count]
                    if count == self.new_tokens or draw.random() < 0.02:
                        finished += count == self.new_tokens
                        host.close(live.pop(i))
            assert finished >= 2, "too few rounds for this model: raise `rounds`"

    # -- KV ---------------------------------------------------------------------------------------

    async def test_published_blocks_can_be_read_by_many(self) -> None:
        """Sequences that begin with blocks of another one get the text they get alone, at once and after it."""
        async with self.make() as executor:
            prompt = self.prompts(executor, 1)[0]
            host = Host(executor)
            first = host.line(prompt)
            text = await host.generate(first, self.new_tokens)
            published = first.blocks[:2]
            for _ in range(2):
                line = host.line(prompt, published=published)
                assert await host.generate(line, self.new_tokens) == text
                host.close(line)
                host.close(first, keep=True)

    async def test_blocks_go_out_and_come_back(self) -> None:
        """Drained to staging and filled into other blocks, KV has the same bytes and gives the same text."""
        async with self.make() as executor:
            memory, prompt = executor.memory, self.prompts(executor, 1)[0]
            host = Host(executor)
            first = host.line(prompt)
            text = await host.generate(first, self.new_tokens)
            await memory.drain(first.blocks[:2], [0, 1])
            end = FRAME_NBYTES + executor.layout.block_nbytes
            saved = [bytes(memory.slot(slot)[FRAME_NBYTES:end]) for slot in (0, 1)]
            assert saved[0] != saved[1]
            host.close(first, keep=True)  # its blocks are not used again, so a read of them would show
            second = host.line(prompt, slots=(0, 1))
            assert await host.generate(second, self.new_tokens) == text
            for slot in (0, 1):
                memory.slot(slot)[:] = bytes(len(memory.slot(slot)))
            await memory.drain(second.blocks[:2], [1, 0])
            assert [bytes(memory.slot(slot)[FRAME_NBYTES:end]) for slot in (1, 0)] == saved
            assert not any(memory.slot(0)[:FRAME_NBYTES]), "a drain wrote into the engine's frame"

    async def test_a_drain_sees_the_steps_before_it(self) -> None:
        """A drain that begins while a step is in flight copies the blocks as that step leaves them."""
        async with self.make() as executor:
            memory, prompt = executor.memory, self.prompts(executor, 1)[0]
            host = Host(executor)
            work = [(line := host.line(prompt), host.work(line, executor.limits.max_step_tokens))]
            handle = executor.submit(host.plan(work))
            block = work[0][1].blocks[:1]
            await memory.drain(block, [0])
            host.commit(work, await handle.result())
            early = bytes(memory.slot(0)[FRAME_NBYTES:])
            await memory.drain(block, [1])
            assert early == bytes(memory.slot(1)[FRAME_NBYTES:])

    async def test_rows_below_write_from_write_nothing(self) -> None:
        """Rows that are computed again leave published blocks alone, whatever these hold."""
        async with self.make() as executor:
            memory = executor.memory
            host = Host(executor)
            prompt = self.prompts(executor, 1)[0][: 2 * host.block_size]
            for slot in (0, 1):
                memory.slot(slot)[:] = bytes(len(memory.slot(slot)))
            # A foreign block of zeros: a writer of the right KV would be seen.
            owner = host.line(prompt, slots=(0, 1))
            owner.tokens.append(0)
            await host.step((owner, host.work(owner, 1)))
            published = owner.blocks[:2]
            for start in (2 * host.block_size - 1, 0):
                reader = host.line(prompt, published=published)
                item = host.work(reader, 1)._replace(start=start, length=2 * host.block_size - start, samples=True)
                assert item.write_from == 2 * host.block_size
                await host.step((reader, item))
                host.close(reader)
            await memory.drain(published, [0, 1])
            for slot in (0, 1):
                assert not any(memory.slot(slot)[FRAME_NBYTES:])

    # -- life and failure -------------------------------------------------------------------------

    async def test_closing_frees(self) -> None:
        """Many more sequences than fit at once come and go; a number may be opened again in the next epoch."""
        async with self.make() as executor:
            prompts = self.prompts(executor, 2)
            texts = [line.output[:2] for line in await self.alone(executor, prompts, GREEDY)]
            host = Host(executor)
            for turn in range(2 * executor.limits.max_seqs + 2):
                line = host.line(prompts[turn % 2])
                assert await host.generate(line, 2) == texts[turn % 2]
                if turn % 3 == 0:
                    host.preempt(line)
                    assert await host.generate(line, 2) == texts[turn % 2]
                host.close(line)
            assert len(host.free) == executor.limits.num_blocks

    async def test_a_failed_step_leaves_the_next_working(self) -> None:
        """A row that cannot run fails by name; the rest of what the plan told stands, and the others run again."""
        async with self.make() as executor:
            prompts = self.prompts(executor, 2)
            texts = [line.output[: self.new_tokens] for line in await self.alone(executor, prompts, GREEDY)]
            stranger = WorkItem(SeqId(10**6), Epoch(0), 0, 1, 0, True)
            for at in (0, 2):
                host = Host(executor)
                running, new = host.line(prompts[0]), host.line(prompts[1])
                await host.generate(running, 2)
                work = [(line, host.work(line, executor.limits.grid)) for line in (running, new)]
                plan = host.plan(work)
                items = [*plan.items]
                items.insert(at, stranger)
                assert await self._failed(executor, plan._replace(items=tuple(items))) == {stranger.seq}
                for line, item in work:
                    line.blocks += item.blocks
                for line, text in zip((running, new), texts, strict=True):
                    assert await host.generate(line, self.new_tokens) == text
                    host.close(line)
                await host.step()

    async def test_work_of_a_past_epoch_is_refused(self) -> None:
        """An item that names another epoch than the open one fails and touches nothing."""
        async with self.make() as executor:
            prompt = self.prompts(executor, 1)[0]
            text = (await self.alone(executor, [prompt], GREEDY))[0].output[: self.new_tokens]
            host = Host(executor)
            line = host.line(prompt)
            await host.generate(line, 1)
            late = host.work(line, 1)._replace(epoch=Epoch(line.epoch + 1))
            assert await self._failed(executor, StepPlan(10**6, (late,))) == {line.seq}
            host.preempt(line)
            assert await host.generate(line, self.new_tokens) == text

    async def test_a_failed_open_can_be_closed(self) -> None:
        """A sequence whose very first step failed is closed like any other, and its number is free again."""
        async with self.make() as executor:
            prompt = self.prompts(executor, 1)[0]
            text = (await self.alone(executor, [prompt], GREEDY))[0].output[: self.new_tokens]
            seq, opened = SeqId(5), SeqOpen(SeqId(5), Epoch(0), tuple(prompt), len(prompt), (), 0, 0, GREEDY)
            # No block for its rows: cannot be computed.
            bad = StepPlan(1, (WorkItem(seq, Epoch(0), 0, len(prompt), 0, True),), (opened,))
            assert seq in await self._failed(executor, bad)
            host = Host(executor)
            line = host.line(prompt)
            line.seq, line.epoch = seq, Epoch(1)
            work = [(line, host.work(line, executor.limits.max_step_tokens))]
            plan = host.plan(work)._replace(closed=(seq,))
            host.commit(work, await executor.submit(plan).result())
            assert await host.generate(line, self.new_tokens) == text

    async def test_a_cancelled_wait_does_not_stop_the_step(self) -> None:
        """Whoever stops waiting for a step finds it done all the same."""
        async with self.make() as executor:
            prompt = self.prompts(executor, 1)[0]
            text = (await self.alone(executor, [prompt], GREEDY))[0].output[: self.new_tokens]
            host = Host(executor)
            line = host.line(prompt)
            chunk = -(-host.block_size // executor.limits.grid) * executor.limits.grid
            item = host.work(line, chunk)
            handle = executor.submit(host.plan([(line, item)]))
            with anyio.CancelScope() as scope:
                scope.cancel()
                await handle.result()
            line.blocks += item.blocks
            line.done = item.length
            assert await host.generate(line, self.new_tokens) == text

    async def test_a_step_may_be_empty(self) -> None:
        """A plan without items is legal and has a result."""
        async with self.make() as executor:
            result = await executor.submit(StepPlan(1, ())).result()
            assert (result.step, result.outputs, result.failed) == (1, (), ())

    # -- helpers ----------------------------------------------------------------------------------

    async def _failed(self, executor: Executor, plan: StepPlan) -> set[int]:
        try:
            result = await executor.submit(plan).result()
        except StepFailed as error:
            return set(error.seqs)
        return {failure.seq for failure in result.failed}

    def _guess(self, executor: Executor, truth: Line, line: Line, draw: random.Random) -> list[int]:
        if "drafts" not in executor.provides or draw.random() < 0.5:
            return []
        known = len(line.tokens)
        guess = truth.tokens[known : known + draw.randint(0, 3)]
        if guess and draw.random() < 0.5:
            guess[draw.randrange(len(guess))] = draw.randrange(executor.limits.vocab_size)
        return guess

    async def _preempt(self, host: Host, line: Line, draw: random.Random, lines: Iterable[Line]) -> None:
        """Half the time through staging: what was computed comes back from there."""
        taken = {fill.slot for other in lines if not other.open for fill in other.loaded}
        slots = [slot for slot in range(host.executor.memory.num_slots) if slot not in taken]
        slots = slots[: line.done // host.block_size if draw.random() < 0.5 else 0]
        await host.executor.memory.drain(line.blocks[: len(slots)], slots)
        host.preempt(line, slots)
