"""Several times what a server can serve, over real HTTP."""

from __future__ import annotations

from collections.abc import Iterator

import anyio
import pytest

from deepinfra.bench.http import Endpoint, Refused
from deepinfra.bench.overload import OverloadRun, run_overload
from deepinfra.bench.server import serving
from deepinfra.core.cost import StepCost
from deepinfra.engine import Engine, Pool
from deepinfra.errors import EngineError
from deepinfra.executors.simulated import SimulatedExecutor
from deepinfra.schedulers import Bucketed
from deepinfra.testing.served import Served
from deepinfra.testing.tiny import TinyRecipe

QUEUE = 12
RUN = OverloadRun(seconds=1.5, concurrency=(8,), calibrate_s=0.8, prompt=6, new=12)


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"  # the server's own, beside which the load is the same on any


@pytest.fixture
def served() -> Iterator[Served]:
    """Four at a time, ten milliseconds a token: some thirty requests per second, of which few may wait."""
    executor = SimulatedExecutor(cost=StepCost(step=0.01), max_seqs=4, num_blocks=64, block_size=16, vocab_size=260)
    with Served(Engine(TinyRecipe(), Pool(Bucketed(max_queue=QUEUE), executor), name="toy")) as served:
        yield served


async def test_a_server_that_is_overloaded_refuses_and_goes_on_serving(served: Served) -> None:
    report = await run_overload(served.url, RUN)
    assert (report.failed, report.errors, report.settled) == (0, (), True)
    assert report.sent == report.served + report.refused
    assert report.refused > 0
    assert report.waiting_most <= QUEUE
    assert report.goodput > 0
    assert report.told_s is not None
    assert report.told_s.worst == int(report.told_s.worst) >= 1
    assert report.retries.came + report.late_retries.came == report.refused
    assert report.memory is None


async def test_who_is_not_patient_does_not_come_again(served: Served) -> None:
    report = await run_overload(
        served.url, OverloadRun(seconds=0.8, concurrency=(8,), calibrate_s=0.5, new=12, patient=0)
    )
    assert report.refused > 0
    assert report.retries.came + report.late_retries.came == 0


async def test_a_server_that_fails_beforehand_is_an_error(served: Served) -> None:
    with pytest.raises(EngineError, match=r"fails before it is overloaded: .*'another'"):
        await run_overload(served.url, OverloadRun(model="another", calibrate_s=0.1))


async def test_a_refusal_carries_its_status_and_when_to_come_again(served: Served) -> None:
    async with anyio.create_task_group() as tasks:
        errors: list[Refused] = []

        async def ask() -> None:
            body = {"model": "toy", "prompt": "a b c", "max_tokens": 50, "ignore_eos": True}
            try:
                async with Endpoint(f"{served.url}/v1").request("/completions", body) as response:
                    await response.json()
            except Refused as error:
                errors.append(error)

        for _ in range(3 * QUEUE):
            tasks.start_soon(ask)
    assert {(error.status, error.retry_after_s is not None) for error in errors} == {(503, True)}


async def test_a_server_that_does_not_start_is_an_error_with_its_words() -> None:
    with pytest.raises(EngineError, match=r"ended before it served: .*nobody\.toml"):
        async with serving({"DEEPINFRA_MODEL": "nobody/nothing.gguf"}, ["--config", "nobody.toml"]):
            raise AssertionError
