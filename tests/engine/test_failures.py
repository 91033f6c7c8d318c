"""What may break inside an engine, and what its clients see of it."""

from __future__ import annotations

import contextlib
import random
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Self

import anyio
import pytest

from deepinfra.core.drafts import Draft, TokenView
from deepinfra.core.events import Event, Failed
from deepinfra.core.ids import BlockKey, SeqId
from deepinfra.core.kv import Match
from deepinfra.core.model import ExecutorLimits
from deepinfra.core.request import GenerateRequest, Prompt, TextInput
from deepinfra.core.step import Choice, MaskRows, SeqFailure, StepPlan, StepResult, StepView
from deepinfra.engine import Engine, Pool
from deepinfra.errors import (
    ConfigError,
    ContextLengthError,
    ExecutorLost,
    PoolFailedError,
    StepFailed,
)
from deepinfra.executors.toy import ToyExecutor
from deepinfra.interfaces.executor import StepHandle
from deepinfra.interfaces.speculator import Speculator
from deepinfra.kvstores.memory import MemoryStore
from deepinfra.schedulers.fcfs import Fcfs
from deepinfra.testing.asking import ask, end_of, events_of, tokens_of
from deepinfra.testing.asking import toy_pool as pool
from deepinfra.testing.clock import ManualClock
from deepinfra.testing.engine import Ask, reference
from deepinfra.testing.executors import FlakyExecutor
from deepinfra.testing.tiny import TinyRecipe


async def test_a_lost_executor_is_entered_again_and_the_text_goes_on() -> None:
    flaky = FlakyExecutor(ToyExecutor(), random.Random(0), rate=0.2, kinds=("lose",), most=1)
    async with Engine(TinyRecipe(), Pool(Fcfs(), flaky)) as engine:
        events = await events_of(engine, ask([1, 2, 3], 30))
        assert flaky.injected == {"lose": 1}
        assert engine.state == "ready"
    assert tokens_of(events) == reference(Ask((1, 2, 3), 30))[: len(tokens_of(events))]
    assert end_of(events).reason == "length"


async def test_a_pool_gives_up_after_three_losses() -> None:
    flaky = FlakyExecutor(ToyExecutor(), random.Random(0), rate=1.0, kinds=("lose",), most=99)
    async with Engine(TinyRecipe(), Pool(Fcfs(), flaky)) as engine:
        with anyio.fail_after(5):
            assert isinstance((await events_of(engine, ask([1, 2, 3], 5)))[-1], Failed)
            while engine.state != "failed":
                with contextlib.suppress(PoolFailedError):
                    await events_of(engine, ask([1, 2, 3], 5))
        with pytest.raises(PoolFailedError):
            await events_of(engine, ask([1, 2, 3], 5))
        assert engine.state == "failed"


class Leaving(ToyExecutor):
    """Loses itself at each step of its first `losses` lives, and has no limits outside them, as a process has none."""

    def __init__(self, losses: int) -> None:
        super().__init__()
        self.losses = losses
        self.entering = anyio.Event()
        self.enter = anyio.Event()
        self.enter.set()
        self.inside = False

    @property
    def limits(self) -> ExecutorLimits:
        assert self.inside
        return super().limits

    @asynccontextmanager
    async def __asynccontextmanager__(self) -> AsyncGenerator[Self]:
        self.entering.set()
        await self.enter.wait()
        async with super().__asynccontextmanager__():
            self.inside = True
            yield self
        self.inside = False

    def submit(self, plan: StepPlan) -> StepHandle:
        if self.losses:
            self.losses -= 1
            self.entering, self.enter = anyio.Event(), anyio.Event()
            raise ExecutorLost("gone")
        return super().submit(plan)


async def test_what_comes_while_a_lost_executor_is_replaced_waits_for_it() -> None:
    executor = Leaving(1)
    got: list[list[Event]] = []
    async with Engine(TinyRecipe(), Pool(Fcfs(), executor)) as engine, anyio.create_task_group() as tasks:

        async def client() -> None:
            got.append(await events_of(engine, ask([1, 2, 3], 5)))

        entering = executor.entering
        tasks.start_soon(client)
        while executor.entering is entering:
            await anyio.lowlevel.checkpoint()
        await executor.entering.wait()
        assert engine.state == "starting"
        tasks.start_soon(client)
        while engine.stats().waiting < 2:
            await anyio.lowlevel.checkpoint()
        executor.enter.set()
    assert [tokens_of(events) for events in got] == [reference(Ask((1, 2, 3), 5))] * 2


