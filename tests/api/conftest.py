"""Real engines over the toy executor, the in-process client, and a check that nothing is left."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest
from anyio import from_thread
from anyio.lowlevel import current_token

from deepinfra.core.step import MaskRows, StepPlan, StepResult
from deepinfra.engine import Engine, Pool
from deepinfra.errors import ExecutorError, ExecutorLost, StepFailed
from deepinfra.executors.toy import ToyExecutor
from deepinfra.interfaces.executor import Executor, StepHandle
from deepinfra.interfaces.recipe import Recipe
from deepinfra.schedulers.fcfs import Fcfs
from deepinfra.testing.recorded import recorded
from deepinfra.testing.replay import ReplayExecutor, Script
from deepinfra.testing.served import Served
from deepinfra.testing.tiny import TinyRecipe


class _Held(StepHandle):
    def __init__(self, inner: StepHandle, gate: anyio.Event, failed: ExecutorError | None) -> None:
        self._inner, self._gate, self._failed = inner, gate, failed

    def masks(self, rows: MaskRows) -> None:
        self._inner.masks(rows)

    async def result(self) -> StepResult:
        with anyio.move_on_after(20):  # so that a failing test ends
            await self._gate.wait()
        result = await self._inner.result()
        if self._failed is not None:
            raise self._failed
        return result


class GatedExecutor(ToyExecutor):
    """The toy executor, whose steps wait while `gate` is shut, and fail or lose it from step `fail_at` on."""

    def __init__(self, *, shut: bool = False, fail_at: int | None = None, loses: bool = False, **settings: Any) -> None:
        super().__init__(**settings)
        self._fail_at, self._loses, self.steps = fail_at, loses, 0
        self.gate = anyio.Event()
        if not shut:
            self.gate.set()

    def submit(self, plan: StepPlan) -> StepHandle:
        self.steps += 1
        self._token = current_token()
        failed: ExecutorError | None = None
        if self._fail_at is not None and self.steps >= self._fail_at:
            failed = StepFailed([item.seq for item in plan.items], "out of memory in a kernel")
            if self._loses:
                failed = ExecutorLost("the device fell off the bus")
        return _Held(super().submit(plan), self.gate, failed)

    def open_from_thread(self) -> None:
        """Open the gate of an engine that runs in another thread."""
        from_thread.run_sync(self.gate.set, token=self._token)


async def until(condition: Callable[[], object]) -> None:
    """Let the other tasks run until a condition holds; times out if that never comes."""
    with anyio.fail_after(20):
        while not condition():
            await anyio.lowlevel.checkpoint()


async def settled(engine: Engine) -> None:
    """Wait until the engine holds nothing for anybody."""

    def idle() -> bool:
        stats = engine.stats()
        slots = all(pool.slots_free == pool.slots_total for pool in stats.pools)
        return stats.running == stats.waiting == 0 and stats.blocks_free == stats.blocks_total and slots

    await until(idle)


def build(
    executor: Executor | None = None, *, recipe: Recipe | None = None, max_queue: int = 4096, name: str | None = None
) -> Engine:
    pool = Pool(Fcfs(max_queue=max_queue), executor or ToyExecutor(num_blocks=256))
    return Engine(recipe or TinyRecipe(), pool, name=name)


class Speaker:
    """A model of one family, served over TCP under the name `m`; it says what it is told to.

    Attributes:
        record: See `deepinfra.testing.recorded`.
        url: Of the server, without a path.
    """

    def __init__(self, family: Any, stack: ExitStack) -> None:
        template = Path(__file__).parents[1] / "data" / "templates" / "Qwen-QwQ-32B.jinja"
        self.record, self._script = recorded(family, template.read_text()), Script()
        self._tokenizer = self.record.files.tokenizer()
        self._executor = ReplayExecutor(self._script, eos=self.record.eos, vocab_size=self._tokenizer.get_vocab_size())
        self.url = stack.enter_context(Served(build(self._executor, recipe=self.record.recipe, name="m"))).url

    def says(self, *texts: str) -> list[tuple[int, ...]]:
        """What it will answer, markers as the control tokens they are, and the ids of each; forgets `prompts`."""
        self._executor.prompts.clear()
        ids = [tuple(self._tokenizer.encode(text, add_special_tokens=False).ids) for text in texts]
        self._script.answers[:] = ids
        return ids

    @property
    def prompts(self) -> list[tuple[int, ...]]:
        """What it was asked since then."""
        return self._executor.prompts

    def asked(self, index: int = 0) -> str:
        """One of these as text, markers included."""
        text: str = self._tokenizer.decode(self.prompts[index], skip_special_tokens=False)
        return text


@pytest.fixture(scope="session")
def speaker_of() -> Iterator[Callable[[Any], Speaker]]:
    """`speaker_of(family)`: each of `FAMILIES` is built and started once, as vocabularies take seconds."""
    with ExitStack() as stack:

        @cache
        def speaker_of(family: Any) -> Speaker:
            return Speaker(family, stack)

        yield speaker_of


class Kit:
    """What most tests here need: `kit.build(...)`, `kit.Gated`, `kit.settled(engine)`."""

    build = staticmethod(build)
    settled = staticmethod(settled)
    until = staticmethod(until)
    Gated = GatedExecutor

    @staticmethod
    def chat(text: str = "hello", **fields: Any) -> dict[str, Any]:
        """A body of the chat protocol."""
        return {"model": "toy", "messages": [{"role": "user", "content": text}], "max_tokens": 8, "seed": 7, **fields}

    @staticmethod
    def completion(prompt: Any = "hello", **fields: Any) -> dict[str, Any]:
        """A body of the completions protocol."""
        return {"model": "toy", "prompt": prompt, "max_tokens": 8, "seed": 7, **fields}


@pytest.fixture
def kit() -> type[Kit]:
    return Kit


@pytest.fixture
def engine() -> Engine:
    """One engine named `toy` with room for 1024 positions."""
    return build()