async def test_a_failed_pool_refuses_what_arrives_while_it_fails() -> None:
    looking, failed = anyio.Event(), anyio.Event()

    class Slow(MemoryStore):
        async def match(self, keys: Sequence[BlockKey]) -> Match:
            looking.set()
            await failed.wait()
            return await super().match(keys)

    class Broken(Fcfs):
        def plan(self, view: StepView) -> Choice:
            if looking.is_set():
                raise RuntimeError("broken policy")
            return super().plan(view)

    async with Engine(TinyRecipe(), Pool(Broken(), ToyExecutor(), store=Slow())) as engine:
        async with anyio.create_task_group() as tasks:

            async def fails() -> None:
                await looking.wait()
                with anyio.fail_after(5):
                    async with engine.generate(ask([1], 3)) as stream:  # too short to be looked for
                        assert isinstance([event async for event in stream][-1], Failed)
                failed.set()

            tasks.start_soon(fails)
            with anyio.fail_after(5), pytest.raises(PoolFailedError):
                await events_of(engine, ask(range(8), 3))


async def test_a_failed_step_ends_its_sequences_only() -> None:
    flaky = FlakyExecutor(ToyExecutor(), random.Random(3), rate=1.0, kinds=("fail",), most=1)
    async with Engine(TinyRecipe(), Pool(Fcfs(), flaky)) as engine:
        bad = await events_of(engine, ask([1, 2, 3], 5))
        good = await events_of(engine, ask([1, 2, 3], 5))
    assert isinstance(bad[-1], Failed)
    assert bad[-1].code == "step-failed"
    assert tokens_of(good) == reference(Ask((1, 2, 3), 5))


class Poisoned(ToyExecutor):
    """Its third step has a row that fails; as in a real one, steps behind it that hold its sequence fail for it."""

    depth = 2

    def submit(self, plan: StepPlan) -> StepHandle:
        if behind := plan.step == 4 and len(plan.items) == 2:  # a row of no sequence: nothing is kept of the step
            plan = plan._replace(items=(*plan.items, plan.items[0]._replace(seq=SeqId(-1), blocks=())))
        return _Poisoned(super().submit(plan), plan, behind)


class _Poisoned(StepHandle):
    def __init__(self, inner: StepHandle, plan: StepPlan, behind: bool) -> None:
        self._inner, self._plan, self._behind = inner, plan, behind

    def masks(self, rows: MaskRows) -> None:
        self._inner.masks(rows)

    async def result(self) -> StepResult:
        victim = self._plan.items[0].seq
        if self._behind:
            raise StepFailed([victim], "NaN in the logits")
        result = await self._inner.result()
        if self._plan.step == 3:
            return result._replace(outputs=result.outputs[1:], failed=(SeqFailure(victim, "NaN in the logits"),))
        return result


async def test_a_step_behind_one_whose_row_failed_counts_as_no_failure_of_its_own() -> None:
    async with Engine(TinyRecipe(), Pool(Fcfs(), Poisoned())) as engine, anyio.create_task_group() as tasks:
        found: dict[int, list[Event]] = {}

        async def run(number: int) -> None:
            found[number] = await events_of(engine, ask([1, 2, number], 30))

        tasks.start_soon(run, 3)
        tasks.start_soon(run, 4)
        with anyio.fail_after(5):
            while len(found) < 2:
                await anyio.lowlevel.checkpoint()
        (pool,) = engine.stats().pools
        assert pool.steps_ahead > 0
        assert pool.step_failures == 0
    (bad,) = [number for number, events in found.items() if isinstance(events[-1], Failed)]
    assert tokens_of(found[7 - bad]) == reference(Ask((1, 2, 7 - bad), 30))


async def test_a_broken_scheduler_fails_the_pool_and_not_the_process() -> None:
    class Broken(Fcfs):
        def plan(self, view):  # type: ignore[no-untyped-def]
            if self._queue.entries:
                raise RuntimeError("broken policy")
            return super().plan(view)

    async with Engine(TinyRecipe(), Pool(Broken(), ToyExecutor())) as engine:
        with anyio.fail_after(5):
            events = await events_of(engine, ask([1, 2], 3))
    assert isinstance(events[-1], Failed)
    assert "RuntimeError" in events[-1].message


@pytest.mark.parametrize("stray", [-1, 260, 2**70])
async def test_a_draft_that_is_no_token_of_the_model_is_not_verified(stray: int) -> None:
    class Stray(Speculator):
        max_drafts = 3

        def propose(self, views: Sequence[TokenView]) -> Sequence[Draft]:
            return [Draft(view.seq, (7, stray, 8), (1.0, 1.0, 1.0)) for view in views]

    async with Engine(TinyRecipe(), Pool(Fcfs(), ToyExecutor(), speculator=Stray())) as engine:
        events = await events_of(engine, ask([1, 2, 3], 8))
        assert engine.stats().pools[0].drafts_verified > 0
    assert tokens_of(events) == reference(Ask((1, 2, 3), 8))


async def test_a_store_that_raises_is_a_miss() -> None:
    class Broken(MemoryStore):
        async def save(self, records):  # type: ignore[no-untyped-def]
            raise OSError("disk on fire")

        async def match(self, keys):  # type: ignore[no-untyped-def]
            raise OSError("disk on fire")

    async with Engine(TinyRecipe(), pool(Broken())) as engine:
        events = await events_of(engine, ask([1, 2, 3, 4], 5))
    assert tokens_of(events) == reference(Ask((1, 2, 3, 4), 5))


def test_an_engine_that_nobody_entered_has_numbers() -> None:
    stats = Engine(TinyRecipe(), pool()).stats()
    assert stats.state == "stopped"
    assert stats.blocks_total == stats.running == 0


def test_importing_deepinfra_loads_no_torch_and_no_starlette(tmp_path: Path) -> None:
    import subprocess
    import sys

    code = "import sys, deepinfra, deepinfra.engine; print([m for m in ('torch', 'starlette') if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert out.stdout.strip() == "[]"


async def test_losses_that_are_far_apart_do_not_fail_a_pool() -> None:
    clock = ManualClock()
    flaky = FlakyExecutor(ToyExecutor(), random.Random(0), rate=1.0, kinds=("lose",), most=5)
    async with Engine(TinyRecipe(), Pool(Fcfs(), flaky), clock=clock) as engine:
        for _ in range(5):
            clock.advance(61)
            await events_of(engine, ask([1, 2], 1))
        assert flaky.injected == {"lose": 5}
        assert engine.state == "ready"
        assert engine.stats().pools[0].executor_losses == 5


async def test_a_failed_pool_says_why_to_every_request() -> None:
    flaky = FlakyExecutor(ToyExecutor(), random.Random(0), rate=1.0, kinds=("lose",), most=99)
    async with Engine(TinyRecipe(), Pool(Fcfs(), flaky)) as engine:
        while engine.state != "failed":
            with contextlib.suppress(PoolFailedError):
                await events_of(engine, ask([1], 2))
        with pytest.raises(PoolFailedError, match="lost 3 times in a row, last: the device fell off the bus"):
            await events_of(engine, ask([1], 2))


async def test_text_that_cannot_fit_is_refused_before_it_is_tokenised() -> None:
    class Counting(TinyRecipe):
        rendered = 0

        def text(self, text: TextInput) -> Prompt:
            self.rendered += 1
            return super().text(text)

    recipe = Counting()
    async with Engine(recipe, pool()) as engine:
        with pytest.raises(ContextLengthError):
            await events_of(engine, GenerateRequest(input=TextInput("a" * 100_000)))
        assert recipe.rendered == 0


async def test_a_store_that_never_answers_is_late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deepinfra.engine.pool._MATCH_TIMEOUT_S", 0.05)
    monkeypatch.setattr("deepinfra.engine.stepper._LOAD_TIMEOUT_S", 0.05)

    class Mute(MemoryStore):
        async def match(self, keys):  # type: ignore[no-untyped-def]
            await anyio.sleep_forever()

    class Stuck(MemoryStore):
        async def load(self, refs, into):  # type: ignore[no-untyped-def]
            await anyio.sleep_forever()

    for store in (Mute(), Stuck()):
        served = pool(store, num_blocks=16)
        with anyio.fail_after(10):
            async with Engine(TinyRecipe(), served) as engine:
                for prompt in ([1] * 12, [2] * 20, [1] * 12):
                    assert tokens_of(await events_of(engine, ask(prompt, 4))) == reference(Ask(tuple(prompt), 4))
                await served.settle()
                assert served.stats().slots_free == served.stats().slots_total


def test_a_pool_cannot_be_prefill_and_decode_at_once() -> None:
    both = pool()
    with pytest.raises(ConfigError, match="twice"):
        Engine(TinyRecipe(), prefill=[both], decode=[both])
